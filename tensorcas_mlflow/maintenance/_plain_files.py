"""Plain files beside a store, without which a model has no MLmodel: list, read, write and copy them."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from tensorcas_mlflow.backends import STORE_FOLDER, Bucket, artifact_path, is_readable_name, is_void_object, object_path
from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.base.files import Settled
from tensorcas_mlflow.base.text import size_text
from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, ConflictError
from tensorcas_mlflow.layout import MAX_BYTES, Manifest
from tensorcas_mlflow.maintenance._copy_refs import Failure, of_store

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainFile:
    """Plain file below an artifact root."""

    path: str
    """Relative to the root, in normal form, with ``/`` between the parts."""
    size: int
    modified_ns: int | None = None
    """Time of its last write, if it is known."""


class PlainFiles(ABC):
    """Plain files below one artifact root: all files but those of stores."""

    uri: str
    is_remote: bool = False
    """Whether each call is a request to another machine. Such files may be read and written by many threads at once."""

    @abstractmethod
    def list(self) -> Iterator[PlainFile]:
        """List all of them, in no order."""

    @abstractmethod
    def skipped(self) -> Iterable[str]:
        """Return the paths that the last `list` left out: links that lead elsewhere, and folders of other stores."""

    @abstractmethod
    def open(self, path: str) -> AbstractContextManager[BinaryIO]:
        """Open one to read it.

        Raises:
            BlobNotFoundError: There is none.
            BackendError: The storage failed.
        """

    @abstractmethod
    def write(self, file: PlainFile, pieces: Iterable[bytes], *, replace: bool) -> None:
        """Write one whole or not at all.

        Args:
            file: Path and time of the last write; the size may have changed.
            pieces: Content of the file.
            replace: Whether it may replace another file.

        Raises:
            ConflictError: There is another file and ``replace`` is False, or its folder cannot be made.
            BackendError: The storage failed.
            Exception: An error of ``pieces``; nothing is written then.
        """

    @abstractmethod
    def make_folder(self, path: str) -> None:
        """Make a folder that is missing, if the storage has folders; raises as `write`."""

    @abstractmethod
    def settle(self) -> None:
        """Make what has been written durable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainReport:
    """Report of a copy of plain files, or of its dry run. Printing it says so in words."""

    n_copied: int = 0
    copied_bytes: int = 0
    n_there: int = 0
    """Files that the destination had already, with the same bytes."""
    kept: tuple[str, ...] = ()
    """Files that differed there, and stayed."""
    skipped: tuple[str, ...] = ()
    """Paths that were left out; see `PlainFiles.skipped`."""
    failed: tuple[Failure, ...] = ()

    def __str__(self) -> str:
        kept = f", {len(self.kept)} are others there and were kept" if self.kept else ""
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return (
            f"copied {self.n_copied} plain files ({size_text(self.copied_bytes)}), "
            f"{self.n_there} were there already{kept}{failed}"
        )


class _UnreadableError(Exception):
    """Ends the writing of a file whose source cannot be read; the cause says why."""


def copy_plain(
    source: PlainFiles,
    destination: PlainFiles,
    *,
    wanted: Callable[[str], bool] = lambda path: True,
    manifests: Mapping[str, Set[str]] | None = None,
    store_id: str = "",
    replace: bool = False,
    dry_run: bool = False,
) -> PlainReport:
    """Copy plain files that the destination lacks.

    Args:
        source: It is only read.
        destination: Plain files to write.
        wanted: Tells by its path whether to copy a file.
        manifests: Paths of files that may be copies of manifests, and the digests of the manifests. A file that is one
            is rewritten to ``store_id``.
        store_id: Id of the store at the destination.
        replace: Whether to replace other files there.
        dry_run: Whether to plan only.

    Raises:
        BackendError: The destination failed.
    """
    copier = _PlainCopier(source, destination, manifests or {}, store_id, replace=replace, dry_run=dry_run)
    sizes = {file.path: file.size for file in destination.list()}
    files = sorted((file for file in source.list() if wanted(file.path)), key=lambda file: file.path)
    if source.is_remote or destination.is_remote:
        threads.run_all(lambda file: copier.copy(file, sizes.get(file.path)), files, waits=True)
    else:
        for file in files:
            copier.copy(file, sizes.get(file.path))
    if not dry_run:
        destination.settle()
    return copier.report(tuple(path for path in source.skipped() if wanted(path)))


class _PlainCopier:
    def __init__(
        self,
        source: PlainFiles,
        destination: PlainFiles,
        manifests: Mapping[str, Set[str]],
        store_id: str,
        *,
        replace: bool,
        dry_run: bool,
    ) -> None:
        self._source = source
        self._destination = destination
        self._manifests = manifests
        self._store_id = store_id
        self._replace = replace
        self._dry_run = dry_run
        self._n_copied = self._copied_bytes = self._n_there = 0
        self._kept: list[str] = []
        self._failed: list[Failure] = []
        self._lock = Lock()

    def copy(self, file: PlainFile, size_there: int | None) -> None:
        """Copy one file; its size at the destination is None if it is missing there."""
        try:
            if size_there is not None and self._is_equal(file):
                with self._lock:
                    self._n_there += 1
            elif size_there is not None and not self._replace:
                self._kept.append(file.path)
            else:
                self._write(file)
        except ConflictError as error:
            self._failed.append(Failure(what=file.path, reason=str(error)))
        except _UnreadableError as error:
            # A file that is gone was deleted meanwhile, and is no failure.
            if not isinstance(error.__cause__, BlobNotFoundError):
                self._failed.append(Failure(what=file.path, reason=str(error.__cause__)))

    def report(self, skipped: tuple[str, ...]) -> PlainReport:
        """Return the report."""
        return PlainReport(
            n_copied=self._n_copied,
            copied_bytes=self._copied_bytes,
            n_there=self._n_there,
            kept=tuple(sorted(self._kept)),
            skipped=skipped,
            failed=tuple(self._failed),
        )

    def _write(self, file: PlainFile) -> None:
        n_bytes = 0

        def counted() -> Iterator[bytes]:
            nonlocal n_bytes
            for piece in self._pieces(file):
                n_bytes += len(piece)
                yield piece

        if self._dry_run:
            n_bytes = file.size
        else:
            self._destination.write(file, counted(), replace=self._replace)
        with self._lock:
            self._n_copied += 1
            self._copied_bytes += n_bytes

    def _is_equal(self, file: PlainFile) -> bool:
        try:
            with self._destination.open(file.path) as there:
                for piece in self._pieces(file):
                    if _read_whole(there, len(piece)) != piece:
                        return False
                return there.read(1) == b""
        except BlobNotFoundError:
            return False

    def _pieces(self, file: PlainFile) -> Iterator[bytes]:
        """Yield the bytes that the destination is to have."""
        digests = self._manifests.get(file.path)
        try:
            with self._source.open(file.path) as opened:
                if digests is not None and file.size <= MAX_BYTES:
                    data = opened.read()
                    yield self._rewritten(data) if digest(data).hex() in digests else data
                    return
                while piece := opened.read(_PIECE_BYTES):
                    yield piece
        except (BlobNotFoundError, BackendError, OSError) as error:
            raise _UnreadableError from error

    def _rewritten(self, data: bytes) -> bytes:
        return of_store(Manifest.from_bytes(data), self._store_id).stream


def _read_whole(file: BinaryIO, n_bytes: int) -> bytes:
    """Read some bytes, or all that are left; one read of a remote file may return fewer."""
    parts: list[bytes] = []
    while n_bytes > 0 and (part := file.read(n_bytes)):
        parts.append(part)
        n_bytes -= len(part)
    return b"".join(parts)


_UPLOADING = ".artifact.uploading."
"""Prefix of the names of partial files, of MLflow's as well as ours."""


class LocalPlainFiles(PlainFiles):
    """Plain files below a folder.

    A listing enters no folder through a symbolic link, and no folder of a store. A link to a file below the root is
    read as that file; all other links are skipped. Nothing is written through a link.
    """

    def __init__(self, root: Path) -> None:
        self.uri = root.as_uri()
        self._root = root
        self._skipped: list[str] = []
        self._settled = Settled()
        self._folders: set[Path] = set()
        """Folders to make durable, including those that existed: an earlier copy may have died."""

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
        """Return the real path of a file below the root, if no folder on the way is a link or a store."""
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
    # Some file systems ignore case.
    return name.casefold() == STORE_FOLDER


def _is_visible(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # no artifact has such a name
        return False
    return not _is_store(name) and not name.startswith(_UPLOADING)


def _check(path: str) -> None:
    """Refuse a path that no plain file can have.

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


_BUFFER_BYTES = 1 << 20


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


class ObjectPlainFiles(PlainFiles):
    """Plain files below a prefix of a bucket. There are no folders and no links; other stores are left out."""

    is_remote = True

    def __init__(self, bucket: Bucket, uri: str) -> None:
        self.uri = uri
        self._bucket = bucket
        self._skipped: list[str] = []

    def list(self) -> Iterator[PlainFile]:
        self._skipped.clear()
        files: list[PlainFile] = []
        for info in self._bucket.walk(""):
            folder, is_store, _ = f"/{info.path}".partition(f"/{STORE_FOLDER}/")
            if not is_store and not is_readable_name(info.path):
                self._skipped.append(info.path)
            elif not is_store and not is_void_object(self._bucket, info):
                path = artifact_path(info.path)
                files.append(PlainFile(path=path, size=info.size, modified_ns=int(info.modified_s * 1e9)))
            elif folder and folder[1:] not in self._skipped:
                self._skipped.append(artifact_path(folder[1:]))
        inside = tuple(f"{folder}/" for folder in self._skipped)
        yield from (file for file in files if not file.path.startswith(inside))

    def skipped(self) -> Iterable[str]:
        return tuple(self._skipped)

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[BinaryIO]:
        found = self._bucket.stream(object_path(path))
        if found is None or is_void_object(self._bucket, found[1]):
            raise BlobNotFoundError(path)
        yield cast(BinaryIO, io.BufferedReader(_Pieces(found[0]), _BUFFER_BYTES))

    def write(self, file: PlainFile, pieces: Iterable[bytes], *, replace: bool) -> None:
        path = object_path(file.path)
        there = None if replace else self._bucket.head(path)
        if there is not None and not is_void_object(self._bucket, there):
            raise ConflictError(f"there is another one at the destination by now: {file.path!r}")
        self._bucket.write(path, pieces)

    def make_folder(self, path: str) -> None:
        """Do nothing: a folder comes with its files."""

    def settle(self) -> None:
        """Do nothing: every write is durable."""
