"""Stretches of an HDF5 file that the function ``hdf5_chunks`` makes of a tensor (``docs/format.md``, HDF5 chunks).

A stretch goes from a chunk to another one, with what lies between the chunks. It holds some whole rows of its data set.
The store keeps the rows in C order, which other formats have, too.
"""

from __future__ import annotations

import math
import zlib
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tensorcas_mlflow.codecs import ChunkedElements, Hdf5Chunks
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._deflated import LEAST_STREAM_BYTES, MOST_RAW_BYTES
from tensorcas_mlflow.file_formats._hdf5_chunks import ChunkPlaces
from tensorcas_mlflow.file_formats._hdf5_filters import most_filtered_bytes, unfiltered
from tensorcas_mlflow.file_formats._hdf5_headers import DataSet, Filters
from tensorcas_mlflow.file_formats._tape import MAX_PEEK_BYTES

_LEAST_CHUNK_BYTES = 1024
"""Smaller chunks take more time than they are worth: each one costs some calls."""
_MOST_GAP_BYTES = 256 << 10
"""Most bytes between two chunks of a stretch. More are likely another data set."""
_NO_FILTERS = Filters(1, None, False)


class Stretch(NamedTuple):
    """Consecutive bytes of a file that hold the chunks of some rows."""

    start: int
    """Address of the first chunk."""
    n_bytes: int
    first_chunk: int
    """Number of the first chunk in C order; the stretch has it and those that follow it."""
    chunks: Hdf5Chunks
    """The function."""
    begins: tuple[int, ...]
    """First byte of each chunk in the stretch, in the order of the file."""
    sizes: tuple[int, ...]
    """Sizes of the chunks as they are stored."""

    @property
    def stop_chunk(self) -> int:
        """Number of the chunk behind the last one."""
        return self.first_chunk + self.chunks.n_chunks

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """First byte and end of what lies between chunks."""
        ends = [begin + size for begin, size in zip(self.begins, self.sizes, strict=True)]
        return [gap for gap in zip(ends[:-1], self.begins[1:], strict=True) if gap[0] < gap[1]]


def may_derive(data_set: DataSet) -> bool:
    """Tell whether the function may make the chunks of a data set."""
    chunks = data_set.chunks
    if chunks is None or data_set.dtype is None or not data_set.shape or 0 in data_set.shape:
        return False
    if chunks.is_filtered and (chunks.filters is None or chunks.filters.level == 0):
        return False
    inner = data_set.shape[len(chunks.sides) :]
    return (
        _LEAST_CHUNK_BYTES <= chunks.chunk_bytes <= MAX_PEEK_BYTES
        and math.prod((*chunks.sides, *inner)) * data_set.dtype.itemsize == chunks.chunk_bytes
    )


def plan_stretch(data_set: DataSet, places: ChunkPlaces, first_chunk: int, least_address: int) -> Stretch | None:
    """Find the longest stretch of whole rows that begins with a chunk.

    Args:
        data_set: A data set of `may_derive`.
        places: Its chunks, as far as they are known.
        first_chunk: Number of the first chunk, which begins a row of chunks.
        least_address: Chunks at lower addresses have passed.

    Returns:
        None if a row of chunks is not known, spread over the file, or too long; and for rows that follow each other in
        C order without filters: those are the tensor as it is.
    """
    chunks, shape, dtype = data_set.chunks, data_set.shape, data_set.dtype
    assert chunks is not None
    assert shape is not None
    assert dtype is not None
    grid = places.addresses.shape
    starts, sizes = places.addresses.reshape(-1)[first_chunk:], places.sizes.reshape(-1)[first_chunk:]
    known = np.flatnonzero(starts >= max(0, least_address))
    order = known[np.argsort(starts[known], kind="stable")]
    begins, stored = starts[order], sizes[order]
    # The first chunks in the file are all chunks of some rows, so far as the largest number among them is their count.
    band, n = math.prod(grid[1:]), len(order)
    counts = np.arange(1, n + 1)
    is_whole = (np.maximum.accumulate(order) + 1 == counts) & (counts % band == 0)
    gaps = np.diff(begins) - stored[:-1]
    breaks = np.flatnonzero((gaps < 0) | (gaps > _MOST_GAP_BYTES))
    masked = np.flatnonzero(places.masks.reshape(-1)[first_chunk:][order])
    bad = np.flatnonzero((stored <= 0) | (stored > most_filtered_bytes(chunks.chunk_bytes)))
    most = min([n, *(breaks[:1] + 1), *masked[:1], *bad[:1], MOST_RAW_BYTES // chunks.chunk_bytes])
    is_short = begins[:most] + stored[:most] - begins[:1] <= MAX_PEEK_BYTES
    ends = np.flatnonzero(is_whole[:most] & is_short)
    if not len(ends):
        return None
    count = int(ends[-1]) + 1
    begins, stored, order, gaps = begins[:count], stored[:count], order[:count], gaps[: count - 1]
    n_bytes = int(begins[-1] + stored[-1] - begins[0])
    in_order = np.diff(order) == 1
    is_tensor = in_order.all() and not gaps.any() and shape[1 : len(chunks.sides)] == chunks.sides[1:]
    if n_bytes < LEAST_STREAM_BYTES or (is_tensor and not chunks.is_filtered):
        return None
    first_row, last_row = (first_chunk // band) * chunks.sides[0], (first_chunk + count) // band * chunks.sides[0]
    edges = [0, *(np.flatnonzero(~in_order | (gaps > 0)) + 1).tolist(), count]
    before = [0, *gaps.tolist()]
    runs = [[before[at], int(order[at]), end - at] for at, end in pairwise(edges)]
    filters = chunks.filters or _NO_FILTERS
    try:
        function = Hdf5Chunks(
            shape=(min(last_row, shape[0]) - first_row, *shape[1:]),
            sides=(*chunks.sides, *shape[len(chunks.sides) :]),
            itemsize=dtype.itemsize,
            shuffle=filters.shuffle,
            level=filters.level,
            fletcher32=filters.fletcher32,
            runs=runs,
        )
    except ValueError:
        return None
    offsets = tuple((begins - begins[0]).tolist())
    return Stretch(int(begins[0]), n_bytes, first_chunk, function, offsets, tuple(stored.tolist()))


def take_apart(stretch: Stretch, data: memoryview) -> bytearray | None:
    """Undo the filters of a stretch's chunks, and prove that the function makes the stretch again.

    Args:
        stretch: The stretch.
        data: Its bytes.

    Returns:
        The elements and the bytes between chunks; None if the function makes other bytes.
    """
    chunks = stretch.chunks
    content = bytearray(chunks.element_bytes + chunks.other_bytes)
    room = np.frombuffer(content, np.uint8)
    elements = ChunkedElements(chunks, room[: chunks.element_bytes])
    filters = Filters(chunks.shuffle, chunks.level, chunks.fletcher32)
    numbers = (number for _, first, count in chunks.runs for number in range(first, first + count))
    for number, begin, size in zip(numbers, stretch.begins, stretch.sizes, strict=True):
        stored = data[begin : begin + size]
        try:
            elements.put(number, unfiltered(stored, filters, chunks.chunk_bytes))
        except (FormatError, zlib.error):
            return None
        if elements.stored(number) != stored:
            return None
    at = chunks.element_bytes
    for begin, end in stretch.gaps:
        content[at : at + end - begin] = data[begin:end]
        at += end - begin
    return content
