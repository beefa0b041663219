"""Memory for reads of chunks: blocks, and the place of each chunk in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.chunking import Offsets, ranges
from tensorcas_mlflow.dtypes import DType, parse_dtype
from tensorcas_mlflow.manifest import Columns, Row
from tensorcas_mlflow.tensor import ALIGNMENT, aligned_bytes

_SHARES_BELOW = 64 << 10
"""Smaller arrays share blocks of memory: one allocation for many, and mostly one read."""
_SHARED_BYTES = 4 << 20
"""Size of such a block, about: as long as one of its arrays is in use, the whole block is."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
    slack: Offsets
    """For each chunk the number of unused bytes behind it; a read may put there the bytes behind it in a pack."""

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
            slack=self.slack[chunks],
        )

    @classmethod
    def of_buffers(cls, buffers: Sequence[memoryview]) -> Target:
        """Use one buffer for each chunk."""
        n_bytes = np.fromiter(map(len, buffers), dtype=np.int64, count=len(buffers))
        none = np.zeros_like(n_bytes)
        return cls(blocks=buffers, block=np.arange(len(buffers)), start=none, n_bytes=n_bytes, slack=none)

    @classmethod
    def of_sizes(cls, n_bytes: Offsets) -> Target:
        """Return a target without memory, for plans that are not executed: each chunk has a buffer of its own."""
        none = np.zeros_like(n_bytes)
        return cls(blocks=(), block=np.arange(len(n_bytes)), start=none, n_bytes=n_bytes, slack=none)

    @classmethod
    def of_block(cls, block: memoryview, n_bytes: Offsets) -> Target:
        """Use one buffer for all chunks, one after the other."""
        none = np.zeros_like(n_bytes)
        return cls(blocks=[block], block=none, start=n_bytes.cumsum() - n_bytes, n_bytes=n_bytes, slack=none)


def dtypes_of(columns: Columns) -> list[DType]:
    """Return the dtypes of the rows' arrays, in the order of `Columns.dtypes`; plain bytes are uint8."""
    return [np.dtype(np.uint8) if name is None else parse_dtype(name) for name in columns.dtypes]


def shapes_of(columns: Columns, rows: Offsets) -> list[tuple[int, ...]]:
    """Return the shapes of some rows."""
    begins = columns.shape_at[rows]
    counts = columns.shape_at[rows + 1] - begins
    sides, stops = columns.sides[ranges(begins, counts)].tolist(), counts.cumsum()
    where = zip((stops - counts).tolist(), stops.tolist(), strict=True)
    return [tuple(sides[start:stop]) for start, stop in where]


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
    expected = zip(places, out.items(), columns.dtype[chosen].tolist(), shapes_of(columns, chosen), strict=True)
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
    where = zip(columns.dtype[rows].tolist(), sizes.tolist(), shapes_of(columns, rows), strict=True)
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
    slack = np.zeros_like(n_bytes_of)
    slack[counts.cumsum()[shares] - 1] = -sizes[shares] % ALIGNMENT
    return arrays, Target(
        blocks=[each.data for each in memory],
        block=np.repeat(block, counts),
        start=np.repeat(start, counts) + ends - n_bytes_of - before,
        n_bytes=n_bytes_of,
        slack=slack,
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
