"""Logs of one store: the merged view of their blobs, and the log this process appends to.

``docs/design/protocol.md``, Logs, has the rules and the reason of each.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tensorcas_mlflow.backends._contract import LogDamage, Token
from tensorcas_mlflow.backends._locked_file import LockedFile
from tensorcas_mlflow.backends._log_digests import WORD_BYTES, pack_words, with_digests
from tensorcas_mlflow.backends._log_index import EMPTY as EMPTY_INDEX
from tensorcas_mlflow.backends._log_index import IndexedBlob, LogIndex, index_bytes, read_index
from tensorcas_mlflow.backends._log_records import (
    CLOSED,
    HEADER_BYTES,
    TOMBSTONE,
    LogBlob,
    LogReader,
    LogRow,
    Record,
    check_header,
    encode_record,
    header,
    inode_in,
    meta_bytes,
    read_tombstones,
    tombstone,
)
from tensorcas_mlflow.base.digest import Buffer, Digests
from tensorcas_mlflow.base.files import Settled, new_name, sync_folder
from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.errors import CorruptError, FormatError, RefusedError

FOLDER = "logs"
_GENERATION = "generation"
_COMMITS = "refs"
"""First segment of the keys of blobs that commits create."""
_NAME = re.compile(r"[0-9a-f]{32}")
_FILE = re.compile(r"[0-9a-f]{32}\.(log|dead|index)")
_FULL_BYTES = 64 << 20
"""Size at which a log gets no more records."""
_MAX_TRIED = 16
"""Bound of the idle logs a writer looks at before it creates another one."""
_PREFIX_STEPS = 4, 16, 64, 256
"""The prefix of a record is the last one with a number divisible by 4. The prefix of that is the one 4 before, or 16 or
64 before if its number is divisible by 16 or 64; every 256th record has none. So a reader of one record needs at most
ten others."""
_REWRITTEN_AT = 2
"""An idle log is rewritten if it has more than so many times the bytes of its live blobs."""
_KEPT_BYTES = 1024
"""Bound of a commit's blob, such as a ref, that stays in memory; its digest may be missing there."""
_MAX_METAS = 32
_MAX_BLOBS = 64
_READ_LOG = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_WRITE_LOG = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_INDEXED_BYTES = 1 << 20
"""Size of a log with an index; a smaller one is read quickly."""
_INDEXED_AGAIN_BYTES = 256 << 10
"""Least number of bytes by which a log grows before its index is written anew."""
_MOST_UNREAD_BYTES = 4 << 20
_PACKS = "packs/"
_INDEX_GROWTH = 8
"""An index is written anew once the log has grown by one part in so many."""
_MOST_DRAWN = 32
"""Records of an indexed log that are read one by one; more are read with the whole log."""
_MOST_PREFIX_BYTES = 256 << 10
"""Bound of a prefix: a reader of one record reads a few of them."""


_Generation = tuple[int, int, int]
"""Device, inode and size of the file of that name."""


class LogEntry(NamedTuple):
    """A live blob in a log; a tuple, since an opened store has many."""

    log: str
    record: int
    row: LogRow
    written_s: float
    data: bytes | None
    """The blob, if it is a small one of a commit."""

    @property
    def key(self) -> str:
        """Key of the blob."""
        return self.row.key

    @property
    def token(self) -> Token:
        """Token of the blob."""
        return f"{self.log}-{self.record:x}-{self.row.number}"


@dataclass(slots=True)
class _Log:
    """The known part of one log."""

    id: str
    end: int = 0
    """End of the last record that counts and is known."""
    n_dead_bytes: int = 0
    """Size of the known tombstones."""
    entries: dict[tuple[int, int], LogEntry] = field(default_factory=dict)
    """Live blobs, by record and row."""
    dead: set[tuple[int, int]] = field(default_factory=set)
    """Tombstones; one may be known before its blob."""
    is_closed: bool = False
    closed_at: int = 0
    """End of the log, if it is closed and its end is known."""
    consumed: set[str] = field(default_factory=set)
    durable: int = 0
    """Every byte before this one is known to be durable."""
    n_durable_dead_bytes: int = 0
    index: LogIndex | None = None
    """Index of the first part; None if all records are read."""
    n_drawn: int = 0
    """Records of the indexed part that were read."""
    drawn: set[int] = field(default_factory=set)
    """Their offsets."""
    written: LogIndex | None = None
    """The index that was read or written last."""
    words: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """Words of packs, by record and row, for the next index."""
    may_have_index: bool = True
    lost_tombstones: list[int] = field(default_factory=list)
    """Places of damaged tombstones."""
    n_stored_bytes: int = 0
    """Size of the heads and stored metas of the records that were read."""
    n_meta_bytes: int = 0
    """Size of their metas."""


class Logs:
    """The logs of one store. For any thread.

    Methods raise OSError, unless they say otherwise; the caller translates it.
    """

    def __init__(self, top: str, *, salvages: bool = False) -> None:
        """Use the logs below a store's folder, if it has any.

        Args:
            top: The store's folder.
            salvages: Whether records behind damage count too, and damage is no error; see `LogDamage`.
        """
        self._salvages = salvages
        self._damages: dict[str, list[LogDamage]] = {}
        self.folder = f"{top}{os.sep}{FOLDER}"
        self._top = top
        self._lock = Lock()
        self._logs: dict[str, _Log] = {}
        self._entries: dict[str, list[LogEntry]] = {}
        """Live blobs, by key."""
        self._packs: dict[bytes, set[str]] = {}
        """Keys of packs by their words; some packs may be gone."""
        self._blobs_in: defaultdict[str, set[str]] = defaultdict(set)
        """Keys of the blobs directly below a prefix."""
        self._names_in: defaultdict[str, set[str]] = defaultdict(set)
        self._unread: list[tuple[_Log, tuple[int, int], LogRow, bytes]] = []
        """Packs whose words are not read: log, record and row, and the bytes if they lie in a meta."""
        self._n_unread_bytes = 0
        self._unentered: list[str] = []
        """Keys of other blobs than refs that are in neither of these."""
        self._metas: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._blobs: OrderedDict[tuple[str, int, int], bytes] = OrderedDict()
        self._settled = Settled()
        self._copies: dict[str, int] = {}
        """Logs that this object has written in place of others, and their durable ends."""
        self._damage: FormatError | None = None
        self._is_on = False
        self._listed: _Generation | None = None
        """Generation at which the logs were last listed."""

    @property
    def is_on(self) -> bool:
        """True if the store has logs."""
        if not self._is_on:
            self._is_on = os.path.isdir(self.folder)
        return self._is_on

    def path(self, log: str) -> str:
        """Return the path of a log."""
        return f"{self.folder}{os.sep}{log}.log"

    def dead_path(self, log: str) -> str:
        """Return the path of a log's tombstones."""
        return f"{self.folder}{os.sep}{log}.dead"

    def index_path(self, log: str) -> str:
        """Return the path of a log's index."""
        return f"{self.folder}{os.sep}{log}.index"

    def is_ours(self, path: str) -> bool:
        """Tell whether a file, by its path below the store's folder, belongs to the logs."""
        folder, _, name = path.rpartition("/")
        return folder == FOLDER and (name == _GENERATION or _FILE.fullmatch(name) is not None)

    def n_bytes(self) -> int:
        """Return the size of all files of the logs."""
        with os.scandir(self.folder) as found:
            return sum(
                file.stat(follow_symlinks=False).st_size for file in found if self.is_ours(f"{FOLDER}/{file.name}")
            )

    def make(self) -> None:
        """Turn logs on in a store that is being created, durably."""
        os.makedirs(self.folder, exist_ok=True)
        self._settled.settle(self.folder)

    # --- the view

    def refresh(self) -> None:
        """Read everything that others have added.

        Raises:
            NewerFormatError: A later release wrote a log.
        """
        with self._lock:
            while not self._refresh():
                pass

    def _refresh(self) -> bool:
        """Read everything that others have added; return False if the logs have to be listed again."""
        generation = self._generation()
        # Every log with a record is in the last listing: a log changes the generation before it gets its first record.
        if generation is None or generation != self._listed:
            self._list()
            # A log may be rewritten during the listing, and the listing may miss the old one and the new one.
            if self._generation() != generation:
                return False
            self._listed = generation
        damages: list[FormatError] = []
        # Tombstones as of one moment, and records as of later ones: otherwise a deletion meanwhile may show a blob that
        # was replaced long ago.
        while self._read_tombstones(damages):
            pass
        try:
            for log in self._logs.values():
                try:
                    self._read_log(log)
                    if log.end < log.closed_at and not self._salvages:
                        damages.append(CorruptError(f"{FOLDER}/{log.id}.log", f"it ends before byte {log.closed_at}"))
                except CorruptError as error:
                    damages.append(error)
        except FileNotFoundError:  # removed since the listing
            self._listed = None
            return False
        # In one step: `check` in another thread may run at any moment.
        self._damage = damages[-1] if damages else None
        return True

    def _read_tombstones(self, damages: list[FormatError]) -> bool:
        """Read the new tombstones of all logs; return whether there are any."""
        has_new = False
        for log in self._logs.values():
            try:
                has_new |= self._read_dead(log)
            except CorruptError as error:
                damages.append(error)
        return has_new

    def _list(self) -> None:
        if os.path.islink(self.folder):
            raise _link_error(self.folder)
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            self._is_on = False
            names = []
        listed = {name[:-4] for name in names if name.endswith(".log") and _NAME.fullmatch(name[:-4])}
        for log in self._logs.keys() - listed:
            self._forget(log)
        for log in sorted(listed - self._logs.keys()):
            self._logs[log] = _Log(log)

    def check(self) -> None:
        """Refuse to say that a blob is absent, or not replaced, while a log is damaged.

        Raises:
            CorruptError: A log is damaged.
        """
        damage = self._damage
        if damage is not None:
            raise damage

    def find(self, key: str) -> LogEntry | None:
        """Return the blob that counts at a key, as of the last refresh."""
        with self._lock:
            self._draw(lambda index: index.with_key(key))
            found = self._entries.get(key)
            return _last(found) if found else None

    def find_each(self, keys: Sequence[str]) -> list[LogEntry | None]:
        """Return for each key the blob that counts there, as of the last refresh."""
        with self._lock:
            self._draw(lambda index: sorted({at for key in keys for at in index.with_key(key)}))
            return [_last(found) if (found := self._entries.get(key)) else None for key in keys]

    def find_packs(self, digests: Digests) -> set[str]:
        """Return the keys of packs that may hold some chunks, as of the last refresh."""
        words = np.ascontiguousarray(digests[:, :WORD_BYTES]).tobytes()
        with self._lock:
            self._draw(lambda index: index.with_words(np.frombuffer(words, "<u4")))
            self._read_words()
            found = [self._packs.get(words[at : at + WORD_BYTES]) for at in range(0, len(words), WORD_BYTES)]
            return {key for keys in found if keys for key in keys if key in self._entries}

    def versions(self, key: str) -> list[LogEntry]:
        """Return all blobs of a key, the one that counts last."""
        with self._lock:
            self._draw(lambda index: index.with_key(key))
            return sorted(self._entries.get(key, ()), key=_version)

    def has_consumed(self, intent: str) -> bool:
        """Tell whether a commit has consumed an intent, as of the last refresh."""
        with self._lock:
            return any(intent in log.consumed for log in self._logs.values())

    def below(self, prefix: str) -> list[LogEntry]:
        """Return the blobs below a prefix, as of the last refresh."""
        with self._lock:
            # Whoever lists all refs below a prefix reads them, mostly.
            self._read_below("")
            found: list[LogEntry] = []
            prefixes = [prefix]
            while prefixes:
                at = prefixes.pop()
                found += [_last(self._entries[key]) for key in self._blobs_in.get(at, ())]
                prefixes += [f"{at}/{name}" if at else name for name in self._names_in.get(at, ())]
            return found

    def children(self, prefix: str) -> tuple[list[LogEntry], set[str]]:
        """Return the blobs directly below a prefix, and the names of the next segments."""
        with self._lock:
            self._read_below(prefix)
            blobs = [_last(self._entries[key]) for key in self._blobs_in.get(prefix, ())]
            return blobs, set(self._names_in.get(prefix, ()))

    def names(self, prefix: str) -> set[str]:
        """Return the last segments of the keys of the blobs directly below a prefix."""
        with self._lock:
            self._read_below(prefix)
            return {key.rpartition("/")[2] for key in self._blobs_in.get(prefix, ())}

    def _generation(self) -> _Generation | None:
        try:
            found = os.lstat(f"{self.folder}{os.sep}{_GENERATION}")
        except FileNotFoundError:
            return None
        if stat.S_ISLNK(found.st_mode):
            raise _link_error(f"{self.folder}{os.sep}{_GENERATION}")
        return found.st_dev, found.st_ino, found.st_size

    def begin_generation(self) -> None:
        """Make every process list the logs again."""
        flags = _WRITE_LOG | os.O_CREAT | os.O_APPEND
        descriptor = os.open(f"{self.folder}{os.sep}{_GENERATION}", flags, 0o666)
        try:
            _write_all(descriptor, b".")
        finally:
            os.close(descriptor)

    def _read_log(self, log: _Log) -> None:
        path = self.path(log.id)
        if os.stat(path).st_size == log.end:
            return
        descriptor = os.open(path, _READ_LOG)
        try:
            size = os.fstat(descriptor).st_size
            if self._salvages:
                self._salvage(log, descriptor, size)
                return
            if log.end == 0 and log.may_have_index and size >= _INDEXED_BYTES:
                log.may_have_index = False
                self._read_index(log, descriptor, size)
            if size < log.end:
                raise CorruptError(f"{FOLDER}/{log.id}.log", f"it ends before byte {log.end}")
            records, end, damage = LogReader(log.id, descriptor, f"{FOLDER}/{log.id}.log").records(log.end, size)
        finally:
            os.close(descriptor)
        for record in records:
            self._add(log, record)
        log.end = end
        if damage is not None:
            raise damage

    def _salvage(self, log: _Log, descriptor: int, size: int) -> None:
        """Read every whole record of a log, and note what is lost."""
        key = f"{FOLDER}/{log.id}.log"
        damages: list[LogDamage] = []
        records, lost = LogReader(log.id, descriptor, key).salvage(size)
        reason: str | None = None
        try:
            if not check_header(log.id, os.pread(descriptor, HEADER_BYTES, 0), key) and records:
                reason = "its header is damaged"
        except CorruptError as error:
            reason = error.reason
        if reason is not None:
            damages.append(LogDamage(key=key, start=0, n_bytes=min(HEADER_BYTES, size), reason=reason))
        for record in records:
            self._add(log, record)
        if size < log.closed_at:
            lost.append((size, log.closed_at))
        for start, stop in lost:
            before = max((record.written_s for record in records if record.offset < start), default=None)
            after = min((record.written_s for record in records if record.offset >= stop), default=None)
            reason = f"its records from byte {start} to byte {stop} are damaged{_between(before, after)}"
            n_bytes = max(0, min(stop, size) - start)
            damages.append(LogDamage(key=key, start=start, n_bytes=n_bytes, reason=reason, loses_records=True))
        log.end = size
        self._damages[log.id] = damages

    def damages(self) -> list[LogDamage]:
        """Return the damage of all logs, as of the last refresh; for a salvaging object."""
        with self._lock:
            return [each for log in sorted(self._damages.keys() & self._logs.keys()) for each in self._damages[log]] + [
                LogDamage(
                    key=f"{FOLDER}/{log.id}.dead",
                    start=at,
                    n_bytes=TOMBSTONE.size,
                    reason=f"the tombstone at byte {at} is damaged, so a deleted blob may be back",
                )
                for log in self._logs.values()
                for at in log.lost_tombstones
            ]

    def mend(self) -> dict[str, str]:
        """Copy the live blobs of damaged logs into new ones, and remove the damaged ones; for a salvaging object.

        Returns:
            The logs left as they are, and why.
        """
        close_writer(self)
        left: dict[str, str] = {}
        with LockedFile.alone_in(self.folder):
            self.refresh()
            for log in {damage.key.rpartition("/")[2].partition(".")[0] for damage in self.damages()}:
                self._alone_with(log, partial(self._rewrite, log))
                if os.path.exists(self.path(log)):
                    left[f"{FOLDER}/{log}.log"] = "a process appends to it: end that process, then repair again"
        return left

    def _read_dead(self, log: _Log) -> bool:
        """Read new tombstones; return whether there are any."""
        path = self.dead_path(log.id)
        try:
            size = os.stat(path).st_size
            # Shorter: the log is gone, and a deletion that came too late has created the file again.
            if size <= log.n_dead_bytes:
                return False
            descriptor = os.open(path, _READ_LOG)
        except FileNotFoundError:  # if it was removed, its log was removed before
            return False
        try:
            data = os.pread(descriptor, size - log.n_dead_bytes, log.n_dead_bytes)
        finally:
            os.close(descriptor)
        lost: list[int] | None = [] if self._salvages else None
        found, n_bytes = read_tombstones(log.id, data, f"{FOLDER}/{log.id}.dead", lost=lost)
        log.lost_tombstones += [log.n_dead_bytes + at for at in lost or ()]
        for offset, row in found:
            if row == CLOSED:
                log.is_closed = True
                log.closed_at = max(log.closed_at, offset)
            else:
                log.dead.add((offset, row))
                entry = log.entries.pop((offset, row), None)
                if entry is not None:
                    self._remove(entry)
        log.n_dead_bytes += n_bytes
        return n_bytes > 0

    def _add(self, log: _Log, record: Record) -> None:
        log.consumed.update(record.consumed)
        log.durable = max(log.durable, record.durable_before)
        log.n_stored_bytes += record.body_start - record.offset
        log.n_meta_bytes += len(record.meta)
        for row in record.rows:
            place = record.offset, row.number
            if place in log.dead or place in log.entries:
                continue
            is_kept = row.is_commit and not row.in_body and row.size <= _KEPT_BYTES
            data = row.data_in(record.meta) if is_kept else None
            if row.key.startswith(_PACKS):
                self._unread.append((log, place, row, b"" if row.in_body else row.data_in(record.meta)))
                self._n_unread_bytes += row.size
                if self._n_unread_bytes > _MOST_UNREAD_BYTES:
                    self._read_words()
            self._add_entry(log, LogEntry(log.id, record.offset, row, record.written_s, data))

    def _read_words(self) -> None:
        """Read the words of the packs of new records; a process that lists refs needs none."""
        for log, place, row, pack in self._unread:
            words = row.words or pack_words(row.kind, pack)
            for at in range(0, len(words), WORD_BYTES):
                self._packs.setdefault(words[at : at + WORD_BYTES], set()).add(row.key)
            if words and (log.written is None or place[0] >= log.written.end):
                log.words[place] = words
        self._unread.clear()
        self._n_unread_bytes = 0

    def _add_entry(self, log: _Log, entry: LogEntry) -> None:
        log.entries[entry.record, entry.row.number] = entry
        key = entry.row.key
        versions = self._entries.get(key)
        if versions is not None:
            versions.append(entry)
            return
        self._entries[key] = [entry]
        if key.startswith(_COMMITS):
            self._enter(key)
        else:  # most processes list refs alone
            self._unentered.append(key)

    def _enter(self, key: str) -> None:
        above, _, _ = key.rpartition("/")
        is_known = above in self._blobs_in
        self._blobs_in[above].add(key)
        while above and not is_known:
            parent, _, name = above.rpartition("/")
            if name in self._names_in[parent]:
                break
            self._names_in[parent].add(name)
            above = parent

    def _remove(self, entry: LogEntry) -> None:
        versions = self._entries[entry.key]
        versions.remove(entry)
        if not versions:
            del self._entries[entry.key]
            entered = self._blobs_in.get(entry.key.rpartition("/")[0])
            if entered is not None:
                entered.discard(entry.key)

    def _forget(self, name: str) -> None:
        for entry in self._logs.pop(name).entries.values():
            self._remove(entry)

    # --- indexes

    def _read_index(self, log: _Log, descriptor: int, size: int) -> None:
        """Take the places of the blobs in the first part of a log from its index, if it has a sound one."""
        try:
            file = os.open(self.index_path(log.id), _READ_LOG)
        except OSError:
            return
        try:
            index = read_index(log.id, _pread(file, 0, os.fstat(file).st_size))
        finally:
            os.close(file)
        if index is None or index.end > size or len(index.records) == 0:
            return
        reader = LogReader(log.id, descriptor, f"{FOLDER}/{log.id}.log")
        try:
            last = reader.record(int(index.records[-1]), index.end)
        except CorruptError:
            return
        if last is None:
            return
        log.index, log.written, log.end = index, index, index.end
        log.consumed.update(index.consumed)
        for blob in index.committed():
            if (blob.record, blob.row.number) not in log.dead:
                self._add_entry(log, LogEntry(log.id, blob.record, blob.row, blob.written_s, None))

    def _draw(self, wanted: Callable[[LogIndex], list[int]]) -> None:
        """Read the records that indexes name."""
        while True:
            try:
                for log in self._logs.values():
                    if log.index is not None:
                        self._read_records(log, [at for at in wanted(log.index) if at not in log.drawn])
                return
            except FileNotFoundError:  # its log was rewritten since
                self._listed = None
                while not self._refresh():
                    pass

    def _read_records(self, log: _Log, offsets: list[int]) -> None:
        if not offsets:
            return
        log.n_drawn += len(offsets)
        if log.n_drawn > _MOST_DRAWN:
            self._read_whole(log)
            return
        key = f"{FOLDER}/{log.id}.log"
        descriptor = os.open(self.path(log.id), _READ_LOG)
        try:
            reader = LogReader(log.id, descriptor, key)
            for at in offsets:
                record = reader.record(at, log.end)
                if record is None:
                    raise CorruptError(key, f"the record at byte {at} is damaged")
                self._add(log, record)
                log.drawn.add(at)
        finally:
            os.close(descriptor)

    def _read_below(self, prefix: str) -> None:
        """Read whole logs, unless their indexes name all blobs below a prefix."""
        if prefix.partition("/")[0] == _COMMITS:
            return
        try:
            self._read_all()
        except FileNotFoundError:  # its log was rewritten since
            self._listed = None
            while not self._refresh():
                pass
            self._read_below(prefix)

    def _read_all(self) -> None:
        for log in self._logs.values():
            self._read_whole(log)
        for key in self._unentered:
            if key in self._entries:
                self._enter(key)
        self._unentered.clear()

    def _read_whole(self, log: _Log) -> None:
        """Read an indexed log without its index."""
        if log.index is None:
            return
        before = log.index, log.end, list(log.entries.values())
        for entry in before[2]:
            self._remove(entry)
        log.entries.clear()
        log.index, log.end = None, 0
        try:
            self._read_log(log)
        except CorruptError as error:
            self._damage = error
        except BaseException:
            log.index, log.end, entries = before
            for entry in entries:
                self._add_entry(log, entry)
            raise

    def write_index(self, name: str, end: int) -> None:
        """Write the index of a log anew if many records are behind it; nothing relies on it.

        Args:
            name: The log, which this process appends to or has written in place of another one.
            end: Every byte of the log before this one is durable, and a record ends there.
        """
        with self._lock:
            log = self._logs.get(name)
            if log is None or log.end < end:
                return
            before = log.written or EMPTY_INDEX
            if end < _INDEXED_BYTES or end - before.end < max(_INDEXED_AGAIN_BYTES, before.end // _INDEX_GROWTH):
                return
            self._read_words()
            places = sorted(place for place in log.entries if before.end <= place[0] < end)
            entries = [log.entries[place] for place in places]
            if any(not entry.row.is_commit and entry.key.startswith(_COMMITS) for entry in entries):
                return
            blobs = (
                IndexedBlob(entry.record, entry.row, entry.written_s, log.words.get(place, b""))
                for place, entry in zip(places, entries, strict=True)
            )
            index = before.extended(blobs, self._existing(log.consumed), end)
            log.written = index
            for place in places:
                log.words.pop(place, None)
            if log.index is not None:
                log.index = index
                log.drawn.update(place[0] for place in places)
            data = index_bytes(name, index)
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
            descriptor = os.open(self.index_path(name), flags, 0o666)
            try:
                _write_all(descriptor, data)
            finally:
                os.close(descriptor)

    def _existing(self, intents: Iterable[str]) -> list[str]:
        return [intent for intent in intents if os.path.lexists(self._top + os.sep + intent)]

    # --- reading blobs

    def open(self, entry: LogEntry) -> tuple[int, str]:
        """Open the log of a blob; return its descriptor and path.

        Raises:
            FileNotFoundError: The log is gone; `refresh` finds the blob elsewhere, if it still exists.
        """
        path = self.path(entry.log)
        return os.open(path, _READ_LOG), path

    def read(self, entry: LogEntry, start: int, size: int) -> bytes:
        """Read a part of a blob; shorter if the log is.

        Raises:
            FileNotFoundError: See `open`.
        """
        if entry.row.in_body:
            descriptor, _ = self.open(entry)
            try:
                return _pread(descriptor, entry.row.start + start, size)
            finally:
                os.close(descriptor)
        return self._blob(entry)[start : start + size]

    def _blob(self, entry: LogEntry) -> bytes:
        """Return a blob that lies in a meta."""
        place = entry.log, entry.record, entry.row.number
        with self._lock:
            blob = self._blobs.get(place)
            if blob is not None:
                self._blobs.move_to_end(place)
                return blob
        data = entry.data
        if data is None:
            if entry.row.is_commit:
                self._note_read(entry.log)
            data = entry.row.data_in(self._meta(entry))
        try:
            blob = with_digests(entry.row.kind, data)
        except ValueError as error:
            key = f"{FOLDER}/{entry.log}.log"
            raise CorruptError(key, f"the record at byte {entry.record} has impossible contents: {error}") from None
        if entry.data is None:
            with self._lock:
                self._blobs[place] = blob
                if len(self._blobs) > _MAX_BLOBS:
                    self._blobs.popitem(last=False)
        return blob

    def _note_read(self, name: str) -> None:
        """Note a read of one commit of an indexed log; many at once read the whole log."""
        with self._lock:
            log = self._logs.get(name)
            if log is not None and log.index is not None:
                log.n_drawn += 1
                if log.n_drawn > _MOST_DRAWN:
                    self._read_below("")

    def _meta(self, entry: LogEntry) -> bytes:
        place = entry.log, entry.record
        with self._lock:
            meta = self._metas.get(place)
            if meta is not None:
                self._metas.move_to_end(place)
                return meta
        descriptor, _ = self.open(entry)
        try:
            size = os.fstat(descriptor).st_size
            record = LogReader(entry.log, descriptor, f"{FOLDER}/{entry.log}.log").record(entry.record, size)
        finally:
            os.close(descriptor)
        if record is None:
            raise CorruptError(f"{FOLDER}/{entry.log}.log", f"the record at byte {entry.record} is damaged")
        self._keep(entry.log, record)
        return record.meta

    def _keep(self, log: str, record: Record) -> None:
        with self._lock:
            self._metas[log, record.offset] = record.meta
            if len(self._metas) > _MAX_METAS:
                self._metas.popitem(last=False)

    # --- appending

    def append(self, blobs: Sequence[LogBlob], consumed: Iterable[str] = (), *, syncs: bool) -> tuple[LogWriter, int]:
        """Append one record to the log of this process, not durably.

        Args:
            blobs: Its blobs.
            consumed: Keys of the intents it consumes.
            syncs: Whether the caller calls `LogWriter.sync` next, whatever happens.

        Returns:
            The writer, and the end of the record.
        """
        while True:
            writer = writer_of(self)
            with writer.lock:
                if not writer.is_current():  # filled or closed by another thread, or removed
                    writer.is_usable = False
                    continue
                record = writer.append(blobs, consumed, syncs=syncs)
                with self._lock:
                    log = self._logs.setdefault(writer.id, _Log(writer.id))
                    if log.end == record.offset or (log.end == 0 and record.offset == HEADER_BYTES):
                        self._add(log, record)
                        log.end = record.end
                return writer, record.end

    def note_durable(self, log: str, end: int) -> None:
        """Note that a log is durable up to a byte."""
        with self._lock:
            if log in self._logs:
                self._logs[log].durable = max(self._logs[log].durable, end)

    def sync(self, logs: Iterable[str] | None = None) -> None:
        """Make the known records and tombstones of some logs durable, whoever wrote them; all logs by default."""
        with self._lock:
            known = [self._logs[log] for log in (self._logs if logs is None else logs) if log in self._logs]
            ends = [(log, log.end, log.n_dead_bytes) for log in known]
        is_new = False
        for log, end, n_dead_bytes in ends:
            if log.durable < end:
                is_new = True
                with contextlib.suppress(FileNotFoundError):
                    _sync(self.path(log.id))
                    log.durable = max(log.durable, end)
            if log.n_durable_dead_bytes < n_dead_bytes:
                is_new = True
                with contextlib.suppress(FileNotFoundError):
                    _sync(self.dead_path(log.id))
                    log.n_durable_dead_bytes = max(log.n_durable_dead_bytes, n_dead_bytes)
        if is_new:
            self._settled.settle(self.folder)

    def bury(self, key: str, *, durable: bool) -> None:
        """Delete all blobs of a key: the lower versions first, and durably, so that none comes back alone."""
        while versions := self.versions(key):
            entry = versions[0]
            line = tombstone(entry.log, entry.record, entry.row.number)
            self._append_dead(entry.log, line, durable=durable or len(versions) > 1)
            # A log may have been rewritten meanwhile: then the blob is in another one by now.
            self.refresh()

    def _append_dead(self, log: str, lines: bytes, *, durable: bool) -> None:
        flags = _WRITE_LOG | os.O_CREAT | os.O_APPEND
        with LockedFile.alone_in(self.dead_path(log), flags) as descriptor:
            # A rewriting of the log holds this lock until the log is gone.
            if not os.path.exists(self.path(log)):
                return
            size = os.fstat(descriptor).st_size
            whole = size // TOMBSTONE.size * TOMBSTONE.size
            if whole != size:  # left by a killed process
                os.ftruncate(descriptor, whole)
            try:
                _write_all(descriptor, lines)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, whole)
                raise
            if durable:
                os.fsync(descriptor)
        if durable:
            sync_folder(self.folder)

    # --- removing logs

    def tidy(self) -> int:
        """Remove idle logs without live blobs, and rewrite those with few; return the bytes freed."""
        close_writer(self)
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            # Of two processes each might take the copy of the other for the one that stays.
            if not LockedFile.lock(descriptor, waits=False):
                return 0
            self.refresh()
            with self._lock:
                self._read_below("")
            self.check()
            freed = self._remove_orphans()
            self._copies.clear()
            for log in list(self._logs):
                with self._lock:
                    known = self._logs.get(log)
                    is_worth_it = known is not None and (
                        not known.entries
                        or self._live_bytes(known) * _REWRITTEN_AT < known.end
                        or self._has_torn_tail(known)
                    )
                if is_worth_it:
                    freed += self._alone_with(log, partial(self._rewrite, log))
            self.refresh()
            for log, end in self._copies.items():
                self.write_index(log, end)
            return freed
        finally:
            LockedFile.release(descriptor)

    def _has_torn_tail(self, log: _Log) -> bool:
        """Tell whether an idle log ends with a torn record: nobody appends to it, and every look reads that tail."""
        try:
            return os.stat(self.path(log.id)).st_size > log.end
        except FileNotFoundError:
            return False

    def _live_bytes(self, log: _Log) -> float:
        """Estimate how many bytes of a log its live blobs need."""
        in_bodies = in_metas = 0
        for entry in log.entries.values():
            if self.find(entry.key) is entry:
                in_bodies += entry.row.size if entry.row.in_body else 0
                in_metas += meta_bytes(entry.row)
        return in_bodies + in_metas * log.n_stored_bytes / max(log.n_meta_bytes, 1)

    def _remove_orphans(self) -> int:
        """Remove tombstones and indexes without a log, with the folder locked; return the bytes freed."""
        names = [name for name in os.listdir(self.folder) if _FILE.fullmatch(name) and not name.endswith(".log")]
        orphans = [name for name in names if not os.path.lexists(self.path(name.partition(".")[0]))]
        if orphans:
            # The removal of the log may not be durable yet.
            sync_folder(self.folder)
        freed = 0
        for name in orphans:
            path = f"{self.folder}{os.sep}{name}"
            with contextlib.suppress(FileNotFoundError):
                n_bytes = os.lstat(path).st_size
                os.unlink(path)
                freed += n_bytes
        return freed

    def _alone_with(self, log: str, act: Callable[[int, int], int]) -> int:
        """Act on an idle log while nobody appends to it or to its tombstones; return the result, 0 if it is in use."""
        try:
            descriptor = os.open(self.path(log), _WRITE_LOG)
        except FileNotFoundError:
            return 0
        if not LockedFile.lock(descriptor, waits=False):
            os.close(descriptor)
            return 0
        try:
            with LockedFile.alone_in(self.dead_path(log), _WRITE_LOG | os.O_CREAT | os.O_APPEND) as dead:
                if not _is_at(descriptor, self.path(log)):
                    return 0
                self.refresh()
                with self._lock:
                    self._read_below("")
                return act(descriptor, dead)
        finally:
            LockedFile.release(descriptor)

    def _rewrite(self, log: str, descriptor: int, dead: int) -> int:
        """Copy the live blobs of a log into a new one, and remove the log."""
        with self._lock:
            known = self._logs.get(log)
            if known is None:
                return 0
            by_record: defaultdict[int, list[LogEntry]] = defaultdict(list)
            for entry in known.entries.values():
                if self.find(entry.key) is entry:
                    by_record[entry.record].append(entry)
            consumed = self._existing(known.consumed)
        n_written = 0
        if by_record or consumed:
            # A lower version goes only if the one that counts cannot be lost.
            self.sync()
            n_written = self._copy(by_record, consumed)
        freed = os.fstat(descriptor).st_size + os.fstat(dead).st_size - n_written
        self._remove_files(log)
        return freed

    def _copy(self, by_record: dict[int, list[LogEntry]], consumed: Sequence[str]) -> int:
        """Copy blobs into a new log, durably, and return its size."""
        log, descriptor, end = create_log(self)
        prefixes = _Prefixes()
        try:
            durable = end
            for _, entries in sorted(by_record.items()):
                blobs = [
                    LogBlob(
                        key=entry.key,
                        data=self.read(entry, 0, entry.row.size),
                        is_commit=entry.row.is_commit,
                        version=entry.row.version,
                        in_body=entry.row.in_body,
                    )
                    for entry in entries
                ]
                pieces, record = encode_record(
                    log,
                    end,
                    blobs,
                    consumed,
                    durable_before=durable,
                    prefix=prefixes.next(),
                    written_s=entries[0].written_s,
                )
                consumed = ()
                for piece in pieces:
                    _write_all(descriptor, piece)
                prefixes.note(record)
                end = record.end
            os.fsync(descriptor)
            self._settled.settle(self.folder)
            self._copies[log] = end
            # An empty record tells readers that the others are durable.
            pieces, record = encode_record(log, end, (), (), durable_before=end, prefix=None)
            _write_all(descriptor, pieces[0])
        except BaseException:
            # The blobs still lie in the log that was to be rewritten.
            with contextlib.suppress(OSError):
                self._remove_files(log)
            raise
        finally:
            LockedFile.release(descriptor)
        return record.end

    def _remove_files(self, log: str) -> None:
        self.begin_generation()
        os.unlink(self.path(log))
        # Durably: without its tombstones the log would come back to life.
        sync_folder(self.folder)
        for path in (self.dead_path(log), self.index_path(log)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def create_log(logs: Logs) -> tuple[str, int, int]:
    """Create a log, locked; return its name, descriptor and end."""
    log = new_name()
    descriptor = os.open(logs.path(log), _WRITE_LOG | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        LockedFile.lock(descriptor)
        _write_all(descriptor, header(log, inode_of(descriptor)))
        logs.begin_generation()
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(logs.path(log))
        LockedFile.release(descriptor)
        raise
    return log, descriptor, HEADER_BYTES


class _Prefixes:
    """Choice of the prefix of each record that one writer appends."""

    def __init__(self) -> None:
        self._n_records = 0
        self._last: dict[int, tuple[int, bytes]] = {}
        """The last record with a number divisible by each step: its offset and meta."""

    def next(self) -> tuple[int, bytes] | None:
        """Return the offset and the meta of the next record's prefix; None if it has none."""
        for step, larger in pairwise((1, *_PREFIX_STEPS)):
            if self._n_records % larger:
                found = self._last[max(step, _PREFIX_STEPS[0])]
                return found if len(found[1]) <= _MOST_PREFIX_BYTES else None
        return None

    def note(self, record: Record) -> None:
        """Note that a record has been appended."""
        for step in _PREFIX_STEPS:
            if self._n_records % step == 0:
                self._last[step] = record.offset, record.meta
        self._n_records += 1


class LogWriter:
    """The one log to which this process appends, locked for as long as it may.

    Methods are for the thread that holds `lock`, except for `sync`.
    """

    def __init__(self, logs: Logs) -> None:
        """Take over an idle log, or create one."""
        self.lock = Lock()
        self.is_usable = True
        self.is_sound = True
        """False after a failed sync."""
        self._syncing = Lock()
        self._n_syncing = 0
        self._is_closing = False
        self._logs = logs
        self._settled = Settled()
        found = self._adopted()
        self.id, self.descriptor, self.end = found or create_log(logs)
        self._durable = self.end
        self._is_settled = False
        self._prefixes = _Prefixes()

    def _adopted(self) -> tuple[str, int, int] | None:
        if self._logs._salvages:  # the known end of a log may lie behind a torn tail
            return None
        self._logs.refresh()
        with self._logs._lock:
            idle = [log for log in self._logs._logs.values() if not log.is_closed and 0 < log.end < _FULL_BYTES]
        for log in sorted(idle, key=lambda log: log.end)[:_MAX_TRIED]:
            path = self._logs.path(log.id)
            try:
                descriptor = os.open(path, _WRITE_LOG)
            except FileNotFoundError:
                continue
            is_taken = False
            try:
                if not LockedFile.lock(descriptor, waits=False):
                    continue
                # Nobody else appends from here on. A torn tail, and what follows it, would not count.
                self._logs.refresh()
                is_at_end = not log.is_closed and os.fstat(descriptor).st_size == log.end
                if is_at_end and _is_at(descriptor, path) and _is_original(descriptor):
                    os.fsync(descriptor)
                    os.lseek(descriptor, log.end, os.SEEK_SET)
                    is_taken = True
                    return log.id, descriptor, log.end
            finally:
                if not is_taken:
                    LockedFile.release(descriptor)
        return None

    def is_current(self) -> bool:
        """Tell whether another record may be appended."""
        return self.is_usable and self.end < _FULL_BYTES and _is_at(self.descriptor, self._logs.path(self.id))

    def append(self, blobs: Sequence[LogBlob], consumed: Iterable[str], *, syncs: bool) -> Record:
        """Append one record, not durably; see `Logs.append`."""
        pieces, record = encode_record(
            self.id, self.end, blobs, consumed, durable_before=self._durable, prefix=self._prefixes.next()
        )
        try:
            for piece in pieces:
                _write_all(self.descriptor, piece)
        except BaseException:
            self._take_back(record.end)
            raise
        self.end = record.end
        self._n_syncing += syncs
        self._prefixes.note(record)
        return record

    def _take_back(self, end: int) -> None:
        """Remove a record that was not written whole: nothing behind it would count."""
        try:
            if os.fstat(self.descriptor).st_size >= end:  # an interrupt after the last byte: others may have read it
                self.end = end
                return
            os.ftruncate(self.descriptor, self.end)
            os.lseek(self.descriptor, self.end, os.SEEK_SET)
        except OSError:
            self.is_usable = False

    def sync(self, end: int, logs: Logs) -> None:
        """Make the log durable up to a byte, and its name. For any thread, after `append`.

        Args:
            end: End of the record that was appended.
            logs: The caller's view, which has this record; it may write an index.

        Raises:
            OSError: The disk failed. Nobody appends to this log any more.
        """
        try:
            # One after the other: of two syncs at once only one may hear of a failure.
            with self._syncing:
                self._sync(end)
            logs.write_index(self.id, end)
        finally:
            with self.lock:
                self._n_syncing -= 1
                if self._is_closing and self._n_syncing == 0:
                    LockedFile.release(self.descriptor)

    def _sync(self, end: int) -> None:
        if not self.is_sound:
            raise OSError(errno.EIO, "an earlier sync of the log failed")
        if self._durable >= end:
            return
        reached = self.end
        try:
            os.fsync(self.descriptor)
            if not self._is_settled:
                self._settled.settle(self._logs.folder)
                self._is_settled = True
        except OSError:
            # A later sync may succeed although these bytes are lost.
            self.is_usable = self.is_sound = False
            with contextlib.suppress(OSError):
                self._logs._append_dead(self.id, tombstone(self.id, 0, CLOSED), durable=False)
            raise
        self._durable = max(self._durable, reached)

    def close(self) -> None:
        """Let others append to the log, once nobody syncs it."""
        with self.lock:
            if self.is_usable and self.end >= _FULL_BYTES:
                # From now on a missing end is damage.
                with contextlib.suppress(OSError):
                    self._logs._append_dead(self.id, tombstone(self.id, self.end, CLOSED), durable=False)
            self.is_usable = False
            if not self._is_closing:
                self._is_closing = True
                if self._n_syncing == 0:
                    LockedFile.release(self.descriptor)


_writers: OrderedDict[str, LogWriter] = OrderedDict()
"""The writers of this process, by the folder of the logs."""
_writers_lock = Lock()
_MAX_WRITERS = 16


def writer_of(logs: Logs) -> LogWriter:
    """Return the writer of this process for a store."""
    with _writers_lock:
        writer = _writers.get(logs.folder)
        if writer is not None:
            if writer.is_usable and writer.end < _FULL_BYTES:
                _writers.move_to_end(logs.folder)
                return writer
            _writers.pop(logs.folder).close()
        writer = _writers[logs.folder] = LogWriter(logs)
        while len(_writers) > _MAX_WRITERS:
            _writers.popitem(last=False)[1].close()
        return writer


def close_writer(logs: Logs) -> None:
    """Close the log this process appends to in one store."""
    with _writers_lock:
        writer = _writers.pop(logs.folder, None)
    if writer is not None:
        writer.close()


def forget_writers() -> None:
    """Leave the parent's logs to the parent, in a child made by fork."""
    _writers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget_writers)


def _link_error(path: str) -> RefusedError:
    return RefusedError("use", FOLDER, f"{path!r} is a symbolic link, and nothing of a store lies behind one")


def _between(before: float | None, after: float | None) -> str:
    """Describe the time of lost records."""

    def text(time_s: float) -> str:
        return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds")

    begin = "" if before is None else f" after {text(before)}"
    end = "" if after is None else f" before {text(after)}"
    return f"; they were written{' and'.join(filter(None, (begin, end)))}" if begin or end else ""


def _version(entry: LogEntry) -> int:
    return entry.row.version


def _last(versions: list[LogEntry]) -> LogEntry:
    return versions[0] if len(versions) == 1 else max(versions, key=_version)


def _is_at(descriptor: int, path: str) -> bool:
    """Tell whether an open log still has its name, and no other: a second one belongs to a copy of the store."""
    try:
        found = os.fstat(descriptor)
        return found.st_nlink == 1 and os.path.samestat(found, os.lstat(path))
    except FileNotFoundError:
        return False


def inode_of(descriptor: int) -> int:
    """Return the inode of an open file."""
    return os.fstat(descriptor).st_ino


def _is_original(descriptor: int) -> bool:
    """Tell whether an open log lies in the file in which it was created, and not in a copy of that file."""
    return inode_in(os.pread(descriptor, HEADER_BYTES, 0)) == inode_of(descriptor)


def _pread(descriptor: int, start: int, size: int) -> bytes:
    pieces = []
    while size > 0:
        piece = os.pread(descriptor, min(size, 1 << 30), start)
        if not piece:
            break
        pieces.append(piece)
        start, size = start + len(piece), size - len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _write_all(descriptor: int, data: Buffer) -> None:
    view = memoryview(data).cast("B")
    while len(view):
        view = view[os.write(descriptor, view[: 1 << 30]) :]


def _sync(path: str) -> None:
    descriptor = os.open(path, _READ_LOG)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
