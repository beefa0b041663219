"""Chunk boundaries (``docs/format.md``, Chunks), for one tensor and for very many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.errors import FormatError

DEFAULT_CHUNK_BYTES = 256 * 1024
MIN_CHUNK_BYTES = 4 * 1024
MAX_CHUNK_BYTES = 64 * 1024 * 1024
_BLOCK_ROWS = 3 << 12

Offsets = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCuts:
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
    return begins[:-1] - np.repeat(begins[at[:-1]], np.diff(at))


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
    np.cumsum(counts, out=offsets[1:])
    return offsets


def ranges(begins: Any, counts: Any) -> Offsets:
    """Return the numbers in several ranges, one range after the other."""
    ends = np.cumsum(counts)
    numbers: Offsets = np.arange(int(counts.sum())) + np.repeat(begins - (ends - counts), counts)
    return numbers
