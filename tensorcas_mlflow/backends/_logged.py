"""Folder of blobs with logs: small saves append to one file (``docs/design/protocol.md``, Logs)."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeVar

from tensorcas_mlflow.backends._contract import (
    MOST_SHARED_BYTES,
    BlobInfo,
    Children,
    Freed,
    LogDamage,
    Token,
    check_key,
)
from tensorcas_mlflow.backends._file import BlobFile
from tensorcas_mlflow.backends._local import LocalBackend, _translated, token_of, write_all
from tensorcas_mlflow.backends._locked_file import LockedFile
from tensorcas_mlflow.backends._log_folder import FOLDER
from tensorcas_mlflow.backends._log_records import LogBlob
from tensorcas_mlflow.backends._log_view import LogEntry, LogView
from tensorcas_mlflow.backends._logs import Logs
from tensorcas_mlflow.base.digest import Buffer, Digests
from tensorcas_mlflow.base.files import is_on_local_disk
from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.errors import BlobExistsError, BlobNotFoundError, CorruptError, RefusedError

_T = TypeVar("_T")

_MOST_BYTES = 1 << 20
"""Bound of a blob in a log."""
_MOST_HELD_BYTES = 8 << 20
"""Bound of the blobs kept in memory for the next commit."""
_META_BYTES = 64 << 10
"""Bound of a blob in the meta of a record, where it shares bytes with earlier ones."""
_IN_FILES = frozenset({"format", "intents", "condemned", "quarantine"})
"""First segments of the keys of blobs that are always files."""
_PACKS = "packs/"


class _Unsynced(NamedTuple):
    """Records of one log that no commit of an object has made durable yet."""

    end: int
    keys: frozenset[str] = frozenset()
    """Keys of the object's blobs in them."""


class _Reading(threading.local):
    """Context in which one thread looks at the logs once; a class, since a generator would take twice the calls."""

    depth = 0
    """Number of these contexts around the thread's current call."""

    def __init__(self, view: LogView) -> None:
        self._view = view

    def __enter__(self) -> None:
        if self.depth == 0:
            _refresh(self._view)
        self.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.depth -= 1


class LoggedBackend(LocalBackend):
    """Blobs as files below a folder, and as records of logs if the folder has logs.

    Without the folder ``logs`` it is a `LocalBackend`.
    """

    def __init__(self, root: Path, *, uri: str | None = None, salvages: bool = False) -> None:
        """Use a folder.

        Args:
            root: The folder; it need not exist.
            uri: URI of the folder, if it has another one than its path.
            salvages: Whether blobs behind damage in a log count too; see `Backend.past_damage`.
        """
        super().__init__(root, uri=uri)
        self._logs = Logs(self._top, salvages=salvages)
        self._view = self._logs.view
        self._folder = self._logs.folder
        self._holding = Lock()
        self._held: dict[str, bytes] = {}
        """Blobs the next commit appends, by key."""
        self._n_held_bytes = 0
        self._unsynced: dict[str, _Unsynced] = {}
        """Records of this object, by log."""
        self._is_local = False
        self._reading = _Reading(self._view)

    @property
    def has_logs(self) -> bool:  # type: ignore[override]  # it may change when the store is created
        """True if small saves go to logs."""
        return self._folder.is_on

    def make_logs(self) -> None:
        with _translated("create", FOLDER):
            os.makedirs(self._top, exist_ok=True)
            self._check_may_change()
            if not LockedFile.works_in(self._top):
                raise RefusedError("create", FOLDER, f"the file system of {self._top!r} does not lock files")
            self._logs.make()

    # --- writing

    def put_new(self, key: str, pieces: Iterable[Buffer], *, durable: bool = True) -> Token:
        if not self._changes_logs() or _is_in_files(key):
            return super().put_new(key, pieces, durable=durable)
        if self._find(key) is not None:
            raise BlobExistsError(key)
        return super().put_new(key, pieces, durable=durable)

    def put_all(self, blobs: Iterable[tuple[str, Iterable[Buffer]]]) -> None:
        if not self._changes_logs():
            super().put_all(blobs)
            return
        self._look()
        super().put_all(self._too_big(blobs))
        if self._n_held_bytes > _MOST_HELD_BYTES:
            self._flush()

    def _too_big(self, blobs: Iterable[tuple[str, Iterable[Buffer]]]) -> Iterator[tuple[str, Iterable[Buffer]]]:
        """Hold the small blobs, and yield the others."""
        for key, pieces in blobs:
            if _is_in_files(key):
                yield key, pieces
                continue
            taken: list[bytes] = []
            n_bytes = 0
            drawn = iter(pieces)
            for piece in drawn:
                view = memoryview(piece).cast("B")
                n_bytes += view.nbytes
                if n_bytes > _MOST_BYTES:
                    yield key, chain(taken, [piece], drawn)
                    break
                taken.append(bytes(view))
            else:
                self._hold(check_key(key), b"".join(taken))

    def _hold(self, key: str, data: bytes) -> Token:
        """Keep a blob in memory for the next commit."""
        if self._known(key) is not None or os.path.lexists(self._top + os.sep + key):
            raise BlobExistsError(key)
        with self._holding:
            if key in self._held:
                raise BlobExistsError(key)
            self._held[key] = data
            self._n_held_bytes += len(data)
        return f"held-{key}"

    def promote(self, source: str, dest: str, data: Buffer, *, token: Token, replace: bool) -> None:
        if not self._changes_logs():
            super().promote(source, dest, data, token=token, replace=replace)
            return
        if _is_in_files(dest):
            self.settle(dest)
            with _translated("commit", dest), self._locked(source, self._path(source), token):
                super().promote(source, dest, data, token=token, replace=replace)
            return
        source_path, dest_path = self._path(source), self._path(dest)
        with _translated("commit", dest):
            # The names of files are durable before a record relies on them.
            self._settle_names()
            with (
                self._locked(source, source_path, token),
                LockedFile.alone_in(dest_path.rpartition(os.sep)[0], make=self._make_folder),
            ):
                self._view.refresh()
                if self._view.failed:
                    # This save may rely on bytes that the disk has lost.
                    self._logs.sync(tuple(self._view.failed))
                if self._view.has_consumed(source):
                    raise BlobNotFoundError(source)
                last = self._view.find(dest)
                self._view.check()
                self._check_written()
                if not replace and (last is not None or os.path.lexists(dest_path)):
                    raise BlobExistsError(dest)
                ref = LogBlob(
                    key=dest,
                    data=bytes(data),
                    is_commit=True,
                    version=1 + (last.row.version if last is not None else 0),
                )
                with self._holding:
                    held = self._held_blobs()
                    writer, record = self._logs.append([ref, *held], [source], syncs=True)
                    # Some blobs may be another thread's, whose commit has to sync them too.
                    self._note_written(writer.id, record.end, held)
                    unsynced = dict(self._unsynced)
                # Versions begin anew after a deletion, so no deleted ref may come back.
                deleted = self._view.undurable_deletions(dest)
            try:
                self._logs.sync({*(unsynced.keys() - {writer.id}), *deleted})
                writer.sync(record.end, self._view)
            except Exception:
                # If it replaced a blob, the replaced one may have lost its manifest by now, and must not come back.
                if ref.version == 1 and not os.path.lexists(dest_path):
                    with contextlib.suppress(OSError):
                        self._logs.take_back(writer.id, record)
                raise
            finally:
                writer.leave()
            with self._holding:
                for log, synced in unsynced.items():
                    if self._unsynced.get(log) == synced:
                        del self._unsynced[log]
            self._view.note_durable(writer.id, record.end)
            try:  # noqa: SIM105 -- `contextlib.suppress` makes three calls
                os.unlink(source_path)
            except FileNotFoundError:
                pass

    def _settle_names(self) -> None:
        """Make the names of new files durable."""
        unsettled = dict(self._unsettled)
        for folder in set(unsettled.values()):
            self._settled.settle(folder)
        self._remember(unsettled.keys())
        for key in unsettled:
            self._unsettled.pop(key, None)

    @contextlib.contextmanager
    def _locked(self, key: str, path: str, token: Token) -> Iterator[None]:
        """Lock a file that may be removed or promoted, and check that it still has its name.

        Raises:
            BlobNotFoundError: It is gone, or another one.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        except (FileNotFoundError, NotADirectoryError):
            raise BlobNotFoundError(key) from None
        try:
            LockedFile.lock(descriptor)
            try:
                found = os.lstat(path)
            except FileNotFoundError:
                raise BlobNotFoundError(key) from None
            if token_of(found) != token or not os.path.samestat(found, os.fstat(descriptor)):
                raise BlobNotFoundError(key)
            yield
        finally:
            LockedFile.release(descriptor)

    def _held_blobs(self) -> list[LogBlob]:
        """Describe the held blobs for a record; the caller holds the lock.

        They stay held until they are written, so that at any time a thread finds them here or in the logs.
        """
        return [
            LogBlob(
                key=key,
                data=data,
                in_body=len(data) > (MOST_SHARED_BYTES if key.startswith(_PACKS) else _META_BYTES),
            )
            for key, data in self._held.items()
        ]

    def _flush(self) -> None:
        """Append the held blobs, not durably: from now on others see them."""
        with self._holding:
            if not self._held:
                return
            held = self._held_blobs()
            with _translated("write", FOLDER):
                writer, record = self._logs.append(held, syncs=False)
            self._note_written(writer.id, record.end, held)

    def _note_written(self, log: str, end: int, blobs: Iterable[LogBlob]) -> None:
        """Note that held blobs lie in a record that is not durable now; the caller holds the lock."""
        self._held, self._n_held_bytes = {}, 0
        before = self._unsynced.get(log, _Unsynced(0))
        self._unsynced[log] = _Unsynced(end, before.keys.union(blob.key for blob in blobs))

    def _check_written(self) -> None:
        """Check that the written blobs still exist.

        Another process may have rewritten a log with a failed sync, or put an earlier state of the store back.

        Raises:
            OSError: One is lost, and its save has not given up yet.
        """
        if not self._unsynced:
            return
        with self._holding:
            keys = sorted(frozenset[str]().union(*(unsynced.keys for unsynced in self._unsynced.values())))
        for key, entry in zip(keys, self._view.find_each(keys), strict=True):
            if entry is None:
                raise OSError(errno.EIO, f"the disk has lost {key}, or the store was put back; save again")

    def _forget_written(self, keys: Iterable[str]) -> None:
        """Forget that some blobs are written, so that no commit checks them; the caller holds the lock."""
        gone = frozenset(keys)
        for log, unsynced in self._unsynced.items():
            self._unsynced[log] = unsynced._replace(keys=unsynced.keys - gone)

    def _flush_below(self, prefix: str) -> None:
        """Append the held blobs if a listing of a prefix has to show any of them."""
        with self._holding:
            is_shown = any(key.startswith(prefix) for key in self._held)
        if is_shown:
            self._flush()

    def discard(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        with self._holding:
            for key in keys:
                self._n_held_bytes -= len(self._held.pop(key, b""))
            self._forget_written(keys)

    def is_in_log(self, key: str) -> bool:
        return self._folder.is_on and (key in self._held or self._known(key) is not None)

    def find_packs(self, digests: Digests) -> set[str]:
        try:
            return self._view.find_packs(digests)
        except OSError:
            with _translated("read", FOLDER):
                raise

    def past_damage(self) -> LoggedBackend:
        return LoggedBackend(self.root, uri=self.uri, salvages=True)

    def damages(self) -> list[LogDamage]:
        if not self._folder.is_on:
            return []
        _refresh(self._view)
        return self._view.damages()

    def mend(self) -> dict[str, str]:
        if not self._changes_logs():
            return {}
        with _translated("mend", FOLDER):
            return self._logs.mend()

    # --- deleting

    def withdraw(self, key: str, token: Token) -> bool:
        if not self._changes_logs():
            return super().withdraw(key, token)
        self._flush()
        path = self._path(key)
        with _translated("withdraw", key):
            if _is_in_files(key) or self._find(key) is None:
                return self._withdraw_file(key, path, token)
            with LockedFile.alone_in(os.path.dirname(path)):
                self._view.refresh()
                last = self._view.find(key)
                if last is None or last.token != token:
                    return False
                self._remove(key, path, durable=True)
                return True

    def _withdraw_file(self, key: str, path: str, token: Token) -> bool:
        """Withdraw a blob that is a file, unless a commit has consumed or replaced it."""
        folder = os.path.dirname(path)
        with (
            contextlib.suppress(BlobNotFoundError, FileNotFoundError, NotADirectoryError),
            self._locked(key, path, token),
            LockedFile.alone_in(folder),
        ):
            self._view.refresh()
            is_consumed = self._view.has_consumed(key)
            if not is_consumed:
                self._view.check()
                if self._view.find(key) is not None:
                    return False
            os.unlink(path)
            self._settled.settle(folder)
            return not is_consumed
        return False

    def delete(self, key: str) -> None:
        if not self._changes_logs() or _is_in_files(key):
            super().delete(key)
            return
        self._flush()
        with _translated("delete", key):
            found = self._find(key)
            if found is None:
                super().delete(key)
            elif not found.row.is_commit:
                with self._holding:
                    self._forget_written([key])
                self._logs.bury(key, durable=False)
            else:
                path = self._path(key)
                with LockedFile.alone_in(os.path.dirname(path), make=self._make_folder):
                    self._view.refresh()
                    self._remove(key, path, durable=False)

    def _remove(self, key: str, path: str, *, durable: bool) -> None:
        """Delete a blob of a commit, with its folder locked: the file it replaced, if any, first."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
            self._settled.settle(os.path.dirname(path))
        self._logs.bury(key, durable=durable)

    # --- reading

    def stat(self, key: str) -> BlobInfo | None:
        if not self._may_log(key):
            return super().stat(key)
        entry = self._find(key, is_late=self._reading.depth > 0)
        if entry is not None:
            return _info(entry)
        found = super().stat(key)
        if found is None:
            self._view.check()
        return found

    def missing(self, keys: Iterable[str]) -> set[str]:
        if not self._folder.is_on:
            return super().missing(keys)
        self._flush()
        self._look()
        keys = list(map(check_key, keys))
        with _translated("read", FOLDER):
            entries = self._view.find_each(keys)
            with _translated("sync", FOLDER):
                while self._logs.sync(self._view.logs_to_sync(filter(None, entries))):
                    entries = self._view.find_each(keys)
        others = [key for key, entry in zip(keys, entries, strict=True) if entry is None]
        gone = super().missing(others) if others else set()
        if gone:
            self._view.check()
        return gone

    def settle(self, prefix: str) -> None:
        if self._folder.is_on:
            self._flush()
            _refresh(self._view)
            with _translated("sync", FOLDER):
                self._logs.sync()
        super().settle(prefix)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        def read(entry: LogEntry) -> bytes:
            size = entry.row.size
            if max_bytes is not None and size > max_bytes:
                raise CorruptError(key, f"it has {size} bytes, more than the {max_bytes} it may have")
            return self._whole(entry, 0, size)

        return self._read(key, read, lambda: super(LoggedBackend, self).get(key, max_bytes=max_bytes))

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        def read(entry: LogEntry) -> None:
            if start + len(out) > entry.row.size:
                raise CorruptError(key, f"it ends before byte {start + len(out)}")
            out[:] = self._whole(entry, start, len(out))

        self._read(key, read, lambda: super(LoggedBackend, self).read_into(key, start, out))

    def open_file(self, key: str) -> BlobFile:
        def read(entry: LogEntry) -> BlobFile:
            if entry.row.in_body:
                descriptor, path = self._logs.open(entry)
                return BlobFile(key, descriptor, path, base=entry.row.start, size=entry.row.size)
            return BlobFile(key, _in_memory(self._whole(entry, 0, entry.row.size)), "")

        return self._read(key, read, lambda: super(LoggedBackend, self).open_file(key))

    def _read(self, key: str, read: Callable[[LogEntry], _T], otherwise: Callable[[], _T]) -> _T:
        """Read a blob from its log, or from its file if no log has it."""
        if not self._may_log(key):
            return otherwise()
        is_late = self._reading.depth > 0
        while True:
            try:
                while (entry := self._find(key, is_late=is_late)) is not None:
                    try:
                        return read(entry)
                    except FileNotFoundError:  # its log was rewritten since
                        _refresh(self._view)
            except OSError:
                with _translated("read", key):
                    raise
            try:
                return otherwise()
            except BlobNotFoundError:
                if not is_late:
                    self._view.check()
                    raise
            is_late = False  # another thread may have written it since the last look

    def _whole(self, entry: LogEntry, start: int, size: int) -> bytes:
        """Read a part of a blob in a log, all of it."""
        data = self._logs.read(entry, start, size)
        if len(data) != size:
            raise CorruptError(entry.key, f"its log ends before byte {start + size} of it")
        return data

    def reading_together(self) -> contextlib.AbstractContextManager[None]:
        return self._reading if self._folder.is_on else contextlib.nullcontext()

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[BlobInfo]:
        if not self._may_log(prefix):
            yield from super().list(prefix, after=after)
            return
        # The files first: a file that a log replaces stays until the blob is deleted.
        files = list(super().list(prefix, after=after))
        self._flush_below(prefix)
        _refresh(self._view)
        with _translated("list", prefix):
            below = self._view.below(prefix)
        in_logs = {entry.key: entry for entry in below if after is None or entry.key > after}
        self._view.check()
        yield from (info for info in files if info.key not in in_logs)
        yield from map(_info, in_logs.values())

    def list_dir(self, prefix: str) -> Children:
        blobs, names = self._list_folder(prefix)
        if not self._may_log(prefix):
            return blobs, names
        self._flush_below(prefix)
        _refresh(self._view)
        with _translated("list", prefix):
            entries, more = self._view.children(prefix)
        self._view.check()
        in_logs = {entry.key: _info(entry) for entry in entries}
        found = {info.key: info for info in blobs} | in_logs
        return [found[key] for key in sorted(found)], sorted({*names, *more})

    def names(self, prefix: str) -> set[str]:
        names = super().names(prefix)
        if self._may_log(prefix):
            self._flush_below(prefix)
            self._look()
            try:
                names |= self._view.names(prefix)
            except OSError:
                with _translated("list", prefix):
                    raise
            self._view.check()
        return names

    def paths(self) -> Iterator[str]:
        if not self._folder.is_on:
            yield from super().paths()
            return
        files = {path for path in super().paths() if not self._folder.is_ours(path)}
        self._flush()
        _refresh(self._view)
        with _translated("list", ""):
            below = self._view.below("")
        yield from files | {entry.key for entry in below}

    def freed_by(self, deleted: Mapping[str, int], *, older_than_s: float) -> Freed:
        if not self._folder.is_on:
            return super().freed_by(deleted, older_than_s=older_than_s)
        self._flush()
        _refresh(self._view)
        with _translated("read", FOLDER):
            in_logs = {key for key in deleted if self._view.find(key) is not None}
            of_logs = self._logs.freed_by(in_logs)
        in_files = {key: size for key, size in deleted.items() if key not in in_logs}
        of_files = super().freed_by(in_files, older_than_s=older_than_s)
        return Freed(of_files.n_bytes + of_logs.n_bytes, of_logs.left_bytes)

    def sweep(self, older_than_s: float) -> int:
        freed = super().sweep(older_than_s)
        if self._folder.is_on:
            self._flush()
            with _translated("sweep", FOLDER):
                freed += self._logs.tidy()
        return freed

    # ---

    def _may_log(self, key: str) -> bool:
        """Tell whether a blob, or blobs below a prefix, may lie in a log."""
        return check_key(key).partition("/")[0] not in _IN_FILES and self._folder.is_on

    def _changes_logs(self) -> bool:
        """Tell whether there are logs, and check that this process may change them."""
        is_on = self._folder.is_on
        if is_on:
            self._check_may_change()
        return is_on

    def _check_may_change(self) -> None:
        """Check that the store lies on a local disk, where all processes see the same logs."""
        if not self._is_local:
            self._is_local = self._view.may_watch = is_on_local_disk(self._top)
        if not self._is_local:
            raise RefusedError(
                "change",
                FOLDER,
                f"{self._top!r} is not on a local disk of this machine, and a store with logs is changed on one only; "
                "TENSORCAS_LOGS=false makes new stores without logs, also that of `tensorcas copy`",
            )

    def _look(self) -> None:
        """Read the latest state of the logs, unless this thread has done so for several calls."""
        if self._reading.depth == 0:
            _refresh(self._view)

    def _find(self, key: str, *, is_late: bool = False) -> LogEntry | None:
        """Return the blob that counts at a key: now, or if late as of the last look."""
        if key in self._held:
            self._flush()
        if not is_late:
            _refresh(self._view)
        found = self._known(check_key(key))
        if found is not None and found.row.is_commit:
            # A damaged record may have replaced it.
            self._view.check()
        return found

    def _known(self, key: str) -> LogEntry | None:
        """Return the blob that counted at a key at the last look."""
        try:
            return self._view.find(key)
        except OSError:
            with _translated("read", FOLDER):
                raise


def _refresh(view: LogView) -> None:
    """Read what others have added to the logs."""
    try:
        view.refresh()
    except OSError:
        with _translated("read", FOLDER):
            raise


def _is_in_files(key: str) -> bool:
    """Tell whether a blob is always a file."""
    return key.partition("/")[0] in _IN_FILES


def _in_memory(data: bytes) -> int:
    """Return the descriptor of a file without a name."""
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):
            descriptor = os.memfd_create("tensorcas", os.MFD_CLOEXEC)
            write_all(descriptor, data)
            return descriptor
    import tempfile

    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        return os.dup(file.fileno())


def _info(entry: LogEntry) -> BlobInfo:
    """Describe a blob in a log."""
    row = entry.row
    return BlobInfo(row.key, row.size, entry.written_s, entry.token)
