"""One load from one store: what it has open, how it reads, and the cache that stands before the storage."""

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
    """What lies in a store in some places, as it is stored."""

    target: Target
    """Where the bytes of each are now."""
    damaged: list[Damage]
    """What cannot be read; the number is that of the place."""
    cached: list[Task]
    """What came from the cache."""
    fresh: list[tuple[str, int, memoryview]]
    """What did not, if there is a cache: the pack, where it begins there, and the bytes."""


class Load:
    """Reads chunks of one store, from the cache what is there; a context manager. For many threads at once."""

    def __init__(self, backend: Backend, cache: ExtentCache | None, store_id: str, way: Way | None) -> None:
        """Begin a load.

        Args:
            backend: Where the packs are.
            cache: What keeps what was read on local disk; None keeps nothing.
            store_id: What the cache knows the store by.
            way: To be taken wherever it can be had; None leaves the choice to the rule.
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
        """Whether threads wait for another machine most of the time."""
        return self._backend.is_remote

    @property
    def scratch(self) -> Scratch:
        """Memory that is used again by what is read next."""
        return self._ways.scratch

    def read(self, places: Places, wanted: Wanted, chunks: Any) -> list[Damage]:
        """Read and decode chunks that take no base, on threads; returns those that are damaged.

        Args:
            places: Of all wanted chunks.
            wanted: All of them.
            chunks: Which to read, by number.

        Raises:
            BlobNotFoundError: A pack is gone.
            BackendError: Another machine does not answer.
        """
        if len(chunks) == 0:
            return []
        reading = Reading(self._backend, self._ways, places, wanted)
        if self._cache is not None:
            tasks, chunks = find_cached(self._cache, self._store_id, places, wanted.target, chunks)
            # What has gone from the cache, or was damaged there, comes from the storage like all that never was there.
            chunks = np.concatenate([chunks, *reading.run_cached(tasks)])
        keep = None if self._filling is None else self._filling.add
        reading.run(self._planner.groups(places, wanted.target, chunks), keep)
        return reading.damaged

    @contextlib.contextmanager
    def stored(self, places: Places, *, from_storage: bool = False) -> Iterator[StoredBytes]:
        """Read what lies in some places, without decoding it, in the calling thread.

        Args:
            places: In any order.
            from_storage: Whether the cache is not to be asked.

        Yields:
            What was read, in memory that is the caller's as long as the context lasts; nothing of it is checked.

        Raises:
            BlobNotFoundError: A pack is gone.
            BackendError: Another machine does not answer.
        """
        places = places.as_bytes()
        start, slack, n_bytes = _layout(places)
        # What the cache is to have must stay as it is until the load has ended.
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
        """Let the cache have what was read, in which no fault was found."""
        if self._filling is not None:
            for extent in stored.fresh:
                self._filling.add(*extent)

    def refuse(self, stored: StoredBytes) -> bool:
        """Remove what came from the cache, in which a fault was found; returns whether anything did."""
        for task in stored.cached:
            assert task.cached is not None
            task.cached.discard()
        return bool(stored.cached)


def digests_of(places: Places) -> Digests:
    """The digests that the entries of some places say."""
    return np.ascontiguousarray(places.entries["digest"])


def _layout(places: Places) -> tuple[Offsets, Offsets, int]:
    """Lay stored bytes out in memory: what is near in a pack lies as there, so that it is read as one.

    Returns:
        For each place where its bytes begin, as far from a multiple of 64 as in the pack; how many bytes behind them
        are nobody's; and how many bytes it all takes.
    """
    offset, size = (places.entries[name].astype(np.int64) for name in ("offset", "stored_bytes"))
    order = np.lexsort((offset, places.pack))
    offset, size, pack = offset[order], size[order], places.pack[order]
    gap = offset[1:] - offset[:-1] - size[:-1]
    is_near = (pack[1:] == pack[:-1]) & (gap >= 0) & (gap < ALIGNMENT)
    # A stretch of what is near begins at a multiple of the alignment, and what it is further in the pack.
    at = np.flatnonzero(np.append(True, ~is_near))
    of_stretch = np.repeat(np.arange(len(at)), np.diff(np.append(at, len(order))))
    inside = offset - offset[at][of_stretch] + offset[at][of_stretch] % ALIGNMENT
    room = np.maximum.reduceat(inside + size, at) if len(at) else at
    room = -(-room // ALIGNMENT) * ALIGNMENT
    start, slack = np.empty_like(offset), np.zeros_like(offset)
    start[order] = inside + (room.cumsum() - room)[of_stretch]
    slack[order[:-1]] = np.where(is_near, gap, 0)
    return start, slack, int(room.sum())
