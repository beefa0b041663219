"""The tables of the database of small blobs, and the statements on them (``docs/format.md``, The database)."""

from __future__ import annotations

import sqlite3
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from types import NoneType
from typing import Any, NamedTuple
from zlib import crc32

from tensorcas_mlflow.backends._records import (
    DIGEST_BYTES,
    HASHED,
    NewBlob,
    as_int,
    blobs_of,
    content_of,
    decode,
    encode,
    folder_of,
    grown,
    key_of,
    keys_below,
    name_of,
    packed_key,
    record_check,
    records_of,
    short_digest,
    stored_key,
)
from tensorcas_mlflow.errors import CorruptError

NAME = "blobs.db"
APPLICATION_ID = 0x54434442
VERSION = 1
PAGE_BYTES = 512
"""A row that is longer fills its pages but the first; larger pages make an empty database larger."""
REFS = "refs"
"""First segment of the keys whose changes are commits."""
WRITTEN, DELETED, MENDED = 1, 2, 3
"""What a commit did: a key has new bytes; a key has none; a repair has built the database anew, and what is missing
among the commits before is known."""
MAX_BASES = 16
"""Bound of the records needed to read another one."""
_MOST_BASES_AT_FIRST = 12, 3
"""Bound of the bases of the record on which a process begins, and of an earlier one that it takes instead."""
_MOST_HELD_BYTES = 4 << 20
_SERIES = 256
"""Number of shared records of one process after which it begins without a base."""
_FULL = 0.7
"""Share of the content of a record that its blobs take, if none is deleted and they are not tiny; the rest is its
table."""
_LEAST_WASTE = 4096, 0.05
"""Bytes of garbage in records, and their share of all, from which on `Change.tidy` writes records anew."""
_POSITIONS = 1024
"""Blobs in a record: the place of a blob is the number of the record times this, and its position there."""

SCHEMA = f"""
PRAGMA page_size = {PAGE_BYTES};
PRAGMA auto_vacuum = INCREMENTAL;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
CREATE TABLE records (number INTEGER PRIMARY KEY, time INTEGER, what INTEGER, key BLOB, before BLOB, after BLOB,
    hash BLOB, base INTEGER, size INTEGER, "check" INTEGER, data BLOB);
CREATE TABLE blobs (key BLOB PRIMARY KEY, place INTEGER, size INTEGER, "commit" INTEGER) WITHOUT ROWID;
CREATE TABLE state (name BLOB PRIMARY KEY, n INTEGER, total INTEGER) WITHOUT ROWID;
"""
_COMMITS = "number, time, what, key, before, after, hash, data IS NULL"
_STATE = """SELECT (SELECT min(number) FROM records), (SELECT max(number) FROM records),
    (SELECT hash FROM records ORDER BY number DESC LIMIT 1), (SELECT n FROM state WHERE name = x''),
    (SELECT total FROM state WHERE name = x'')"""
_ROWS = 'SELECT blobs.key, place, blobs.size, "commit", time FROM blobs LEFT JOIN records ON number = place >> 10 '

NO_DIGEST = bytes(DIGEST_BYTES)


class DamagedError(CorruptError):
    """The database is damaged where a call needs it."""

    def __init__(self, problem: str, key: str = NAME) -> None:
        """Name a key, if the damage costs only that."""
        super().__init__(key, f"in {NAME}: {problem}; `tensorcas repair` keeps what is whole")
        self.problem = problem

    def __reduce__(self) -> tuple[type[DamagedError], tuple[str, str]]:
        return type(self), (self.problem, self.key)


class Row(NamedTuple):
    """One blob."""

    stored: bytes
    """Its key, as the table of blobs has it."""
    record: int
    position: int
    size: int
    """Bytes that the blob has."""
    commit: int | None
    """Number of its commit, if its bytes have moved to another record."""
    time: int | None
    """Time of writing of its record, in milliseconds of Unix time; None if the record is missing."""

    @property
    def is_ref(self) -> bool:
        """Tell whether it is a ref, which has commits."""
        return folder_of(self.stored) == REFS

    @property
    def check(self) -> int:
        """Return what it adds to the total of its folder: a CRC-32."""
        facts = b"%d %d %d %d" % (self.record, self.position, self.size, self.commit or 0)
        return crc32(facts, crc32(self.stored))

    @property
    def token(self) -> str:
        """Return what names it among all blobs that the key has ever had, if it is a ref."""
        return f"commit-{self.commit or self.record}" if self.is_ref else f"{self.record}-{self.position}"


class Commit(NamedTuple):
    """One commit."""

    number: int
    time: int
    what: int
    key: bytes
    """Packed key; the row has it, and ``after``, only if the record of the ref is gone or another one."""
    before: bytes | None
    after: bytes | None
    hash: bytes

    def hash_after(self, last: bytes) -> bytes:
        """Return the hash that it must have behind a commit with another hash."""
        facts = b"%d %d %d\n" % (self.number, self.time, self.what)
        return short_digest(b"".join((last, facts, self.before or NO_DIGEST, self.after or NO_DIGEST, self.key)))


class State(NamedTuple):
    """The last commit."""

    commits: int
    """Its number; 0 for none."""
    hash: bytes
    lowest: int
    """The lowest number of a record; 0 if all of them are commits."""


@dataclass
class Record:
    """The data of a record."""

    base: int | None
    """Number of the record that it is a difference from, 0 for none; None if no record may build on it."""
    check: int
    small: bytes
    """Its content, shrunk."""
    n_bases: int
    """Number of the records that are needed to read it."""

    @cached_property
    def blobs(self) -> list[NewBlob]:
        """Return its blobs, deleted ones among them.

        Raises:
            CorruptError: It is damaged.
        """
        return blobs_of(grown(self.small))


class Draft(NamedTuple):
    """A record that is encoded before the transaction that writes it."""

    blobs: Sequence[NewBlob]
    small: bytes
    """Its content, shrunk."""
    base: int | None
    """Check of the record that it is a difference from."""
    data: bytes


class Known:
    """What a process knows of one file: records, its series of records, and what it has checked."""

    def __init__(self, file: tuple[int, int] = (-1, -1)) -> None:
        """Know nothing yet of a file with a device and an inode."""
        self.file = file
        self.checked: set[str] = set()
        """First segments of keys below which no row is missing."""
        self.modified_ns = 0
        """Time of the last change of the file that is known to be a checkpoint; 0 before the first look."""
        self.head_number = -1
        """Number of the last commit at the last checkpoint that is known."""
        self.is_suspect = False
        """True if the file was not as its head says: then the next write is followed by a checkpoint."""
        self.problem: str | None = None
        """What is wrong with the whole database: no ref can be relied on."""
        self.lost: dict[int, int] = {}
        """Numbers of commits that are lost, by the names of their keys; no listing of refs can be relied on."""
        self._held: OrderedDict[int, Record] = OrderedDict()
        self._n_bytes = 0
        self.n_shared = 0
        """Number of shared records that this process has written."""
        self.bases: dict[int, int] = {}
        """Numbers of its last records at each distance; see `Change._base`."""

    def draft(self, blobs: Sequence[NewBlob]) -> Draft | None:
        """Encode the first record that the next commit of some blobs will write, if it can be told."""
        shared, _ = records_of(blobs)
        base = self._held.get(self.bases.get(distance_of(self.n_shared), 0)) if self.n_shared % _SERIES else None
        if not shared or base is None:
            return None
        small = content_of(shared[0])
        return Draft(shared[0], small, base.check, encode(small, base.small))

    def get(self, number: int, check: int) -> Record | None:
        """Return the record with a check, if it is held."""
        held = self._held.get(number)
        return held if held is not None and held.check == check else None

    def put(self, number: int, record: Record) -> None:
        """Hold a record, and forget the oldest ones."""
        old = self._held.pop(number, None)
        self._n_bytes -= 0 if old is None else len(old.small)
        if len(record.small) <= _MOST_HELD_BYTES:
            self._held[number] = record
            self._n_bytes += len(record.small)
        while self._n_bytes > _MOST_HELD_BYTES:
            try:
                self._n_bytes -= len(self._held.popitem(last=False)[1].small)
            except KeyError:  # another thread was faster
                break


class Rows:
    """Reads of the tables through one connection. Its methods raise `sqlite3.Error` and `DamagedError`."""

    def __init__(self, connection: sqlite3.Connection, known: Known) -> None:
        self.connection = connection
        self.known = known
        self._waits: bool | None = None
        self._run = connection.execute

    def wait_for_disk(self, waits: bool) -> None:
        """Choose whether later commits through this connection wait for the disk."""
        if self._waits is not waits:
            self._run(f"PRAGMA synchronous = {'FULL' if waits else 'NORMAL'}")
            self._waits = waits

    def state(self) -> State:
        """Return the last commit, which two tables name."""
        lowest, number, hash_, *said = self._run(_STATE).fetchone()
        number, hash_ = (0, NO_DIGEST) if (number or 0) <= 0 else (number, hash_)
        if type(hash_) is not bytes or said != [number, as_int(hash_)]:
            raise DamagedError(f"it ends with commit {number}, and not as its state says")
        return State(number, hash_, min(0, lowest or 0))

    # --- blobs

    def find(self, key: str) -> Row | None:
        """Return the row of a key."""
        found = self._run(_ROWS + "WHERE blobs.key = ?", (stored_key(key),)).fetchone()
        return None if found is None else row_of(*found)

    def taken(self, keys: Sequence[str]) -> list[str]:
        """Return those of some keys that have rows."""
        some = [*map(stored_key, keys)]
        found: set[bytes] = set()
        for at in range(0, len(some), 500):
            marks = ", ".join("?" * len(some[at : at + 500]))
            found.update(*self._run(f"SELECT key FROM blobs WHERE key IN ({marks})", some[at : at + 500]))
        return [*compress(keys, map(found.__contains__, some))]

    def below(self, prefix: str, damages: list[CorruptError] | None = None) -> list[tuple[str, Row]]:
        """Return the keys and rows below a prefix of whole segments; all for ``""``.

        Args:
            prefix: The prefix.
            damages: Takes the errors of rows that are left out; None to raise the first one.
        """
        rows = []
        for facts in self._run(_ROWS + "WHERE blobs.key >= ? AND blobs.key < ?", keys_below(prefix)).fetchall():
            try:
                row = row_of(*facts)
                rows.append((self._key_of(row), row))
            except CorruptError as error:
                if damages is None:
                    raise
                damages.append(error)
        if prefix in HASHED or prefix.partition("/")[0] not in HASHED:
            return rows
        return [(key, row) for key, row in rows if key.startswith(f"{prefix}/")]

    def keys(self, prefix: str) -> list[str]:
        """Return the keys below a prefix of whole segments."""
        if not prefix or prefix.partition("/")[0] in HASHED:
            return [key for key, _ in self.below(prefix)]
        found = self._run("SELECT key FROM blobs WHERE key >= ? AND key < ?", keys_below(prefix))
        return [key_of(stored) for (stored,) in found]

    def _key_of(self, row: Row) -> str:
        """Return the key of a row."""
        if folder_of(row.stored) not in HASHED:
            return key_of(row.stored)
        key = self._blob(row).key
        if stored_key(key) != row.stored:
            raise DamagedError(f"record {row.record} does not hold what a row says")
        return key

    def _blob(self, row: Row) -> NewBlob:
        blobs = self.record(row.record).blobs
        if row.position >= len(blobs) or len(blobs[row.position].data) != row.size:
            raise DamagedError(f"record {row.record} does not hold what a row says")
        return blobs[row.position]

    def check_folder(self, folder: str) -> None:
        """Check once that no row is missing among those whose keys have a first segment."""
        if folder in self.known.checked:
            return
        found = self._run(_ROWS + "WHERE blobs.key >= ? AND blobs.key < ?", keys_below(folder)).fetchall()
        said = self._run("SELECT n, total FROM state WHERE name = ?", (folder.encode(),)).fetchone() or (0, 0)
        if (len(found), sum(row_of(*facts).check for facts in found)) != said:
            raise DamagedError(f"it has {len(found)} blobs below {folder!r} and not {said[0]}, or other ones")
        self.known.checked.add(folder)

    def check_absent(self, key: str) -> None:
        """Check that what has no row at a key, or below it, has no blob, and is not damaged."""
        if self.known.problem is not None:
            self.check_whole()
        if self.known.lost:
            raise DamagedError(f"commits {sorted(self.known.lost.values())} are lost")
        self.check_folder(key.partition("/")[0])

    def check_whole(self) -> None:
        """Check that the whole database is what was committed last, as far as its files show at the first look."""
        if self.known.problem is not None:
            raise DamagedError(self.known.problem)

    def check_ref(self, key: str, row: Row | None) -> None:
        """Check that there was no later commit of a ref."""
        self.check_whole()
        lost = self.known.lost.get(name_of(key))
        if lost is not None:
            raise DamagedError(f"commit {lost}, of {key!r}, is lost")
        try:
            self.check_folder(REFS)
        except DamagedError:
            if row is None or self._may_be_followed(row):
                raise

    def _may_be_followed(self, row: Row) -> bool:
        """Tell whether a later commit of a ref is there, or a damaged one that may be of any ref."""
        query = f"SELECT {_COMMITS} FROM records WHERE number > ?"
        for found in self._run(query, (row.record if row.commit is None else row.commit,)).fetchall():
            try:
                keys = [self._commit(found).key]
            except CorruptError:
                of_record = "SELECT key FROM blobs WHERE place >> 10 = ? AND key >= ? AND key < ?"
                keys = [key for (key,) in self._run(of_record, (found[0], *keys_below(REFS)))]
            if not keys or row.stored in keys:
                return True
        return False

    def data(self, key: str, row: Row) -> bytes:
        """Read a blob; a ref is what its commit says."""
        blob = self._blob(row)
        if blob.key != key:
            raise DamagedError(f"the record of {key!r} does not hold it")
        if row.commit is not None:
            commit = self.commit(row.commit)
            if commit is None or (commit.key, commit.after) != (row.stored, short_digest(blob.data)):
                raise DamagedError(f"the last commit of {key!r} is not what the database has there")
        return blob.data

    def record(self, number: int, depth: int = MAX_BASES) -> Record:
        """Read a record."""
        query = 'SELECT base, size, "check", data FROM records WHERE number = ?'
        found = self._run(query, (number,)).fetchone()
        if found is None:
            raise DamagedError(f"record {number} is missing")
        held = self.known.get(number, found[2])
        if held is not None:
            return held
        if depth < 0 or not is_record(number, *found):
            raise DamagedError(f"record {number} is damaged")
        base, size, check, data = found
        below = self.record(base, depth - 1) if base else None
        small = decode(data, size, None if below is None else below.small)
        record = Record(base, check, small, 0 if below is None else below.n_bases + 1)
        self.known.put(number, record)
        return record

    # --- commits

    def commit(self, number: int) -> Commit | None:
        """Return a commit by its number."""
        found = self._run(f"SELECT {_COMMITS} FROM records WHERE number = ?", (number,)).fetchone()
        return None if found is None else self._commit(found)

    def _commit(self, found: Sequence[Any]) -> Commit:
        """Describe a commit, whose hash the caller checks."""
        *facts, is_alone = found
        return commit_of(facts if is_alone else with_ref(facts, self.record(facts[0]).blobs))

    def hash_of(self, number: int) -> bytes | None:
        """Return the hash of a commit; None if it is missing."""
        found = self._run("SELECT hash FROM records WHERE number = ?", (number,)).fetchone()
        return None if found is None else found[0]

    def commits(self) -> Iterator[Commit]:
        """Yield all commits in their order."""
        for found in self._run(f"SELECT {_COMMITS} FROM records WHERE number > 0 ORDER BY number").fetchall():
            yield self._commit(found)

    def vacuum(self) -> None:
        """Give the free pages back, in a transaction."""
        [(n_free,)] = self._run("PRAGMA freelist_count").fetchall()
        for _ in range(n_free):  # for more of them Python takes the first step only
            self._run("PRAGMA incremental_vacuum(1)")

    def n_bytes(self) -> int:
        """Return the size of its pages."""
        [(n_pages,)] = self._run("PRAGMA page_count").fetchall()
        return int(n_pages) * PAGE_BYTES


def distance_of(number: int) -> int:
    """Return how far back the base of a record of a series lies."""
    return 64 if number % 64 == 0 else 16 if number % 16 == 0 else 4 if number % 4 == 0 else 1


def commit_of(found: Sequence[Any]) -> Commit:
    """Describe a commit, whose hash the caller checks."""
    commit = Commit(*found)
    kinds = list(map(type, commit))
    if kinds[:4] != [int, int, int, bytes] or kinds[6] is not bytes or not set(kinds[4:6]) <= {bytes, NoneType}:
        raise DamagedError(f"commit {found[0]} is damaged")
    if NO_DIGEST in (commit.before, commit.after) and commit.what != MENDED:  # the hash has it for none
        raise DamagedError(f"commit {found[0]} is damaged")
    return commit


def with_ref(facts: Sequence[Any], blobs: Sequence[NewBlob]) -> list[Any]:
    """Return what a row says of a commit, with the packed key and the digest of the first ref in its record.

    Raises:
        DamagedError: It has none, or the row has others.
    """
    number, at, what, key, before, after, hash_ = facts
    ref = next((blob for blob in blobs if blob.key.startswith(f"{REFS}/")), None)
    if ref is None or key is not None or after is not None:
        raise DamagedError(f"commit {number} is damaged")
    return [number, at, what, packed_key(ref.key), before, short_digest(ref.data), hash_]


def is_record(number: int, *facts: Any) -> bool:
    """Tell whether the base, size, check and data of a record are right."""
    base, size, check, data = facts
    kinds = list(map(type, facts))
    if kinds[1:] != [int, int, bytes] or kinds[0] not in (int, NoneType):
        return False
    is_right: bool = record_check(number, base, size, data) == check
    return is_right


def row_of(stored: Any, place: Any, size: Any, commit: Any, at: Any) -> Row:
    """Describe a row of the table ``blobs``."""
    if list(map(type, (stored, place, size))) == [bytes, int, int] and {type(commit), type(at)} <= {int, NoneType}:
        return tuple.__new__(Row, (stored, place >> 10, place & 1023, size, commit, at))
    raise DamagedError("the row of a blob is damaged")


class Change(Rows):
    """One transaction that writes, by the process that holds the lock of the database."""

    def __init__(self, connection: sqlite3.Connection, known: Known, *, is_new: bool = False) -> None:
        super().__init__(connection, known)
        self._run_many = connection.executemany
        self._commits, self._hash, self._lowest = (0, NO_DIGEST, 0) if is_new else self.state()
        self._counts: dict[bytes, list[int]] = {}
        self._held: dict[int, Record] = {}
        self._bases = dict(known.bases)
        self._n_shared = known.n_shared
        self._before: dict[bytes, bytes | None] = {}
        """Digests of refs that this transaction has removed, until their commits are written."""
        self.committed: list[tuple[int, int]] = []
        """Numbers of its commits, and the names of their keys."""

    def add(
        self,
        blobs: Sequence[NewBlob],
        *,
        is_series: bool,
        moved: Mapping[str, tuple[int, int | None]] | None = None,
        draft: Draft | None = None,
    ) -> list[Row]:
        """Write new blobs, whose keys have none, and the commits of refs; return their rows.

        Args:
            blobs: The blobs.
            is_series: Whether the small ones are a difference from earlier ones, and later ones from them.
            moved: Times of writing, and numbers of commits, of blobs that are moved from other records.
            draft: The first record, if it is encoded.
        """
        rows: list[Row] = []
        shared, alone = records_of(blobs)
        now = _now_ms()
        for turn, some in enumerate([*shared, *map(list, zip(alone, strict=True))]):
            is_shared = is_series and turn < len(shared)
            refs = [] if moved is not None else [blob for blob in some if blob.key.startswith(f"{REFS}/")]
            at = now if moved is None else min(moved[blob.key][0] for blob in some)
            known = draft if draft is not None and draft.blobs == some else Draft(some, content_of(some), None, b"")
            number = self._add_record(known, refs[:1], at, is_shared=is_shared)
            numbers: dict[str, int | None] = {}
            for ref in refs[1:]:
                numbers[ref.key] = self._append(WRITTEN, packed_key(ref.key), at, short_digest(ref.data))
            for position, blob in enumerate(some):
                commit = numbers.get(blob.key) if moved is None else moved[blob.key][1]
                rows.append(Row(stored_key(blob.key), number, position, len(blob.data), commit, at))
        self._run_many(
            "INSERT INTO blobs VALUES (?, ?, ?, ?)",
            [(row.stored, row.record * _POSITIONS + row.position, row.size, row.commit) for row in rows],
        )
        self._count(rows, 1)
        return rows

    def _add_record(self, draft: Draft, refs: Sequence[NewBlob], at: int, *, is_shared: bool) -> int:
        """Write a record; it is the commit of a ref, if it is given one."""
        base, below = self._base() if is_shared else (None, None)
        small = draft.small
        is_encoded = below is not None and below.check == draft.base
        data = draft.data if is_encoded else encode(small, None if below is None else below.small)
        number = self._commits + 1 if refs else self._lowest - 1
        check = record_check(number, base, len(small), data)
        facts = base, len(small), check, data
        if refs:
            self._append(WRITTEN, packed_key(refs[0].key), at, short_digest(refs[0].data), facts)
        else:
            self._lowest = number
            self._insert((number, at, *[None] * 5, *facts))
        self._held[number] = Record(base, check, small, 0 if below is None else below.n_bases + 1)
        if is_shared:
            self._note_base(number)
        return number

    def _insert(self, values: Sequence[Any]) -> None:
        self._run("INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)

    def _base(self) -> tuple[int, Record | None]:
        """Choose the record from which the next of the series is a difference, and return its number.

        It is one of the last few, so that it is similar, with a dozen bases at most.
        """
        at = self._n_shared
        distance = distance_of(at)
        number = self._commits if at == 0 else self._bases.get(distance, 0) if at % _SERIES else 0
        most = _MOST_BASES_AT_FIRST[0] if at == 0 else MAX_BASES - 1
        try:
            base = self._record(number) if number else None
            if base is not None and base.n_bases > most:
                most = _MOST_BASES_AT_FIRST[1]
            while base is not None and base.base and base.n_bases > most:
                number, base = base.base, self._record(base.base)
        except CorruptError:
            return 0, None
        # Another process may have written the records anew, and given the number to one that is deleted alone.
        return (0, None) if base is None or base.base is None else (number, base)

    def _note_base(self, number: int) -> None:
        for distance in (64, 16, 4, 1):
            if self._n_shared % distance == 0:
                self._bases[distance] = number
        self._n_shared += 1

    def _record(self, number: int) -> Record:
        return self._held.get(number) or self.record(number)

    def remove(self, row: Row) -> None:
        """Delete a blob; for a ref the caller adds another one, or logs its deletion."""
        self._run("DELETE FROM blobs WHERE key = ?", (row.stored,))
        self._count([row], -1)
        if row.is_ref:
            commit = self.commit(row.record if row.commit is None else row.commit)
            self._before[row.stored] = None if commit is None else commit.after
        if row.record < 0:
            self._run("DELETE FROM records WHERE number = ? AND base IS NULL", (row.record,))

    def log_written(self, key: str, data: bytes) -> int:
        """Append the commit of a ref whose bytes are written apart; return its number."""
        return self._append(WRITTEN, packed_key(key), _now_ms(), short_digest(data))

    def log_deletion(self, key: str, before: bytes | None = None) -> None:
        """Append the commit of a ref that was removed, or that had a digest and is lost."""
        self._before.setdefault(packed_key(key), before)
        self._append(DELETED, packed_key(key), _now_ms(), None)

    def log_repair(self, number: int, all_before: bytes) -> None:
        """Append the commit of a repair: the hash after which the chain begins anew, and the digest of all before.

        Args:
            number: Number of the last commit that is known to have been there.
            all_before: Digest of the commits that are left.
        """
        self._commits = number
        self._before[b""] = self._hash
        self._append(MENDED, b"", _now_ms(), all_before)

    def _append(
        self,
        what: int,
        key: bytes,
        at: int,
        after: bytes | None,
        facts: tuple[int | None, int | None, int | None, bytes | None] = (None, None, None, None),
    ) -> int:
        commit = Commit(self._commits + 1, at, what, key, self._before.pop(key, None), after, b"")
        self.copy_commit(commit._replace(hash=commit.hash_after(self._hash)), facts)
        return commit.number

    def copy_commit(self, commit: Commit, facts: Sequence[Any] = (None, None, None, None)) -> None:
        """Append a commit as it is, and the base, size, check and data of its record."""
        number, at, what, key, before, after, hash_ = commit
        self._insert(
            (number, at, what, *((key, before, after) if facts[-1] is None else (None, before, None)), hash_, *facts)
        )
        self._commits, self._hash = commit.number, commit.hash
        self.committed.append((commit.number, name_of(key_of(commit.key)) if commit.key else 0))

    def _count(self, rows: Sequence[Row], sign: int) -> None:
        """Note that rows have come, or gone."""
        for row in rows:
            counted = self._counts.setdefault(folder_of(row.stored).encode(), [0, 0])
            counted[0] += sign
            counted[1] += sign * row.check

    def save(self) -> None:
        """Write the state, at the end of the transaction."""
        self._run_many(
            "INSERT INTO state VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE SET n = n + excluded.n, "
            "total = total + excluded.total",
            [(name, *counted) for name, counted in self._counts.items()],
        )
        if self.committed or not self._commits:
            self._run("INSERT OR REPLACE INTO state VALUES (x'', ?, ?)", (self._commits, as_int(self._hash)))

    def keep(self) -> None:
        """Remember what was written, once the transaction has succeeded."""
        for number, record in self._held.items():
            self.known.put(number, record)
        self.known.bases, self.known.n_shared = self._bases, self._n_shared

    def tidy(self) -> None:
        """Delete records of which nothing is needed, and write those anew that waste much, and what builds on them."""
        live: dict[int, list[Row]] = {}
        for facts in self._run(_ROWS).fetchall():
            row = row_of(*facts)
            live.setdefault(row.record, []).append(row)
        query = "SELECT number, base, size, length(data), time FROM records WHERE data IS NOT NULL"
        sizes = {number: facts for number, *facts in self._run(query)}
        # Those of one time are similar.
        touched = sorted(self._touched(live, sizes), key=lambda number: int(sizes[number][3] or 0))
        if touched:
            self._bases, self._n_shared = {}, _SERIES
        for number in touched:
            rows = live.get(number, [])
            keys = [self._key_of(row) for row in rows]
            blobs = [NewBlob(key, self.data(key, row)) for key, row in zip(keys, rows, strict=True)]
            moved = {key: _moved(row) for key, row in zip(keys, rows, strict=True)}
            self._run_many("DELETE FROM blobs WHERE key = ?", [(row.stored,) for row in rows])
            self._count(rows, -1)
            if blobs:
                self.add(blobs, is_series=True, moved=moved)
        # SQLite joins pages when rows are deleted, and leaves those half empty whose rows become shorter.
        commits = [commit for number in touched if number > 0 and (commit := self.commit(number)) is not None]
        self._run_many("DELETE FROM records WHERE number = ?", [(number,) for number in touched])
        for commit in commits:
            self._insert((*commit, None, None, None, None))

    def _touched(self, live: Mapping[int, list[Row]], sizes: Mapping[int, list[Any]]) -> list[int]:
        """Choose the records to be deleted or written anew."""
        children: dict[int, list[int]] = {}
        for number, (base, *_) in sizes.items():
            children.setdefault(base or 0, []).append(number)
        n_wasted = n_stored = 0
        touched: list[int] = []
        is_touched: set[int] = set()
        ordered = list(children.get(0, []))
        for number in ordered:  # it grows
            ordered += children.get(number, [])
            base, size, n_bytes, _ = sizes[number]
            wanted = sum(row.size for row in live.get(number, ())) / max(1, size)
            n_stored += n_bytes
            if base is None and wanted:
                continue
            if wanted < _FULL or base in is_touched:
                n_wasted += int((1 - min(1, wanted / _FULL)) * n_bytes)
                touched.append(number)
                is_touched.add(number)
        if n_wasted >= max(_LEAST_WASTE[0], _LEAST_WASTE[1] * n_stored):
            return touched
        needed = {number for number in sizes if number in live}
        for number in reversed(ordered):
            if number in needed:
                needed.add(sizes[number][0] or 0)
        return [number for number in ordered if number not in needed]


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _moved(row: Row) -> tuple[int, int | None]:
    """Return the time and the commit of a row that moves to another record."""
    return row.time or 0, row.record if row.is_ref and row.commit is None else row.commit
