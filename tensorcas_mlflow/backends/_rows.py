"""The tables of the database of small blobs, and the statements on them (``docs/format.md``, The database)."""

from __future__ import annotations

import sqlite3
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from types import NoneType
from typing import Any, NamedTuple
from zlib import crc32

from tensorcas_mlflow.backends._records import (
    DIGEST_BYTES,
    NewBlob,
    Part,
    content_of,
    decode,
    encode,
    key_of,
    name_of,
    packed_key,
    parts_of,
    record_check,
    records_of,
    row_check,
    short_digest,
)
from tensorcas_mlflow.errors import CorruptError

NAME = "blobs.db"
APPLICATION_ID = 0x54434442
VERSION = 1
PAGE_BYTES = 2048
"""Larger pages make an empty database larger, and smaller ones leave more of each page unused."""
REFS = "refs"
"""First segment of the keys whose changes are commits."""
WRITTEN, DELETED, MENDED = 1, 2, 3
"""What a commit did: a key has new bytes; a key has none; a repair has built the database anew, and what is missing
among the commits before is known."""
MAX_BASES = 16
"""Bound of the records needed to read another one."""
_MOST_HELD_BYTES = 4 << 20
_SERIES = 256
"""Number of shared records of one process after which it begins without a base."""
_FULL = 0.7
"""Share of the content of a record that its blobs take, if none is deleted and they are not tiny; the rest is its
table."""
_LEAST_WASTE = 4096, 0.05
"""Bytes of garbage in records, and their share of all, from which on `Change.tidy` writes records anew."""

SCHEMA = f"""
PRAGMA page_size = {PAGE_BYTES};
PRAGMA auto_vacuum = INCREMENTAL;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
CREATE TABLE state (commits INTEGER, hash BLOB, born INTEGER, records INTEGER, base INTEGER, "check" INTEGER);
CREATE TABLE folders (name BLOB PRIMARY KEY, n_rows INTEGER, total INTEGER) WITHOUT ROWID;
CREATE TABLE blobs (key BLOB PRIMARY KEY, born INTEGER, record INTEGER, start INTEGER, size INTEGER, "check" INTEGER)
    WITHOUT ROWID;
CREATE TABLE records (number INTEGER PRIMARY KEY, base INTEGER, depth INTEGER, form INTEGER, size INTEGER, data BLOB,
    "check" INTEGER);
CREATE INDEX records_by_base ON records (base) WHERE base IS NOT NULL;
CREATE TABLE commits (number INTEGER PRIMARY KEY, name INTEGER, time INTEGER, what INTEGER, key BLOB, before BLOB,
    after BLOB, hash BLOB);
CREATE INDEX commits_by_name ON commits (name);
"""


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

    key: str
    born: int
    """Time of writing in microseconds of Unix time; no two blobs of a database have the same."""
    record: int
    start: int
    size: int
    """Bytes that it takes in the content of its record, which are as many as it has."""

    @property
    def check(self) -> int:
        """Return the check with which it is stored."""
        return row_check(packed_key(self.key), self.born, self.record, self.start, self.size)

    @property
    def token(self) -> str:
        """Return what names it among all blobs that the key has ever had."""
        return f"born-{self.born:x}"


class Commit(NamedTuple):
    """One row of the table of commits."""

    number: int
    name: int
    time: int
    what: int
    key: bytes
    before: bytes | None
    after: bytes | None
    hash: bytes

    def hash_after(self, last: bytes) -> bytes:
        """Return the hash that it must have behind a commit with another hash."""
        facts = b"%d %d %d\n" % (self.number, self.time, self.what)
        return short_digest(b"".join((last, facts, self.before or NO_DIGEST, self.after or NO_DIGEST, self.key)))


class State(NamedTuple):
    """What the database says of itself."""

    commits: int
    """Number of the last commit, and its hash."""
    hash: bytes
    born: int
    """`Row.born` of the last blob."""
    records: int
    """Number of the last record."""
    base: int | None
    """Number of a late record of the series."""

    @property
    def check(self) -> int:
        """Return the CRC-32 with which it is stored."""
        return crc32(b"%d %b %d %d %d" % (self.commits, self.hash, self.born, self.records, self.base or 0))


EMPTY = State(0, NO_DIGEST, 0, 0, None)


class Known:
    """What a process knows of one file: contents of records, and what it has checked."""

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
        self._held: OrderedDict[int, tuple[int, bytes]] = OrderedDict()
        self._n_bytes = 0
        self.n_shared = 0
        """Number of shared records that this process has written."""
        self.bases: dict[int, int] = {}
        """Numbers of its last records at each distance; see `Change._base`."""

    def get(self, number: int, check: int) -> bytes | None:
        """Return the content of the record with a check, if it is held."""
        held = self._held.get(number)
        return held[1] if held is not None and held[0] == check else None

    def put(self, number: int, check: int, content: bytes) -> None:
        """Hold a content, and forget the oldest ones."""
        if number not in self._held and len(content) <= _MOST_HELD_BYTES:
            self._held[number] = check, content
            self._n_bytes += len(content)
        while self._n_bytes > _MOST_HELD_BYTES:
            try:
                self._n_bytes -= len(self._held.popitem(last=False)[1][1])
            except KeyError:  # another thread was faster
                break


class Rows:
    """Reads of the tables through one connection. Its methods raise `sqlite3.Error` and `DamagedError`."""

    def __init__(self, connection: sqlite3.Connection, known: Known) -> None:
        self.connection = connection
        self.known = known
        self._run = connection.execute

    def state(self) -> State:
        """Return the state of the database."""
        found = self._run("SELECT * FROM state").fetchall()
        try:
            [(*facts, check)] = found
            state = State(*facts)
            if _kinds(facts) <= {int, bytes, NoneType} and state.check == check:
                return state
        except (TypeError, ValueError):
            pass
        raise DamagedError("its state is damaged")

    # --- blobs

    def find(self, key: str) -> Row | None:
        """Return the row of a key."""
        packed = packed_key(key)
        found = self._run('SELECT born, record, start, size, "check" FROM blobs WHERE key = ?', (packed,)).fetchone()
        return None if found is None else checked(packed, key, *found)

    def below(self, prefix: str) -> list[Row]:
        """Return the rows of the keys below a prefix of whole segments; all rows for ``""``."""
        if prefix:
            begin = packed_key(prefix)
            query = "WHERE key > ? AND key < ?"
            found = self._run(f"SELECT * FROM blobs {query}", (begin + b"/", begin + b"0")).fetchall()
        else:
            found = self._run("SELECT * FROM blobs").fetchall()
        return [checked(key, None, *facts) for key, *facts in found]

    def listed(self, prefix: str) -> list[Row]:
        """Return the rows below a prefix, once no row is missing below its first segment."""
        self.check_absent(prefix)
        return self.below(prefix)

    def check_folder(self, folder: str) -> None:
        """Check once that no row is missing among those whose keys have a first segment."""
        if folder in self.known.checked:
            return
        rows = self.below(folder)
        begin = folder.encode()
        said = self._run("SELECT n_rows, total FROM folders WHERE name = ?", (begin,)).fetchall() or [(0, 0)]
        if [(len(rows), sum(row.check for row in rows))] != said:
            raise DamagedError(f"it has {len(rows)} blobs below {folder!r} and not {said[0][0]}")
        self.known.checked.add(folder)

    def check_absent(self, key: str) -> None:
        """Check that what has no row at a key, or below it, has no blob, and is not damaged."""
        self.check_whole()
        if self.known.lost:
            raise DamagedError(f"commits {sorted(self.known.lost.values())} are lost")
        self.check_folder(key.partition("/")[0])

    def check_whole(self) -> None:
        """Check that the whole database is what was committed last, as far as its files show at the first look."""
        if self.known.problem is not None:
            raise DamagedError(self.known.problem)

    def data(self, row: Row) -> bytes:
        """Read a blob."""
        content = self.content(row.record)
        for part in parts_of(content):
            if part.start == row.start and part.key == row.key and part.size == row.size:
                return part.data_in(content)
        raise DamagedError(f"the record of {row.key!r} does not hold it")

    def content(self, number: int, depth: int = MAX_BASES) -> bytes:
        """Read the content of a record."""
        found = self._run(
            'SELECT base, depth, form, size, data, "check" FROM records WHERE number = ?', (number,)
        ).fetchone()
        if found is None:
            raise DamagedError(f"record {number} is missing")
        base, _, form, size, data, check = found
        held = self.known.get(number, check)
        if held is not None:
            return held
        if depth <= 0 or not is_record(number, *found):
            raise DamagedError(f"record {number} is damaged")
        content = decode(form, data, size, None if base is None else self.content(base, depth - 1))
        self.known.put(number, check, content)
        return content

    # --- commits

    def last_commit(self, key: str) -> Commit | None:
        """Return the last commit of a key."""
        packed = packed_key(key)
        query = "SELECT * FROM commits WHERE name = ? ORDER BY number DESC"
        for found in self._run(query, (name_of(key),)):
            commit = commit_of(found)
            if commit.key == packed:
                return commit
        return None

    def commit(self, number: int) -> Commit | None:
        """Return a commit by its number."""
        found = self._run("SELECT * FROM commits WHERE number = ?", (number,)).fetchone()
        return None if found is None else commit_of(found)

    def commits(self) -> Iterator[Commit]:
        """Yield all commits in their order."""
        for found in self._run("SELECT * FROM commits ORDER BY number"):
            yield commit_of(found)

    def check_ref(self, key: str, data: bytes | None) -> None:
        """Check that the last commit of a key left it as it is: with some bytes, or with none."""
        self.check_whole()
        lost = self.known.lost.get(name_of(key))
        if lost is not None:
            raise DamagedError(f"commit {lost}, of {key!r}, is lost")
        self.check_last(key, data)

    def check_last(self, key: str, data: bytes | None) -> None:
        """Check that the last commit of a key that is in the database left these bytes, or none."""
        last = self.last_commit(key)
        said = None if last is None else last.after
        if said != (None if data is None else short_digest(data)):
            raise DamagedError(f"the last commit of {key!r} is not what the database has there")

    def vacuum(self) -> None:
        """Give the free pages back, in a transaction."""
        [(n_free,)] = self._run("PRAGMA freelist_count").fetchall()
        for _ in range(n_free):  # for more of them Python takes the first step only
            self._run("PRAGMA incremental_vacuum(1)")

    def n_bytes(self) -> int:
        """Return the size of its pages."""
        [(n_pages,)] = self._run("PRAGMA page_count").fetchall()
        return int(n_pages) * PAGE_BYTES


def commit_of(found: Sequence[Any]) -> Commit:
    """Describe a row of the table of commits, whose hash the caller checks."""
    commit = Commit(*found)
    if _kinds([commit.key]) != {bytes} or commit.what not in (WRITTEN, DELETED, MENDED):
        raise DamagedError(f"commit {commit.number} is damaged")
    return commit


def is_record(number: int, *facts: Any) -> bool:
    """Tell whether a row of the table ``records`` has the right check, which is its last value."""
    try:
        return _kinds(facts) <= {int, bytes, NoneType} and bool(record_check(number, *facts[:-1]) == facts[-1])
    except TypeError:
        return False


def _kinds(facts: Iterable[Any]) -> set[type]:
    """Return the types of values: a check reads 2.5 like 2."""
    return set(map(type, facts))


def checked(packed: Any, key: str | None, *facts: Any) -> Row:
    """Describe a row of the table ``blobs``, once its check is right."""
    try:
        born, record, start, size, check = facts
        # As `row_check`: a listing comes here for each row.
        is_right = crc32(b"%d %d %d %d" % (born, record, start, size), crc32(packed)) == check
        if is_right and set(map(type, facts)) == {int}:
            return tuple.__new__(Row, (key or key_of(packed), born, record, start, size))
    except (TypeError, ValueError, OverflowError):
        pass
    raise DamagedError(f"the row of a blob is damaged (its key begins with {bytes(packed)[:40]!r})")


class Change(Rows):
    """One transaction that writes, by the process that holds the lock of the database."""

    def __init__(self, connection: sqlite3.Connection, known: Known, *, is_new: bool = False) -> None:
        super().__init__(connection, known)
        self._now = (EMPTY if is_new else self.state())._asdict()
        self._folders: dict[bytes, list[int]] = {}
        self._held: dict[int, tuple[int, bytes]] = {}
        self._bases = dict(known.bases)
        self._n_shared = known.n_shared
        self.committed: list[tuple[int, int]] = []
        """Numbers of its commits, and the names of their keys."""

    def add(self, blobs: Sequence[NewBlob], *, is_series: bool, born: dict[str, int] | None = None) -> list[Row]:
        """Write new blobs, whose keys have none, and return their rows.

        Args:
            blobs: The blobs.
            is_series: Whether the small ones are a difference from earlier ones, and later ones from them.
            born: Times of writing, of blobs that are moved from other records.
        """
        rows: list[Row] = []
        shared, alone = records_of(blobs)
        for some, is_shared in [*((each, is_series) for each in shared), *(([each], False) for each in alone)]:
            content, parts = content_of(some)
            number = self._add_record(content, is_shared=is_shared)
            rows += [self._add_row(part, number, None if born is None else born[part.key]) for part in parts]
        return rows

    def _add_record(self, content: bytes, *, is_shared: bool) -> int:
        number = self._now["records"] = self._now["records"] + 1
        base, below, depth = self._base() if is_shared else (None, None, 0)
        form, data = encode(content, below)
        check = record_check(number, base, depth, form, len(content), data)
        self._run(
            "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?)", (number, base, depth, form, len(content), data, check)
        )
        self._held[number] = check, content
        if is_shared:
            self._note_base(number)
        return int(number)

    def _base(self) -> tuple[int | None, bytes | None, int]:
        """Choose the record from which the next of the series is a difference: its number and content, and the depth.

        It is one of the last few, so that it is similar, at a depth of a dozen at most.
        """
        at = self._n_shared
        distance = next(each for each in (64, 16, 4, 1) if at % each == 0)
        number = self._bases.get(max(distance, 4)) if at % _SERIES else None
        most_depth = MAX_BASES
        if at == 0:
            number, most_depth = self._now["base"], 4
        if number is None:
            return None, None, 0
        found = self._run("SELECT depth FROM records WHERE number = ?", (number,)).fetchone()
        if found is None or not isinstance(found[0], int) or found[0] + 1 >= most_depth:
            return None, None, 0
        try:
            return number, self._content(number), found[0] + 1
        except CorruptError:
            return None, None, 0

    def _note_base(self, number: int) -> None:
        for distance in (4, 16, 64):
            if self._n_shared % distance == 0:
                self._bases[distance] = number
        if self._n_shared % 4 == 0:
            self._now["base"] = number
        self._n_shared += 1

    def _add_row(self, part: Part, record: int, born: int | None) -> Row:
        if born is None:
            born = max(self._now["born"] + 1, time.time_ns() // 1000)
        self._now["born"] = max(self._now["born"], born)
        packed = packed_key(part.key)
        check = row_check(packed, born, record, part.start, part.size)
        self._run("INSERT INTO blobs VALUES (?, ?, ?, ?, ?, ?)", (packed, born, record, part.start, part.size, check))
        self._count(part.key, 1, check)
        return Row(part.key, born, record, part.start, part.size)

    def remove(self, row: Row) -> None:
        """Delete a blob, and its record if nothing is left of that."""
        self._remove_row(row)
        self.drop_record(row.record)

    def _remove_row(self, row: Row) -> None:
        packed = packed_key(row.key)
        self._run("DELETE FROM blobs WHERE key = ?", (packed,))
        self._count(row.key, -1, -row_check(packed, row.born, row.record, row.start, row.size))

    def drop_record(self, number: int) -> None:
        """Delete a record, and the records on which it builds, unless they hold a blob or others build on them."""
        while number is not None:
            found = self._run("SELECT base FROM records WHERE number = ?", (number,)).fetchone()
            if found is None:
                return
            try:
                keys = [packed_key(part.key) for part in parts_of(self._content(number))]
            except CorruptError:
                return  # a repair decides
            for key in keys:
                if self._run("SELECT 1 FROM blobs WHERE key = ? AND record = ?", (key, number)).fetchone():
                    return
            if self._run("SELECT 1 FROM records WHERE base = ? LIMIT 1", (number,)).fetchone():
                return
            self._run("DELETE FROM records WHERE number = ?", (number,))
            [number] = found

    def _content(self, number: int) -> bytes:
        held = self._held.get(number)
        return self.content(number) if held is None else held[1]

    def log(self, key: str, after: bytes | None) -> None:
        """Append a commit: a key has other bytes now, or none."""
        last = self.last_commit(key)
        before = None if last is None else last.after
        if after is None:
            self._append(DELETED, key, before, None)
        else:
            self._append(WRITTEN, key, before, short_digest(after))

    def log_repair(self, number: int, all_before: bytes) -> None:
        """Append the commit of a repair: the hash after which the chain begins anew, and the digest of all before.

        Args:
            number: Number of the last commit that is known to have been there.
            all_before: Digest of the commits that are left.
        """
        self._now["commits"] = number
        self._append(MENDED, "", self._now["hash"], all_before)

    def _append(self, what: int, key: str, before: bytes | None, after: bytes | None) -> None:
        number, now = self._now["commits"] + 1, time.time_ns() // 1_000_000
        commit = Commit(number, name_of(key), now, what, packed_key(key), before, after, b"")
        commit = commit._replace(hash=commit.hash_after(self._now["hash"]))
        self.copy_commit(commit)

    def copy_commit(self, commit: Commit) -> None:
        """Append a commit as it is."""
        self._run("INSERT INTO commits VALUES (?, ?, ?, ?, ?, ?, ?, ?)", commit)
        self._now.update(commits=commit.number, hash=commit.hash)
        self.committed.append((commit.number, commit.name))

    def _count(self, key: str, n_rows: int, check: int) -> None:
        counted = self._folders.setdefault(key.partition("/")[0].encode(), [0, 0])
        counted[0] += n_rows
        counted[1] += check

    def save(self) -> None:
        """Write the state, at the end of the transaction."""
        for name, (n_rows, total) in self._folders.items():
            changed = self._run(
                "UPDATE folders SET n_rows = n_rows + ?, total = total + ? WHERE name = ?", (n_rows, total, name)
            )
            if changed.rowcount == 0:
                self._run("INSERT INTO folders VALUES (?, ?, ?)", (name, n_rows, total))
        state = State(**self._now)
        self._run(
            'INSERT OR REPLACE INTO state (rowid, commits, hash, born, records, base, "check") '
            "VALUES (1, ?, ?, ?, ?, ?, ?)",
            (*state, state.check),
        )

    def keep(self) -> None:
        """Remember what was written, once the transaction has succeeded."""
        for number, (check, content) in self._held.items():
            self.known.put(number, check, content)
        self.known.bases, self.known.n_shared = self._bases, self._n_shared

    def tidy(self) -> None:
        """Write records anew that hold deleted blobs, or that build on such records, if they waste enough."""
        live: dict[int, list[Row]] = {}
        for row in self.below(""):
            live.setdefault(row.record, []).append(row)
        touched: list[int] = []
        n_wasted = n_stored = 0
        found = self._run("SELECT number, base, size, length(data) FROM records ORDER BY number").fetchall()
        changed: set[int] = set()
        for number, base, size, n_bytes in found:
            wanted = sum(row.size for row in live.get(number, ())) / max(1, size)
            n_stored += n_bytes
            if wanted < _FULL or base in changed:
                n_wasted += int((1 - min(1, wanted / _FULL)) * n_bytes)
                changed.add(number)
                touched.append(number)
        if n_wasted < max(_LEAST_WASTE[0], _LEAST_WASTE[1] * n_stored):
            return
        self._bases, self._n_shared = {}, _SERIES
        for number in touched:
            rows = live.get(number, [])
            blobs = [NewBlob(row.key, self.data(row)) for row in rows]
            for row in rows:
                self._remove_row(row)
            if blobs:
                self.add(blobs, is_series=True, born={row.key: row.born for row in rows})
        for number in reversed(touched):
            self.drop_record(number)
