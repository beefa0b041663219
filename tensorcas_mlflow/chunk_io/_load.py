"""One load: open packs, cache, and the chains of deltas."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend, Scratch, aligned_buffer
from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.config import n_threads
from tensorcas_mlflow.base.digest import Digests, digest
from tensorcas_mlflow.base.tensors import ALIGNMENT, Offsets
from tensorcas_mlflow.chunk_io._cache import ExtentCache, Filling
from tensorcas_mlflow.chunk_io._catalog import Catalog
from tensorcas_mlflow.chunk_io._fetch import Damage, Reading, Wanted, Ways, check_sizes, find_cached
from tensorcas_mlflow.chunk_io._lookup import Places
from tensorcas_mlflow.chunk_io._plan import OpenFiles, Planner, Target, Task
from tensorcas_mlflow.chunk_io._ways import Way
from tensorcas_mlflow.codecs import RAW, codec_numbered
from tensorcas_mlflow.errors import BlobNotFoundError, FormatError
from tensorcas_mlflow.layout import bases_of, is_delta, pack_key


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


_PART_BYTES = 1 << 20
"""Size of the chunks read and decoded together. More are read no faster from memory, and each thread takes several
times as much memory."""
_LEAST_PART_BYTES = 512 << 10
_PARTS_PER_THREAD = 3
"""Small reads are divided into smaller parts, so no thread waits long for another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links of the chains of some deltas: every chunk needed to decode them."""

    places: Places
    """Places of all links: those of one delta after the other, each beginning with the delta itself, then its base,
    then the base of that."""
    begins: Any
    """For each delta the number of its first link; and at the end the number of all."""

    @classmethod
    def of(cls, catalog: Catalog, deltas: Places) -> Links:
        """Follow deltas to the ends of their chains.

        Raises:
            BlobNotFoundError: A pack lacks the base a delta names, as far as is known.
        """
        levels, chains = [deltas], [np.arange(len(deltas.found))]
        while (at := np.flatnonzero(is_delta(levels[-1].entries))).size:
            entries = levels[-1].entries[at]
            bases = catalog.find_bases(entries)
            if not bases.found.all():
                raise BlobNotFoundError(pack_key(bases_of(entries[~bases.found])[0].pack))
            levels.append(bases)
            chains.append(chains[-1][at])
        chain = np.concatenate(chains)
        lengths = np.bincount(chain, minlength=len(deltas.found))
        places = Places.joined(levels).some(np.argsort(chain, kind="stable"))
        return cls(places=places, begins=np.append(0, lengths.cumsum()))


class DeltaReading:
    """Reading of deltas from given places."""

    def __init__(self, load: Load, links: Links, wanted: Wanted) -> None:
        """Prepare the read.

        Args:
            load: The load it belongs to.
            links: The chunks the deltas need.
            wanted: The deltas, and no other chunks.
        """
        self._load = load
        self._links = links
        self._wanted = wanted

    def run(self) -> list[Damage]:
        """Read and decode; return the damage, by number of the delta.

        Raises:
            BlobNotFoundError: A pack is gone.
            BackendError: Another machine does not answer.
        """
        damaged = self._impossible()
        sizes = self._wanted.target.n_bytes
        left = np.setdiff1d(np.arange(len(sizes)), [damage.chunk for damage in damaged])

        def run(part: Any) -> None:
            damaged.extend(self._read(part))

        threads.run_all(run, _parts(left, sizes[left]), waits=self._load.waits)
        return damaged

    def _impossible(self) -> list[Damage]:
        """Return the deltas with impossible entries among their links, before an entry costs memory."""
        begins, places = self._links.begins, self._links.places
        sizes = np.repeat(self._wanted.target.n_bytes, np.diff(begins))
        claimed = Wanted(digests=digests_of(places), target=Target.of_sizes(sizes), verify=False)
        found: dict[int, Damage] = {}
        for damage in check_sizes(places, claimed):
            delta = int(np.searchsorted(begins, damage.chunk, side="right")) - 1
            found[delta] = self._damage(delta, damage.chunk - int(begins[delta]), damage.reason)
        return list(found.values())

    def _read(self, part: Any, *, from_storage: bool = False) -> list[Damage]:
        """Read and decode some deltas, by number."""
        begins = self._links.begins
        counts = begins[part + 1] - begins[part]
        ends = counts.cumsum()
        numbers = np.repeat(begins[part] - ends + counts, counts) + np.arange(ends[-1])
        with self._load.stored(self._links.places.some(numbers), from_storage=from_storage) as stored:
            damaged = self._decode(part, ends - counts, stored)
            if not damaged:
                self._load.accept(stored)
            if not damaged or not self._load.refuse(stored):
                return damaged
        return self._read(np.array(sorted(damage.chunk for damage in damaged)), from_storage=True)

    def _decode(self, part: Any, firsts: Any, stored: StoredBytes) -> list[Damage]:
        """Decode the bytes read.

        Args:
            part: Numbers of the deltas.
            firsts: For each the number of its first link among the bytes read.
            stored: The bytes read.
        """
        damaged: list[Damage] = []
        unread = {damage.chunk: damage for damage in stored.damaged}
        most = int(self._wanted.target.n_bytes[part].max())
        areas = [self._load.scratch.take(most) for _ in range(2)]
        memory = [area.data for area in areas]
        for delta, first in zip(part.tolist(), firsts.tolist(), strict=True):
            n_links = int(self._links.begins[delta + 1] - self._links.begins[delta])
            lost = [unread[link] for link in range(first, first + n_links) if link in unread]
            if lost:
                number = lost[0].chunk - first
                damaged.append(replace(self._damage(delta, number, lost[0].reason), error=lost[0].error))
                continue
            links = [stored.target.view(link) for link in range(first, first + n_links)]
            if self._decode_chain(delta, links, memory) is not None:
                fault = self._decode_chain(delta, links, memory, checks_all=True)
                assert fault is not None, "what fails once fails again"
                damaged.append(self._damage(delta, *fault))
        for area in areas:
            self._load.scratch.give_back(area)
        return damaged

    def _decode_chain(
        self, delta: int, links: list[memoryview], areas: list[memoryview], *, checks_all: bool = False
    ) -> tuple[int, str] | None:
        """Decode a delta into place; return the first faulty link and its fault.

        Args:
            delta: Its number.
            links: The stored bytes of its links, its own first.
            areas: Two pieces of memory for bases, each as long as the chunk at least.
            checks_all: Whether to compare each link with its digest; otherwise a wrong base shows only in the
                result.
        """
        out = self._wanted.target.view(delta)
        begin = int(self._links.begins[delta])
        entries = self._links.places.entries[begin : begin + len(links)]
        codecs = entries["codec"].tolist()
        base: memoryview | None = None
        for number in range(len(links) - 1, -1, -1):
            chunk = areas[number & 1][: len(out)] if number else out
            try:
                if number and codecs[number] == RAW.number:
                    chunk = links[number]
                else:
                    codec_numbered(codecs[number]).decode_into(links[number], chunk, base)
            except FormatError as error:
                return number, str(error)
            if checks_all or (not number and self._wanted.verify):
                expected = entries["digest"][number] if number else self._wanted.digests[delta]
                if (actual := digest(chunk)) != expected.tobytes():
                    return number, f"its bytes hash to {actual.hex()}"
            base = chunk
        return None

    def _damage(self, delta: int, number: int, reason: str) -> Damage:
        """Describe damage in a link: the delta itself is the first, number 0."""
        link = int(self._links.begins[delta]) + number
        places = self._links.places
        return Damage(
            chunk=delta,
            key=pack_key(places.packs[int(places.pack[link])]),
            reason=reason,
            base=places.entries["digest"][link].tobytes() if number else None,
        )


def _parts(deltas: Any, sizes: Any) -> list[Any]:
    """Split deltas, in their order, into parts of about equal size."""
    if len(deltas) == 0:
        return []
    begins = sizes.cumsum() - sizes
    total = int(sizes.sum())
    each = min(_PART_BYTES, max(_LEAST_PART_BYTES, total // (_PARTS_PER_THREAD * n_threads())))
    return np.split(deltas, np.flatnonzero(np.diff(begins // each)) + 1)
