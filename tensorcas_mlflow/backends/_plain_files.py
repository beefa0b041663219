"""Plain files beside a store, in a folder or a bucket: list, read, write and remove them."""

from __future__ import annotations

import errno
import io
import math
import os
import re
import shutil
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, cast

from tensorcas_mlflow.backends._buckets import Bucket, ObjectInfo
from tensorcas_mlflow.backends._objects import is_void, is_void_object, new_void
from tensorcas_mlflow.backends._open import open_bucket
from tensorcas_mlflow.backends._root import (
    STORE_FOLDER,
    UPLOADING,
    Root,
    artifact_path,
    is_readable_name,
    is_store,
    is_visible,
    is_visible_path,
    object_path,
)
from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.files import Settled, new_name, sync_folder
from tensorcas_mlflow.errors import BlobNotFoundError, ConflictError

_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_CHANGE_S = 60
"""A partial file older than this was left by a dead process."""
_BUFFER_BYTES = 1 << 20

Remove = Callable[[Callable[[], bool]], None]
"""Removes a plain file if its argument says that the store shows something in its place."""

_Held = int
"""Open descriptor: as long as it is open, no other file gets its inode."""
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_OF_ITSELF = getattr(os, "O_PATH", os.O_RDONLY) | _NO_LINK
_A_FOLDER = os.O_RDONLY | os.O_DIRECTORY | _NO_LINK

_settled = Settled()
_stores: dict[str, tuple[int, int, int]] = {}
"""Device, inode and change time of the ``format`` of seen stores, by folder."""
_MAX_STORES = 1024
_MOST_TOGETHER = 8
"""Number of files synced together. Each is open until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainFile:
    """Plain file or folder below a root."""

    path: str
    """Relative to the root, in normal form, with ``/`` between the parts."""
    size: int = 0
    modified_ns: int | None = None
    """Time of its last write, if it is known."""
    is_folder: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NewText:
    """Small file to be written."""

    path: str
    """As of a `PlainFile`."""
    data: bytes
    modified_ns: int | None = None
    content_type: str | None = None


class PlainFiles(ABC):
    """Plain files below one root: all files but those of stores and partial uploads.

    Paths are artifact paths: relative, in normal form, "" for the root. Folders raise `OSError` when the file system
    fails, and buckets raise `BackendError`.
    """

    calls_are_requests: bool = False
    """True if each call is a request to another machine. Many threads may then call at once."""

    def find(self, path: str) -> Path | None:
        """Return the real path of the local file or folder that an artifact path shows, or None."""
        return None

    def is_file(self, path: str, file: Path) -> bool:
        """Tell whether an artifact path shows this very local file."""
        found = self.find(path)
        with suppress(FileNotFoundError):  # removed since it was found
            return found is not None and found.samefile(file)
        return False

    @abstractmethod
    def has_file(self, path: str) -> bool:
        """Tell whether a file, or any link, lies at a path."""

    @abstractmethod
    def has_folder(self, path: str) -> bool:
        """Tell whether an artifact path shows a folder."""

    @abstractmethod
    def is_empty(self) -> bool:
        """Tell whether the root is empty or missing; a store counts as content."""

    def is_folder(self, path: str) -> bool:
        """Tell whether a folder, and no link, keeps a file from being written at a path."""
        return False

    def blocker(self, folder: str) -> str | None:
        """Return the first part of a path that exists and is no real folder, so that nothing can be written below."""
        return None

    def is_changing(self, path: str) -> bool:
        """Tell whether a file of a folder is being replaced or removed at this moment."""
        return False

    @abstractmethod
    def children(self, path: str) -> Iterator[PlainFile]:
        """List the files and folders of a folder, in no order; nothing if there is no such folder."""

    @abstractmethod
    def walk(self, path: str = "", *, left_out: list[str] | None = None) -> Iterator[PlainFile]:
        """List all files below a folder, and its folders if the storage has any, each before its content.

        Args:
            path: The folder.
            left_out: A list that receives the paths of links that are not followed, and of objects without an artifact
                path. With it, folders that hold another store are left out, too.
        """

    @abstractmethod
    def content(self, path: str) -> Iterator[tuple[int | None, float]]:
        """Yield size and time of the last change of all that `remove` would remove.

        The size of a folder is None, and so is the size of the void that a replaced object left.
        """

    @abstractmethod
    def topmost(self, is_wanted: Callable[[str], bool]) -> Iterator[str]:
        """Find the folders whose paths are wanted, but none inside another."""

    @abstractmethod
    def stores_below(self, path: str) -> list[str]:
        """Find the folders at or below a path that are roots of stores."""

    @abstractmethod
    def open(self, path: str) -> AbstractContextManager[BinaryIO]:
        """Open a file to read it.

        Raises:
            BlobNotFoundError: There is none.
            ValueError: No plain file can have this path.
        """

    @abstractmethod
    def fetch(self, path: str, out: Path) -> bool:
        """Write a file to a local one, with its times if it is local too; False if there is none."""

    @abstractmethod
    def write(
        self,
        path: str,
        pieces: Iterable[bytes],
        *,
        modified_ns: int | None = None,
        content_type: str | None = None,
        replace: bool = True,
        settle: bool = True,
    ) -> None:
        """Write a file whole or not at all; its folder is made if it is missing.

        Args:
            path: Path of the file.
            pieces: Content of the file.
            modified_ns: Time of its last write, for storage that keeps it.
            content_type: Content type to declare, for storage that keeps it.
            replace: Whether it may replace another file.
            settle: Whether to make the name durable; otherwise `settle` does.

        Raises:
            ConflictError: There is another file and ``replace`` is False, or its folder cannot be made.
            ValueError: No plain file can have this path.
            Exception: An error of ``pieces``; nothing is written then.
        """

    @abstractmethod
    def write_all(self, texts: Sequence[NewText]) -> None:
        """Write small files, each whole or not at all, and make them durable together; raises as `write`."""

    @abstractmethod
    def make_folder(self, path: str) -> None:
        """Make a folder and those above it, if the storage has folders; raises as `write`."""

    @abstractmethod
    def settle(self, folders: Iterable[str]) -> None:
        """Make the names in some folders durable, and their own."""

    @abstractmethod
    def replacing(self, path: str) -> AbstractContextManager[Remove]:
        """Look at the file or link at a path, and return a function that removes just that one.

        The function keeps a file that was put there since. It asks its argument whether the store shows something in
        the file's place only when nobody sees the file any more; otherwise the file comes back.
        """

    @abstractmethod
    def remove(self, path: str, *, until_s: float = math.inf) -> None:
        """Remove a file, or a folder with all below it but stores; idempotent.

        Args:
            path: The file or folder.
            until_s: Unix time; what has changed since stays.
        """


def open_plain_files(root: Root) -> PlainFiles:
    """Open the plain files below a root; touch nothing."""
    return LocalPlainFiles(root.folder) if root.is_local else ObjectPlainFiles(open_bucket(root, ""))


class LocalPlainFiles(PlainFiles):
    """Plain files below a folder.

    No folder is entered through a symbolic link below the root. A link to a file is read as that file if the file lies
    below the root too. All other links are as if they were not there, but a removal removes them. Nothing is written
    through a link.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def find(self, path: str) -> Path | None:
        if not is_visible_path(path):
            return None
        try:
            real = Path(os.path.realpath(self._root / path, strict=True))
        except OSError as error:
            leads_nowhere = error.errno == errno.EACCES and os.path.islink(self._root / path)
            if error.errno not in _NOT_THERE and not leads_nowhere:
                raise
            return None
        if real == self._unlinked(path):
            return real
        root = self._unlinked("")
        is_link_to_artifact = (
            self._is_reached(path)
            and real.is_file()
            and real.is_relative_to(root)
            and is_visible_path(real.relative_to(root).as_posix())
        )
        return real if is_link_to_artifact else None

    def has_file(self, path: str) -> bool:
        return os.path.lexists(self._root / path)

    def has_folder(self, path: str) -> bool:
        found = self.find(path)
        return found is not None and found.is_dir()

    def is_empty(self) -> bool:
        try:
            with os.scandir(self._root) as entries:
                return next(entries, None) is None
        except FileNotFoundError:
            return True
        except NotADirectoryError:
            return False

    def is_folder(self, path: str) -> bool:
        with _ignoring(*_NOT_THERE):
            return _is_real_folder(self._root / path)
        return False

    def blocker(self, folder: str) -> str | None:
        place = self._root
        for name in folder.split("/") if folder else ():
            place /= name
            with _ignoring(errno.ENOENT):
                if not _is_real_folder(place):
                    return place.relative_to(self._root).as_posix()
        return None

    def is_changing(self, path: str) -> bool:
        since = time.time() - _CHANGE_S
        with _ignoring(*_NOT_THERE), os.scandir(self._root / path) as entries:
            names = [entry for entry in entries if entry.name.startswith(UPLOADING)]
            return any(entry.stat(follow_symlinks=False).st_ctime > since for entry in names)
        return False

    def children(self, path: str) -> Iterator[PlainFile]:
        return self._children(path, [])

    def _children(self, path: str, left_out: list[str]) -> Iterator[PlainFile]:
        folder = self.find(path)
        for entry in _entries(folder) if folder is not None else ():
            if not is_visible(entry.name):
                continue
            child = _joined(path, entry.name)
            with _ignoring(*_NOT_THERE):  # deleted since the folder was read
                if entry.is_dir(follow_symlinks=False):
                    yield PlainFile(path=child, is_folder=True)
                elif entry.is_symlink() and self.find(child) is None:
                    left_out.append(child)
                elif stat.S_ISREG((found := entry.stat()).st_mode):
                    yield PlainFile(path=child, size=found.st_size, modified_ns=found.st_mtime_ns)

    def walk(self, path: str = "", *, left_out: list[str] | None = None) -> Iterator[PlainFile]:
        folders = [path]
        while folders:
            for file in self._children(folders.pop(), [] if left_out is None else left_out):
                if file.is_folder and left_out is not None and self.is_folder(f"{file.path}/{STORE_FOLDER}"):
                    left_out.append(file.path)
                    continue
                if file.is_folder:
                    folders.append(file.path)
                yield file

    def content(self, path: str) -> Iterator[tuple[int | None, float]]:
        top = self.find(path)
        for folder, folders, names in os.walk(top) if top is not None else ():
            folders[:] = [name for name in folders if not is_store(name)]
            # A copied file has the times of its source, but its inode was changed when it was copied.
            for place in [folder, *(os.path.join(folder, name) for name in names)]:
                with suppress(FileNotFoundError):
                    found = os.lstat(place)
                    yield None if place == folder else found.st_size, found.st_ctime

    def topmost(self, is_wanted: Callable[[str], bool]) -> Iterator[str]:
        folders = [""]
        while folders:
            folder = folders.pop()
            if is_wanted(folder):
                yield folder
                continue
            folders += (
                _joined(folder, entry.name)
                for entry in _entries(self._root / folder)
                if is_visible(entry.name) and entry.is_dir(follow_symlinks=False)
            )

    def stores_below(self, path: str) -> list[str]:
        found = []
        for folder, names, _ in os.walk(self._root / path):
            if STORE_FOLDER in names and Path(folder, STORE_FOLDER, "format").is_file():
                found.append(Path(folder).relative_to(self._root).as_posix())
                names.clear()  # no store lies in another
        return ["" if place == "." else place for place in found]

    @contextmanager
    def open(self, path: str) -> Iterator[BinaryIO]:
        if path:
            _check(path)
        real = self.find(path)
        with ExitStack() as stack:
            file: BinaryIO | None = None
            with _ignoring(*_NOT_THERE):  # removed since it was found, or replaced by a link
                if real is not None and real.is_file():
                    file = stack.enter_context(os.fdopen(self._opened(real), "rb"))
            if file is None:
                raise BlobNotFoundError(path)
            yield file

    def _opened(self, real: Path) -> int:
        """Open a file below the root; a link that was put on the way to it since is not followed."""
        root = Path(os.path.realpath(self._root))
        *folders, name = real.relative_to(root).parts
        with ExitStack() as stack:
            at = os.open(root, _A_FOLDER)
            stack.callback(os.close, at)
            for folder in folders:
                at = os.open(folder, _A_FOLDER, dir_fd=at)
                stack.callback(os.close, at)
            return os.open(name, os.O_RDONLY | _NO_LINK | os.O_NONBLOCK, dir_fd=at)

    def fetch(self, path: str, out: Path) -> bool:
        try:
            with self.open(path) as file:
                shutil.copy2(f"/dev/fd/{file.fileno()}", out)
        except BlobNotFoundError:
            return False
        except shutil.SameFileError:
            raise shutil.SameFileError(f"{os.fspath(out)!r} is the artifact") from None
        return True

    def write(
        self,
        path: str,
        pieces: Iterable[bytes],
        *,
        modified_ns: int | None = None,
        content_type: str | None = None,
        replace: bool = True,
        settle: bool = True,
    ) -> None:
        _check(path)
        folder, _, name = path.rpartition("/")
        try:
            write_whole(self._made(folder) / name, pieces, modified_ns=modified_ns, replace=replace)
        except IsADirectoryError:
            raise ConflictError(f"{path!r} is a folder at the destination") from None
        if settle:
            self.settle([folder])

    def write_all(self, texts: Sequence[NewText]) -> None:
        # Syncing each file and each folder in turn would wait for the disk once for each.
        for begin in range(0, len(texts), _MOST_TOGETHER):
            with ExitStack() as stack:
                staged: list[_Staged] = []
                for text in texts[begin : begin + _MOST_TOGETHER]:
                    _check(text.path)
                    folder, _, name = text.path.rpartition("/")
                    place = self._made(folder) / name
                    staged.append(stack.enter_context(_Staged(place, [text.data], modified_ns=text.modified_ns)))
                folders = {os.path.abspath(file.place.parent) for file in staged}
                _settled.settle(names_of=folders, beside=[file.sync for file in staged])
                for file in staged:
                    try:
                        file.name()
                    except IsADirectoryError:
                        path = file.place.relative_to(self._root).as_posix()
                        raise ConflictError(f"{path!r} is a folder at the destination") from None
                _settled.settle(beside=[partial(_sync_names, folder) for folder in folders])

    def make_folder(self, path: str) -> None:
        if path:
            _check(path)
        self._made(path)

    def settle(self, folders: Iterable[str]) -> None:
        for folder in folders:
            with suppress(FileNotFoundError):  # somebody has removed it since
                _settled.settle(os.path.abspath(self._root / folder))

    def _made(self, path: str) -> Path:
        """Make a folder part by part, so that no link is followed on the way."""
        place = self._root
        if not place.is_dir():
            _forget_folders(os.path.abspath(place))
            place.mkdir(parents=True, exist_ok=True)
        for name in path.split("/") if path else ():
            place /= name
            with suppress(FileNotFoundError):
                if _is_real_folder(place):
                    continue
            try:
                place.mkdir()
                _forget_folders(os.path.abspath(place))
            except FileExistsError:
                if not _is_real_folder(place):
                    raise ConflictError(f"{path!r} is no folder at the destination, or behind a link") from None
        return place

    @contextmanager
    def replacing(self, path: str) -> Iterator[Remove]:
        with ExitStack() as stack:
            held: _Held | None = None
            with _ignoring(*_NOT_THERE):
                held = os.open(self._root / path, _OF_ITSELF)
                stack.callback(os.close, held)
            yield lambda is_hidden: self._drop(path, held, is_hidden)

    def _drop(self, path: str, held: _Held | None, is_hidden: Callable[[], bool]) -> None:
        place = self._root / path
        taken = _partial(place)
        if held is None or not _is_held(place, held):
            return
        with _ignoring(*_NOT_THERE):
            place.rename(taken)
            if not _is_held(taken, held) or not is_hidden():
                with _ignoring(errno.EEXIST):
                    os.link(taken, place, follow_symlinks=False)
            taken.unlink()

    def remove(self, path: str, *, until_s: float = math.inf) -> None:
        if not is_visible_path(path) or not self._is_reached(path):
            return
        place = self._root / path
        # What is a folder only when it is to be unlinked as a file was made in between: a later deletion's to remove.
        with _ignoring(*_NOT_THERE, errno.EISDIR):
            if place.is_dir() and (not path or not place.is_symlink()):
                _remove_folder(place, until_s)
            elif place.lstat().st_ctime <= until_s:
                place.unlink()

    def _unlinked(self, path: str) -> Path:
        # Where a path leads if no link lies on the way; the root itself may well be reached through links.
        return Path(os.path.realpath(self._root), path)

    def _is_reached(self, path: str) -> bool:
        # Whether no link lies on the way to a path, itself left out.
        return not path or Path(os.path.realpath((self._root / path).parent)) == self._unlinked(path).parent


def write_whole(
    place: Path, pieces: Iterable[bytes | memoryview], *, modified_ns: int | None = None, replace: bool = True
) -> None:
    """Write a local file whole or not at all, with durable bytes; its name is not yet durable.

    Raises:
        ConflictError: There is another file, and ``replace`` is False.
        Exception: An error of ``pieces``; nothing is written then.
    """
    with _Staged(place, pieces, modified_ns=modified_ns) as file:
        file.sync()
        file.name(replace=replace)


class _Staged:
    """Local file under way, with all its bytes. At the end of a ``with`` block it has its name, or is gone."""

    def __init__(self, place: Path, pieces: Iterable[bytes | memoryview], *, modified_ns: int | None = None) -> None:
        self.place = place
        self._staging: Path | None = _partial(place)
        descriptor = os.open(self._staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._file = os.fdopen(descriptor, "wb")
        try:
            for piece in pieces:
                self._file.write(piece)
            self._file.flush()
            if modified_ns is not None:
                os.utime(descriptor, ns=(modified_ns, modified_ns))
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> _Staged:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def sync(self) -> None:
        """Make the bytes durable."""
        os.fsync(self._file.fileno())

    def name(self, *, replace: bool = True) -> None:
        """Give the file its name.

        Raises:
            ConflictError: There is another file, and ``replace`` is False.
        """
        assert self._staging is not None
        if replace:
            self._staging.replace(self.place)
            self._staging = None
            return
        try:
            # link() refuses a name that exists; rename() would replace it.
            os.link(self._staging, self.place)
        except FileExistsError:
            raise ConflictError(f"there is another one at the destination by now: {self.place.name!r}") from None

    def _close(self) -> None:
        try:
            self._file.close()
        finally:
            if self._staging is not None:
                self._staging.unlink(missing_ok=True)


def _sync_names(folder: str) -> None:
    with suppress(FileNotFoundError):  # somebody has removed it since
        sync_folder(folder)


def settle_tree(folder: str) -> None:
    """Make a folder, its name and everything in it durable, after another program has written it without syncing.

    Args:
        folder: An absolute path. Links in it are left alone.
    """
    _forget_folders(folder)
    _settled.settle_tree(folder)


def _forget_folders(folder: str) -> None:
    """Record that a folder has been created, and perhaps those above it, up to the nearest store.

    Folders above a store that this process has seen before are the old ones: a new store would have another ``format``.
    """
    top = folder
    while (above := os.path.dirname(top)) != top:
        top = above
        try:
            found = os.stat(f"{top}{os.sep}{STORE_FOLDER}{os.sep}format")
        except OSError:
            continue
        is_known = _stores.get(top) == (identity := (found.st_dev, found.st_ino, found.st_ctime_ns))
        if len(_stores) >= _MAX_STORES:
            _stores.clear()
        _stores[top] = identity
        _settled.forget(folder, top if is_known else "")
        return
    _settled.forget(folder)


def _partial(place: Path) -> Path:
    return place.with_name(f"{UPLOADING}{new_name()}")


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        return list(entries)
    return []


def _is_real_folder(place: Path) -> bool:
    return stat.S_ISDIR(place.lstat().st_mode)


def _is_held(place: Path, held: _Held) -> bool:
    with _ignoring(*_NOT_THERE):
        return os.path.samestat(place.lstat(), os.fstat(held))
    return False


def _remove_folder(folder: Path, until_s: float) -> None:
    with os.scandir(folder) as entries:
        children = [entry for entry in entries if not is_store(entry.name)]
    for child in children:
        with _ignoring(errno.ENOENT, errno.EISDIR):
            if child.is_dir(follow_symlinks=False):
                _remove_folder(Path(child.path), until_s)
            elif os.lstat(child.path).st_ctime <= until_s:
                os.unlink(child.path)
    # A folder stays that holds a store, or was written to since it was read; and so does a root that is a link.
    with _ignoring(errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
        folder.rmdir()


@contextmanager
def _ignoring(*codes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in codes:
            raise


class ObjectPlainFiles(PlainFiles):
    """Plain files below a prefix of a bucket.

    There are no links, and no folders but those that hold something; a name can be both a file and a folder. Names are
    kept as they are, except that ``%`` and control characters are percent-encoded. Objects without an artifact path are
    as if they were not there, but a removal removes them.

    Nobody can delete just the object that was looked at; but it can be replaced. So a plain file that the store shows
    something in the place of becomes a void.
    """

    calls_are_requests = True

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def has_file(self, path: str) -> bool:
        info = self._bucket.head(object_path(path))
        return info is not None and not is_void_object(self._bucket, info)

    def has_folder(self, path: str) -> bool:
        return next(self.walk(path), None) is not None

    def is_empty(self) -> bool:
        return next(self._bucket.walk(""), None) is None

    def children(self, path: str) -> Iterator[PlainFile]:
        if not is_visible_path(path):
            return
        objects, names = self._bucket.children(object_path(path))
        for name in names:
            if _is_shown(name):
                yield PlainFile(path=_joined(path, artifact_path(name)), is_folder=True)
        for info in objects:
            if _is_shown(info.path) and not is_void_object(self._bucket, info):
                yield _plain_file(info)

    def walk(self, path: str = "", *, left_out: list[str] | None = None) -> Iterator[PlainFile]:
        if not is_visible_path(path):
            return
        files: list[PlainFile] = []
        stores: dict[str, None] = {}
        for info in self._bucket.walk(object_path(path)):
            folder, is_in_store, _ = f"/{info.path}".partition(f"/{STORE_FOLDER}/")
            if is_in_store:
                stores[artifact_path(folder[1:])] = None
            elif not _is_shown(info.path):
                if left_out is not None:
                    left_out.append(info.path)
            elif not is_void_object(self._bucket, info):
                if left_out is None:
                    yield _plain_file(info)
                else:
                    files.append(_plain_file(info))
        if left_out is not None:
            others = [folder for folder in stores if folder]
            left_out += others
            inside = tuple(f"{folder}/" for folder in others)
            yield from (file for file in files if not file.path.startswith(inside))

    def content(self, path: str) -> Iterator[tuple[int | None, float]]:
        for info in self._bucket.walk(object_path(path)):
            if _is_plain(info):
                yield None if is_void_object(self._bucket, info) else info.size, info.modified_s

    def topmost(self, is_wanted: Callable[[str], bool]) -> Iterator[str]:
        found: dict[str, None] = {}
        for info in self._bucket.walk(""):
            if _is_shown(info.path):
                folders = accumulate(artifact_path(info.path).split("/")[:-1], _joined)
                if (folder := next(filter(is_wanted, folders), None)) is not None:
                    found[folder] = None
        yield from found

    def stores_below(self, path: str) -> list[str]:
        found = (info.path for info in self._bucket.walk(object_path(path)))
        ending = re.compile(rf"(?:(.*)/)?{re.escape(STORE_FOLDER)}/format")
        return [artifact_path(match[1] or "") for name in found if (match := ending.fullmatch(name))]

    @contextmanager
    def open(self, path: str) -> Iterator[BinaryIO]:
        yield cast(BinaryIO, io.BufferedReader(_Pieces(self._stream(path)), _BUFFER_BYTES))

    def _stream(self, path: str) -> Iterator[Any]:
        if path:
            _check(path)
        found = self._bucket.stream(object_path(path)) if path else None
        if found is None or is_void_object(self._bucket, found[1]):
            raise BlobNotFoundError(path)
        return found[0]

    def fetch(self, path: str, out: Path) -> bool:
        try:
            pieces = self._stream(path)
        except BlobNotFoundError:
            return False
        with out.open("wb") as file:
            file.writelines(pieces)
        return True

    def write(
        self,
        path: str,
        pieces: Iterable[bytes],
        *,
        modified_ns: int | None = None,
        content_type: str | None = None,
        replace: bool = True,
        settle: bool = True,
    ) -> None:
        _check(path)
        if not replace and self.has_file(path):
            raise ConflictError(f"there is another one at the destination by now: {path!r}")
        self._bucket.write(object_path(path), pieces, content_type=content_type)

    def write_all(self, texts: Sequence[NewText]) -> None:
        def write(text: NewText) -> None:
            self.write(text.path, [text.data], content_type=text.content_type)

        threads.run_all(write, texts, waits=True)

    def make_folder(self, path: str) -> None:
        """Do nothing: a folder comes with its files."""

    def settle(self, folders: Iterable[str]) -> None:
        """Do nothing: every write is durable."""

    @contextmanager
    def replacing(self, path: str) -> Iterator[Remove]:
        before = self._bucket.head(object_path(path))

        def remove(is_hidden: Callable[[], bool]) -> None:
            found = None if before is None else self._bucket.get(object_path(path))
            if before is None or found is None or found[1].token != before.token or is_void(found[0]):
                return
            if not is_hidden():
                return
            token = self._bucket.swap(object_path(path), new_void(), before.token)
            # Somebody may just have written the same text once more, which has the same token, and dropped the ref.
            if token is not None and not is_hidden():
                self._bucket.swap(object_path(path), found[0], token)

        yield remove

    def remove(self, path: str, *, until_s: float = math.inf) -> None:
        if not is_visible_path(path):
            return
        itself = self._bucket.head(object_path(path)) if path else None
        for info in [*([] if itself is None else [itself]), *self._bucket.walk(object_path(path))]:
            if _is_plain(info) and info.modified_s <= until_s:
                self._bucket.delete(info.path)


class _Pieces(io.RawIOBase):
    """File that reads pieces as they come."""

    def __init__(self, pieces: Iterator[Any]) -> None:
        self._pieces = pieces
        self._piece = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        out = memoryview(buffer).cast("B")
        while not len(self._piece):
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._piece = memoryview(piece)
        n_bytes = min(len(out), len(self._piece))
        out[:n_bytes] = self._piece[:n_bytes]
        self._piece = self._piece[n_bytes:]
        return n_bytes


def _is_plain(info: ObjectInfo) -> bool:
    return not any(map(is_store, info.path.split("/")))


def _is_shown(name: str) -> bool:
    """Tell whether an object, or a folder of objects, has an artifact path."""
    return is_readable_name(name) and is_visible_path(artifact_path(name))


def _plain_file(info: ObjectInfo) -> PlainFile:
    return PlainFile(path=artifact_path(info.path), size=info.size, modified_ns=int(info.modified_s * 1e9))


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _check(path: str) -> None:
    """Refuse a path that no plain file can have.

    Raises:
        ValueError: It leads out of the root or into a store, or is not in normal form.
    """
    for part in path.split("/"):
        if part in ("", ".", "..") or "\0" in part or not is_visible(part):
            raise ValueError(f"not the path of a plain file: {path[:200]!r}")
