"""Copies of the plain files beside a store, without which a model has no MLmodel."""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import BinaryIO

from tensorcas_mlflow.backends import PlainFile, PlainFiles
from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.base.text import count_text, size_text
from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, ConflictError
from tensorcas_mlflow.layout.manifests import MAX_BYTES, Manifest
from tensorcas_mlflow.maintenance._copy_refs import Failure, of_store

_PIECE_BYTES = 1 << 20


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
    """Paths that were left out; see `PlainFiles.walk`."""
    failed: tuple[Failure, ...] = ()

    def __str__(self) -> str:
        kept = f", {len(self.kept)} are others there and were kept" if self.kept else ""
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return (
            f"copied {count_text(self.n_copied, 'plain file')} ({size_text(self.copied_bytes)}), "
            f"{self.n_there} there already{kept}{failed}"
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
    skipped: list[str] = []
    with backend_errors("."):
        there = list(destination.walk(left_out=[]))
        files = [file for file in source.walk(left_out=skipped) if not file.is_folder and wanted(file.path)]
    files.sort(key=lambda file: file.path)
    sizes = {file.path: file.size for file in there if not file.is_folder}
    if source.calls_are_requests or destination.calls_are_requests:
        threads.run_all(lambda file: copier.copy(file, sizes.get(file.path)), files, waits=True)
    else:
        for file in files:
            copier.copy(file, sizes.get(file.path))
    if not dry_run:
        # Those that existed, too: an earlier copy may have died.
        with backend_errors("."):
            destination.settle({"", *(file.path for file in there if file.is_folder), *copier.folders})
    return copier.report(tuple(filter(wanted, skipped)))


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
        self.folders: set[str] = set()
        """Folders written to, and those above."""
        self._n_copied = self._copied_bytes = self._n_there = 0
        self._kept: list[str] = []
        self._failed: list[Failure] = []
        self._lock = Lock()

    def copy(self, file: PlainFile, size_there: int | None) -> None:
        """Copy one file; its size at the destination is None if it is missing there."""
        try:
            with backend_errors(file.path):
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
            self._destination.write(
                file.path, counted(), modified_ns=file.modified_ns, replace=self._replace, settle=False
            )
        with self._lock:
            folder = file.path
            while folder := posixpath.dirname(folder):
                self.folders.add(folder)
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


@contextlib.contextmanager
def backend_errors(path: str) -> Iterator[None]:
    """Turn errors of a file system into `BackendError`, around a block."""
    try:
        yield
    except OSError as error:
        raise BackendError("copy", path, f"{type(error).__name__}: {error}") from error
