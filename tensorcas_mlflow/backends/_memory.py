"""Blobs in memory, for tests of everything above: the simplest implementation of the contract."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator

from tensorcas_mlflow.backends._contract import Backend, BlobInfo, Children, FoundFile, Token, check_key
from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.errors import BlobExistsError, BlobNotFoundError, CorruptError


class MemoryBackend(Backend):
    """Blobs in a dict. Lives as long as the object; shared by its users."""

    def __init__(self, *, is_remote: bool = False) -> None:
        """Create an empty backend.

        Args:
            is_remote: Whether callers treat it as remote.
        """
        self.uri = "tensorcas-memory:///"
        self.is_remote = is_remote
        self._lock = Lock()
        self._blobs: dict[str, tuple[bytes, float, Token]] = {}
        self._versions = itertools.count()

    def put_new(self, key: str, pieces: Iterable[Buffer], *, durable: bool = True) -> Token:
        data = b"".join(bytes(piece) for piece in pieces)
        with self._lock:
            if check_key(key) in self._blobs:
                raise BlobExistsError(key)
            return self._set(key, data)

    def promote(self, source: str, dest: str, data: Buffer, *, token: Token, replace: bool) -> None:
        with self._lock:
            found = self._blobs.get(check_key(source))
            if found is None or found[2] != token:
                raise BlobNotFoundError(source)
            if check_key(dest) in self._blobs and not replace:
                raise BlobExistsError(dest)
            del self._blobs[source]
            self._set(dest, bytes(data))

    def withdraw(self, key: str, token: Token, *, own: Iterable[str] | None = None) -> bool:
        with self._lock:
            found = self._blobs.get(check_key(key))
            if found is None or found[2] != token:
                return False
            del self._blobs[key]
            return True

    def stat(self, key: str) -> BlobInfo | None:
        with self._lock:
            found = self._blobs.get(check_key(key))
        return None if found is None else BlobInfo(key=key, size=len(found[0]), modified_s=found[1], token=found[2])

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        with self._lock:
            found = self._blobs.get(check_key(key))
        if found is None:
            raise BlobNotFoundError(key)
        if max_bytes is not None and len(found[0]) > max_bytes:
            raise CorruptError(key, f"it has {len(found[0])} bytes, more than the {max_bytes} it may have")
        return found[0]

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        data = self.get(key)[start : start + len(out)]
        if len(data) != len(out):
            raise CorruptError(key, f"it ends before byte {start + len(out)}")
        out[:] = data

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[BlobInfo]:
        below = check_key(prefix) + "/"
        with self._lock:
            found = sorted((key, blob) for key, blob in self._blobs.items() if key.startswith(below))
            found = [(key, blob) for key, blob in found if after is None or key > after]
        for key, (data, modified_s, token) in found:
            yield BlobInfo(key=key, size=len(data), modified_s=modified_s, token=token)

    def list_dir(self, prefix: str, *, most: int | None = None) -> Children:
        depth = prefix.count("/") + 1
        found = list(self.list(prefix))
        blobs = {info.key.split("/")[depth]: info for info in found if info.key.count("/") == depth}
        segments = {info.key.split("/")[depth] for info in found if info.key.count("/") > depth}
        return Children(dict.fromkeys(blobs, True), segments, lambda: list(blobs.values()))

    def files(self) -> Iterator[FoundFile]:
        with self._lock:
            return iter([FoundFile(key, len(data)) for key, (data, _, _) in self._blobs.items()])

    def delete(self, *keys: str) -> None:
        for key in keys:
            with self._lock:
                self._blobs.pop(check_key(key), None)

    def _set(self, key: str, data: bytes) -> Token:
        token = str(next(self._versions))
        self._blobs[key] = (data, time.time(), token)
        return token
