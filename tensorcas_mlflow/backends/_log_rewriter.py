"""Rewriting of logs: it copies the live blobs of an idle log into a new log and removes the old one.

``docs/design/protocol.md``, Logs, has the rules and the reason of each.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set

from tensorcas_mlflow.backends._contract import Freed
from tensorcas_mlflow.backends._local import write_all
from tensorcas_mlflow.backends._locked_file import LockedFile
from tensorcas_mlflow.backends._log_folder import FOLDER, WRITE_LOG, stat_at
from tensorcas_mlflow.backends._log_records import (
    HEADER_BYTES,
    MARK_AT,
    TOMBSTONE,
    LogBlob,
    Record,
    encode_record,
    mark,
)
from tensorcas_mlflow.backends._log_view import LogEntry, LogView
from tensorcas_mlflow.backends._log_writer import Prefixes, close_writer
from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.base.files import Settled


class LogRewriter:
    """One pass over the logs of a store that rewrites some of them."""

    def __init__(self, view: LogView, read: Callable[[LogEntry], bytes], sync: Callable[[], None]) -> None:
        """Prepare a pass.

        Args:
            view: View of the logs.
            read: Returns a blob.
            sync: Makes the known records and tombstones of all logs without a failed sync durable, inside
                `LogView.marking_failures`.
        """
        self._view = view
        self._folder = view.folder
        self._read = read
        self._sync = sync
        self._settled = Settled()
        self._copies: dict[str, int] = {}
        """The new logs, and their durable ends."""
        self._lost: list[str] = []
        """Rewritten logs whose last records the disk had lost."""

    def tidy(self) -> int:
        """Remove idle logs without live blobs, and rewrite those with few; return the bytes freed."""
        close_writer(self._view)
        descriptor = os.open(self._folder.path, os.O_RDONLY)
        try:
            # Of two processes each might take the copy of the other for the one that stays.
            if not LockedFile.lock(descriptor, waits=False):
                return 0
            self._view.refresh()
            self._view.read_all()
            self._view.check()
            freed = self._folder.remove_orphans()
            for log in self._view.logs():
                if self._view.is_worth_rewriting(log):
                    freed += self._rewrite(log)
            self._view.refresh()
            for log, end in self._copies.items():
                self._view.write_index(log, end)
            return freed
        finally:
            LockedFile.release(descriptor)

    def freed_by(self, keys: Set[str]) -> Freed:
        """Return the bytes that a deletion of some blobs and then `tidy` free; encodes the blobs that `tidy` copies."""
        close_writer(self._view)
        freed = left = 0
        for log in self._view.logs():
            entries = self._view.live_blobs(log)
            live = [entry for entry in entries if entry.key not in keys]
            if self._view.is_worth_rewriting(log, without=keys) and not self._is_in_use(log):
                freed += self._folder.n_bytes(log) - self._copied_bytes(log, live)
            else:
                freed -= TOMBSTONE.size * (len(entries) - len(live))
                left += self._view.garbage_in(log, keys)
        return Freed(freed, left)

    def _copied_bytes(self, log: str, live: Sequence[LogEntry]) -> int:
        """Return the size of the new log with some blobs of a log."""
        consumed = self._view.consumed_in(log)
        if not live and not consumed:
            return 0
        end = HEADER_BYTES
        for _, record in self._encoded(log, end, live, consumed):
            end = record.end
        return encode_record(log, end, (), (), durable_before=end, prefix=None, is_summarized=False)[1].end

    def _is_in_use(self, log: str) -> bool:
        """Tell whether a process may append to a log."""
        try:
            descriptor = os.open(self._folder.log_path(log), WRITE_LOG)
        except OSError:
            return True
        if LockedFile.lock(descriptor, waits=False):
            LockedFile.release(descriptor)
            return False
        os.close(descriptor)
        return True

    def mend(self) -> dict[str, str]:
        """Rewrite damaged logs; for a salvaging view.

        Returns:
            The logs left as they are, and why.
        """
        close_writer(self._view)
        left: dict[str, str] = {}
        with LockedFile.alone_in(self._folder.path):
            self._view.refresh()
            for log in {damage.key.rpartition("/")[2].partition(".")[0] for damage in self._view.damages()}:
                self._rewrite(log)
                if os.path.exists(self._folder.log_path(log)):
                    left[f"{FOLDER}/{log}.log"] = "a process appends to it: end that process, then repair again"
        return left

    def renew(self, logs: Iterable[str]) -> None:
        """Rewrite logs with a failed sync: only another write of their records makes these durable.

        Raises:
            OSError: The disk failed again, or a process still uses such a log.
        """
        close_writer(self._view)
        with LockedFile.alone_in(self._folder.path):
            self._view.refresh()
            for log in logs:
                self._rewrite(log)
                if os.path.exists(self._folder.log_path(log)):
                    reason = f"a sync of {FOLDER}/{log}.log failed, and a process still has it open"
                    raise OSError(errno.EIO, f"{reason}; save there, or end that process, then try again")
        self._view.refresh()
        if self._lost:
            raise OSError(errno.EIO, f"the disk has lost the last records of {FOLDER}/{self._lost[0]}.log; save again")

    def _rewrite(self, log: str) -> int:
        """Rewrite a log while nobody appends to it or deletes from it; return the bytes freed, 0 if it is in use."""
        path = self._folder.log_path(log)
        try:
            descriptor = os.open(path, WRITE_LOG)
        except FileNotFoundError:
            return 0
        if not LockedFile.lock(descriptor, waits=False):
            os.close(descriptor)
            return 0
        try:
            # A mark needs the lock of the tombstones, and comes before the lock of the log is free.
            with (
                self._view.marking_failures(),
                self._folder.locked_dead(log) as dead,
            ):
                if stat_at(descriptor, path) is None:
                    return 0
                self._view.refresh()
                if log not in self._view.logs():
                    return 0
                if log in self._view.failed and not self._view.read_again(log):
                    self._lost.append(log)
                live = self._view.live_blobs(log)
                consumed = self._view.consumed_in(log)
                n_written = 0
                if live or consumed:
                    # A lower version goes only if the one that counts cannot be lost.
                    self._sync()
                    n_written = self._copy(live, consumed)
                freed = os.fstat(descriptor).st_size + os.fstat(dead).st_size - n_written
                self._folder.remove_log(log)
                return freed
        finally:
            LockedFile.release(descriptor)

    def _copy(self, live: Sequence[LogEntry], consumed: Sequence[str]) -> int:
        """Copy blobs into a new log, durably, and return its size."""
        log, descriptor, end = self._folder.create_log()
        try:
            for pieces, record in self._encoded(log, end, live, consumed):
                for piece in pieces:
                    write_all(descriptor, piece)
                end = record.end
            os.fsync(descriptor)
            self._settled.settle(self._folder.path)
            self._copies[log] = end
            # An empty record tells readers that the others are durable.
            pieces, record = encode_record(log, end, (), (), durable_before=end, prefix=None, is_summarized=False)
            write_all(descriptor, pieces[0])
            os.pwrite(descriptor, mark(log, end), MARK_AT)
        except BaseException:
            # The blobs still lie in the log that was to be rewritten.
            with contextlib.suppress(OSError):
                self._folder.remove_log(log)
            raise
        finally:
            LockedFile.release(descriptor)
        return record.end

    def _encoded(
        self, log: str, start: int, live: Sequence[LogEntry], consumed: Sequence[str]
    ) -> Iterator[tuple[Sequence[Buffer], Record]]:
        """Encode blobs as the records of a new log, in their order."""
        by_record: defaultdict[int, list[LogEntry]] = defaultdict(list)
        for entry in live:
            by_record[entry.record].append(entry)
        prefixes = Prefixes()
        end = start
        for _, entries in sorted(by_record.items()):
            pieces, record = encode_record(
                log,
                end,
                [self._copied(entry) for entry in entries],
                consumed,
                durable_before=start,
                prefix=prefixes.next(),
                written_s=entries[0].written_s,
                is_summarized=False,  # whoever sees the new log has lost what it knew of the old one
            )
            consumed = ()
            yield pieces, record
            prefixes.note(record)
            end = record.end

    def _copied(self, entry: LogEntry) -> LogBlob:
        """Return a blob as the new log gets it."""
        row = entry.row
        return LogBlob(
            key=row.key, data=self._read(entry), is_commit=row.is_commit, version=row.version, in_body=row.in_body
        )
