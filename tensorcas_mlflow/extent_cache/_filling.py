"""Small extents waiting until there are enough of them for a file."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from tensorcas_mlflow.extent_cache._file import Buffer, PutExtent
from tensorcas_mlflow.threads import Lock

FILE_BYTES = 8 << 20
"""Size of a cache file, about: large enough for few files, small enough for small evictions."""
_MOST_WAITING_BYTES = 64 << 20


class Filling:
    """The extents one load puts into the cache: a context manager, for many threads.

    Thousands of small extents become few files: those of one pack wait for each other, 64 MiB in all at most. When the
    context ends, the rest is put; when it ends by an exception, the rest is dropped.
    """

    def __init__(self, put: Callable[[str, list[PutExtent]], None]) -> None:
        self._put = put
        self._lock = Lock()
        self._waiting: dict[str, list[PutExtent]] = {}
        self._sizes: dict[str, int] = {}

    def __enter__(self) -> Filling:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            for pack in list(self._waiting):
                self._flush(pack)

    def add(self, pack: str, start: int, data: Buffer) -> None:
        """Put one extent, now or together with others.

        Args:
            pack: Name of the pack.
            start: Start of the extent in it.
            data: Its bytes, verified; they must not change until the context has ended.
        """
        n_bytes = memoryview(data).nbytes
        if n_bytes >= FILE_BYTES // 2:
            self._put(pack, [(start, data)])
            return
        with self._lock:
            self._waiting.setdefault(pack, []).append((start, data))
            self._sizes[pack] = self._sizes.get(pack, 0) + n_bytes
            full = pack if self._sizes[pack] >= FILE_BYTES else None
            if full is None and sum(self._sizes.values()) > _MOST_WAITING_BYTES:
                full = max(self._sizes, key=self._sizes.__getitem__)
        if full is not None:
            self._flush(full)

    def _flush(self, pack: str) -> None:
        with self._lock:
            extents = self._waiting.pop(pack, [])
            self._sizes.pop(pack, None)
        if extents:
            self._put(pack, extents)
