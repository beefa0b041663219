"""One load from one store: its open files, its ways of reading, and the cache in front of the storage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend, Scratch, aligned_buffer
from tensorcas_mlflow.chunking import Offsets
from tensorcas_mlflow.digest import Digests
from tensorcas_mlflow.extent_cache import ExtentCache, Filling
from tensorcas_mlflow.readplan import Way
from tensorcas_mlflow.store._fetch import Ways
from tensorcas_mlflow.store._lookup import Places
from tensorcas_mlflow.store._open_files import OpenFiles
from tensorcas_mlflow.store._plan import Planner
from tensorcas_mlflow.store._reading import Reading, find_cached
from tensorcas_mlflow.store._take import Damage, Wanted
from tensorcas_mlflow.store._target import Target
from tensorcas_mlflow.store._tasks import Task
from tensorcas_mlflow.tensor import ALIGNMENT


@dataclass(slots=True, kw_only=True)
class StoredBytes:
    """Stored bytes of some places, not decoded."""

    target: Target
    """Current place of each in memory."""
    damaged: list[Damage]
    """Unreadable places, by number."""
    cached: list[Task]
    """Tasks served by the cache."""
    fresh: list[tuple[str, int, memoryview]]
    """Reads of the storage, if there is a cache: the pack, the start there, and the bytes."""


class Load:
    """Reader of one store's chunks through the cache; a context manager. For many threads at once."""

    def __init__(self, backend: Backend, cache: ExtentCache | None, store_id: str, way: Way | None) -> None:
        """Begin a load.

        Args:
            backend: The backend of the packs.
            cache: Cache of reads on local disk; None caches nothing.
            store_id: Id of the store in the cache.
            way: A way to use if it is available; None leaves the choice to the rule.
        """
        self._backend = backend
        self._cache = cache
        self._store_id = store_id
        self._files = OpenFiles(backend)
        self._planner = Planner(backend, self._files, way)
        self._ways = Ways(backend, self._files)
        self._filling: Filling | None = None
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> Load:
        self._ends.enter_context(self._files)
        if self._cache is not None:
            self._filling = self._ends.enter_context(self._cache.filling(self._store_id))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.__exit__(kind, error, trace)

    @property
    def waits(self) -> bool:
        """True if threads spend most of their time waiting for another machine."""
        return self._backend.is_remote

    @property
    def scratch(self) -> Scratch:
        """Memory reused by the next reads."""
        return self._ways.scratch

    def read(self, places: Places, wanted: Wanted, chunks: Any) -> list[Damage]:
        """Read and decode chunks without bases, on threads; return the damaged ones.

        Args:
            places: Places of all wanted chunks.
            wanted: All wanted chunks.
            chunks: Numbers of the chunks to read.

        Raises:
            BlobNotFoundError: A pack is gone.
            BackendError: Another machine does not answer.
        """
        if len(chunks) == 0:
            return []
        reading = Reading(self._backend, self._ways, places, wanted)
        if self._cache is not None:
            tasks, chunks = find_cached(self._cache, self._store_id, places, wanted.target, chunks)
            # After a cache miss, or damage in the cache, the chunk comes from the storage.
            chunks = np.concatenate([chunks, *reading.run_cached(tasks)])
        keep = None if self._filling is None else self._filling.add
        reading.run(self._planner.groups(places, wanted.target, chunks), keep)
        return reading.damaged

    @contextlib.contextmanager
    def stored(self, places: Places, *, from_storage: bool = False) -> Iterator[StoredBytes]:
        """Read the stored bytes of some places, without decoding, in the calling thread.

        Args:
            places: In any order.
            from_storage: Whether to bypass the cache.

        Yields:
            The bytes, in memory of the caller's for as long as the context lasts; unverified.

        Raises:
            BlobNotFoundError: A pack is gone.
            BackendError: Another machine does not answer.
        """
        places = places.as_bytes()
        start, slack, n_bytes = _layout(places)
        # Bytes for the cache must stay unchanged until the load has ended.
        scratch = self.scratch.take(n_bytes) if self._cache is None else None
        block = (aligned_buffer(n_bytes) if scratch is None else scratch).data
        sizes = places.entries["stored_bytes"].astype(np.int64)
        target = Target(blocks=[block], block=np.zeros_like(start), start=start, n_bytes=sizes, slack=slack)
        wanted = Wanted(digests=digests_of(places), target=target, verify=False)
        reading = Reading(self._backend, self._ways, places, wanted)
        cached: list[Task] = []
        fresh: list[tuple[str, int, memoryview]] = []
        chunks = np.arange(len(start))
        try:
            if self._cache is not None and not from_storage:
                cached, chunks = find_cached(self._cache, self._store_id, places, target, chunks)
                chunks = np.concatenate([chunks, *reading.run_cached(cached, is_alone=True)])
            keep = None if self._cache is None else lambda *extent: fresh.append(extent)
            reading.run(self._planner.groups(places, target, chunks), keep, is_alone=True)
            yield StoredBytes(target=target, damaged=reading.damaged, cached=cached, fresh=fresh)
        finally:
            self.scratch.give_back(scratch)

    def accept(self, stored: StoredBytes) -> None:
        """Put verified bytes into the cache."""
        if self._filling is not None:
            for extent in stored.fresh:
                self._filling.add(*extent)

    def refuse(self, stored: StoredBytes) -> bool:
        """Remove the faulty bytes' extents from the cache; return whether any came from there."""
        for task in stored.cached:
            assert task.cached is not None
            task.cached.discard()
        return bool(stored.cached)


def digests_of(places: Places) -> Digests:
    """Return the digests in the entries of some places."""
    return np.ascontiguousarray(places.entries["digest"])


def _layout(places: Places) -> tuple[Offsets, Offsets, int]:
    """Lay stored bytes out in memory: neighbours in a pack stay neighbours, so one read covers them.

    Returns:
        For each place the start of its bytes, with the same offset from a multiple of 64 as in the pack; the number
        of unused bytes behind them; and the total size.
    """
    offset, size = (places.entries[name].astype(np.int64) for name in ("offset", "stored_bytes"))
    order = np.lexsort((offset, places.pack))
    offset, size, pack = offset[order], size[order], places.pack[order]
    gap = offset[1:] - offset[:-1] - size[:-1]
    is_near = (pack[1:] == pack[:-1]) & (gap >= 0) & (gap < ALIGNMENT)
    # A stretch of neighbours begins at a multiple of the alignment, plus its offset in the pack.
    at = np.flatnonzero(np.append(True, ~is_near))
    of_stretch = np.repeat(np.arange(len(at)), np.diff(np.append(at, len(order))))
    inside = offset - offset[at][of_stretch] + offset[at][of_stretch] % ALIGNMENT
    room = np.maximum.reduceat(inside + size, at) if len(at) else at
    room = -(-room // ALIGNMENT) * ALIGNMENT
    start, slack = np.empty_like(offset), np.zeros_like(offset)
    start[order] = inside + (room.cumsum() - room)[of_stretch]
    slack[order[:-1]] = np.where(is_near, gap, 0)
    return start, slack, int(room.sum())
