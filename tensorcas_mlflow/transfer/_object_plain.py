"""Plain files in an object store, each an object."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, cast

from tensorcas_mlflow.backends import STORE_FOLDER, Bucket, artifact_path, is_readable_name, is_void_object, object_path
from tensorcas_mlflow.errors import BlobNotFoundError, ConflictError
from tensorcas_mlflow.transfer._plain import PlainFile, PlainFiles

_BUFFER_BYTES = 1 << 20


class _Pieces(io.RawIOBase):
    """A file to read from pieces as they come."""

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
        """Nothing is to be done: a folder comes with what lies in it."""

    def settle(self) -> None:
        """Nothing is to be done: what has been written is durable."""
