"""A backend at which somebody else acts between two calls of whoever works."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from tensorcas_mlflow.backends import Backend, Token
from tensorcas_mlflow.base.digest import Buffer
from tests.faulty import FaultyBackend

T = TypeVar("T")


class Interrupted(FaultyBackend):
    """Lets somebody act, on the backend within, before one of the calls."""

    def __init__(self, inner: Backend, nth: int, act: Callable[[], None]) -> None:
        super().__init__(inner)
        self._nth = nth
        self._act = act

    def has_acted(self) -> bool:
        """Tell whether the call has come."""
        return self._nth < 0

    def _call(self, operation: str, key: str, act: Callable[[], T]) -> T:
        if len(self.calls) == self._nth:
            self._nth = -1
            self._act()
        return super()._call(operation, key, act)


class AfterPuts(FaultyBackend):
    """Lets somebody act after blobs below a prefix were put: each once, one after each."""

    def __init__(self, inner: Backend, prefix: str, acts: list[Callable[[], None]]) -> None:
        super().__init__(inner)
        self._prefix = prefix
        self._acts = list(acts)

    def put_new(self, key: str, pieces: Iterable[Buffer], *, durable: bool = True) -> Token:
        token = super().put_new(key, pieces, durable=durable)
        if key.startswith(self._prefix) and self._acts:
            self._acts.pop(0)()
        return token
