"""Blobs in the logs of one store: reading, appending and deleting them.

The view knows the live blobs, the writer appends, the rewriter frees space; this layer joins them.
``docs/design/protocol.md``, Logs, has the rules and the reason of each.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING

from tensorcas_mlflow.backends._log_digests import with_digests
from tensorcas_mlflow.backends._log_folder import FOLDER, LogFolder, open_file, read_at, sync_file
from tensorcas_mlflow.backends._log_reader import LogReader
from tensorcas_mlflow.backends._log_records import LogBlob, Place, Record, tombstone
from tensorcas_mlflow.backends._log_view import LogEntry, LogView, UndurableLog
from tensorcas_mlflow.base.files import Settled
from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.errors import CorruptError

if TYPE_CHECKING:
    from tensorcas_mlflow.backends._contract import Freed
    from tensorcas_mlflow.backends._log_rewriter import LogRewriter
    from tensorcas_mlflow.backends._log_writer import LogWriter

_MAX_METAS = 32
_MAX_BLOBS = 64


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
        self.folder = LogFolder(top)
        self.view = LogView(self.folder, salvages=salvages)
        self._lock = Lock()
        self._metas: OrderedDict[bytes, bytes] = OrderedDict()
        """Metas of the records read last, by the digests of the records."""
        self._blobs: OrderedDict[tuple[str, Place], bytes] = OrderedDict()
        """Blobs in metas read last, by log and place."""
        self._settled = Settled()

    def make(self) -> None:
        """Turn logs on in a store that is being created, durably."""
        os.makedirs(self.folder.path, exist_ok=True)
        self._settled.settle(self.folder.path)

    # --- reading blobs

    def open(self, entry: LogEntry) -> tuple[int, str]:
        """Open the log of a blob; return its descriptor and path.

        Raises:
            FileNotFoundError: The log is gone; `LogView.refresh` finds the blob elsewhere, if it still exists.
        """
        path = self.folder.log_path(entry.log)
        return open_file(path), path

    def read(self, entry: LogEntry, start: int, size: int) -> bytes:
        """Read a part of a blob; shorter if the log is.

        Raises:
            FileNotFoundError: See `open`.
        """
        if entry.row.in_body:
            descriptor, _ = self.open(entry)
            try:
                return read_at(descriptor, entry.row.start + start, size)
            finally:
                os.close(descriptor)
        return self._blob(entry)[start : start + size]

    def _blob(self, entry: LogEntry) -> bytes:
        """Return a blob that lies in a meta."""
        if entry.data is not None:
            return self._with_digests(entry, entry.data)
        place = entry.log, entry.place
        with self._lock:
            blob = self._blobs.get(place)
            if blob is not None:
                self._blobs.move_to_end(place)
                return blob
        if entry.row.is_commit:
            self.view.note_read(entry.log)
        blob = self._with_digests(entry, entry.row.data_in(self._meta(entry)))
        with self._lock:
            self._blobs[place] = blob
            if len(self._blobs) > _MAX_BLOBS:
                self._blobs.popitem(last=False)
        return blob

    @staticmethod
    def _with_digests(entry: LogEntry, data: bytes) -> bytes:
        """Put the digests back into a blob."""
        try:
            return with_digests(entry.row.kind, data)
        except ValueError as error:
            key = f"{FOLDER}/{entry.log}.log"
            raise CorruptError(key, f"the record at byte {entry.record} has impossible contents: {error}") from None

    def _meta(self, entry: LogEntry) -> bytes:
        """Return the meta of the record that holds a blob."""
        with self._lock:
            meta = self._metas.get(entry.check)
            if meta is not None:
                self._metas.move_to_end(entry.check)
                return meta
        key = f"{FOLDER}/{entry.log}.log"
        descriptor, _ = self.open(entry)
        try:
            record = LogReader(entry.log, descriptor, key).record(entry.record, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
        if record is None or record.check != entry.check:
            raise CorruptError(key, f"the record at byte {entry.record} is damaged")
        with self._lock:
            self._metas[entry.check] = record.meta
            if len(self._metas) > _MAX_METAS:
                self._metas.popitem(last=False)
        return record.meta

    # --- appending

    def append(
        self, blobs: Sequence[LogBlob], consumed: Iterable[str] = (), *, syncs: bool
    ) -> tuple[LogWriter, Record]:
        """Append one record to the log of this process, not durably.

        Args:
            blobs: Its blobs.
            consumed: Keys of the intents it consumes.
            syncs: Whether the caller calls `LogWriter.sync` next, and then `leave`, whatever happens.

        Returns:
            The writer, and the record.
        """
        from tensorcas_mlflow.backends._log_writer import writer_of

        while True:
            writer = writer_of(self.view)
            with writer.lock:
                if not writer.is_current():  # filled or closed by another thread, or removed
                    writer.is_usable = False
                    continue
                record = writer.append(blobs, consumed, syncs=syncs)
                self.view.add_own(writer.id, record)
                return writer, record

    def sync(self, logs: Iterable[str] | None = None) -> bool:
        """Make the known records and tombstones of some logs durable, whoever wrote them; all logs by default.

        Returns:
            Whether a log had to be rewritten for that: then a blob may lie in another log, or be lost.
        """
        undurable = self.view.undurable(logs)
        if not undurable:
            return False
        failed = [log.id for log in undurable if log.is_failed]
        if failed:
            self._rewriter().renew(failed)
        with self.view.marking_failures():
            self._sync([log for log in undurable if not log.is_failed])
        return bool(failed)

    def _sync_sound(self) -> None:
        """Make all logs without a failed sync durable."""
        self._sync([log for log in self.view.undurable() if not log.is_failed])

    def _sync(self, logs: Sequence[UndurableLog]) -> None:
        """Sync the files of some logs, inside `LogView.marking_failures`."""
        synced: list[tuple[str, int, int]] = []
        for log in logs:
            try:
                if log.has_new_records:
                    sync_file(log.id, self.folder.log_path(log.id))
                    synced.append((log.id, log.end, 0))
                if log.has_new_tombstones:
                    sync_file(log.id, self.folder.dead_path(log.id))
                    synced.append((log.id, 0, log.n_dead_bytes))
            except FileNotFoundError:  # its live blobs are durable elsewhere
                continue
        if logs:
            self._settled.settle(self.folder.path)
        for each in synced:
            self.view.note_durable(*each)

    def bury(self, key: str, *, durable: bool) -> None:
        """Delete all blobs of a key: the lower versions first, and durably, so that none comes back alone."""
        while versions := self.view.versions(key):
            entry = versions[0]
            # Somebody else may have deleted the lower versions, not durably.
            if len(versions) == 1 and entry.row.is_commit and self.sync(self.view.undurable_deletions(key)):
                continue
            line = tombstone(entry.log, entry.place)
            self.folder.append_dead(entry.log, line, durable=durable or len(versions) > 1)
            # A log may have been rewritten meanwhile: then the blob is in another one by now.
            self.view.refresh()

    def take_back(self, log: str, record: Record) -> None:
        """Delete the ref of a refused commit, the first blob of its record, not durably; before `LogWriter.leave`."""
        self.folder.append_dead(log, tombstone(log, record.place(0)), durable=False)

    # --- removing logs

    def tidy(self) -> int:
        """Remove idle logs without live blobs, and rewrite those with few; return the bytes freed."""
        return self._rewriter().tidy()

    def freed_by(self, keys: Set[str]) -> Freed:
        """Estimate the bytes that a deletion of some blobs in logs and then `tidy` free."""
        return self._rewriter().freed_by(keys)

    def mend(self) -> dict[str, str]:
        """Copy the live blobs of damaged logs into new ones, and remove the damaged ones; for a salvaging object.

        Returns:
            The logs left as they are, and why.
        """
        return self._rewriter().mend()

    def _rewriter(self) -> LogRewriter:
        """Return a new pass over these logs."""
        from tensorcas_mlflow.backends._log_rewriter import LogRewriter

        return LogRewriter(self.view, read=lambda entry: self.read(entry, 0, entry.row.size), sync=self._sync_sound)
