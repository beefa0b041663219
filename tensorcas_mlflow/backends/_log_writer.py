"""Log that this process appends to: taking one over or creating one, appending records, and syncing them.

``docs/design/protocol.md``, Logs, has the rules and the reason of each.
"""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from tensorcas_mlflow.backends._local import write_all
from tensorcas_mlflow.backends._locked_file import LockedFile
from tensorcas_mlflow.backends._log_folder import WRITE_LOG, SyncError, is_original, stat_at, sync_open
from tensorcas_mlflow.backends._log_records import MARK_AT, LogBlob, Record, encode_record, mark
from tensorcas_mlflow.backends._log_view import LogView
from tensorcas_mlflow.base.files import Settled
from tensorcas_mlflow.base.threads import Lock

_FULL_BYTES = 64 << 20
"""Size at which a log gets no more records."""
_MAX_TRIED = 16
"""Bound of the idle logs a writer looks at before it creates another one."""
_PREFIX_STEPS = 4, 16, 64, 256
"""The prefix of a record is the last one with a number divisible by 4. The prefix of that is the one 4 before, or 16 or
64 before if its number is divisible by 16 or 64; every 256th record has none. So a reader of one record needs at most
ten others."""
_MOST_PREFIX_BYTES = 256 << 10
"""Bound of a prefix: a reader of one record reads a few of them."""


class Prefixes:
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

    Methods are for the thread that holds `lock`, except for `sync`, `leave` and `close`.
    """

    def __init__(self, view: LogView) -> None:
        """Take over an idle log, or create one."""
        self.lock = Lock()
        self.is_usable = True
        self.is_sound = True
        """False after a failed sync."""
        self._syncing = Lock()
        self._n_syncing = 0
        self._is_closing = False
        self._folder = view.folder
        self._settled = Settled()
        self.id, self.descriptor, self.end = _adopted(view) or view.folder.create_log()
        self._path = view.folder.log_path(self.id)
        self._durable = self.end
        self._is_settled = False
        self._prefixes = Prefixes()

    def is_current(self) -> bool:
        """Tell whether another record may be appended."""
        if not self.is_usable or self.end >= _FULL_BYTES:
            return False
        found = stat_at(self.descriptor, self._path)
        # A second name belongs to a copy of the store. An earlier state may have been written over the file.
        return found is not None and found.st_nlink == 1 and found.st_size == self.end

    def append(self, blobs: Sequence[LogBlob], consumed: Iterable[str], *, syncs: bool) -> Record:
        """Append one record, not durably.

        Args:
            blobs: Its blobs.
            consumed: Keys of the intents it consumes.
            syncs: Whether the caller calls `sync` next, and then `leave`, whatever happens.
        """
        pieces, record = encode_record(
            self.id, self.end, blobs, consumed, durable_before=self._durable, prefix=self._prefixes.next()
        )
        try:
            for piece in pieces:
                write_all(self.descriptor, piece)
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

    def sync(self, end: int, view: LogView) -> None:
        """Make the log durable up to a byte, and its name. For any thread, between `append` and `leave`.

        Args:
            end: End of the record that was appended.
            view: The caller's view, which has this record; it may write an index.

        Raises:
            OSError: The disk failed. Nobody appends to this log any more.
        """
        # One after the other: of two syncs at once only one may hear of a failure.
        with self._syncing, view.marking_failures():
            self._sync(end)
        view.write_index(self.id, end)

    def leave(self) -> None:
        """End what `append` began; the last one to leave a failed log releases it. For any thread."""
        with self.lock:
            self._n_syncing -= 1
            # Whoever writes the records again, elsewhere, needs the lock of the log.
            self._is_closing |= not self.is_sound
            if self._is_closing and self._n_syncing == 0:
                LockedFile.release(self.descriptor)

    def _sync(self, end: int) -> None:
        """Sync the log, unless another thread has synced this record; close it after a failure."""
        if not self.is_sound:
            raise SyncError(self.id, OSError(errno.EIO, "an earlier sync of the log failed"))
        if self._durable >= end:
            return
        reached = self.end
        try:
            os.fsync(self.descriptor)
            if not self._is_settled:
                self._settled.settle(self._folder.path)
                self._is_settled = True
        except OSError as error:
            self.is_usable = self.is_sound = False
            raise SyncError(self.id, error) from error
        self._durable = max(self._durable, reached)
        try:  # noqa: SIM105 -- `contextlib.suppress` makes three calls
            os.pwrite(self.descriptor, mark(self.id, self._durable), MARK_AT)
        except OSError:  # the commit is durable all the same
            pass

    def close(self) -> None:
        """Let others append to the log, once nobody syncs it."""
        with self.lock:
            if self.is_usable and self.end >= _FULL_BYTES:
                # From now on a missing end is damage.
                self._folder.mark_closed(self.id, self.end)
            self.is_usable = False
            if not self._is_closing:
                self._is_closing = True
                if self._n_syncing == 0:
                    LockedFile.release(self.descriptor)


def _adopted(view: LogView) -> tuple[str, int, int] | None:
    """Lock an idle log and return its name, descriptor and end; None if there is none."""
    view.refresh()
    for log in view.open_logs(below=_FULL_BYTES)[:_MAX_TRIED]:
        path = view.folder.log_path(log)
        try:
            descriptor = os.open(path, WRITE_LOG)
        except FileNotFoundError:
            continue
        is_taken = False
        try:
            if not LockedFile.lock(descriptor, waits=False):
                continue
            # Nobody else appends from here on. A torn tail, and what follows it, would not count.
            view.refresh()
            end = view.open_end(log)
            is_at_end = end is not None and os.fstat(descriptor).st_size == end
            at_path = stat_at(descriptor, path)
            is_alone = at_path is not None and at_path.st_nlink == 1
            if end is not None and is_at_end and is_alone and is_original(descriptor):
                with view.marking_failures():
                    sync_open(log, descriptor)
                os.lseek(descriptor, end, os.SEEK_SET)
                is_taken = True
                return log, descriptor, end
        finally:
            if not is_taken:
                LockedFile.release(descriptor)
    return None


_writers: OrderedDict[str, LogWriter] = OrderedDict()
"""The writers of this process, by the folder of the logs."""
_writers_lock = Lock()
_MAX_WRITERS = 16


def writer_of(view: LogView) -> LogWriter:
    """Return the writer of this process for a store."""
    folder = view.folder.path
    with _writers_lock:
        writer = _writers.get(folder)
        if writer is not None:
            if writer.is_usable and writer.end < _FULL_BYTES:
                _writers.move_to_end(folder)
                return writer
            _writers.pop(folder).close()
        writer = _writers[folder] = LogWriter(view)
        while len(_writers) > _MAX_WRITERS:
            _writers.popitem(last=False)[1].close()
        return writer


def close_writer(view: LogView) -> None:
    """Close the log this process appends to in one store."""
    with _writers_lock:
        writer = _writers.pop(view.folder.path, None)
    if writer is not None:
        writer.close()


def forget_writers() -> None:
    """Leave the parent's logs to the parent, in a child made by fork."""
    _writers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget_writers)
