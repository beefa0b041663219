"""Plain files of an artifact root, in a folder or a bucket: visible without this package."""

from __future__ import annotations

import errno
import mimetypes
import os
import posixpath
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from mlflow.entities.file_info import FileInfo

from tensorcas_mlflow.backends import (
    STORE_FOLDER,
    ObjectInfo,
    Root,
    artifact_path,
    is_readable_name,
    is_void,
    is_void_object,
    new_void,
    object_path,
    open_bucket,
)
from tensorcas_mlflow.base.files import Settled
from tensorcas_mlflow.integration.artifacts._paths import UPLOADING, Links, is_store, is_visible, is_visible_path

_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_MAX_ATTEMPTS = 100
_CHANGE_S = 60
"""What lies aside for longer was left by somebody who died."""

Remove = Callable[[Callable[[], bool]], None]
"""Removes a plain file that something is shown in the place of, which the argument tells."""

_Held = int
"""An open descriptor: as long as it is open, no other file gets its inode."""
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_OF_ITSELF = getattr(os, "O_PATH", os.O_RDONLY) | _NO_LINK
_A_FOLDER = os.O_RDONLY | os.O_DIRECTORY | _NO_LINK


_settled = Settled()


class PlainTree:
    """Plain artifacts by their path below one root.

    No folder is entered through a symbolic link, whoever made it: `links` gives the path that needs none. A link to a
    file is read as that file if the file lies below the root too. All other links are as if they were not there, but a
    deletion removes them.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.links: Links | None = Links(root)

    def find(self, path: str) -> Path | None:
        """Give the real path of the plain file or folder that an artifact path shows, or None."""
        if not is_visible_path(path):
            return None
        try:
            real = Path(os.path.realpath(self._root / path, strict=True))
        except OSError as error:
            if error.errno not in _NOT_THERE:
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

    def fetch(self, path: str, out: Path) -> bool:
        """Copy a plain file to another place, with its times; False if there is none."""
        plain = self.find(path)
        if plain is None or not plain.is_file():
            return False
        with ExitStack() as stack:
            file: int | None = None
            with _ignoring(*_NOT_THERE):  # removed since it was found, or replaced by a link
                file = stack.enter_context(self._opened(plain))
            if file is not None:
                try:
                    shutil.copy2(f"/dev/fd/{file}", out)
                except shutil.SameFileError:
                    raise shutil.SameFileError(f"{os.fspath(out)!r} is the artifact") from None
            return file is not None

    @contextmanager
    def _opened(self, real: Path) -> Iterator[int]:
        """Open a file below the root; a link that was put on the way to it since is not followed."""
        root = Path(os.path.realpath(self._root))
        *folders, name = real.relative_to(root).parts
        with ExitStack() as stack:
            at = os.open(root, _A_FOLDER)
            stack.callback(os.close, at)
            for folder in folders:
                at = os.open(folder, _A_FOLDER, dir_fd=at)
                stack.callback(os.close, at)
            file = os.open(name, os.O_RDONLY | _NO_LINK | os.O_NONBLOCK, dir_fd=at)
            stack.callback(os.close, file)
            yield file

    def is_file(self, path: str, file: Path) -> bool:
        """Tell whether an artifact path shows this very file."""
        found = self.find(path)
        with suppress(FileNotFoundError):  # removed since it was found
            return found is not None and found.samefile(file)
        return False

    def has_folder(self, path: str) -> bool:
        """Tell whether an artifact path shows a plain folder."""
        found = self.find(path)
        return found is not None and found.is_dir()

    def children(self, path: str) -> Iterator[FileInfo]:
        """List what a plain folder shows, in no order; nothing if there is no such folder."""
        folder = self.find(path)
        if folder is None or not folder.is_dir():
            return
        prefix = f"{path}/" if path else ""
        with os.scandir(folder) as entries:
            for entry in entries:
                child = prefix + entry.name
                with _ignoring(*_NOT_THERE):  # deleted since the folder was read
                    if not is_visible(entry.name) or (entry.is_symlink() and self.find(child) is None):
                        continue
                    is_dir = entry.is_dir()
                    yield FileInfo(child, is_dir, None if is_dir else entry.stat().st_size)

    def is_changing(self, path: str) -> bool:
        """Tell whether a file of a plain folder is being put in its place, or taken out of it, at this moment."""
        since = time.time() - _CHANGE_S
        with _ignoring(*_NOT_THERE), os.scandir(self._root / path) as entries:
            names = [entry for entry in entries if entry.name.startswith(UPLOADING)]
            return any(entry.stat(follow_symlinks=False).st_ctime > since for entry in names)
        return False

    def walk(self, path: str) -> Iterator[FileInfo]:
        """List all folders and files below a plain folder, each folder before what it holds."""
        for info in self.children(path):
            yield info
            if info.is_dir:
                yield from self.walk(info.path)

    def is_empty(self) -> bool:
        """Tell whether the root is an empty folder, or not there at all."""
        try:
            with os.scandir(self._root) as entries:
                return next(entries, None) is None
        except FileNotFoundError:
            return True
        except NotADirectoryError:
            return False

    def blocker(self, folder: str) -> str | None:
        """Name the first part of a path that is there and is no real folder, so that nothing can be written below."""
        place = self._root
        for name in folder.split("/") if folder else ():
            place /= name
            with _ignoring(errno.ENOENT):
                if not stat.S_ISDIR(place.lstat().st_mode):
                    return place.relative_to(self._root).as_posix()
        return None

    def is_folder(self, path: str) -> bool:
        """Tell whether a folder, and not a link to one, lies at a path that is to be written."""
        place = self._root / path
        return place.is_dir() and not place.is_symlink()

    def make_folder(self, path: str) -> None:
        """Make a plain folder and those above it, where they are missing."""
        place = self._root / path
        _against_removals(lambda: _make(place))

    def write(self, path: str, data: bytes, *, modified_ns: int | None = None) -> None:
        """Write a plain file whole and durably, in place of the one there; its folder is made if it is missing."""
        place = self._root / path

        def write() -> None:
            _make(place.parent)
            staging = place.with_name(f"{UPLOADING}{uuid.uuid4().hex}")
            try:
                with staging.open("xb") as file:
                    file.write(data)
                    file.flush()
                    if modified_ns is not None:
                        os.utime(file.fileno(), ns=(modified_ns, modified_ns))
                    os.fsync(file.fileno())
                staging.replace(place)
            except BaseException:
                staging.unlink(missing_ok=True)
                raise

        _against_removals(write)
        with suppress(FileNotFoundError):  # somebody has removed it since, with its folder
            _settled.settle(os.path.abspath(place.parent))

    def has_file(self, path: str) -> bool:
        """Tell whether anything lies at a path, a link that leads nowhere included."""
        return os.path.lexists(self._root / path)

    @contextmanager
    def replacing(self, path: str) -> Iterator[Remove]:
        """Look at the plain file or link at a path, and give what removes just that one, and nothing put there since.

        The function that is given is told how to find out whether something is shown in the file's place, so that it
        can go. That is asked when nobody sees the file any more, and the file comes back if it is not so.
        """
        with ExitStack() as stack:
            held: _Held | None = None
            with _ignoring(*_NOT_THERE):
                held = os.open(self._root / path, _OF_ITSELF)
                stack.callback(os.close, held)
            yield lambda is_hidden: self._drop(path, held, is_hidden)

    def _drop(self, path: str, held: _Held | None, is_hidden: Callable[[], bool]) -> None:
        place = self._root / path
        taken = place.with_name(f"{UPLOADING}{uuid.uuid4().hex}")
        if held is None or not _is_held(place, held):
            return
        with _ignoring(*_NOT_THERE):
            place.rename(taken)
            if not _is_held(taken, held) or not is_hidden():
                with _ignoring(errno.EEXIST):
                    os.link(taken, place, follow_symlinks=False)
            taken.unlink()

    def stores_below(self, path: str) -> list[str]:
        """Find the folders at or below a path that are roots of stores, relative to this root."""
        found = []
        for folder, names, _ in os.walk(self._root / path):
            if STORE_FOLDER in names and Path(folder, STORE_FOLDER, "format").is_file():
                found.append(Path(folder).relative_to(self._root).as_posix())
                names.clear()  # no store lies in another
        return ["" if place == "." else place for place in found]

    def remove(self, path: str) -> None:
        """Remove what lies at a path, with all below it but stores and the folders they lie in; idempotent."""
        if not is_visible_path(path) or not self._is_reached(path):
            return
        place = self._root / path
        # What is a folder only when it is to be unlinked as a file was made in between: a later deletion's to remove.
        with _ignoring(*_NOT_THERE, errno.EISDIR):
            if place.is_dir() and (not path or not place.is_symlink()):
                _remove_folder(place)
            else:
                place.unlink()

    def _unlinked(self, path: str) -> Path:
        # Where a path leads if no link lies on the way; the root itself may well be reached through links.
        return Path(os.path.realpath(self._root), path)

    def _is_reached(self, path: str) -> bool:
        # Whether no link lies on the way to a path, itself left out.
        return not path or Path(os.path.realpath((self._root / path).parent)) == self._unlinked(path).parent


def _make(folder: Path) -> None:
    if not folder.is_dir():
        _settled.forget(os.path.abspath(folder))
        folder.mkdir(parents=True, exist_ok=True)


def _is_held(place: Path, held: _Held) -> bool:
    with _ignoring(*_NOT_THERE):
        return os.path.samestat(place.lstat(), os.fstat(held))
    return False


def _remove_folder(folder: Path) -> None:
    with os.scandir(folder) as entries:
        children = [entry for entry in entries if not is_store(entry.name)]
    for child in children:
        with _ignoring(errno.ENOENT, errno.EISDIR):
            if child.is_dir(follow_symlinks=False):
                _remove_folder(Path(child.path))
            else:
                Path(child.path).unlink()
    # A folder stays that holds a store, or was written to since it was read; and so does a root that is a link.
    with _ignoring(errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
        folder.rmdir()


def _against_removals(act: Callable[[], None]) -> None:
    """Do what somebody who removes folders at the same time may spoil, again and again."""
    for _ in range(_MAX_ATTEMPTS - 1):
        # The second is what mkdir says of a folder that is there, and is gone when it looks whether it is one.
        with suppress(FileNotFoundError, FileExistsError):
            return act()
    return act()


@contextmanager
def _ignoring(*codes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in codes:
            raise


_FORMAT = f"{STORE_FOLDER}/format"


class ObjectTree:
    """Plain artifacts by their path below one root.

    There are no folders but those that hold something, and a name can be both a file and a folder, as everywhere in
    object stores. Names are kept as they are, except that ``%`` and control characters are percent-encoded; objects of
    names that no artifact path has are as if they were not there.

    Nobody can delete just the object that was looked at, and nothing written there since; but it can be replaced. So a
    plain file that a file in the store takes the place of becomes a void.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._bucket = open_bucket(root, "")
        self.links: Links | None = None

    def find(self, path: str) -> Path | None:
        """No artifact here is a local file."""
        return None

    def fetch(self, path: str, out: Path) -> bool:
        """Write a plain file to a local one; False if there is none."""
        found = self._bucket.stream(object_path(path)) if path and is_visible_path(path) else None
        if found is None or is_void_object(self._bucket, found[1]):
            return False
        with out.open("wb") as file:
            for piece in found[0]:
                file.write(piece)
        return True

    def is_file(self, path: str, file: Path) -> bool:
        """Tell whether an artifact path shows this very local file, which none does."""
        return False

    def has_folder(self, path: str) -> bool:
        """Tell whether anything lies below an artifact path."""
        return is_visible_path(path) and next(self._below(path), None) is not None

    def children(self, path: str) -> Iterator[FileInfo]:
        """List what a folder shows, in no order; nothing if there is no such folder."""
        if not is_visible_path(path):
            return
        objects, names = self._bucket.children(object_path(path))
        for name in names:
            if not is_store(name) and is_readable_name(name):
                yield FileInfo(_joined(path, artifact_path(name)), True, None)
        for info in objects:
            if is_readable_name(info.path) and not is_void_object(self._bucket, info):
                yield _file_info(info)

    def is_changing(self, path: str) -> bool:
        """Tell whether a file is being put in its place at this moment: here each is put there at once."""
        return False

    def walk(self, path: str) -> Iterator[FileInfo]:
        """List all files below a folder."""
        if is_visible_path(path):
            yield from map(_file_info, self._below(path))

    def is_empty(self) -> bool:
        """Tell whether nothing lies below the root, stores included."""
        return next(self._bucket.walk(""), None) is None

    def blocker(self, folder: str) -> str | None:
        """Name what keeps a folder from being written to: here nothing does."""
        return None

    def is_folder(self, path: str) -> bool:
        """Tell whether a folder keeps a file from being written at a path: here none does."""
        return False

    def make_folder(self, path: str) -> None:
        """Make a folder: here each comes and goes with what it holds."""

    def write(self, path: str, data: bytes, *, modified_ns: int | None = None) -> None:
        """Write a plain file whole, in place of the one there."""
        # All that is plain is text, whatever else its name may mean.
        guessed, encoding = mimetypes.guess_type(posixpath.basename(path))
        content_type = guessed if guessed is not None and encoding is None else "text/plain"
        self._bucket.put(object_path(path), data, content_type=content_type)

    def has_file(self, path: str) -> bool:
        """Tell whether there is a plain file at a path."""
        info = self._bucket.head(object_path(path))
        return info is not None and not is_void_object(self._bucket, info)

    @contextmanager
    def replacing(self, path: str) -> Iterator[Remove]:
        """Look at the plain file at a path, and give what removes just that one; see `PlainTree.replacing`."""
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

    def stores_below(self, path: str) -> list[str]:
        """Find the folders at or below a path that are roots of stores, relative to this root."""
        found = (info.path for info in self._bucket.walk(object_path(path)))
        ending = re.compile(rf"(?:(.*)/)?{re.escape(_FORMAT)}")
        return [artifact_path(match[1] or "") for name in found if (match := ending.fullmatch(name))]

    def remove(self, path: str) -> None:
        """Remove what lies at a path, with all below it but stores; idempotent."""
        if not is_visible_path(path):
            return
        if path:
            self._bucket.delete(object_path(path))
        for info in self._bucket.walk(object_path(path)):
            if _is_plain(info):
                self._bucket.delete(info.path)

    def _below(self, path: str) -> Iterator[ObjectInfo]:
        for info in self._bucket.walk(object_path(path)):
            if _is_plain(info) and is_readable_name(info.path) and not is_void_object(self._bucket, info):
                yield info


def _is_plain(info: ObjectInfo) -> bool:
    return not any(map(is_store, info.path.split("/")))


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _file_info(info: ObjectInfo) -> FileInfo:
    return FileInfo(artifact_path(info.path), False, info.size)
