"""A backend that fails on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Literal, TypeVar

from tensorcas_mlflow.backends import Backend, BlobInfo, Children, FoundFile, Token
from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.errors import BackendError

T = TypeVar("T")
When = Literal["before", "after"]


class SimulatedCrash(BaseException):
    """The simulated death of the process. No handler of ordinary errors sees it."""


class FaultyBackend(Backend):
    """Wrapper of a backend. It counts the calls, and makes a chosen one fail or be the last."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.uri = inner.uri
        self.is_remote = inner.is_remote
        self.calls: list[str] = []
        """Names of the operations called so far."""
        self._fault: tuple[int, frozenset[str] | None, When, bool] | None = None
        self._is_dead = False

    def fail(self, nth: int, *, operations: Iterable[str] | None = None, when: When = "before") -> None:
        """Let one call raise BackendError, like a full or broken disk.

        Args:
            nth: Number of the call from now on, counted from 0.
            operations: Names of the operations to count; all by default.
            when: Whether the call fails before or after it took effect.
        """
        self._arm(nth, operations, when, crash=False)

    def crash(self, nth: int, *, operations: Iterable[str] | None = None, when: When = "before") -> None:
        """Let one call raise `SimulatedCrash`, and every later one too: a dead process does nothing. See `fail`."""
        self._arm(nth, operations, when, crash=True)

    def has_met(self) -> bool:
        """Tell whether the last requested fault has occurred."""
        return self._fault is None

    def _arm(self, nth: int, operations: Iterable[str] | None, when: When, *, crash: bool) -> None:
        names = None if operations is None else frozenset(operations)
        self._fault = (nth, names, when, crash)

    def _call(self, operation: str, key: str, act: Callable[[], T]) -> T:
        if self._is_dead:
            raise SimulatedCrash
        self.calls.append(operation)
        if self._fault is None or (self._fault[1] is not None and operation not in self._fault[1]):
            return act()
        nth, names, when, crash = self._fault
        if nth > 0:
            self._fault = (nth - 1, names, when, crash)
            return act()
        self._fault = None
        self._is_dead = crash
        if when == "after":
            act()
        if crash:
            raise SimulatedCrash
        raise BackendError(operation, key, "it was told to fail")

    def put_new(self, key: str, pieces: Iterable[Buffer], *, durable: bool = True) -> Token:
        return self._call("put_new", key, lambda: self.inner.put_new(key, pieces, durable=durable))

    def promote(self, source: str, dest: str, data: Buffer, *, token: Token, replace: bool) -> None:
        self._call("promote", dest, lambda: self.inner.promote(source, dest, data, token=token, replace=replace))

    def withdraw(self, key: str, token: Token, *, own: Iterable[str] | None = None) -> bool:
        return self._call("withdraw", key, lambda: self.inner.withdraw(key, token, own=own))

    def stat(self, key: str) -> BlobInfo | None:
        return self._call("stat", key, lambda: self.inner.stat(key))

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        return self._call("get", key, lambda: self.inner.get(key, max_bytes=max_bytes))

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        self._call("read_into", key, lambda: self.inner.read_into(key, start, out))

    def list_dir(self, prefix: str, *, most: int | None = None) -> Children:
        return self._call("list_dir", prefix, lambda: self.inner.list_dir(prefix, most=most))

    def files(self) -> Iterator[FoundFile]:
        return self.inner.files()

    def delete(self, *keys: str) -> None:
        for key in keys:
            self._call("delete", key, partial(self.inner.delete, key))

    def missing(self, keys: Iterable[str]) -> set[str]:
        return self._call("missing", ".", lambda: self.inner.missing(keys))

    def settle(self, prefix: str) -> None:
        self._call("settle", prefix, lambda: self.inner.settle(prefix))

    def freed_by(self, deleted: Mapping[str, int], *, older_than_s: float) -> int:
        return self.inner.freed_by(deleted, older_than_s=older_than_s)

    def sweep(self, older_than_s: float) -> int:
        return self._call("sweep", ".", lambda: self.inner.sweep(older_than_s))

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[BlobInfo]:
        yield from self._call("list", prefix, lambda: tuple(self.inner.list(prefix, after=after)))
