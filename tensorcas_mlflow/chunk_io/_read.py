"""Reader of tensors: locate, plan, read, decode straight into place, verify; chains of deltas included."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.backends import Backend, Scratch, aligned_buffer
from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.config import n_threads
from tensorcas_mlflow.base.digest import Digests, digest
from tensorcas_mlflow.base.tensors import ALIGNMENT, Offsets
from tensorcas_mlflow.chunk_io._cache import CacheFill, ExtentCache
from tensorcas_mlflow.chunk_io._catalog import Catalog, Places
from tensorcas_mlflow.chunk_io._fetch import ChunkFetch, Damage, Wanted, Ways, check_sizes, find_cached
from tensorcas_mlflow.chunk_io._map import map_rows, mappable
from tensorcas_mlflow.chunk_io._plan import ChosenRows, OpenFiles, Planner, Target, Task, check_outs, new_arrays
from tensorcas_mlflow.chunk_io._ways import ReadPlan, Way, way_of_environment
from tensorcas_mlflow.codecs import RAW, codec_numbered
from tensorcas_mlflow.errors import BlobNotFoundError, ChunkNotFoundError, CorruptChunkError, FormatError
from tensorcas_mlflow.layout import Columns, Manifest, Row, Rows, bases_of, is_delta, pack_key, pack_name


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
            way: A way to use if it is available; None leaves the choice to `choose`.
        """
        self._backend = backend
        self._cache = cache
        self._store_id = store_id
        self._files = OpenFiles(backend)
        self._planner = Planner(backend, self._files, way)
        self._ways = Ways(backend, self._files)
        self._filling: CacheFill | None = None
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
        reading = ChunkFetch(self._backend, self._ways, places, wanted)
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
        reading = ChunkFetch(self._backend, self._ways, places, wanted)
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
class ChainLinks:
    """The links of the chains of some deltas: every chunk needed to decode them."""

    places: Places
    """Places of all links: those of one delta after the other, each beginning with the delta itself, then its base,
    then the base of that."""
    begins: Any
    """For each delta the number of its first link; and at the end the number of all."""

    @classmethod
    def of(cls, catalog: Catalog, deltas: Places) -> ChainLinks:
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

    def __init__(self, load: Load, links: ChainLinks, wanted: Wanted) -> None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOwner:
    """The checkpoint or file of some consecutive chunks."""

    label: str | None = None
    """Its name in words; None if it is unknown."""
    rows: Sequence[Row] = ()
    """All rows that count in the chunks' numbers."""
    first: int = 0
    """Number of the first of the chunks, counted over all rows."""

    def names(self, chunks: Any) -> tuple[str, ...]:
        """Return the names of some chunks' tensors, by the chunks' numbers; stretches of a file have no name."""
        return names_of(self.rows, np.asarray(chunks) + self.first)


def names_of(rows: Sequence[Row], chunks: Any) -> tuple[str, ...]:
    """Return the names of some chunks' tensors, by the chunks' numbers counted over all rows."""
    columns = rows.columns if isinstance(rows, Rows) else Columns.of_rows(rows)
    at = np.unique(columns.rows_of(chunks))
    return tuple(name for row in at.tolist() if row < len(columns) and (name := columns.name(row)))


NOBODY = ChunkOwner()


_FILE_BATCH_BYTES = 16 << 20
_MAX_ATTEMPTS = 100
"""Maximum number of moves of a chunk during one read. Each move takes a whole collection during the read. Many in a row
occur only if rewriting collections run without a pause and the reader hardly runs."""


class ChunkReader:
    """Reader of the chunks of one store, through the local cache.

    Every method raises:
        ChunkNotFoundError: No pack of this store holds a chunk.
        CorruptChunkError: A chunk is damaged. Without ``verify`` it shows only if decoding fails.
    """

    def __init__(self, backend: Backend, catalog: Catalog, *, cache: ExtentCache | None = None, store_id: str = ""):
        """Create a reader.

        Args:
            backend: The backend of the packs.
            catalog: The catalog of that backend.
            cache: Cache of reads on local disk; None caches nothing.
            store_id: Id of the store in the cache.
        """
        self._backend = backend
        self._catalog = catalog
        self._cache = cache
        self._store_id = store_id

    def tensors(
        self,
        manifest: Manifest,
        names: Iterable[str] | None,
        *,
        verify: bool,
        out: Mapping[str, Array] | None = None,
        copy: bool | None = None,
        way: Way | None = None,
    ) -> dict[str, Array]:
        """Read whole tensors; see `Store.read_tensors`.

        Raises:
            TensorNotFoundError: A name has no tensor.
            ValueError: An array to fill does not fit.
        """
        wanted = manifest.names() if names is None else list(names)
        columns = manifest.columns
        rows = np.arange(len(columns)) if names is None else manifest.numbers(wanted)
        outs = {} if out is None else check_outs(columns, rows, wanted, out)
        arrays = self.rows(manifest, rows, verify=verify, outs=outs, copy=copy, way=way)
        return dict(zip(wanted, arrays, strict=True))

    def rows(
        self,
        manifest: Manifest,
        rows: Offsets,
        *,
        verify: bool,
        outs: Mapping[int, Array] | None = None,
        copy: bool | None = None,
        is_private: bool = False,
        way: Way | None = None,
    ) -> list[Array]:
        """Read whole rows by their numbers; otherwise like `tensors`.

        Args:
            manifest: A manifest of this store.
            rows: Numbers of the rows.
            verify: Whether to check every chunk.
            outs: Arrays to fill, by position among ``rows``, checked by `check_outs`.
            copy: See `Store.read_tensors`.
            is_private: Whether views of mapped packs are writable; writes never reach the packs.
            way: See `Store.read_tensors`.

        Returns:
            An array a row, in their order.
        """
        columns, outs = manifest.columns, outs or {}
        is_all = len(rows) == len(columns) and bool((rows == np.arange(len(rows))).all())
        digests = columns.digests if is_all else columns.digests[columns.chunks_of(rows)]
        mapped: dict[int, Array] = {}
        if copy is False and not outs:
            chosen = digests if verify else None
            mapped = self._map(columns, rows, digests, manifest.chunk_bytes, chosen, is_private=is_private)
            if len(mapped) == len(rows):
                return [mapped[at] for at in range(len(rows))]
        left = np.delete(np.arange(len(rows)), list(mapped)) if mapped else np.arange(len(rows))
        if mapped:
            digests = columns.digests[columns.chunks_of(rows[left])]
        arrays, target = new_arrays(columns, rows[left], manifest.chunk_bytes, outs)
        owner = ChunkOwner(label=manifest.label, rows=ChosenRows(columns, rows[left]))
        self._read(Wanted(digests=digests, target=target, verify=verify), owner, way)
        if not mapped:
            return list(arrays)
        found = dict(zip(left.tolist(), arrays, strict=True)) | mapped
        return [found[at] for at in range(len(rows))]

    def explain(
        self, manifest: Manifest, names: Iterable[str] | None, *, copy: bool | None = None, way: Way | None = None
    ) -> ReadPlan:
        """Return the plan `tensors` would follow now; see `Store.explain`."""
        columns = manifest.columns
        rows = np.arange(len(columns)) if names is None else manifest.numbers(names)
        digests = columns.digests[columns.chunks_of(rows)]
        owner = ChunkOwner(label=manifest.label, rows=ChosenRows(columns, rows))
        places = self._locate(digests, frozenset(), np.arange(len(digests)), owner)
        mapped = mappable(places, columns, rows, manifest.chunk_bytes) if copy is False else rows[:0]
        counts = columns.chunk_at[rows + 1] - columns.chunk_at[rows]
        is_mapped = np.isin(np.arange(len(rows)), mapped)
        chunks = np.flatnonzero(~np.repeat(is_mapped, counts))
        with OpenFiles(self._backend) as files:
            planner = Planner(self._backend, files, way or way_of_environment())
            sizes = columns.chunk_sizes(manifest.chunk_bytes, rows)
            n_cached = 0
            if self._cache is not None:
                target = Target.of_sizes(sizes)
                tasks, chunks = find_cached(self._cache, self._store_id, places, target, chunks)
                n_cached = sum(len(task.members) for task in tasks)
            packs = planner.reads(places, Target.of_sizes(sizes), chunks)
        return ReadPlan(
            n_tensors=len(rows),
            n_bytes=int(columns.n_bytes[rows].sum()),
            n_mapped=len(mapped),
            n_cached=n_cached,
            packs=packs,
        )

    def _map(
        self,
        columns: Columns,
        rows: Offsets,
        digests: Digests,
        chunk_bytes: int,
        expected: Digests | None,
        *,
        is_private: bool,
    ) -> dict[int, Array]:
        """Memory-map rows stored raw and in one piece; return arrays by position among the rows."""
        places = self._catalog.find(digests)
        if not places.found.all():
            self._catalog.refresh()
            places = self._catalog.find(digests)
        with OpenFiles(self._backend) as files:
            return map_rows(files, places, columns, rows, chunk_bytes, expected, is_private=is_private)

    def pieces(self, manifest: Manifest, *, verify: bool) -> Iterator[memoryview]:
        """Yield the bytes of all rows, one after the other, some 16 MiB at a time."""
        sizes = manifest.columns.chunk_sizes(manifest.chunk_bytes)
        stops = sizes.cumsum()
        begin = 0
        while begin < len(sizes):
            base = int(stops[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(stops, base + _FILE_BATCH_BYTES, side="right")))
            block = np.empty(int(stops[end - 1]) - base, dtype=np.uint8).data
            target = Target.of_block(block, sizes[begin:end])
            owner = ChunkOwner(label=manifest.label, rows=manifest.rows, first=begin)
            self._read(Wanted(digests=manifest.digests[begin:end], target=target, verify=verify), owner)
            yield block
            begin = end

    def read(self, digests: Digests, outs: list[memoryview], *, verify: bool, owner: ChunkOwner = NOBODY) -> None:
        """Read chunks, each into a buffer of its size.

        If a chunk is damaged in one pack and intact in another, the intact copy is used.

        Args:
            digests: The chunks.
            outs: Buffer of each.
            verify: Whether to check each against its digest.
            owner: Owner of the chunks, for errors.
        """
        self._read(Wanted(digests=digests, target=Target.of_buffers(outs), verify=verify), owner)

    def _read(self, wanted: Wanted, owner: ChunkOwner, way: Way | None = None) -> None:
        if way is None:
            way = way_of_environment()
        everything = np.arange(len(wanted.target))
        damaged = self._read_from(wanted, everything, frozenset(), owner, way)
        if any(damage.error is None for damage in damaged):
            # The index may be the damaged part: a pack's table carries a digest of its own.
            self._catalog.refresh_from_packs()
            damaged = self._read_from(wanted, _chunks_of(damaged), frozenset(), owner, way)
        if damaged:
            self._read_other_copies(wanted, damaged, owner, way)

    def _read_other_copies(self, wanted: Wanted, damaged: list[Damage], owner: ChunkOwner, way: Way | None) -> None:
        """Read chunks with one damaged copy from other packs; an error reports the first copy."""
        lost: list[Damage] = []
        waiting = [(frozenset[str](), damaged, damaged)]
        while waiting:
            without, found, told = waiting.pop()
            first = {damage.chunk: damage for damage in told}
            by_pack: dict[str, list[Damage]] = {}
            for damage in found:
                by_pack.setdefault(pack_name(damage.key), []).append(damage)
                if damage.error is None:
                    is_of = damage.base or wanted.digests[damage.chunk].tobytes()
                    self._catalog.distrust(pack_name(damage.key), is_of)
            for pack, group in by_pack.items():
                chunks, besides = _chunks_of(group), without | {pack}
                places = self._catalog.find(wanted.digests[chunks], besides)
                lost += [first[chunk] for chunk in chunks[~places.found].tolist()]
                again = self._read_from(wanted, chunks[places.found], besides, owner, way)
                if again:
                    waiting.append((besides, again, [first[damage.chunk] for damage in again]))
        if not lost:
            return
        damage = min(lost, key=lambda each: (each.error is not None, each.chunk))
        if damage.error is not None:
            raise damage.error
        names = owner.names(sorted(each.chunk for each in lost))
        digest_text = wanted.digests[damage.chunk].tobytes().hex()
        raise CorruptChunkError(digest_text, damage.key, damage.reason, owner.label, names)

    def _read_from(
        self, wanted: Wanted, chunks: Any, without: frozenset[str], owner: ChunkOwner, way: Way | None
    ) -> list[Damage]:
        """Read some of the wanted chunks, avoiding some packs; return the damaged copies."""
        part = wanted if len(chunks) == len(wanted.target) else wanted.some(chunks)
        n_moves = 0
        while True:
            places = self._locate(part.digests, without, chunks, owner)
            try:
                return self._read_at(places, part, chunks, way)
            except BlobNotFoundError:
                # A collector has moved a chunk before this read; its new place is in the index.
                used = {places.packs[number] for number in np.unique(places.pack)}
                is_whole, bases = self._catalog.find_chains(places)
                moved = {pack_name(key) for key in self._backend.missing(map(pack_key, used | bases))}
                n_moves += 1
                # The catalog already misses the packs another thread has found missing.
                if n_moves == _MAX_ATTEMPTS or not (moved or not is_whole.all()):
                    raise
                self._catalog.miss(moved)
                if n_moves > 1:
                    # A long idle reader may know of a chunk in very many packs that collections have emptied.
                    self._catalog.miss_all_gone()
                self._catalog.refresh()

    def _locate(self, digests: Digests, without: frozenset[str], chunks: Any, owner: ChunkOwner) -> Places:
        catalog = self._catalog
        places = catalog.find(digests, without)
        # Read the packs twice: a chunk moved during the listing may be in a new pack not yet listed.
        for refresh in (catalog.refresh, catalog.refresh_from_packs, catalog.refresh_from_packs):
            if places.found.all():
                return places
            refresh()
            places = catalog.find(digests, without)
        if not places.found.all():
            if catalog.refusal is not None:
                raise catalog.refusal
            missing = np.flatnonzero(~places.found)
            names, suspects = owner.names(chunks[missing]), tuple(catalog.suspects())
            digest_text = digests[missing[0]].tobytes().hex()
            raise ChunkNotFoundError(digest_text, len(missing), owner.label, names, suspects)
        return places

    def _read_at(self, places: Places, wanted: Wanted, numbers: Any, way: Way | None) -> list[Damage]:
        """Read chunks from places; return the damaged ones, by ``numbers``.

        Raises:
            BlobNotFoundError: A pack is gone: one of these, or one needed to decode their chunks.
        """
        found = check_sizes(places, wanted)
        possible = np.delete(np.arange(len(wanted.target)), [damage.chunk for damage in found])
        is_added = is_delta(places.entries[possible])
        deltas = possible[is_added]
        with Load(self._backend, self._cache, self._store_id, way) as load:
            found += load.read(places, wanted, possible[~is_added])
            if len(deltas):
                links = ChainLinks.of(self._catalog, places.some(deltas))
                damaged = DeltaReading(load, links, wanted.some(deltas)).run()
                found += [replace(damage, chunk=int(deltas[damage.chunk])) for damage in damaged]
        return [replace(damage, chunk=int(numbers[damage.chunk])) for damage in found]


def _chunks_of(damaged: Sequence[Damage]) -> Any:
    return np.array(sorted(damage.chunk for damage in damaged), dtype=np.intp)
