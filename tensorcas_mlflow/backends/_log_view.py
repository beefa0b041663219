"""Merged view of one store's logs: the live blobs of their records, as one process knows them.

``docs/design/protocol.md``, Logs, has the rules and the reason of each.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tensorcas_mlflow.backends._contract import LogDamage, Token
from tensorcas_mlflow.backends._local import write_all
from tensorcas_mlflow.backends._log_digests import WORD_BYTES, pack_words
from tensorcas_mlflow.backends._log_folder import (
    FOLDER,
    Generation,
    LogFolder,
    SyncError,
    file_bytes,
    inode_of,
    open_file,
    read_at,
)
from tensorcas_mlflow.backends._log_index import EMPTY as EMPTY_INDEX
from tensorcas_mlflow.backends._log_index import IndexedBlob, LogIndex, index_bytes, read_index
from tensorcas_mlflow.backends._log_reader import LogReader, read_summaries
from tensorcas_mlflow.backends._log_records import (
    CLOSED,
    HEAD_BYTES,
    HEADER_BYTES,
    TOMBSTONE,
    USUAL_FOLDERS,
    LogRow,
    Place,
    Record,
    SkippedRecord,
    check_header,
    inode_in,
    key_hash,
    marked_end,
    meta_bytes,
    read_tombstones,
    record_check,
)
from tensorcas_mlflow.backends._log_skipped import LogPlace, SkippedRecords
from tensorcas_mlflow.base.digest import Digests
from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.errors import CorruptError, RefusedError

if TYPE_CHECKING:
    from tensorcas_mlflow.backends._log_watch import LogWatch

_COMMITS = "refs"
"""First segment of the keys of blobs that commits create."""
_PACKS = "packs/"
_KEPT_BYTES = 1024
"""Bound of a commit's blob, such as a ref, that stays in memory; its digest may be missing there."""
_INDEXED_BYTES = 1 << 20
"""Size of a log with an index; a smaller one is read quickly."""
_INDEXED_AGAIN_BYTES = 256 << 10
"""Least number of bytes by which a log grows before its index is written anew."""
_INDEX_GROWTH = 8
"""An index is written anew once the log has grown by one part in so many."""
_MOST_UNREAD_BYTES = 4 << 20
"""Bound of the new packs whose words are read later."""
_MOST_SINGLE_READS = 32
"""Bound of the records of an indexed log that are read one by one; more are read with the whole log."""
_WATCHED_LOGS = 3
"""Least number of logs for which the folder is watched: looking at fewer costs as little."""
_WATCHED_AT = 16
"""Number of looks after which a process counts as one that saves again and again."""
_REWRITTEN_AT = 2
"""A log is worth rewriting if it has more than so many times the bytes of its live blobs."""


class LogEntry(NamedTuple):
    """A live blob in a log; a tuple, since an opened store has many."""

    log: str
    record: int
    row: LogRow
    written_s: float
    data: bytes | None
    """The blob, if it is a small one of a commit."""
    check: bytes
    """Begin of the digest of the record."""

    @property
    def key(self) -> str:
        """Key of the blob."""
        return self.row.key

    @property
    def token(self) -> Token:
        """Token of the blob."""
        return f"{self.log}-{self.record:x}-{self.row.number}-{self.check.hex()}"

    @property
    def place(self) -> Place:
        """Place of the blob in its log."""
        return Place(self.record, self.row.number, self.check)


class UndurableLog(NamedTuple):
    """The known part of a log that may not be durable."""

    id: str
    end: int
    n_dead_bytes: int
    has_new_records: bool
    """True if some of these records may not be durable."""
    has_new_tombstones: bool
    """True if some of these tombstones may not be durable."""
    is_failed: bool
    """True if a sync of the log has failed, so that no later one makes it durable."""


@dataclass(slots=True, eq=False, repr=False)
class _KnownLog:
    """The known part of one log."""

    id: str
    path: str
    dead_path: str
    """Path of the tombstones."""
    end: int = 0
    """End of the last record that counts and is known."""
    n_dead_bytes: int = 0
    """Size of the known tombstones."""
    entries: dict[tuple[int, int], LogEntry] = field(default_factory=dict)
    """Live blobs, by record and row."""
    dead: set[Place] = field(default_factory=set)
    """Tombstones; one may be known before its blob."""
    last_dead: bytes = b""
    """The last known tombstone."""
    dead_file: tuple[int, int] | None = None
    """Device and inode of the file of the tombstones that was read."""
    dead_ns: int = 0
    """Time of the last change of that file: others may have put back some tombstones, and written as many."""
    last: tuple[int, bytes] | None = None
    """Offset of the last known record, and the begin of its digest."""
    is_replaced: bool = False
    """True if another state of the log is in the place of the known one."""
    is_closed: bool = False
    """True if nobody appends to the log any more."""
    least_end: int = 0
    """The log has been durable up to this byte, or was closed there."""
    consumed: set[str] = field(default_factory=set)
    """Intents that commits in the log have consumed."""
    durable: int = 0
    """Every byte before this one is known to be durable."""
    file: tuple[int, int] | None = None
    """Device and inode of the file that was read."""
    is_original: bool = False
    """True if the log was created in this file: what the records of a copy say of durability holds for the original."""
    is_synced: bool = False
    """True if a sync of this file by this process has succeeded."""
    n_durable_dead_bytes: int = 0
    """Size of the tombstones that are known to be durable."""
    deleted: set[str] = field(default_factory=set)
    """Keys of blobs of commits with tombstones that may not be durable."""
    n_unnamed_dead_bytes: int = 0
    """Size of the first tombstones: the index may leave out the keys of their blobs."""
    index: LogIndex | None = None
    """Index of the first part; None if all records are read."""
    n_single_reads: int = 0
    """Reads of one record each in the indexed part."""
    single_reads: set[int] = field(default_factory=set)
    """Offsets of the records of these reads."""
    written: LogIndex | None = None
    """The index that was read or written last."""
    words: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """Words of packs, by record and row, for the next index."""
    may_have_index: bool = True
    """False once a search for an index has ended."""
    lost_tombstones: list[int] = field(default_factory=list)
    """Places of damaged tombstones."""
    metas: dict[int, bytes] = field(default_factory=dict)
    """Metas of the last records, by offset: the next ones are mostly differences from them."""
    n_stored_bytes: int = 0
    """Size of the heads, the summaries and the stored metas of the records that were read."""
    n_meta_bytes: int = 0
    """Size of their metas."""

    @property
    def is_ended(self) -> bool:
        """True if nobody may append to the log: it is closed, or lacks its end."""
        return self.is_closed or self.end < self.least_end


class LogView:
    """Live blobs in the logs of one store, as of the last refresh. For any thread.

    Methods raise OSError, unless they say otherwise; the caller translates it.
    """

    may_watch = False
    """True if the logs are known to lie on a local disk, where the kernel reports every change."""

    def __init__(self, folder: LogFolder, *, salvages: bool = False) -> None:
        """View the logs in a folder.

        Args:
            folder: The folder of the logs; it need not exist.
            salvages: Whether records behind damage count too, and damage is no error; see `LogDamage`.
        """
        self.folder = folder
        self._salvages = salvages
        self._damages: dict[str, list[LogDamage]] = {}
        self._lock = Lock()
        self._logs: dict[str, _KnownLog] = {}
        self._entries: dict[str, list[LogEntry]] = {}
        """Live blobs, by key."""
        self._skipped = SkippedRecords()
        self._has_indexes = False
        """True if some records are known by an index alone."""
        self._packs: dict[bytes, set[str]] = {}
        """Keys of packs by their words; some packs may be gone."""
        self._blobs_in: defaultdict[str, set[str]] = defaultdict(set)
        """Keys of the blobs directly below a prefix."""
        self._names_in: defaultdict[str, set[str]] = defaultdict(set)
        self._unread: list[tuple[_KnownLog, tuple[int, int], LogRow, bytes]] = []
        """Packs whose words are not read: log, record and row, and the bytes if they lie in a meta."""
        self._n_unread_bytes = 0
        self._unentered: list[str] = []
        """Keys of other blobs than refs that are in neither of these."""
        self.failed: set[str] = set()
        """Logs with a failed sync: their last records and tombstones may never reach the disk."""
        self._damage: CorruptError | None = None
        self._listed: Generation | None = None
        """Generation at which the logs were last listed."""
        self._watch: LogWatch | None = None
        self._n_looks = 0
        self._changed: set[str] | None = None
        """Names of the files that have changed since they were last read; None if any may have."""

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
        generation = self.folder.generation()
        is_listed = False
        # Every log with a record is in the last listing: a log changes the generation before it gets its first record.
        if generation is None or generation != self._listed:
            self._list()
            # A log may be rewritten during the listing, and the listing may miss the old one and the new one.
            if self.folder.generation() != generation:
                return False
            self._listed = generation
            is_listed = True
            # The folder may be another one by now.
            self._end_watch()
        self._ask_watch()
        damages: list[CorruptError] = []
        try:
            # Tombstones as of one moment, and records as of later ones: otherwise a deletion meanwhile may show a blob
            # that was replaced long ago.
            while self._read_tombstones(damages):
                self._ask_watch()
            changed, self._changed = self._changed, None  # after an error any file may have changed
            for log in self._logs.values() if changed is None else self._logs_with(changed):
                try:
                    # A folder that was put back in place may have files of the same sizes.
                    self._read_log(log, is_changed=changed is not None or is_listed)
                    if log.end < log.least_end and not self._salvages:
                        damages.append(_lost(log))
                except CorruptError as error:
                    damages.append(error)
        except FileNotFoundError:  # removed or replaced since the listing
            self._listed = None
            return False
        # In one step: `check` in another thread may run at any moment.
        self._damage = damages[-1] if damages else None
        if self._watch is not None and not damages:  # damage is found anew by each look
            self._changed = set()
        return True

    def _ask_watch(self) -> None:
        """Note the files that have changed, and begin to watch the folder if that saves calls."""
        self._n_looks += 1
        if self._watch is None:
            is_wanted = self.may_watch and not self._salvages
            if is_wanted and self._n_looks >= _WATCHED_AT and len(self._logs) >= _WATCHED_LOGS:
                from tensorcas_mlflow.backends._log_watch import LogWatch

                # Before the files are looked at: later changes are reported.
                self._watch = LogWatch.begin(self.folder.path)
                self._n_looks = 0
            self._changed = None
            return
        changed = self._watch.changed()
        if changed is None:
            self._end_watch()
        elif self._changed is not None:
            self._changed |= changed

    def _end_watch(self) -> None:
        """End the watch on the folder: every file counts as changed."""
        if self._watch is not None:
            self._watch.close()
        self._watch = self._changed = None

    def _logs_with(self, files: set[str], ending: str = "") -> list[_KnownLog]:
        """Return the logs that have some files, or those of an ending among them."""
        names = {name.partition(".")[0] for name in files if name.endswith(ending)}
        return [log for log in map(self._logs.get, names) if log is not None]

    def _read_tombstones(self, damages: list[CorruptError]) -> bool:
        """Read the new tombstones of all logs; return whether there are any."""
        has_new = False
        changed = self._changed
        for log in self._logs.values() if changed is None else self._logs_with(changed, ".dead"):
            try:
                has_new |= self._read_dead(log)
            except CorruptError as error:
                damages.append(error)
        return has_new

    def _list(self) -> None:
        """List the logs again: forget the removed ones, and know the new ones."""
        listed = self.folder.names()
        for log in [name for name, log in self._logs.items() if log.is_replaced or name not in listed]:
            self._forget(log)
        for log in sorted(listed - self._logs.keys()):
            self._known(log)

    def _known(self, name: str) -> _KnownLog:
        """Return the known part of a log: none of it if the log is new."""
        log = self._logs.get(name)
        if log is None:
            folder = self.folder
            log = self._logs[name] = _KnownLog(name, folder.log_path(name), folder.dead_path(name))
        return log

    def check(self) -> None:
        """Refuse to say that a blob is absent, or not replaced, while a log is damaged.

        Raises:
            CorruptError: A log is damaged.
        """
        damage = self._damage
        if damage is not None:
            raise CorruptError(damage.key, f"{damage.reason}; `tensorcas repair` keeps every whole record")

    def find(self, key: str) -> LogEntry | None:
        """Return the blob that counts at a key, as of the last refresh."""
        with self._lock:
            # A save makes few Python calls: `tests/integration/checkpoints/test_small_steps.py` counts them.
            if self._skipped.n or self._has_indexes:
                self._read_for([key])
            found = self._entries.get(key)
            return _last(found) if found else None

    def find_each(self, keys: Sequence[str]) -> list[LogEntry | None]:
        """Return for each key the blob that counts there, as of the last refresh."""
        with self._lock:
            if self._skipped.n or self._has_indexes:
                self._read_for(keys)
            return [_last(found) if (found := self._entries.get(key)) else None for key in keys]

    def find_packs(self, digests: Digests) -> set[str]:
        """Return the keys of packs that may hold some chunks, as of the last refresh."""
        joined = np.ascontiguousarray(digests[:, :WORD_BYTES]).tobytes()
        words = [joined[at : at + WORD_BYTES] for at in range(0, len(joined), WORD_BYTES)]
        with self._lock:
            if self._skipped.n or self._has_indexes:
                self._read_wanted(
                    lambda index: index.with_words(np.frombuffer(joined, "<u4")),
                    lambda: self._skipped.with_words(words),
                )
            self._read_words()
            found = list(map(self._packs.get, words))
            return {key for keys in found if keys for key in keys if key in self._entries}

    def versions(self, key: str) -> list[LogEntry]:
        """Return all blobs of a key, the one that counts last."""
        with self._lock:
            self._read_for([key])
            return sorted(self._entries.get(key, ()), key=_version)

    def has_consumed(self, intent: str) -> bool:
        """Tell whether a commit has consumed an intent, as of the last refresh."""
        with self._lock:
            if self._skipped.n:
                self._read_wanted(lambda index: [], lambda: self._skipped.with_keys([key_hash(intent)]))
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

    # --- reading the files

    def _read_log(self, log: _KnownLog, *, is_changed: bool = False, skips: bool = True) -> None:
        """Read the new records of a log.

        Args:
            log: The log.
            is_changed: Whether somebody has most likely changed it since the last reading.
            skips: Whether to read only the summaries of records that have one.

        Raises:
            FileNotFoundError: It is gone, or another state of it is in its place.
        """
        if not is_changed:
            found = os.lstat(log.path)
            if 0 < log.end == found.st_size and (found.st_dev, found.st_ino) == log.file:
                return
        descriptor = open_file(log.path)
        try:
            found = os.fstat(descriptor)
            size = found.st_size
            file = found.st_dev, found.st_ino
            if log.file not in (None, file) or size < log.end or not _has_last(log, descriptor):
                raise _replaced(log)
            if log.file is None:
                size = _meet(log, descriptor, file)
            if log.end == 0 and log.may_have_index:
                log.may_have_index = False
                self._read_index(log, descriptor, size)
            if self._salvages:
                self._salvage(log, descriptor, size)
                return
            if 0 < log.end == size:
                return
            if skips and log.end and self._skip_new(log, descriptor, size):
                return
            reader = LogReader(log.id, descriptor, f"{FOLDER}/{log.id}.log", metas=log.metas, durable=log.least_end)
            records, end, damage = reader.records(log.end, size, skips=skips)
            log.metas = reader.metas(end)
        finally:
            os.close(descriptor)
        for record in records:
            if isinstance(record, Record):
                self._add(log, record)
            else:
                self._skip(log, record)
            log.last = record.offset, record.check
        log.end = end
        if damage is not None:
            raise damage

    def _skip_new(self, log: _KnownLog, descriptor: int, size: int) -> bool:
        """Read the summaries of new records as far as each has one; tell whether that is all there is."""
        summaries, end = read_summaries(log.id, descriptor, log.end, size)
        for summary in summaries:
            self._skip(log, summary)
            log.last = summary.offset, summary.check
        log.end = end
        return end == size

    def _salvage(self, log: _KnownLog, descriptor: int, size: int) -> None:
        """Read every whole record of a log, and note what is lost."""
        key = f"{FOLDER}/{log.id}.log"
        damages: list[LogDamage] = []
        records, lost = LogReader(log.id, descriptor, key, durable=log.least_end).salvage(size)
        reason: str | None = None
        try:
            if not check_header(log.id, os.pread(descriptor, HEADER_BYTES, 0), key):
                reason = "its header is damaged"
        except CorruptError as error:
            reason = error.reason
        if reason is not None:
            damages.append(LogDamage(key=key, start=0, n_bytes=min(HEADER_BYTES, size), reason=reason))
        for record in records:
            self._add(log, record)
        if size < log.least_end:
            begin = lost.pop()[0] if lost and lost[-1][1] == size else size
            lost.append((begin, log.least_end))
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

    def _read_dead(self, log: _KnownLog) -> bool:
        """Read new tombstones; return whether there are any."""
        try:
            found = os.lstat(log.dead_path)
            size, file = found.st_size, (found.st_dev, found.st_ino)
            if size == log.n_dead_bytes and log.dead_file in (None, file) and log.dead_ns in (0, found.st_ctime_ns):
                return False
            descriptor = open_file(log.dead_path)
        except FileNotFoundError:
            if log.n_dead_bytes:
                raise _replaced(log) from None
            return False
        n_last = len(log.last_dead)
        try:
            data = os.pread(descriptor, max(0, size - log.n_dead_bytes) + n_last, log.n_dead_bytes - n_last)
        finally:
            os.close(descriptor)
        if log.dead_file not in (None, file) or size < log.n_dead_bytes or data[:n_last] != log.last_dead:
            raise _replaced(log)
        log.dead_ns = found.st_ctime_ns
        lost: list[int] | None = [] if self._salvages else None
        places, n_bytes = read_tombstones(log.id, data[n_last:], f"{FOLDER}/{log.id}.dead", lost=lost)
        log.lost_tombstones += [log.n_dead_bytes + at for at in lost or ()]
        for place in places:
            if place.row == CLOSED:
                log.is_closed = True
                log.least_end = max(log.least_end, place.record)
                if place.record == 0:
                    self.failed.add(log.id)
            else:
                log.dead.add(place)
                entry = log.entries.get((place.record, place.row))
                if entry is not None and entry.check == place.check:
                    del log.entries[place.record, place.row]
                    self._remove(entry)
                    if entry.row.is_commit:
                        log.deleted.add(entry.key)
        if n_bytes:
            log.dead_file, log.last_dead = file, data[n_last:][n_bytes - TOMBSTONE.size : n_bytes]
        log.n_dead_bytes += n_bytes
        return n_bytes > 0

    def _add(self, log: _KnownLog, record: Record) -> None:
        """Add the blobs of a record that are not deleted."""
        log.consumed.update(record.consumed)
        log.durable = max(log.durable, record.durable_before)
        log.n_stored_bytes += record.body_start - record.offset
        log.n_meta_bytes += len(record.meta)
        entries, dead, offset = log.entries, log.dead, record.offset
        for row in record.rows:
            place = offset, row.number
            if dead and (*place, record.check) in dead:
                if row.is_commit:
                    log.deleted.add(row.key)
                continue
            if place in entries:
                continue
            data = None
            if row.is_commit and row.size <= _KEPT_BYTES and not row.in_body:
                data = row.data_in(record.meta)
            if row.key.startswith(_PACKS):
                self._unread.append((log, place, row, b"" if row.in_body else row.data_in(record.meta)))
                self._n_unread_bytes += row.size
                if self._n_unread_bytes > _MOST_UNREAD_BYTES:
                    self._read_words()
            self._add_entry(log, LogEntry(log.id, offset, row, record.written_s, data, record.check))

    def _skip(self, log: _KnownLog, summary: SkippedRecord) -> None:
        """Note a record without reading its meta: most processes never need most records of others."""
        log.durable = max(log.durable, summary.durable_before)
        self._skipped.note(log.id, summary)

    def _read_for(self, keys: Sequence[str]) -> None:
        """Read the records that may have some keys."""
        hashes = [key_hash(key) for key in keys]
        self._read_wanted(
            lambda index: sorted({at for key in keys for at in index.with_key(key)}),
            lambda: self._skipped.with_keys(hashes),
        )

    def _read_wanted(self, indexed: Callable[[LogIndex], list[int]], skipped: Callable[[], list[LogPlace]]) -> None:
        """Read the records that may have some blobs.

        Args:
            indexed: Returns the offsets of records, from an index.
            skipped: Returns the skipped ones.
        """
        while True:
            self._read_indexed(indexed)
            try:
                self._read_skipped(skipped())
                return
            except FileNotFoundError:  # its log was rewritten since, and the new one may have an index
                self._list_anew()

    def _read_skipped(self, places: Iterable[LogPlace]) -> None:
        """Read some skipped records."""
        wanted: defaultdict[str, set[int]] = defaultdict(set)
        for name, at in places:
            wanted[name].add(at)
        for name, offsets in wanted.items():
            log, key = self._logs[name], f"{FOLDER}/{name}.log"
            descriptor = open_file(log.path)
            try:
                reader, size = LogReader(name, descriptor, key, metas=log.metas), os.fstat(descriptor).st_size
                for at in sorted(offsets):
                    try:
                        record = reader.record(at, size)
                        if record is None:
                            raise CorruptError(key, f"the record at byte {at} is damaged")
                    except CorruptError:
                        # The disk may have lost a record of a failed sync. Whoever rewrites the log says so.
                        if name not in self.failed or at < log.durable:
                            raise
                    else:
                        self._add(log, record)
                    self._skipped.remove((name, at))
            finally:
                os.close(descriptor)
            log.metas = reader.metas(log.end)

    def _list_anew(self) -> None:
        """List the logs again, and read everything that others have added."""
        self._listed = None
        while not self._refresh():
            pass

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

    def _add_entry(self, log: _KnownLog, entry: LogEntry) -> None:
        """Add one live blob."""
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
        """Add a key to the tree of prefixes."""
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
        """Remove one blob."""
        versions = self._entries[entry.key]
        versions.remove(entry)
        if not versions:
            del self._entries[entry.key]
            entered = self._blobs_in.get(entry.key.rpartition("/")[0])
            if entered is not None:
                entered.discard(entry.key)

    def _forget(self, name: str) -> None:
        """Remove a log and its blobs."""
        self.failed.discard(name)
        self._skipped.forget(name)
        for entry in self._logs.pop(name).entries.values():
            self._remove(entry)

    # --- for the process that appends

    def add_own(self, name: str, record: Record) -> None:
        """Add a record that this process has appended, unless the view lacks an earlier one."""
        with self._lock:
            log = self._known(name)
            if log.end == record.offset or (log.end == 0 and record.offset == HEADER_BYTES):
                self._add(log, record)
                log.last, log.end = (record.offset, record.check), record.end

    def open_logs(self, *, below: int) -> list[str]:
        """Return the logs of fewer bytes that have not ended, the smallest first; a salvaging view returns none."""
        if self._salvages:  # the known end of a log may lie behind a torn tail
            return []
        with self._lock:
            found = [log for log in self._logs.values() if 0 < log.end < below and not log.is_ended]
            return [log.id for log in sorted(found, key=lambda log: log.end)]

    def open_end(self, name: str) -> int | None:
        """Return the end of the last record that counts; None if the log has ended or is gone."""
        with self._lock:
            log = self._logs.get(name)
            return None if log is None or log.is_ended else log.end

    def undurable(self, names: Iterable[str] | None = None) -> list[UndurableLog]:
        """Return those of some logs, by default of all, whose known records or tombstones may not be durable."""
        found = []
        with self._lock:
            for log in map(self._logs.get, self._logs if names is None else names):
                if log is not None:
                    doubts = (
                        log.durable < log.end,
                        log.n_durable_dead_bytes < log.n_dead_bytes,
                        log.id in self.failed,
                    )
                    if True in doubts:
                        found.append(UndurableLog(log.id, log.end, log.n_dead_bytes, *doubts))
        return found

    def logs_to_sync(self, entries: Iterable[LogEntry]) -> set[str]:
        """Return the logs to sync so that some blobs are durable: logs of a failed sync or with new tombstones, too."""
        found = set()
        with self._lock:
            for entry in entries:
                log = self._logs.get(entry.log)
                if log is not None and (
                    not (log.is_original and log.is_synced)
                    or entry.record >= log.durable
                    or log.n_durable_dead_bytes < log.n_dead_bytes
                    or log.id in self.failed
                ):
                    found.add(log.id)
        return found

    def note_durable(self, name: str, end: int, n_dead_bytes: int = 0) -> None:
        """Note that a sync has made a log durable up to a byte, and so many bytes of its tombstones."""
        with self._lock:
            log = self._logs.get(name)
            if log is not None:
                log.is_synced |= end > 0
                log.durable = max(log.durable, end)
                log.n_durable_dead_bytes = max(log.n_durable_dead_bytes, n_dead_bytes)
                if log.n_durable_dead_bytes == log.n_dead_bytes:
                    log.deleted.clear()

    def undurable_deletions(self, key: str) -> list[str]:
        """Return the logs that may hold an earlier blob of a commit at a key with a tombstone that is not durable."""
        with self._lock:
            if self._skipped.n:
                self._read_wanted(lambda index: [], lambda: self._skipped.with_keys([key_hash(key)]))
            return [
                log.id
                for log in self._logs.values()
                if log.n_durable_dead_bytes < log.n_dead_bytes
                and (key in log.deleted or log.n_durable_dead_bytes < log.n_unnamed_dead_bytes)
            ]

    @contextlib.contextmanager
    def marking_failures(self) -> Iterator[None]:
        """Mark the log whose sync fails in this context; the caller holds no lock of tombstones outside of it."""
        try:
            yield
        except SyncError as error:
            # A later sync may succeed although these bytes are lost.
            self.folder.mark_failed(error.log)
            with self._lock:
                if error.log in self._logs:
                    self.failed.add(error.log)
            raise

    # --- for the process that rewrites

    def read_again(self, name: str) -> bool:
        """Read a log with a failed sync anew, with the bodies of its last records; return whether all are still there.

        The system may have given up their bytes.
        """
        with self._lock:
            before = self._logs[name].end
            self._changed = None
            self._forget(name)
            log = self._known(name)
            log.may_have_index = False
            self.failed.add(name)
            self._read_dead(log)
            self._read_log(log)
            return log.end >= before

    def read_all(self) -> None:
        """Read all records whose metas have not been read, which finds damage to those of indexed logs.

        Raises:
            CorruptError: A skipped record is damaged.
        """
        with self._lock:
            self._read_below("")

    def logs(self) -> list[str]:
        """Return the names of all logs."""
        with self._lock:
            return list(self._logs)

    def live_blobs(self, name: str) -> list[LogEntry]:
        """Return the blobs of a log that count."""
        with self._lock:
            self._read_below("")
            log = self._logs.get(name)
            return [] if log is None else self._counting(log)

    def consumed_in(self, name: str) -> list[str]:
        """Return the intents that exist and that commits in a log have consumed."""
        with self._lock:
            self._read_below("")
            log = self._logs.get(name)
            return [] if log is None else self.folder.existing(log.consumed)

    def garbage_in(self, name: str, without: Set[str]) -> int:
        """Estimate the bytes of garbage in a log's files if the blobs of some keys are deleted."""
        with self._lock:
            self._read_below("")
            log = self._logs.get(name)
            return 0 if log is None else max(0, self.folder.n_bytes(name) - round(self._live_bytes(log, without)))

    def is_worth_rewriting(self, name: str, *, without: Set[str] = frozenset()) -> bool:
        """Tell whether a rewriting frees much of a log, or its torn tail, which every look reads.

        Args:
            name: The log.
            without: Keys of blobs that count as deleted.
        """
        with self._lock:
            self._read_below("")
            log = self._logs.get(name)
            if log is None:
                return False
            live_bytes = self._live_bytes(log, without)
            if live_bytes == 0 or name in self.failed or live_bytes * _REWRITTEN_AT < log.end:
                return True
            return file_bytes(log.path) > log.end

    def _counting(self, log: _KnownLog) -> list[LogEntry]:
        """Return the blobs of a log that no later version replaces, unless the disk may lose that version."""
        last = ((entry, _last(self._entries[entry.key])) for entry in log.entries.values())
        return [entry for entry, counts in last if counts is entry or counts.log in self.failed]

    def _live_bytes(self, log: _KnownLog, without: Set[str] = frozenset()) -> float:
        """Estimate how many bytes of a log its live blobs need, without those of some keys."""
        live = [entry for entry in self._counting(log) if entry.key not in without]
        in_bodies = sum(entry.row.size for entry in live if entry.row.in_body)
        in_metas = sum(meta_bytes(entry.row) for entry in live)
        return in_bodies + in_metas * log.n_stored_bytes / max(log.n_meta_bytes, 1)

    # --- indexes

    def _read_index(self, log: _KnownLog, descriptor: int, size: int) -> None:
        """Take the places of the blobs in the first part of a log from its index, if it has a sound one."""
        try:
            file = open_file(self.folder.index_path(log.id))
        except (OSError, RefusedError):
            return
        try:
            index = read_index(log.id, read_at(file, 0, os.fstat(file).st_size))
        finally:
            os.close(file)
        if index is None:
            return
        log.least_end = max(log.least_end, index.end)
        if index.end > size or size < _INDEXED_BYTES or self._salvages or len(index.records) == 0:
            return
        reader = LogReader(log.id, descriptor, f"{FOLDER}/{log.id}.log")
        try:
            last = reader.record(int(index.records[-1]), index.end)
        except CorruptError:
            return
        if last is None or last.check != index.checks[-1].tobytes():
            return
        log.last = last.offset, last.check
        log.index, log.written, log.end = index, index, index.end
        self._has_indexes = True
        log.consumed.update(index.consumed)
        log.n_unnamed_dead_bytes = log.n_dead_bytes
        for blob in index.committed():
            if (blob.record, blob.row.number, blob.check) not in log.dead:
                self._add_entry(log, LogEntry(log.id, blob.record, blob.row, blob.written_s, None, blob.check))

    def _read_indexed(self, wanted: Callable[[LogIndex], list[int]]) -> None:
        """Read the records that the indexes of all logs name.

        Args:
            wanted: Returns the offsets of records, from an index.
        """
        while True:
            try:
                for log in self._logs.values():
                    if log.index is not None:
                        self._read_records(log, [at for at in wanted(log.index) if at not in log.single_reads])
                return
            except FileNotFoundError:  # its log was rewritten since
                self._list_anew()

    def _read_records(self, log: _KnownLog, offsets: list[int]) -> None:
        """Read some records of an indexed log, or the whole log if they are many."""
        if not offsets:
            return
        log.n_single_reads += len(offsets)
        if log.n_single_reads > _MOST_SINGLE_READS:
            self._read_whole(log)
            return
        key = f"{FOLDER}/{log.id}.log"
        descriptor = open_file(log.path)
        try:
            reader = LogReader(log.id, descriptor, key)
            for at in offsets:
                record = reader.record(at, log.end)
                if record is None:
                    raise CorruptError(key, f"the record at byte {at} is damaged")
                self._add(log, record)
                log.single_reads.add(at)
        finally:
            os.close(descriptor)

    def note_read(self, name: str) -> None:
        """Note a read of one commit of an indexed log; many at once read the whole log."""
        with self._lock:
            log = self._logs.get(name)
            if log is not None and log.index is not None:
                log.n_single_reads += 1
                if log.n_single_reads > _MOST_SINGLE_READS:
                    self._read_below("")

    def _read_below(self, prefix: str) -> None:
        """Read everything that may name blobs below a prefix."""
        folder = prefix.partition("/")[0]
        while True:
            try:
                if folder != _COMMITS:  # indexes name all refs
                    self._read_all()
                if folder in ("", *USUAL_FOLDERS):
                    self._read_skipped(self._skipped.all())
                break
            except FileNotFoundError:  # its log was rewritten since
                self._list_anew()
        if folder != _COMMITS:
            for key in self._unentered:
                if key in self._entries:
                    self._enter(key)
            self._unentered.clear()

    def _read_all(self) -> None:
        """Read all indexed logs whole."""
        for log in self._logs.values():
            self._read_whole(log)
        self._has_indexes = any(log.index is not None for log in self._logs.values())

    def _read_whole(self, log: _KnownLog) -> None:
        """Read an indexed log without its index."""
        if log.index is None:
            return
        before = log.index, (log.end, log.last), self._skipped.forget(log.id), list(log.entries.values())
        for entry in before[3]:
            self._remove(entry)
        log.entries.clear()
        log.index, log.end, log.last = None, 0, None
        try:
            self._read_log(log, skips=False)
        except CorruptError as error:
            self._damage, self._changed = error, None
        except BaseException:
            log.index, (log.end, log.last), skipped, entries = before
            self._skipped.restore(log.id, skipped)
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
            try:
                # Another process has appended them before this one took the log over.
                self._read_skipped(self._skipped.in_log(name))
            except (OSError, CorruptError):
                return
            self._read_words()
            places = sorted([place for place in log.entries if before.end <= place[0] < end])
            entries = [log.entries[place] for place in places]
            if [entry for entry in entries if not entry.row.is_commit and entry.key.startswith(_COMMITS)]:
                return
            blobs = (
                IndexedBlob(entry.record, entry.row, entry.written_s, entry.check, log.words.get(place, b""))
                for place, entry in zip(places, entries, strict=True)
            )
            index = before.extended(blobs, self.folder.existing(log.consumed), end)
            log.written = index
            for place in places:
                log.words.pop(place, None)
            if log.index is not None:
                log.index = index
                log.single_reads.update(place[0] for place in places)
            data = index_bytes(name, index)
        path = self.folder.index_path(name)
        with contextlib.suppress(OSError):
            # A file of its own: a copy of the store by hard links may have the old one.
            try:  # noqa: SIM105 -- `contextlib.suppress` makes three calls
                os.unlink(path)
            except FileNotFoundError:
                pass
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                write_all(descriptor, data)
            finally:
                os.close(descriptor)


def _meet(log: _KnownLog, descriptor: int, file: tuple[int, int]) -> int:
    """Read the header of a log for the first time; return the size of its file after that."""
    log.file = file
    head = os.pread(descriptor, HEADER_BYTES, 0)
    log.is_original = len(head) == HEADER_BYTES and inode_in(head) == inode_of(descriptor)
    log.least_end = max(log.least_end, marked_end(log.id, head))
    return os.fstat(descriptor).st_size  # somebody may have appended before the mark was read


def _has_last(log: _KnownLog, descriptor: int) -> bool:
    """Tell whether the last known record of a log still lies in the open file."""
    if log.last is None:
        return True
    at, check = log.last
    return record_check(os.pread(descriptor, HEAD_BYTES, at)) == check


def _replaced(log: _KnownLog) -> FileNotFoundError:
    """Note that another state of a log is in the place of the known one, such as one from a backup."""
    log.is_replaced = True
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), log.path)


def _lost(log: _KnownLog) -> CorruptError:
    """Return the error for a log that lacks bytes that have been durable."""
    reason = f"its records from byte {log.end} to byte {log.least_end} are damaged, or it ends before them"
    return CorruptError(f"{FOLDER}/{log.id}.log", reason)


def _between(before: float | None, after: float | None) -> str:
    """Describe the time of lost records."""

    def text(time_s: float) -> str:
        return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds")

    begin = "" if before is None else f" after {text(before)}"
    end = "" if after is None else f" before {text(after)}"
    return f"; they were written{' and'.join(filter(None, (begin, end)))}" if begin or end else ""


def _version(entry: LogEntry) -> tuple[int, float]:
    """Return the version of a blob, and its time: a backup that was copied over a store may bring a version again."""
    return entry.row.version, entry.written_s


def _last(versions: list[LogEntry]) -> LogEntry:
    """Return the blob of a key that counts, from all its versions."""
    return versions[0] if len(versions) == 1 else max(versions, key=_version)
