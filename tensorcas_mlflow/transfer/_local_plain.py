"""Plain files in a folder of the file system."""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from tensorcas_mlflow._durable import Settled
from tensorcas_mlflow.backends import STORE_FOLDER
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, ConflictError
from tensorcas_mlflow.transfer._plain import PlainFile, PlainFiles

_UPLOADING = ".artifact.uploading."
"""How the names of files under way begin, MLflow's as well as ours."""


class LocalPlainFiles(PlainFiles):
    """Plain files below a folder.

    No folder is entered through a symbolic link, and no folder of a store. A link to a file is read as that file if it
    lies below the root too; all others are skipped. Nothing is written through a link.
    """

    def __init__(self, root: Path) -> None:
        self.uri = root.as_uri()
        self._root = root
        self._skipped: list[str] = []
        self._settled = Settled()
        self._folders: set[Path] = set()
        """Folders whose names are to be made durable: also those that were there, as an earlier copy may have died."""

    def list(self) -> Iterator[PlainFile]:
        self._skipped.clear()
        folders = [""]
        while folders:
            folder = folders.pop()
            with _translated("list", folder or "."):
                try:
                    entries = list(os.scandir(self._root / folder))
                except (FileNotFoundError, NotADirectoryError):
                    continue
            self._folders.add(self._root / folder)
            if folder and any(_is_store(entry.name) and entry.is_dir(follow_symlinks=False) for entry in entries):
                self._skipped.append(folder)  # the files of another store, to be copied with it
                continue
            for entry in entries:
                path = f"{folder}/{entry.name}" if folder else entry.name
                if not _is_visible(entry.name):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(path)
                elif (found := self._look_at(path, is_link=entry.is_symlink())) is not None:
                    yield found

    def skipped(self) -> Iterable[str]:
        return tuple(self._skipped)

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[BinaryIO]:
        _check(path)
        with _translated("read", path):
            real = self._real(path)
            if real is None:
                raise BlobNotFoundError(path)
            try:
                descriptor = os.open(real, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
            except (FileNotFoundError, NotADirectoryError):
                raise BlobNotFoundError(path) from None
        with os.fdopen(descriptor, "rb") as file:
            yield file

    def write(self, file: PlainFile, pieces: Iterable[bytes], *, replace: bool) -> None:
        _check(file.path)
        folder, _, name = file.path.rpartition("/")
        place = self._made(folder) / name
        staging = place.with_name(f"{_UPLOADING}{uuid.uuid4().hex}")
        with _translated("write", file.path):
            descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with os.fdopen(descriptor, "wb") as opened:
                for piece in pieces:
                    with _translated("write", file.path):
                        opened.write(piece)
                with _translated("write", file.path):
                    opened.flush()
                    if file.modified_ns is not None:
                        os.utime(opened.fileno(), ns=(file.modified_ns, file.modified_ns))
                    os.fsync(opened.fileno())
            with _translated("write", file.path):
                self._put(staging, place, file.path, replace=replace)
        finally:
            with contextlib.suppress(OSError):
                staging.unlink()
        self._folders.add(place.parent)

    def make_folder(self, path: str) -> None:
        _check(path)
        self._made(path)

    def settle(self) -> None:
        with _translated("sync", "."):
            for folder in self._folders:
                with contextlib.suppress(FileNotFoundError):
                    self._settled.settle(os.path.abspath(folder))
        self._folders.clear()

    def _put(self, staging: Path, place: Path, path: str, *, replace: bool) -> None:
        try:
            if replace:
                staging.replace(place)
            else:
                # link() refuses a name that exists; rename() would replace it.
                os.link(staging, place)
        except FileExistsError:
            raise ConflictError(f"there is another one at the destination by now: {path!r}") from None
        except IsADirectoryError:
            raise ConflictError(f"{path!r} is a folder at the destination") from None

    def _made(self, path: str) -> Path:
        """Make a folder part by part, so that no link is followed on the way."""
        place = self._root
        for name in ["", *path.split("/")] if path else [""]:
            place = place / name if name else place
            with _translated("make the folder", path or "."):
                try:
                    os.makedirs(place) if place == self._root else os.mkdir(place)
                except FileExistsError:
                    if name and not stat.S_ISDIR(place.lstat().st_mode):
                        raise ConflictError(f"{path!r} is no folder at the destination, or behind a link") from None
            self._folders.add(place)
        return place

    def _look_at(self, path: str, *, is_link: bool) -> PlainFile | None:
        with contextlib.suppress(FileNotFoundError):
            real = self._real(path)
            found = None if real is None else real.stat()
            if found is not None and stat.S_ISREG(found.st_mode):
                return PlainFile(path=path, size=found.st_size, modified_ns=found.st_mtime_ns)
            if is_link:
                self._skipped.append(path)
        return None

    def _real(self, path: str) -> Path | None:
        """Where a path leads, if that is below the root, in no store, and no folder was entered through a link."""
        root = Path(os.path.realpath(self._root))
        place = root / path
        if Path(os.path.realpath(place.parent)) != place.parent:
            return None
        try:
            real = Path(os.path.realpath(place, strict=True))
        except OSError:
            return None
        if not real.is_relative_to(root) or not all(map(_is_visible, real.relative_to(root).parts)):
            return None
        return real


def _is_store(name: str) -> bool:
    # Some file systems make no difference between great and small letters.
    return name.casefold() == STORE_FOLDER


def _is_visible(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # no artifact has such a name
        return False
    return not _is_store(name) and not name.startswith(_UPLOADING)


def _check(path: str) -> None:
    """Refuse what is no path of a plain file.

    Raises:
        ValueError: It leads out of the root or into a store, or is not in normal form.
    """
    for part in path.split("/"):
        if part in ("", ".", "..") or "\0" in part or not _is_visible(part):
            raise ValueError(f"not the path of a plain file: {path[:200]!r}")


@contextlib.contextmanager
def _translated(action: str, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BackendError(action, path, f"{type(error).__name__}: {error}") from error
