"""Backend with a count of reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager

from tensorcas_mlflow.backends._contract import Backend, BlobInfo, Children, FoundFile, Token
from tensorcas_mlflow.backends._file import BlobFile, ReadCounter
from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.errors import BlobNotFoundError


class MeteredBackend(Backend):
    """Wrapper of a backend with a count of its reads."""

    def __init__(self, inner: Backend, tally: ReadCounter) -> None:
        """Wrap a backend.

        Args:
            inner: The wrapped backend.
            tally: The counter.
        """
        self.inner = inner
        self.uri = inner.uri
        self.is_remote = inner.is_remote
        self.is_carrier = inner.is_carrier
        self.has_database = inner.has_database
        self.tally = tally

    def put_new(self, key: str, pieces: Iterable[Buffer], *, durable: bool = True) -> Token:
        return self.inner.put_new(key, pieces, durable=durable)

    def put_all(self, blobs: Iterable[tuple[str, Iterable[Buffer]]]) -> None:
        self.inner.put_all(blobs)

    def promote(self, source: str, dest: str, data: Buffer, *, token: Token, replace: bool) -> None:
        self.inner.promote(source, dest, data, token=token, replace=replace)

    def withdraw(self, key: str, token: Token, *, own: Iterable[str] | None = None) -> bool:
        return self.inner.withdraw(key, token, own=own)

    def stat(self, key: str) -> BlobInfo | None:
        self.tally.add(0)
        return self.inner.stat(key)

    def missing(self, keys: Iterable[str]) -> set[str]:
        wanted = list(keys)
        self.tally.add(0, len(wanted))
        return self.inner.missing(wanted)

    def alone(self) -> AbstractContextManager[bool]:
        return self.inner.alone()

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        try:
            blob = self.inner.get(key, max_bytes=max_bytes)
        except BlobNotFoundError:
            self.tally.add(0)
            raise
        self.tally.add(len(blob))
        return blob

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        self.inner.read_into(key, start, out)
        self.tally.add(len(out))

    def open_file(self, key: str) -> BlobFile | None:
        file = self.inner.open_file(key)
        if file is not None:
            file.tally = self.tally
        return file

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[BlobInfo]:
        self.tally.add(0)
        return self.inner.list(prefix, after=after)

    def list_dir(self, prefix: str, *, most: int | None = None) -> Children:
        self.tally.add(0)
        return self.inner.list_dir(prefix, most=most)

    def files(self) -> Iterator[FoundFile]:
        self.tally.add(0)
        return self.inner.files()

    def delete(self, *keys: str) -> None:
        self.inner.delete(*keys)

    def settle(self, prefix: str) -> None:
        self.inner.settle(prefix)

    def prepare(self, *, database: bool | None = None) -> None:
        self.inner.prepare(database=database)
        self.has_database = self.inner.has_database

    def freed_by(self, deleted: Mapping[str, int], *, older_than_s: float) -> int:
        return self.inner.freed_by(deleted, older_than_s=older_than_s)

    def sweep(self, older_than_s: float) -> int:
        return self.inner.sweep(older_than_s)
