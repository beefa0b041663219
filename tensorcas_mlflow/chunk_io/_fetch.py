"""One load: reads of packs and of the cache, decoding into place, and the damage found."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from tensorcas_mlflow.backends import PAGE_BYTES, Backend, BlobFile, MeteredBackend, Scratch, aligned_buffer
from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.config import n_threads
from tensorcas_mlflow.base.tensors import distinct, offsets_of
from tensorcas_mlflow.chunk_io._decode import (
    DIRECT,
    FILE,
    Batch,
    ChainLinks,
    Fault,
    Wanted,
    decode,
    decode_chain,
)
from tensorcas_mlflow.chunk_io._places import Places
from tensorcas_mlflow.chunk_io._plan import OpenFiles, Planner
from tensorcas_mlflow.chunk_io._ways import LOCAL_GAP_BYTES, PLAIN_READ, Extent, Way, WayChoice, plan_reads
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError
from tensorcas_mlflow.layout.packs import is_possible, pack_key, sizes_text

if TYPE_CHECKING:
    from tensorcas_mlflow.chunk_io._cache import CachedPack, CachedRead, CacheFill, ExtentCache

T = TypeVar("T")

_CORE_PART_BYTES = 256 << 10
"""Size of the deltas the core decodes together: with their bases they stay in the cache of a processor."""
_MOST_PART_BYTES = 8 << 20
"""Size of the chunks with one root that the core decodes together."""
_PART_BYTES = 1 << 20
"""Size of the deltas a thread of Python decodes together."""
_WINDOW_BYTES = 64 << 20
"""Size of the deltas whose stored bytes, and those of their bases, are fetched together from a remote store: few large
reads of each pack in a chain."""
_CALL_BYTES = 256 << 20
"""Bound of one call of the core: a KeyboardInterrupt waits for its end."""
_CALL_PACKS = 64
"""Bound of the files open for one call of the core."""
_DIRECT_CALL_BYTES = 64 << 20
"""Bound of one call of the core that checks stored bytes past the page cache."""
_LEAST_DIRECT_RATE = 200e6
"""Bytes a second of a disk that is fast enough to read the same bytes twice: filling the page cache takes longer."""


class Damage(NamedTuple):
    """An unreadable or damaged copy of a chunk."""

    chunk: int
    """Its number among the wanted chunks."""
    key: str
    """Key of the pack."""
    reason: str
    error: BackendError | None = None
    """The storage's error, if the storage failed."""
    base: bytes | None = None
    """Digest of the base, if the damage is in the base, in the pack of ``key``."""


def check_sizes(places: Places, sizes: Any) -> dict[int, str]:
    """Return the reasons of the places with impossible entries, by number, before an entry costs memory."""
    wrong = (places.entries["raw_bytes"] != sizes) | ~is_possible(places.entries)
    return {at: f"{sizes_text(places.entries[at])}, the manifest {sizes[at]}" for at in np.flatnonzero(wrong).tolist()}


def check_links(links: ChainLinks, sizes: Any) -> dict[int, str]:
    """Return the reasons of the impossible entries of chains like `check_sizes`, by the number of the link.

    Args:
        links: The chains. A base is as long as its delta, or longer.
        sizes: Sizes of the chunks at their ends.
    """
    stated = links.places.entries["raw_bytes"].astype(np.int64)
    expected = stated.copy()
    expected[1:] = np.maximum(stated[1:], stated[:-1])
    expected[links.begins[:-1]] = sizes
    return check_sizes(links.places, expected)


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Stored:
    """Stored bytes of some links."""

    buffers: list[memoryview] = field(default_factory=list)
    buffer: Any
    """For each link the number of its buffer; -1 if it could not be read."""
    begin: Any
    """For each link its start in the buffer."""
    faults: dict[int, tuple[str, BackendError | None]] = field(default_factory=dict)
    """The reason why a link could not be read, and the error of the storage if it failed."""
    cached: list[CachedRead] = field(default_factory=list)
    """Reads served by the cache."""
    n_cached: int = 0
    """Links served by the cache."""
    fresh: list[tuple[str, int, memoryview]] = field(default_factory=list)
    """Reads of the storage, if there is a cache: the pack, the start there, and the bytes."""
    scratch: list[Any] = field(default_factory=list)
    """Memory to give back."""
    lock: Lock = field(default_factory=Lock)
    """Held while a buffer is added."""

    def add(self, links: Any, begins: Any, block: memoryview) -> None:
        """Add a buffer with the stored bytes of some links, by number; any thread may."""
        with self.lock:
            self.buffer[links], self.begin[links] = len(self.buffers), begins
            self.buffers.append(block)

    def some(self, links: slice) -> Stored:
        """Return the stored bytes of consecutive links; each was read."""
        return Stored(buffers=self.buffers, buffer=self.buffer[links], begin=self.begin[links])


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
        self._scratch = Scratch()
        self._cached: dict[str, CachedPack] = {}
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

    def read(self, links: ChainLinks, wanted: Wanted) -> list[Damage]:
        """Read and decode chunks; return the damaged ones.

        Args:
            links: The links of all wanted chunks.
            wanted: The chunks.

        Raises:
            BlobNotFoundError: A pack is gone.
            BackendError: Another machine does not answer.
        """
        return _Reading(self, links, wanted).run()

    def suspects(self, links: ChainLinks) -> Any:
        """Read the stored bytes of all links on this machine, and decode none.

        Returns:
            The numbers of the chunks with a link that cannot be read, or that does not hash to its stored digest.

        Raises:
            BlobNotFoundError: A pack is gone.
        """
        entries, pack = links.places.entries, links.places.pack
        order = np.lexsort((entries["offset"], pack))
        ordered, packs = entries[order], pack[order]
        is_first = np.ones(len(order), dtype=bool)
        is_first[1:] = packs[1:] != packs[:-1]
        for name in ("offset", "stored_bytes"):
            is_first[1:] |= ordered[name][1:] != ordered[name][:-1]
        is_first[1:] |= (ordered["stored_digest"][1:] != ordered["stored_digest"][:-1]).any(axis=1)
        firsts = np.flatnonzero(is_first)
        is_good = np.empty(len(firsts), dtype=bool)
        stored = links.places.some(order[firsts])
        # The load after the check reads deltas through the page cache, and should find them there.
        is_short = len(links.begins) <= len(order)
        for choice, mine in self._planner.ways(stored, np.arange(len(firsts))):
            through_cache = choice._replace(way="pread") if choice.way == "direct" and is_short else choice
            is_good[mine] = self._check(stored.some(mine), through_cache)
        of_link = np.empty(len(order), dtype=bool)
        of_link[order] = is_good[is_first.cumsum() - 1]
        return np.flatnonzero(~np.logical_and.reduceat(of_link, links.begins[:-1])) if len(order) else order

    def _check(self, places: Places, choice: WayChoice) -> Any:
        """Compare distinct stored chunks, in the order of their places, with their stored digests; return a mask."""
        from tensorcas_mlflow.chunk_io._check import check_payloads

        is_good = np.empty(len(places.found), dtype=bool)
        sizes = places.entries["stored_bytes"].astype(np.int64)
        is_slow = False
        for start, stop in _check_calls(
            places.pack, sizes, _DIRECT_CALL_BYTES if choice.way == "direct" else _CALL_BYTES
        ):
            numbers, which = np.unique(places.pack[start:stop], return_inverse=True)
            begin_s = time.perf_counter()
            with self.open_packs([pack_key(places.packs[number]) for number in numbers.tolist()]) as files:
                way = choice._replace(way="pread") if is_slow else choice
                is_good[start:stop] = check_payloads(files, which, places.entries[start:stop], way)
            # A slow disk should deliver the bytes once: the load after the check finds them in the page cache.
            is_slow |= int(sizes[start:stop].sum()) < _LEAST_DIRECT_RATE * (time.perf_counter() - begin_s)
        return is_good

    def undecodable(self, links: ChainLinks, wanted: Wanted, root: Any) -> Any:
        """Read, decode and verify chunks of this machine's files with the compiled core.

        Args:
            links: The links of all wanted chunks.
            wanted: The chunks; a target without memory keeps none.
            root: For each chunk a number of the end of its chain. Neighbours with one root are decoded together, so
                that the core decodes what their chains share once.

        Returns:
            The numbers of the chunks that failed, and of those that need another way than files.

        Raises:
            BlobNotFoundError: A pack is gone.
        """
        return _Reading(self, links, wanted, root).run_in_core()

    def plan(self, links: ChainLinks, sizes: Any, root: Any | None = None) -> list[tuple[WayChoice, list[Any]]]:
        """Plan the reading of chunks: of those without bases by their packs, and of deltas in their order.

        Args:
            links: The links of all wanted chunks.
            sizes: The size of each chunk.
            root: See `undecodable`; None if each chunk is decoded by itself.

        Returns:
            Ways, and the parts to read in each: the numbers of the chunks.
        """
        counts = np.diff(links.begins)
        is_delta = counts > 1
        if root is not None:
            is_delta |= np.isin(root, root[is_delta])
        deltas = np.flatnonzero(is_delta)
        own = links.places if len(deltas) == 0 else links.places.some(links.begins[:-1])
        groups = self._planner.groups(own, np.flatnonzero(~is_delta))
        planned = [(group.choice, [extent.members for extent in group.extents]) for group in groups]
        if len(deltas):
            numbers, _ = links.of_chunks(deltas)
            choice = self._planner.choice_for_deltas(links.places.some(numbers))
            each = _CORE_PART_BYTES if self.is_local else _PART_BYTES
            each = _WINDOW_BYTES if self.waits else each
            of = None if root is None else root[deltas]
            planned.append((choice, parts_of(deltas, sizes[deltas], each, of)))
        return planned

    def fetch(self, places: Places, choice: WayChoice, *, from_storage: bool, on_threads: bool = False) -> Stored:
        """Read the stored bytes of some places into memory.

        Args:
            places: The places.
            choice: The way.
            from_storage: Whether to leave the cache out.
            on_threads: Whether to read on many threads at once; otherwise the calling thread reads.

        Raises:
            BlobNotFoundError: A pack is gone.
            BackendError: Another machine does not answer.
        """
        n_links = len(places.found)
        stored = Stored(buffer=np.full(n_links, -1), begin=np.zeros(n_links, np.int64))
        left = np.arange(n_links)
        if self._cache is not None and not from_storage:
            left = self._fetch_cached(self._cache, places, stored, on_threads=on_threads)
        offset, size = places.entries["offset"][left], places.entries["stored_bytes"][left]
        extents = plan_reads(
            places.pack[left], offset, size, max_gap_bytes=choice.gap_bytes, max_read_bytes=choice.read_bytes
        )

        def read(extent: Extent) -> None:
            self._fetch_extent(places, left[extent.members], (extent.start, extent.stop), choice, stored)

        _for_each(read, extents, on_threads=on_threads, waits=True)
        return stored

    def give_back(self, stored: Stored) -> None:
        """Reuse the memory of a read."""
        for buffer in stored.scratch:
            self._scratch.give_back(buffer)

    def accept(self, stored: Stored) -> None:
        """Put verified bytes into the cache."""
        if self._filling is not None:
            for extent in stored.fresh:
                self._filling.add(*extent)
        if stored.n_cached and isinstance(self._backend, MeteredBackend):
            self._backend.tally.add_cached(stored.n_cached)

    @property
    def is_local(self) -> bool:
        """True if nothing lies between this process and the blobs' files."""
        return self._cache is None and not self._backend.is_remote

    @property
    def waits(self) -> bool:
        """True if threads spend most of their time waiting for another machine."""
        return self._backend.is_remote

    @contextlib.contextmanager
    def open_packs(self, keys: Sequence[str]) -> Iterator[list[BlobFile | None]]:
        """Open packs; None stands for one that cannot be opened.

        Raises:
            BlobNotFoundError: A pack is gone.
        """
        with contextlib.ExitStack() as stack:
            files: list[BlobFile | None] = []
            for key in keys:
                try:
                    files.append(stack.enter_context(self._files.using(key)))
                except BlobNotFoundError:
                    raise
                except (BackendError, CorruptError):
                    files.append(None)
            yield files

    def _fetch_cached(self, cache: ExtentCache, places: Places, stored: Stored, *, on_threads: bool) -> Any:
        """Take stored bytes from the cache; return the numbers of the missing ones."""

        def read(found: tuple[CachedRead, Any]) -> None:
            one, mine = found
            block = one.read()
            if block is not None:
                stored.add(mine[one.members], one.begins, block)
                stored.cached.append(one)

        reads: list[tuple[CachedRead, Any]] = []
        for number in distinct(places.pack).tolist():
            name, mine = places.packs[number], np.flatnonzero(places.pack == number)
            opened = self._cached.get(name)
            if opened is None:
                opened = self._cached[name] = cache.open_pack(self._store_id, name)
            entries = places.entries.take(mine)
            reads += [(one, mine) for one in opened.find(entries["offset"], entries["stored_bytes"]).reads]
        _for_each(read, reads, on_threads=on_threads)
        stored.n_cached = sum(len(one.members) for one in stored.cached)
        return np.flatnonzero(stored.buffer < 0)

    def _fetch_extent(
        self, places: Places, members: Any, extent: tuple[int, int], choice: WayChoice, stored: Stored
    ) -> None:
        """Read one extent of a pack, and its members one by one if this fails."""
        key = pack_key(places.packs[int(places.pack[members[0]])])
        start, stop = extent
        try:
            block = self._read(key, start, stop, choice, stored)
        except CorruptError as error:
            fault: tuple[str, BackendError | None] = f"it cannot be read: {error.reason}", None
        except BackendError as error:
            # A failed request to a remote store says nothing about the blob.
            if self._backend.is_remote or isinstance(error, BlobNotFoundError):
                raise
            fault = str(error), error
        else:
            stored.add(members, places.entries["offset"][members].astype(np.int64) - start, block)
            return
        if len(members) == 1:
            stored.faults[int(members[0])] = fault
            return
        # A truncated pack, or one bad sector of a disk, does not damage the chunks around it.
        for member in members.tolist():
            begin, size = int(places.entries["offset"][member]), int(places.entries["stored_bytes"][member])
            self._fetch_extent(places, np.array([member]), (begin, begin + size), choice, stored)

    def _read(self, key: str, start: int, stop: int, choice: WayChoice, stored: Stored) -> memoryview:
        n_bytes = stop - start
        if choice.way != "ranges":
            with self._files.using(key) as file:
                if file is not None and choice.way == "map":
                    stretch = file.map(start, stop)
                    stretch.populate(start, stop)
                    return stretch.data[start - stretch.begin :].data
                if file is not None and choice.way == "direct" and file.is_direct:
                    stored.scratch.append(self._scratch.take(n_bytes + 2 * PAGE_BYTES))
                    return file.read_direct(start, stop, stored.scratch[-1])
                if file is not None:
                    stored.scratch.append(self._scratch.take(n_bytes))
                    block: memoryview = stored.scratch[-1].data[:n_bytes]
                    file.read_into(start, [block])
                    return block
        # Not scratch: the cache keeps it until the load has ended.
        block = aligned_buffer(n_bytes).data
        self._backend.read_into(key, start, block)
        if self._cache is not None:
            stored.fresh.append((key.removeprefix("packs/").removesuffix(".pack"), start, block))
        return block


_Parts = tuple[WayChoice, list[Any]]
"""A way, and the chunks of each part to read in it."""
_NO_CHUNKS = np.empty(0, dtype=np.int64)


class _Reading:
    """The reading of some chunks within a load."""

    def __init__(self, load: Load, links: ChainLinks, wanted: Wanted, root: Any | None = None) -> None:
        self._load = load
        self._links = links
        self._wanted = wanted
        self._root = root
        self._damaged: list[Damage] = []

    def run(self) -> list[Damage]:
        """Read and decode; return the damage."""
        for waits, for_core, others in self._planned():
            # Link by link, the reasons of failures show.
            for chunk in self._run_in_core(for_core, waits=waits).tolist():
                self._run_part(PLAIN_READ, np.array([chunk]))
            self._run_in_python([(choice, part) for choice, parts in others for part in parts], waits=waits)
        return self._damaged

    def run_in_core(self) -> Any:
        """Read what the core can read; return the numbers of the chunks that failed, and of all others."""
        left = [_NO_CHUNKS]
        for waits, for_core, others in self._planned():
            left += [self._run_in_core(for_core, waits=waits), *(part for _, parts in others for part in parts)]
        return np.concatenate(left)

    def _planned(self) -> Iterator[tuple[bool, list[_Parts], list[_Parts]]]:
        """Plan the reading; yield whether threads wait for a disk, the parts for the core, and the other parts."""
        planned = self._load.plan(self._links, self._wanted.target.n_bytes, self._root)
        for waits in (False, True):
            chosen = [(choice, parts) for choice, parts in planned if choice.waits == waits and parts]
            is_for_core = [self._load.is_local and choice.is_of_file for choice, _ in chosen]
            for_core = [each for each, is_of in zip(chosen, is_for_core, strict=True) if is_of]
            yield waits, for_core, [each for each, is_of in zip(chosen, is_for_core, strict=True) if not is_of]

    def _run_in_core(self, chosen: Sequence[_Parts], *, waits: bool) -> Any:
        """Read local files, decode and verify, all in the compiled core; return the numbers of the failed chunks."""
        if not chosen:
            return _NO_CHUNKS
        ways = [choice for choice, parts in chosen for _ in parts]
        parts = [part for _, parts in chosen for part in parts]
        numbers = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        batch = Batch.of(self._links, np.concatenate(parts), numbers, LOCAL_GAP_BYTES)
        is_alone = all(choice.is_alone for choice, _ in chosen)
        many = 1 if is_alone else threads.N_WAITING if waits else n_threads()
        failed: list[Any] = []
        for first, stop in _calls(batch):
            failed.append(self._call_core(batch.some(first, stop), ways[first:stop], many))
        return np.concatenate(failed)

    def _call_core(self, batch: Batch, ways: Sequence[WayChoice], many: int) -> Any:
        """Run one batch in the compiled core; return the numbers of the failed chunks."""
        packs, pack = np.unique(batch.read_pack, return_inverse=True)
        of_read = np.repeat(np.arange(len(ways)), np.diff(batch.part_read))
        is_direct = np.array([choice.way == "direct" for choice in ways])[of_read]
        is_exact = np.array([choice.is_exact for choice in ways])[of_read]
        sizes = batch.read_stop - batch.read_start
        source = np.empty(len(pack), dtype=np.int64)
        kind = np.full(len(pack), FILE)
        with self._load.open_packs([pack_key(self._links.places.packs[number]) for number in packs.tolist()]) as files:
            for number, file in enumerate(files):
                mine = pack == number
                source[mine] = -1 if file is None else file.descriptor
                if file is None:
                    continue
                file.count(int(sizes[mine].sum()), int(mine.sum()))
                if is_exact[mine].any():
                    file.read_at_random()
                direct = file.direct_descriptor if is_direct[mine].any() and file.open_direct() else None
                if direct is not None:
                    mine &= is_direct
                    source[mine], kind[mine] = direct, DIRECT
            return decode(self._links, self._wanted, batch, source=source, kind=kind, n_threads=many)

    def _run_in_python(self, parts: Sequence[tuple[WayChoice, Any]], *, waits: bool) -> None:
        """Read parts on Python's threads, each into memory, and decode it there."""

        def run(each: tuple[WayChoice, Any]) -> None:
            self._run_part(*each)

        if self._load.waits:
            windows = [(choice, chunks) for choice, chunks in parts if self._are_deltas(chunks)]
            for choice, chunks in windows:
                self._run_part(choice, chunks, on_threads=True)
            parts = [(choice, chunks) for choice, chunks in parts if not self._are_deltas(chunks)]
        if len(parts) <= 1 or all(choice.is_alone for choice, _ in parts):
            for each in parts:
                run(each)
        else:
            threads.run_all(run, parts, waits=waits or self._load.waits)

    def _are_deltas(self, chunks: Any) -> bool:
        return bool(len(chunks)) and len(self._links.of_chunks(chunks)[0]) > len(chunks)

    def _run_part(
        self, choice: WayChoice, chunks: Any, *, from_storage: bool = False, on_threads: bool = False
    ) -> None:
        """Read and decode some chunks, by number; on many threads, or in the calling one."""
        numbers, counts = self._links.of_chunks(chunks)
        places = self._links.places.some(numbers)
        stored = self._load.fetch(places, choice, from_storage=from_storage, on_threads=on_threads)
        try:
            if on_threads and not stored.faults:
                damaged = self._decode_on_threads(chunks, numbers, counts, stored)
            else:
                damaged = self._decode(chunks, numbers, counts, stored)
        finally:
            self._load.give_back(stored)
        if not damaged:
            self._load.accept(stored)
        elif not stored.cached:
            self._damaged.extend(damaged)
        else:
            for read in stored.cached:
                read.discard()
            self._run_part(choice, np.array([damage.chunk for damage in damaged]), from_storage=True)

    def _decode_on_threads(self, chunks: Any, numbers: Any, counts: Any, stored: Stored) -> list[Damage]:
        """Decode like `_decode`, some chunks in each thread."""
        begins = offsets_of(counts)
        damaged: list[Damage] = []

        def decode_part(part: Any) -> None:
            first, stop = int(part[0]), int(part[-1]) + 1
            links = slice(int(begins[first]), int(begins[stop]))
            damaged.extend(self._decode(chunks[first:stop], numbers[links], counts[first:stop], stored.some(links)))

        threads.run_all(decode_part, parts_of(np.arange(len(chunks)), self._wanted.target.n_bytes[chunks], _PART_BYTES))
        return damaged

    def _decode(self, chunks: Any, numbers: Any, counts: Any, stored: Stored) -> list[Damage]:
        """Decode stored bytes into place; return the damage."""
        firsts = counts.cumsum() - counts
        left = np.arange(len(chunks))
        if len(chunks) > 1 and not stored.faults:
            whole = Batch.of_buffers(chunks, counts, numbers, stored.buffer, stored.begin, stored.buffers)
            failed = decode(
                self._links, self._wanted, whole, source=np.arange(len(stored.buffers)), buffers=stored.buffers
            )
            left = np.flatnonzero(np.isin(chunks, failed))
        damaged: list[Damage] = []
        for at in left.tolist():
            first, n_links = int(firsts[at]), int(counts[at])
            fault = self._decode_alone(int(chunks[at]), numbers[first : first + n_links], first, stored)
            if fault is not None:
                damaged.append(fault)
        return damaged

    def _decode_alone(self, chunk: int, numbers: Any, first: int, stored: Stored) -> Damage | None:
        """Decode one chunk, link by link; return the damage."""
        links = range(first, first + len(numbers))
        for number, link in enumerate(links):
            if link in stored.faults:
                reason, error = stored.faults[link]
                return self._damage(chunk, number, reason, error)
        entries = self._links.places.entries.take(numbers)
        sizes = entries["stored_bytes"].tolist()
        where = zip(stored.buffer[links].tolist(), stored.begin[links].tolist(), sizes, strict=True)
        payloads = [stored.buffers[buffer][begin : begin + size] for buffer, begin, size in where]
        target, wanted = self._wanted.target, self._wanted
        expected = wanted.digests[chunk].tobytes() if wanted.verify else None
        made = decode_chain(entries, payloads, expected, int(target.n_bytes[chunk]))
        if isinstance(made, Fault):
            return self._damage(chunk, made.number, made.reason)
        target.view(chunk)[:] = made
        return None

    def _damage(self, chunk: int, number: int, reason: str, error: BackendError | None = None) -> Damage:
        return damage_of(self._links, chunk, number, reason, error)


def _for_each(function: Callable[[T], None], items: Iterable[T], *, on_threads: bool, waits: bool = False) -> None:
    """Apply a function to every item, on threads or in the calling one."""
    if on_threads:
        threads.run_all(function, list(items), waits=waits)
    else:
        for item in items:
            function(item)


def damage_of(links: ChainLinks, chunk: int, number: int, reason: str, error: BackendError | None = None) -> Damage:
    """Describe damage in a link of a chunk: the chunk itself is the first, number 0."""
    link = int(links.begins[chunk]) + number
    places = links.places
    return Damage(
        chunk=chunk,
        key=pack_key(places.packs[int(places.pack[link])]),
        reason=reason,
        error=error,
        base=places.entries["digest"][link].tobytes() if number else None,
    )


def parts_of(chunks: Any, sizes: Any, each: int, root: Any | None = None) -> list[Any]:
    """Split chunks, in their order, into parts of about equal size; with roots, mostly where the root changes."""
    if len(chunks) == 0:
        return []
    begins = sizes.cumsum() - sizes
    if root is None:
        return np.split(chunks, np.flatnonzero(np.diff(begins // each)) + 1)
    is_first = np.append(True, root[1:] != root[:-1])
    begin_of_root = np.maximum.accumulate(np.where(is_first, begins, 0))
    is_border = np.diff(begin_of_root // each) != 0
    is_border |= np.diff((begins - begin_of_root) // _MOST_PART_BYTES) > 0
    return np.split(chunks, np.flatnonzero(is_border) + 1)


def _check_calls(packs: Any, sizes: Any, most_bytes: int) -> Iterator[tuple[int, int]]:
    """Split payloads, in the order of their packs, into calls of bounded size with a bounded number of packs."""
    if len(packs) == 0:
        return
    nth = np.cumsum(np.append(False, packs[1:] != packs[:-1])) // _CALL_PACKS
    ends = sizes.cumsum() // most_bytes
    borders = np.flatnonzero((np.diff(nth) != 0) | (np.diff(ends) != 0)) + 1
    edges = [0, *borders.tolist(), len(packs)]
    yield from pairwise(edges)


def _calls(batch: Batch) -> Iterator[tuple[int, int]]:
    """Split a batch into calls of the core, as ranges of parts."""
    begins = (batch.read_stop - batch.read_start).cumsum()
    firsts, stops = batch.part_read[:-1].tolist(), batch.part_read[1:].tolist()
    is_short = len(begins) == 0 or (int(begins[-1]) <= _CALL_BYTES and len(distinct(batch.read_pack)) <= _CALL_PACKS)
    if is_short:
        yield 0, len(batch)
        return
    first, start, packs = 0, 0, set[int]()
    for part, (read, stop) in enumerate(zip(firsts, stops, strict=True)):
        mine = set(batch.read_pack[read:stop].tolist())
        end = int(begins[stop - 1])
        if part > first and (len(packs | mine) > _CALL_PACKS or end - start > _CALL_BYTES):
            yield first, part
            first, start, packs = part, int(begins[read - 1]), set()
        packs |= mine
    yield first, len(batch)
