"""The plain files beside a store, without which a model has no MLmodel: what they are, and copying them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import BinaryIO

from tensorcas_mlflow import threads
from tensorcas_mlflow._texts import size_text
from tensorcas_mlflow.digest import digest
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, ConflictError
from tensorcas_mlflow.manifest import MAX_BYTES, Manifest
from tensorcas_mlflow.threads import Lock
from tensorcas_mlflow.transfer._compare import of_store
from tensorcas_mlflow.transfer._report import Failure

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainFile:
    """A plain file below an artifact root."""

    path: str
    """Relative to the root, in normal form, with ``/`` between the parts."""
    size: int
    modified_ns: int | None = None
    """When it was last written, where that is known."""


class PlainFiles(ABC):
    """The plain files below one artifact root: all but those of stores."""

    uri: str
    is_remote: bool = False
    """Whether each call is a request to another machine. Such files may be read and written by many threads at once."""

    @abstractmethod
    def list(self) -> Iterator[PlainFile]:
        """List all of them, in no order."""

    @abstractmethod
    def skipped(self) -> Iterable[str]:
        """Paths, found by the last `list`, of what was left out: links that lead elsewhere, folders of other stores."""

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
            file: Its path, and when it is to have been written; its size may have changed.
            pieces: The content.
            replace: Whether it may take the place of one that is there.

        Raises:
            ConflictError: There is one and ``replace`` is False, or its folder cannot be made there.
            BackendError: The storage failed.
            Exception: Whatever ``pieces`` raises; nothing is written then.
        """

    @abstractmethod
    def make_folder(self, path: str) -> None:
        """Make a folder where the storage knows such a thing and it is missing; raises as `write`."""

    @abstractmethod
    def settle(self) -> None:
        """Make what has been written durable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainReport:
    """What has been done about plain files, or what would be."""

    n_copied: int = 0
    copied_bytes: int = 0
    n_there: int = 0
    """Those that the destination had already, with the same bytes."""
    kept: tuple[str, ...] = ()
    """Those of which it had another one, which has stayed."""
    skipped: tuple[str, ...] = ()
    """What was left out: see `PlainFiles.skipped`."""
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
        destination: Where to.
        wanted: Tells by its path whether a file is to be copied.
        manifests: Paths of files that may be copies of manifests, and the manifests' digests. Those that are, are
            written as ``store_id``'s.
        store_id: Of the destination's store.
        replace: Whether files take the place of other ones there.
        dry_run: Whether only to say what would be done.

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
        """Copy one file, whose size at the destination is given if it is there."""
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
            # What is gone by now was deleted meanwhile, and is no failure.
            if not isinstance(error.__cause__, BlobNotFoundError):
                self._failed.append(Failure(what=file.path, reason=str(error.__cause__)))

    def report(self, skipped: tuple[str, ...]) -> PlainReport:
        """Say what has been done."""
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
        """The bytes that the destination is to have."""
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
    """Read so many bytes, or what is left; a remote file may give fewer at a time."""
    parts: list[bytes] = []
    while n_bytes > 0 and (part := file.read(n_bytes)):
        parts.append(part)
        n_bytes -= len(part)
    return b"".join(parts)
