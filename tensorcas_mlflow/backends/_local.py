"""Blobs as files below a folder of a local or network file system."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from tensorcas_mlflow.backends._contract import (
    Backend,
    BlobInfo,
    Children,
    FoundFile,
    Token,
    check_key,
    is_listed_segment,
)
from tensorcas_mlflow.backends._file import BlobFile
from tensorcas_mlflow.backends._locked_file import LockedFile
from tensorcas_mlflow.backends._root import UPLOADING
from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.base.files import Settled, new_name, pid_space, sync_folder
from tensorcas_mlflow.errors import (
    BackendError,
    BlobExistsError,
    BlobNotFoundError,
    CorruptError,
    RefusedError,
    StarvedError,
    StoreNotFoundError,
)

STAGING = "+staging-"
"""Prefix of the names of files under way. No key contains ``+``, so such a file is never mistaken for a blob."""
O_BINARY = getattr(os, "O_BINARY", 0)
MOST_BYTES = 1 << 30
"""Bound of bytes per call; Linux reads and writes at most 2 GiB."""
_EARLY_BYTES = 4 << 20
"""After each so many bytes the writer asks the system to start writing them to disk; otherwise the disk would mostly be
idle until the fsync. Smaller steps gain nothing."""
_SYNC_FILE_RANGE_WRITE = 2


class NewFile:
    """One file under way. Its methods raise OSError."""

    def __init__(self, path: str, make_folder: Callable[[str], None]) -> None:
        """Create it in the folder of the blob.

        Args:
            path: Path of the blob.
            make_folder: Creates the folder if it is missing.
        """
        self.path = path
        self.folder = path.rpartition(os.sep)[0]
        self._staging = f"{self.folder}{os.sep}{STAGING}{os.getpid()}-{HOST}-{new_name()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | O_BINARY
        try:
            self.descriptor = os.open(self._staging, flags, 0o666)
        except FileNotFoundError:
            make_folder(self.folder)
            self.descriptor = os.open(self._staging, flags, 0o666)
        self._n_bytes = 0
        self._n_early_bytes = 0

    def write(self, piece: Buffer) -> None:
        """Write more bytes, and keep unwritten ones from piling up in memory."""
        self._n_bytes += write_all(self.descriptor, piece)
        if self._n_bytes - self._n_early_bytes >= _EARLY_BYTES:
            begin_writeback(self.descriptor, self._n_early_bytes, self._n_bytes)
            self._n_early_bytes = self._n_bytes

    def sync(self) -> None:
        """Make the bytes durable."""
        os.fsync(self.descriptor)

    def name(self) -> Token:
        """Give the file its name, and return its token.

        Raises:
            FileExistsError: The name is taken.
        """
        token = token_of(os.fstat(self.descriptor))
        # link() refuses a name that exists, so the first writer wins; rename() would replace it.
        os.link(self._staging, self.path)
        return token

    def close(self) -> None:
        """Close it, named or not. Remains are for `Backend.sweep`; they must not hide the original error."""
        try:
            os.close(self.descriptor)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(self._staging)


def write_all(descriptor: int, piece: Buffer) -> int:
    """Write a buffer to a file at its current position, and return its size."""
    view = memoryview(piece).cast("B")
    n_bytes = view.nbytes
    while len(view):
        view = view[os.write(descriptor, view[:MOST_BYTES]) :]
    return n_bytes


def begin_writeback(descriptor: int, start: int, stop: int) -> None:
    """Ask the system to start writing a range of a file to disk, if it supports that. Nothing depends on it."""
    ask = _sync_file_range()
    if ask is not None:
        ask(descriptor, start, stop - start, _SYNC_FILE_RANGE_WRITE)


@cache
def _sync_file_range() -> Any:
    import ctypes

    try:
        function = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError, TypeError):  # TypeError: Windows has no library without a name
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


def token_of(found: os.stat_result) -> Token:
    """Return a text that differs between files at the same place, as long as the file exists."""
    return f"{found.st_dev:x}-{found.st_ino:x}"


_NODE = "".join(c for c in os.uname().nodename if c.isalnum())[:40] if hasattr(os, "uname") else "host"
HOST = _NODE + pid_space()
"""Part of the names of files under way: elsewhere the process id means nothing here."""


def writer_is_dead(name: str) -> bool:
    """Tell from the name of a file under way whether its process is known to be dead."""
    pid, _, rest = name.removeprefix(STAGING).partition("-")
    host = rest.partition("-")[0]
    if host != HOST or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False


_READ = os.O_RDONLY | O_BINARY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""Follow no link, and do not wait for the other end of a pipe."""
_STARVED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_MAX_REMEMBERED = 1 << 16
"""Bound of the remembered keys of durable blobs; beyond it all are forgotten, and their folders synced once more."""
_MOST_TOGETHER = 8
"""Number of files synced together. Each is open until then."""


@contextlib.contextmanager
def _alone_in(folder: str, *, waits: bool = True) -> Iterator[bool]:
    """Lock a folder against replacing and withdrawing blobs, since a withdrawal reads a blob before it removes it.

    Intents need no such lock, since their keys never come back. The system releases the lock of a dead process. On a
    file system without locks, a withdrawal may remove a blob written there at the same moment.

    Args:
        folder: The folder; or a file, for `LocalBackend.alone`.
        waits: Whether to wait for another owner of the lock. If not, False is yielded while there is one.

    Raises:
        FileNotFoundError: There is none.
    """
    if os.name != "posix":
        yield True
        return
    descriptor = os.open(folder, os.O_RDONLY)
    is_alone = True
    try:
        with contextlib.suppress(OSError):
            is_alone = LockedFile.lock(descriptor, waits=waits)
        yield is_alone
    finally:
        LockedFile.release(descriptor)


class LocalBackend(Backend):
    """Blobs as files: a key is a path below the root.

    The root may lie behind symbolic links. No link below it is followed, be it a blob or a folder of blobs: a collector
    would delete its target, and two stores with a common folder would treat each other's packs as garbage. A link is
    listed like a blob but cannot be read, so every collector notices it.
    """

    def __init__(self, root: Path, *, uri: str | None = None) -> None:
        self.root = root
        self.uri = uri or root.as_uri()
        self._top = os.fspath(root)
        self._is_known = False
        """True if any of the root has been seen: if the root is gone later, it is not recreated."""
        self._settled = Settled()
        self._durable: set[str] = set()
        """Keys of blobs whose names are known to be durable."""
        self._unsettled: dict[str, str] = {}
        """Keys of blobs whose names the next `promote` makes durable, and the folder of each."""

    def put_new(self, key: str, pieces: Iterable[Buffer], *, durable: bool = True) -> Token:
        with self._under_way(key, pieces) as file:
            if durable:
                with _translated("write", key):
                    file.sync()
            token = _named(file, key)
        self._is_known = True
        if durable:
            with _translated("write", key):
                self._settled.settle(file.folder)
            self._remember({key})
        return token

    def put_all(self, blobs: Iterable[tuple[str, Iterable[Buffer]]]) -> None:
        # Several fsyncs in turn would each wait for the disk; concurrent ones mostly wait once.
        with contextlib.ExitStack() as stack:
            files: dict[str, NewFile] = {}
            for key, pieces in blobs:
                if len(files) == _MOST_TOGETHER:
                    self._finish(files)
                    stack.close()
                    files.clear()
                files[key] = stack.enter_context(self._under_way(key, pieces))
            self._finish(files)

    def promote(self, source: str, dest: str, data: Buffer, *, token: Token, replace: bool) -> None:
        source_path, dest_path = self._path(source), self._path(dest)
        folder = os.path.dirname(dest_path)
        unsettled = dict(self._unsettled)
        with _translated("commit", dest):
            try:
                descriptor = os.open(source_path, os.O_RDWR | O_BINARY | getattr(os, "O_NOFOLLOW", 0))
            except FileNotFoundError:
                raise BlobNotFoundError(source) from None
            try:
                found = os.fstat(descriptor)
                if found.st_nlink > 1 and token_of(found) == token:
                    # A copy of the store by hard links has this file, too, and what follows would change it there.
                    # Without its intent a save begins anew, with another file.
                    os.unlink(source_path)
                    raise BlobNotFoundError(source)
                if token_of(found) != token:
                    raise BlobNotFoundError(source)
                if not replace and os.path.lexists(dest_path):
                    raise BlobExistsError(dest)
                # The file becomes the new blob in place, so the one rename below decides everything. If the source was
                # withdrawn meanwhile, this writes into a file without a name.
                write_all(descriptor, data)
                os.ftruncate(descriptor, memoryview(data).nbytes)
                self._make_folder(folder)
                self._sync(descriptor, unsettled, folder)
            finally:
                os.close(descriptor)
            try:
                if replace:
                    with _alone_in(folder):
                        os.rename(source_path, dest_path)
                else:
                    os.link(source_path, dest_path)
            except FileNotFoundError:
                raise BlobNotFoundError(source) from None
            except FileExistsError:
                raise BlobExistsError(dest) from None
            if not replace:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(source_path)
            self._settled.settle(folder)

    def withdraw(self, key: str, token: Token, *, own: Iterable[str] | None = None) -> bool:
        path = self._path(key)
        with (
            _translated("withdraw", key),
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            _alone_in(os.path.dirname(path)),
        ):
            descriptor = os.open(path, _READ)
            try:
                if token_of(os.fstat(descriptor)) != token:
                    return False
                os.unlink(path)
                if own is None:
                    sync_folder(os.path.dirname(path))
                # A promote without replacing links the file before it unlinks the source, and may be between the two.
                # If the file has a name left in this store, that promote was first; without one nobody can link it any
                # more.
                found = os.fstat(descriptor)
                return found.st_nlink == 0 or not self._has_name_of(found)
            finally:
                os.close(descriptor)
        return False

    def _has_name_of(self, found: os.stat_result) -> bool:
        """Tell whether a file has a name in this store; others belong to copies of the store by hard links."""
        for folder, _, _ in os.walk(self._top):
            for entry in os.scandir(folder):
                if entry.inode() == found.st_ino and os.path.samestat(entry.stat(follow_symlinks=False), found):
                    return True
        return False

    def stat(self, key: str) -> BlobInfo | None:
        try:
            found = os.lstat(self._path(key))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            with _translated("look at", key):
                raise
        return _info(key, found) if stat.S_ISREG(found.st_mode) else None

    def missing(self, keys: Iterable[str]) -> set[str]:
        gone: set[str] = set()
        there: set[str] = set()
        for key in keys:
            (gone if self.stat(key) is None else there).add(key)
        # The creator of a blob may have died before the blob's name was durable, and nothing that relies on the blob
        # may become durable without it.
        new = there - self._durable
        folders = {os.path.dirname(self._path(key)) for key in new}
        with _translated("sync", " ".join(sorted(os.path.relpath(folder, self._top) for folder in folders))):
            self._settled.settle(*folders)
        self._remember(new)
        return gone

    def settle(self, prefix: str) -> None:
        with _translated("sync", prefix):
            for folder, _, _ in os.walk(self._path(prefix), onerror=_refuse):
                with contextlib.suppress(FileNotFoundError):
                    self._settled.settle(folder)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        with _translated("read", key):
            descriptor = self._open(key)
            try:
                size = os.fstat(descriptor).st_size
                if max_bytes is not None and size > max_bytes:
                    raise CorruptError(key, f"it has {size} bytes, more than the {max_bytes} it may have")
                # One more byte than it has: a short read is the end, so most blobs take one call.
                data = os.read(descriptor, min(size + 1, MOST_BYTES))
                if len(data) <= size < MOST_BYTES:
                    return data
                pieces = [data]
                while pieces[-1]:
                    pieces.append(os.read(descriptor, MOST_BYTES))
                return b"".join(pieces)
            finally:
                os.close(descriptor)

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        with _translated("read", key):
            descriptor = self._open(key)
            try:
                at = 0
                while at < len(out):
                    n_read = os.preadv(descriptor, [out[at : at + MOST_BYTES]], start + at)
                    if n_read == 0:
                        raise CorruptError(key, f"it ends before byte {start + len(out)}")
                    at += n_read
            finally:
                os.close(descriptor)

    def open_file(self, key: str) -> BlobFile:
        with _translated("read", key):
            return BlobFile(key, self._open(key), self._path(key))

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[BlobInfo]:
        folders = [check_key(prefix)]
        while folders:
            folder = folders.pop()
            found = LocalBackend.list_dir(self, folder)
            yield from found.facts() if after is None else [info for info in found.facts() if info.key > after]
            folders.extend(f"{folder}/{name}" for name in found.segments)

    def list_dir(self, prefix: str, *, most: int | None = None) -> Children:
        blobs: dict[str, os.DirEntry[str]] = {}
        segments: set[str] = set()
        try:
            folder = self._path(prefix)
            _check_no_link(folder, prefix)
            for entry in os.scandir(folder):
                if is_listed_segment(entry.name) is None:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    segments.add(entry.name)
                # A link is no blob, and is not followed; but it may have replaced one, and every collector has to
                # notice it.
                elif not entry.name.startswith(UPLOADING) and (
                    entry.is_file(follow_symlinks=False) or entry.is_symlink()
                ):
                    blobs[entry.name] = entry
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:
            with _translated("list", prefix):
                raise

        def facts() -> list[BlobInfo]:
            found: list[BlobInfo] = []
            with _translated("list", prefix):
                for name in sorted(blobs):
                    with contextlib.suppress(FileNotFoundError):
                        found.append(_info(f"{prefix}/{name}", blobs[name].stat(follow_symlinks=False)))
            return found

        return Children(dict.fromkeys(blobs, True), segments, facts)

    def files(self) -> Iterator[FoundFile]:
        folders = [""]
        with _translated("list", "."):
            while folders:
                prefix = folders.pop()
                with contextlib.suppress(FileNotFoundError), os.scandir(self._top + os.sep + prefix) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(f"{prefix}{entry.name}/")
                            continue
                        with contextlib.suppress(FileNotFoundError):
                            size = entry.stat(follow_symlinks=False).st_size
                            yield FoundFile(prefix + entry.name, size, entry.name.startswith((STAGING, UPLOADING)))

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        with contextlib.ExitStack() as stack:
            is_alone = True
            with contextlib.suppress(OSError):  # it is not there yet, or this process may not open it
                # A file that nothing else locks: a commit locks the folder of its ref, or that of the database.
                is_alone = stack.enter_context(_alone_in(self._path("format"), waits=False))
            yield is_alone

    def delete(self, *keys: str) -> None:
        for key in keys:
            with _translated("delete", key), contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(self._path(key))

    def freed_by(self, deleted: Mapping[str, int], *, older_than_s: float) -> int:
        left = sum(size for _, size in self._left_behind(older_than_s))
        return sum(deleted.values()) + left

    def sweep(self, older_than_s: float) -> int:
        freed = 0
        with _translated("sweep", "."):
            for path, size in self._left_behind(older_than_s):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                    freed += size
        return freed

    def _left_behind(self, older_than_s: float) -> Iterator[tuple[str, int]]:
        """Yield the temporary files of dead writers: paths and sizes."""
        before = time.time() - older_than_s
        with _translated("list", "."):
            for folder, _, files in os.walk(self.root):
                for name in files:
                    if not name.startswith((STAGING, UPLOADING)):
                        continue
                    path = os.path.join(folder, name)
                    with contextlib.suppress(FileNotFoundError):
                        found = os.lstat(path)
                        if found.st_mtime <= before or writer_is_dead(name):
                            yield path, found.st_size

    def _path(self, key: str) -> str:
        *folders, leaf = check_key(key).split("/")
        place = self._top
        for folder in folders:
            place = f"{place}{os.sep}{folder}"
            # Every access to a blob passes here; a function, or `os.path.islink`, would cost more than the lstat.
            try:
                mode = os.lstat(place).st_mode
            except OSError:
                continue
            if stat.S_ISLNK(mode):
                _refuse_link(place, key)
        return f"{place}{os.sep}{leaf}"

    def _open(self, key: str) -> int:
        try:
            descriptor = os.open(self._path(key), _READ)
        except (FileNotFoundError, NotADirectoryError):
            raise BlobNotFoundError(key) from None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise CorruptError(key, "it is a symbolic link, and links are not followed") from None
            raise
        self._is_known = True
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise CorruptError(key, "it is no file")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    @contextlib.contextmanager
    def _under_way(self, key: str, pieces: Iterable[Buffer]) -> Iterator[NewFile]:
        """Write a file and keep it open, not durable yet and without its name."""
        path = self._path(key)
        with _translated("write", key):
            file = NewFile(path, self._make_folder)
        try:
            # An OSError of the pieces is not this storage's, so only errors of writing are translated.
            for piece in pieces:
                try:
                    file.write(piece)
                except OSError:
                    with _translated("write", key):
                        raise
            yield file
        finally:
            file.close()

    def _finish(self, files: dict[str, NewFile]) -> None:
        """Make files durable and name them; `promote` makes the names durable."""

        def sync(key: str) -> None:
            with _translated("write", key):
                files[key].sync()

        threads.run_all(sync, list(files), waits=True)
        for key, file in files.items():
            _named(file, key)
            self._unsettled[key] = file.folder

    def _sync(self, descriptor: int, unsettled: Mapping[str, str], dest: str) -> None:
        """Make a file durable, the names of blobs, given as keys and their folders, and the name of a folder."""
        self._settled.settle(*set(unsettled.values()), names_of=[dest], beside=[partial(os.fsync, descriptor)])
        self._remember(unsettled.keys())
        # Only now: until then every other promote has to sync them itself.
        for key in unsettled:
            self._unsettled.pop(key, None)

    def _make_folder(self, folder: str) -> None:
        is_below = self._is_known
        try:
            if is_below:
                self._make_below(folder)
            else:
                os.makedirs(folder)
        except FileExistsError:
            return
        # Another process may have removed an earlier folder of this name. The root is never created a second time.
        self._settled.forget(folder, self._top if is_below else "")

    def _make_below(self, folder: str) -> None:
        """Create a folder and its parents up to the root.

        Raises:
            StoreNotFoundError: The root is gone: a deleted store must not come back without its ``format``.
            FileExistsError: The folder exists.
        """
        if folder == self._top:
            if not os.path.isdir(folder):
                raise StoreNotFoundError(self.uri)
            raise FileExistsError(folder)
        try:
            os.mkdir(folder)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                self._make_below(os.path.dirname(folder))
            os.mkdir(folder)

    def _remember(self, keys: Set[str]) -> None:
        if len(self._durable) > _MAX_REMEMBERED:
            self._durable.clear()
        self._durable |= keys


def _named(file: NewFile, key: str) -> Token:
    try:
        return file.name()
    except FileExistsError:
        raise BlobExistsError(key) from None
    except OSError:
        with _translated("write", key):
            raise


def _check_no_link(folder: str, key: str) -> None:
    if os.path.islink(folder):
        _refuse_link(folder, key)


def _refuse_link(folder: str, key: str) -> NoReturn:
    raise RefusedError("use", key, f"{folder!r} is a symbolic link, and nothing of a store lies behind one")


def _refuse(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _info(key: str, found: os.stat_result) -> BlobInfo:
    return BlobInfo(
        key=key,
        size=found.st_size,
        modified_s=found.st_mtime,
        token=token_of(found),
        is_link=stat.S_ISLNK(found.st_mode),
    )


class _translated:  # noqa: N801 -- used like contextlib.suppress
    """Translation of errors of the system, for a ``with`` statement.

    A generator would take twice the calls. Accesses that every small save makes take none: they enter this only with an
    error.
    """

    __slots__ = ("_action", "_key")

    def __init__(self, action: str, key: str) -> None:
        self._action = action
        self._key = key

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, IsADirectoryError):
            raise CorruptError(self._key, "it is a folder") from None
        if isinstance(error, OSError):
            translated = StarvedError if error.errno in _STARVED else BackendError
            raise translated(self._action, self._key, f"{type(error).__name__}: {error}") from error
