"""Read plan of one load: target memory, open packs, and the reads of each way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.backends import Backend, BlobFile
from tensorcas_mlflow.base.dtypes import DType, parse_dtype
from tensorcas_mlflow.base.tensors import ALIGNMENT, Offsets, aligned_bytes, distinct
from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.chunk_io._places import Places
from tensorcas_mlflow.chunk_io._ways import (
    LEAST_ASKED_BYTES,
    LOCAL_GAP_BYTES,
    Extent,
    PackRead,
    Situation,
    Way,
    WayChoice,
    choose,
    plan_reads,
)
from tensorcas_mlflow.codecs import RAW
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError
from tensorcas_mlflow.layout.manifests import Columns, Row
from tensorcas_mlflow.layout.packs import pack_key

if TYPE_CHECKING:
    pass

_SHARES_BELOW = 2 << 20
"""Smaller arrays share blocks of memory: one allocation for many, mostly one read, and huge pages."""
_SHARED_BYTES = 4 << 20
"""Size of such a block, about: as long as one of its arrays is in use, the whole block is."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Target:
    """Memory of some chunks. Two chunks of one target never overlap."""

    blocks: Sequence[memoryview]
    """Writable bytes."""
    block: Offsets
    """For each chunk the number of its block."""
    start: Offsets
    """For each chunk its start in the block."""
    n_bytes: Offsets
    """Size of each chunk."""

    def __len__(self) -> int:
        return len(self.start)

    def view(self, chunk: int) -> memoryview:
        """Return the memory of one chunk."""
        start = int(self.start[chunk])
        memory: memoryview = self.blocks[self.block[chunk]][start : start + int(self.n_bytes[chunk])]
        return memory

    def some(self, chunks: Any) -> Target:
        """Return the memory of some of the chunks, by number."""
        return Target(
            blocks=self.blocks,
            block=self.block[chunks],
            start=self.start[chunks],
            n_bytes=self.n_bytes[chunks],
        )

    @classmethod
    def of_buffers(cls, buffers: Sequence[memoryview]) -> Target:
        """Use one buffer for each chunk."""
        n_bytes = np.fromiter(map(len, buffers), dtype=np.int64, count=len(buffers))
        none = np.zeros_like(n_bytes)
        return cls(blocks=buffers, block=np.arange(len(buffers)), start=none, n_bytes=n_bytes)

    @classmethod
    def of_sizes(cls, n_bytes: Offsets) -> Target:
        """Return a target without memory, for plans that are not executed and for chunks that are only verified."""
        none = np.zeros_like(n_bytes)
        return cls(blocks=(), block=np.arange(len(n_bytes)), start=none, n_bytes=n_bytes)

    @classmethod
    def of_block(cls, block: memoryview, n_bytes: Offsets) -> Target:
        """Use one buffer for all chunks, one after the other."""
        none = np.zeros_like(n_bytes)
        return cls(blocks=[block], block=none, start=n_bytes.cumsum() - n_bytes, n_bytes=n_bytes)


def dtypes_of(columns: Columns) -> list[DType]:
    """Return the dtypes of the rows' arrays, in the order of `Columns.dtypes`; plain bytes are uint8."""
    return [np.dtype(np.uint8) if name is None else parse_dtype(name) for name in columns.dtypes]


class ChosenRows(Sequence[Row]):
    """Some rows of a manifest, each built on access."""

    def __init__(self, columns: Columns, rows: Offsets) -> None:
        self._columns = columns
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: Any) -> Any:
        return self._columns.row(int(self._rows[at]))


def check_outs(columns: Columns, rows: Offsets, names: Sequence[str], out: Mapping[str, Array]) -> dict[int, Array]:
    """Return the arrays to fill, by position among the rows.

    Raises:
        ValueError: An array cannot hold its row, belongs to no row, or two arrays share memory.
    """
    at_name = {name: at for at, name in enumerate(names)}
    unknown = out.keys() - at_name.keys()
    if unknown:
        raise ValueError(f"there is an array to read {min(unknown)!r} into, which is not read")
    dtypes = dtypes_of(columns)
    places = [at_name[name] for name in out]
    chosen = rows[places]
    found: dict[int, Array] = {}
    expected = zip(places, out.items(), columns.dtype[chosen].tolist(), columns.shapes(chosen), strict=True)
    for at, (name, array), dtype, shape in expected:
        if array.dtype != dtypes[dtype] or array.shape != shape:
            said = f"{array.dtype} {array.shape}"
            raise ValueError(f"tensor {name!r} is {dtypes[dtype]} {shape}, and cannot be read into {said}")
        if not (array.flags.c_contiguous and array.flags.writeable):
            raise ValueError(f"tensor {name!r} cannot be read into an array that is read-only or not in C order")
        found[at] = array
    _check_apart(out)
    return found


def _check_apart(out: Mapping[str, Array]) -> None:
    """Check that no two contiguous arrays share memory: one of two tensors would be lost without an error."""
    begins = np.array([array.__array_interface__["data"][0] for array in out.values()], dtype=np.int64)
    sizes = np.array([array.nbytes for array in out.values()], dtype=np.int64)
    order = np.argsort(begins, kind="stable")
    order = order[sizes[order] > 0]
    both = np.flatnonzero(begins[order[1:]] < (begins + sizes)[order[:-1]])
    if len(both):
        names = list(out)
        one, other = sorted((int(order[both[0]]), int(order[both[0] + 1])))
        raise ValueError(
            f"tensors {names[one]!r} and {names[other]!r} cannot be read into arrays that share memory: "
            "give each an array of its own"
        )


def new_arrays(
    columns: Columns, rows: Offsets, chunk_bytes: int, outs: Mapping[int, Array]
) -> tuple[list[Array], Target]:
    """Allocate arrays for some rows, and the target of their chunks.

    Args:
        columns: Columns of a manifest.
        rows: Numbers of the rows.
        chunk_bytes: The manifest's chunk size.
        outs: Existing arrays, checked, by position among ``rows``.

    Returns:
        An array a row, C-contiguous; new ones are aligned to 64 bytes, as in frameworks: their kernels choose by
        the address, and at another alignment a model would predict other last digits. And the target of the rows'
        chunks, one after the other.
    """
    sizes = columns.n_bytes[rows]
    shares = (sizes < _SHARES_BELOW) & (sizes > 0)
    for at in outs:
        shares[at] = False
    blocks, block, start = _shared_blocks(sizes, shares)
    memory: list[Any] = [*blocks]
    dtypes = dtypes_of(columns)
    arrays: list[Array] = []
    where = zip(columns.dtype[rows].tolist(), sizes.tolist(), columns.shapes(rows), strict=True)
    block_of, start_of = block.tolist(), start.tolist()
    for at, (dtype, n_bytes, shape) in enumerate(where):
        if at in outs:
            arrays.append(outs[at])
            if n_bytes:
                block[at] = len(memory)
                memory.append(outs[at].reshape(-1).view(np.uint8))
            continue
        if n_bytes == 0:
            arrays.append(np.empty(shape, dtype=dtypes[dtype]))
            continue
        number, begin = block_of[at], start_of[at]
        if number < 0:
            number, begin = len(memory), 0
            block[at] = number
            memory.append(aligned_bytes(n_bytes))
        arrays.append(np.ndarray(shape, dtypes[dtype], memory[number], begin))
    counts = columns.chunk_at[rows + 1] - columns.chunk_at[rows]
    n_bytes_of = columns.chunk_sizes(chunk_bytes, rows)
    ends = n_bytes_of.cumsum()
    before = np.repeat(sizes.cumsum() - sizes, counts)
    return arrays, Target(
        blocks=[each.data for each in memory],
        block=np.repeat(block, counts),
        start=np.repeat(start, counts) + ends - n_bytes_of - before,
        n_bytes=n_bytes_of,
    )


def _shared_blocks(sizes: Offsets, shares: Any) -> tuple[list[Any], Offsets, Offsets]:
    """Lay small rows out in blocks, in their order, like packs do: one read then covers many rows.

    Returns:
        The blocks; for each row the number of its block, -1 for rows in none; and its start there.
    """
    block = np.full(len(sizes), -1, dtype=np.int64)
    start = np.zeros(len(sizes), dtype=np.int64)
    room = -(-sizes[shares] // ALIGNMENT) * ALIGNMENT
    if len(room) == 0:
        return [], block, start
    begins = room.cumsum() - room
    number = begins // _SHARED_BYTES
    is_first = np.ones(len(room), dtype=bool)
    is_first[1:] = number[1:] != number[:-1]
    nth = is_first.cumsum() - 1
    firsts = begins[is_first]
    lengths = np.diff(np.append(firsts, begins[-1] + room[-1]))
    block[shares], start[shares] = nth, begins - firsts[nth]
    return [aligned_bytes(n_bytes) for n_bytes in lengths.tolist()], block, start


_MOST_IDLE = 32


@dataclass(slots=True, eq=False, repr=False)
class _Held:
    file: BlobFile | None
    n_users: int = 0


class OpenFiles:
    """Opener of blobs. It keeps them open, and closes them all as a context manager. For many threads at once."""

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
        """Yield a blob, open for the duration of the block; see `Backend.open_file`."""
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


class ReadGroup(NamedTuple):
    """Reads executed in one way."""

    choice: WayChoice
    extents: list[Extent]
    """The reads; their members are numbers of wanted chunks."""


class Planner:
    """Chooser of the ways of one load."""

    def __init__(self, backend: Backend, files: OpenFiles, way: Way | None) -> None:
        """Create a planner.

        Args:
            backend: The backend of the packs.
            files: Opener of the packs.
            way: A way to use if it is available; None leaves the choice to `choose`.
        """
        self._backend = backend
        self._files = files
        self._way = way

    def groups(self, places: Places, chunks: Any) -> list[ReadGroup]:
        """Plan the reads of some wanted chunks, by number, each as it lies in its pack.

        Raises:
            BlobNotFoundError: A pack is gone.
        """
        return [
            ReadGroup(choice=choice, extents=_extents(places, mine, choice))
            for choice, mine in self.ways(places, chunks)
        ]

    def choice_for_deltas(self, links: Places) -> WayChoice:
        """Choose one way for the links of all deltas: they are short reads of many packs.

        Raises:
            BlobNotFoundError: A pack is gone.
        """
        choices = [choice for choice, _ in self.ways(links, np.arange(len(links.found)))]
        chosen = next((choice for choice in choices if choice.waits), choices[0])
        is_exact = any(choice.is_exact for choice in choices)
        return chosen._replace(way="pread" if chosen.way == "direct" else chosen.way, is_exact=is_exact)

    def reads(self, places: Places, chunks: Any) -> tuple[PackRead, ...]:
        """Return for each pack the planned read of some wanted chunks.

        Raises:
            BlobNotFoundError: A pack is gone.
        """
        out: list[PackRead] = []
        for group in self.groups(places, chunks):
            by_pack: dict[int, list[Extent]] = {}
            for extent in group.extents:
                by_pack.setdefault(extent.pack, []).append(extent)
            for pack, extents in by_pack.items():
                members = np.concatenate([extent.members for extent in extents])
                out.append(
                    PackRead(
                        key=pack_key(places.packs[pack]),
                        n_chunks=len(members),
                        n_bytes=int(places.entries["stored_bytes"][members].astype(np.int64).sum()),
                        n_reads=len(extents),
                        read_bytes=sum(extent.stop - extent.start for extent in extents),
                        choice=group.choice,
                    )
                )
        return tuple(sorted(out, key=lambda each: each.key))

    def ways(self, places: Places, chunks: Any) -> list[tuple[WayChoice, Any]]:
        """Choose a way for each large pack, and one for all packs with small amounts.

        Args:
            places: Places of stored chunks.
            chunks: Numbers of the chunks to read.

        Returns:
            Ways, and the numbers of the chunks to read in each.

        Raises:
            BlobNotFoundError: A pack is gone.
        """
        if len(chunks) == 0:
            return []
        stored = places.entries["stored_bytes"][chunks].astype(np.int64)
        pack = places.pack[chunks]
        of_pack = np.bincount(pack, weights=stored)
        total = int(stored.sum())
        # Small amounts need no check of their pack, and are planned at once, however many packs there are.
        is_little = of_pack[pack] < LEAST_ASKED_BYTES
        parts = [chunks[pack == number] for number in distinct(pack[~is_little]).tolist()]
        if is_little.any():
            parts.append(chunks[is_little])
        return [(self._choose(places, part, total, len(chunks)), part) for part in parts]

    def _choose(self, places: Places, chunks: Any, total: int, n_chunks: int) -> WayChoice:
        """Choose the way for one large pack, or for all packs with small amounts."""
        key = pack_key(places.packs[int(places.pack[chunks[0]])])
        entries = places.entries.take(chunks)
        try:
            with self._files.using(key) as file:
                return choose(self._situation(entries, file, total, n_chunks), self._way)
        except BlobNotFoundError:
            raise
        except (BackendError, CorruptError):
            # The read finds this out again, and reports the affected chunks.
            return choose(self._situation(entries, None, total, n_chunks))

    def _situation(self, entries: Any, file: BlobFile | None, total: int, n_chunks: int) -> Situation:
        n_bytes = int(entries["stored_bytes"].astype(np.int64).sum())
        is_raw = bool((entries["codec"] == RAW.number).all())
        if file is None:
            return Situation(
                n_bytes=n_bytes,
                is_raw=is_raw,
                total_bytes=total,
                n_chunks=n_chunks,
                is_remote=self._backend.is_remote,
            )
        extents = plan_reads(
            np.zeros(len(entries), np.int64),
            entries["offset"],
            entries["stored_bytes"],
            max_gap_bytes=LOCAL_GAP_BYTES,
            max_read_bytes=file.size,
        )
        stretches = [(extent.start, extent.stop) for extent in extents]
        return Situation(
            n_bytes=n_bytes,
            is_raw=is_raw,
            n_stretches=len(stretches),
            total_bytes=total,
            n_chunks=n_chunks,
            pack_bytes=file.size,
            share_in_memory=lambda: file.share_in_memory(stretches),
            can_direct=file.open_direct,
        )


def _extents(places: Places, chunks: Any, choice: WayChoice) -> list[Extent]:
    """Join the places of some wanted chunks, by number, into reads."""
    entries = places.entries
    extents = plan_reads(
        places.pack[chunks],
        entries["offset"][chunks],
        entries["stored_bytes"][chunks],
        max_gap_bytes=choice.gap_bytes,
        max_read_bytes=choice.read_bytes,
    )
    return [extent._replace(members=chunks[extent.members]) for extent in extents]
