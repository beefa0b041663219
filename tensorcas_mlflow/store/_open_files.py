"""The pack files of one load: each is opened once, and few are open at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

from tensorcas_mlflow.backends import Backend, BlobFile
from tensorcas_mlflow.threads import Lock

_MOST_IDLE = 32


@dataclass(slots=True)
class _Held:
    file: BlobFile | None
    n_users: int = 0


class OpenFiles:
    """Opener of blobs that keeps them open; a context manager that closes them all. For many threads at once."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = Lock()
        self._held: dict[str, _Held] = {}

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            held, self._held = self._held, {}
        for each in held.values():
            if each.file is not None:
                each.file.close()

    @contextlib.contextmanager
    def using(self, key: str) -> Iterator[BlobFile | None]:
        """Yield an open blob that stays open for as long as the context lasts; see `Backend.open_file`."""
        with self._lock:
            held = self._held.pop(key, None)
            if held is None:
                held = _Held(self._backend.open_file(key))
            self._held[key] = held  # the most recently used one is the last
            held.n_users += 1
        try:
            yield held.file
        finally:
            with self._lock:
                held.n_users -= 1
                if len(self._held) > _MOST_IDLE:
                    self._close_idle()

    def _close_idle(self) -> None:
        for key, held in list(self._held.items())[:-_MOST_IDLE]:
            if not held.n_users:
                del self._held[key]
                if held.file is not None:
                    held.file.close()
