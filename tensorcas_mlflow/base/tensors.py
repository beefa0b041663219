"""Tensors as the store sees them: specs, raw bytes, and chunk boundaries (``docs/format.md``, Chunks)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.base.dtypes import DType, dtype_name, parse_dtype
from tensorcas_mlflow.errors import FormatError

MAX_NAME_BYTES = 4096
MAX_DIMENSIONS = 64
MAX_TENSOR_BYTES = 1 << 56
NOT_IN_NAMES = "\0\n\r"
ALIGNMENT = 64
"""Alignment of arrays in memory, in bytes, as in frameworks."""

T = TypeVar("T")


def group_by_bytes(items: Iterable[T], bytes_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield consecutive items in groups of at most ``most`` bytes; a larger item is a group alone."""
    group: list[T] = []
    n_bytes = 0
    for item in items:
        size = bytes_of(item)
        if group and n_bytes + size > most:
            yield group
            group, n_bytes = [], 0
        group.append(item)
        n_bytes += size
    if group:
        yield group


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Name, dtype and shape of a manifest's row. Checked once, here: names and shapes from a store may be hostile."""

    name: str
    dtype: str | None
    """The dtype's name, or None for a stretch of plain bytes."""
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not _is_name(self.name) or not 0 <= len(self.shape) <= MAX_DIMENSIONS:
            raise FormatError(f"not a tensor's name and shape: {self.name[:80]!r}, {len(self.shape)} dimensions")
        # numpy refuses an empty array with impossible sides too.
        sides = math.prod(side for side in self.shape if side)
        if min(self.shape, default=0) < 0 or sides * self.numpy_dtype.itemsize > MAX_TENSOR_BYTES:
            raise FormatError(f"tensor {self.name!r} has an impossible shape")
        if self.dtype is None and len(self.shape) != 1:
            raise FormatError(f"the bytes {self.name!r} must have one dimension")

    @property
    def numpy_dtype(self) -> DType:
        """Dtype of the row as an array; plain bytes are uint8."""
        return np.dtype(np.uint8) if self.dtype is None else _dtype_called(self.dtype)

    @property
    def n_bytes(self) -> int:
        """Size of the row's bytes."""
        return math.prod(self.shape) * self.numpy_dtype.itemsize

    @classmethod
    def of(cls, name: str, array: Array) -> Spec:
        """Describe an array.

        Raises:
            ValueError: The name is empty, too long or unprintable, or the dtype cannot be stored.
        """
        if not name or not _is_name(name):
            raise ValueError(f"not a tensor's name: {name[:80]!r} (1 to {MAX_NAME_BYTES} bytes, no NUL, no newline)")
        if name == SKELETON:
            if array.dtype != np.uint8 or array.ndim != 1:
                raise ValueError(f"{SKELETON} must be 1-d uint8, not {array.ndim}-d {array.dtype}")
            return cls(name=name, dtype=None, shape=array.shape)
        return cls(name=name, dtype=dtype_name(array.dtype), shape=array.shape)


@lru_cache(maxsize=64)
def _dtype_called(name: str) -> DType:
    return parse_dtype(name)


def _is_name(name: str) -> bool:
    try:
        n_bytes = len(name.encode())
    except UnicodeEncodeError:
        return False
    return n_bytes <= MAX_NAME_BYTES and not any(character in name for character in NOT_IN_NAMES)


def bytes_of(array: Array) -> memoryview:
    """View an array's elements in C order as bytes; copy them only if they are in another order."""
    contiguous = np.ascontiguousarray(array)
    if contiguous.size == 0:
        return memoryview(b"")
    return contiguous.reshape(-1).view(np.uint8).data


def pieces_of(data: memoryview, ends: Any) -> list[memoryview]:
    """Cut bytes at ascending offsets, the last one their size."""
    return [data[start:stop] for start, stop in pairwise([0, *ends.tolist()])]


def empty_array(spec: Spec) -> Array:
    """Allocate an array at a multiple of 64 bytes, as the frameworks do.

    Their kernels choose by the address: at another alignment, a model would predict other last digits.
    """
    if spec.n_bytes == 0:
        return np.empty(spec.shape, dtype=spec.numpy_dtype)
    return aligned_bytes(spec.n_bytes).view(spec.numpy_dtype).reshape(spec.shape)


def aligned_bytes(n_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Allocate bytes at a multiple of `ALIGNMENT`. NumPy asks the system for huge pages from 4 MiB on."""
    block = np.empty(n_bytes + ALIGNMENT, dtype=np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + n_bytes]


DEFAULT_CHUNK_BYTES = 256 * 1024
MIN_CHUNK_BYTES = 4 * 1024
MAX_CHUNK_BYTES = 64 * 1024 * 1024
_BLOCK_ROWS = 3 << 12

Offsets = np.ndarray[Any, np.dtype[np.int64]]


class RowCuts(NamedTuple):
    """The cuts of many tensors, one after the other. If no tensor has cuts, None replaces the whole object."""

    given: Any
    """One bool for each tensor: whether it has cuts."""
    at: Offsets
    """Start of each tensor's cuts among ``values``, and, last, the end of the last tensor's."""
    values: Offsets
    """Byte offsets, as in `chunk_ends`."""

    def of(self, row: int) -> Offsets | None:
        """Return the cuts of one tensor."""
        return self.values[self.at[row] : self.at[row + 1]] if self.given[row] else None

    def some(self, rows: Any) -> RowCuts | None:
        """Return the cuts of some tensors, in the given order."""
        given = self.given[rows]
        if not given.any():
            return None
        begins, counts = self.at[rows], self.at[rows + 1] - self.at[rows]
        return RowCuts(given=given, at=offsets_of(counts), values=self.values[ranges(begins, counts)])


def chunk_ends(n_bytes: int, chunk_bytes: int, cuts: Sequence[int] | Offsets | None = None) -> Offsets:
    """Return the chunk ends of one tensor.

    Args:
        n_bytes: The tensor's size.
        chunk_bytes: The store's chunk size.
        cuts: Byte offsets of additional chunk ends: ascending, above 0, the last one ``n_bytes``.

    Returns:
        Ascending byte offsets, the last one ``n_bytes``; empty for an empty tensor.

    Raises:
        FormatError: The cuts are not such offsets.
    """
    size = np.array([n_bytes], dtype=np.int64)
    if cuts is None:
        ends = np.arange(chunk_bytes, n_bytes + chunk_bytes, chunk_bytes, dtype=np.int64)
        ends[-1:] = n_bytes
        return ends
    at = np.asarray(cuts, dtype=np.int64)
    of_one = RowCuts(given=np.array([True]), at=np.array([0, len(at)]), values=at)
    check_cuts(size, of_one)
    return chunk_sizes(size, chunk_bytes, of_one).cumsum()


def check_cuts(n_bytes: Offsets, cuts: RowCuts) -> None:
    """Check that cuts are valid for the functions below.

    Args:
        n_bytes: Sizes of the tensors.
        cuts: Their cuts.

    Raises:
        FormatError: The cuts of a tensor do not ascend from above 0 to its size, or an empty tensor has cuts.
    """
    counts = np.diff(cuts.at)
    wrong = cuts.given & ((counts == 0) != (n_bytes == 0))
    rows = np.flatnonzero(cuts.given & (counts > 0))
    wrong[rows] |= cuts.values[cuts.at[rows + 1] - 1] != n_bytes[rows]
    # Find the tensors with a cut not above its predecessor.
    first = np.zeros(len(cuts.values), dtype=bool)
    first[cuts.at[rows]] = True
    before = np.where(first, 0, np.roll(cuts.values, 1))
    wrong[np.repeat(np.arange(len(counts)), counts)[cuts.values <= before]] = True
    if wrong.any():
        size = int(n_bytes[np.flatnonzero(wrong)[0]])
        raise FormatError(f"cuts must ascend from above 0 to the tensor's size of {size} bytes")


def blocks_of(n_rows: int) -> Iterator[slice]:
    """Split very many rows into blocks, so temporary arrays stay in caches and need no fresh memory."""
    return (slice(begin, min(begin + _BLOCK_ROWS, n_rows)) for begin in range(0, n_rows, _BLOCK_ROWS))


def chunk_counts(n_bytes: Offsets, chunk_bytes: int, cuts: RowCuts | None = None) -> Offsets:
    """Count the chunks of many tensors.

    Args:
        n_bytes: Their sizes.
        chunk_bytes: The store's chunk size.
        cuts: Their cuts, checked by `check_cuts`.
    """
    if cuts is None:
        return _n_chunks(n_bytes, chunk_bytes)
    pieces, at = _pieces(n_bytes, cuts)
    return np.diff(offsets_of(_n_chunks(pieces, chunk_bytes))[at])


def chunk_sizes(n_bytes: Offsets, chunk_bytes: int, cuts: RowCuts | None = None) -> Offsets:
    """Return the sizes of the chunks of many tensors, one after the other; see `chunk_counts`."""
    pieces = n_bytes if cuts is None else _pieces(n_bytes, cuts)[0]
    if not len(pieces) or pieces.max() <= chunk_bytes:
        return pieces[pieces > 0]
    counts = _n_chunks(pieces, chunk_bytes)
    sizes = np.full(int(counts.sum()), chunk_bytes, dtype=np.int64)
    has = counts > 0
    sizes[counts.cumsum()[has] - 1] = (pieces - (counts - 1) * chunk_bytes)[has]
    return sizes


def chunk_begins(sizes: Offsets, at: Offsets) -> Offsets:
    """Return the start of each chunk in its tensor.

    Args:
        sizes: Sizes of the chunks of many tensors, one after the other.
        at: Number of the first chunk of each tensor, and, last, the number of all chunks.
    """
    begins = offsets_of(sizes)
    return begins[:-1] - begins[at[:-1]].repeat(at[1:] - at[:-1])


def _n_chunks(n_bytes: Offsets, chunk_bytes: int) -> Offsets:
    if not len(n_bytes) or n_bytes.max() <= chunk_bytes:
        return (n_bytes > 0).astype(np.int64)
    return -(-n_bytes // chunk_bytes)


def _pieces(n_bytes: Offsets, cuts: RowCuts) -> tuple[Offsets, Offsets]:
    """Return the sizes of the pieces between cuts, and the pieces of each tensor: one, if it has no cuts."""
    at = offsets_of(np.where(cuts.given, np.diff(cuts.at), n_bytes > 0))
    counts = np.diff(at)
    is_cut = np.repeat(cuts.given, counts)
    ends = np.empty(len(is_cut), dtype=np.int64)
    ends[is_cut] = cuts.values
    ends[~is_cut] = n_bytes[~cuts.given & (counts > 0)]
    begins = np.roll(ends, 1)
    begins[at[:-1][counts > 0]] = 0
    return ends - begins, at


def offsets_of(counts: Any) -> Offsets:
    """Return the starts of adjacent stretches of these lengths, and, last, the end of the last one."""
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.add.accumulate(counts, out=offsets[1:])
    return offsets


def ranges(begins: Any, counts: Any) -> Offsets:
    """Return the numbers in several ranges, one range after the other."""
    ends = np.cumsum(counts)
    numbers: Offsets = np.arange(int(counts.sum())) + np.repeat(begins - (ends - counts), counts)
    return numbers


def distinct(numbers: Any) -> Offsets:
    """Return the distinct values of whole numbers, ascending.

    `numpy.unique` does the same, but imports masked arrays on its first call, a longer work than reading a manifest.
    """
    ordered = np.array(numbers).ravel()
    ordered.sort()
    is_new = np.empty(len(ordered), dtype=bool)
    is_new[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    found: Offsets = ordered[is_new]
    return found
