"""Chunks of HDF5 data sets: without their filters, put together as a tensor, and as a function of one.

The function ``hdf5_chunks`` (``docs/format.md``, HDF5 chunks) makes a stretch of a file: it goes from a chunk to
another one, with what lies between the chunks. It holds some whole rows of its data set. The store keeps the rows in C
order, which other formats have, too.
"""

from __future__ import annotations

import math
import zlib
from collections import OrderedDict
from itertools import pairwise
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.base.tensors import bytes_of
from tensorcas_mlflow.codecs import ChunkedElements, Hdf5Chunks, fletcher32
from tensorcas_mlflow.errors import CorruptError, FormatError
from tensorcas_mlflow.file_formats._deflated import LEAST_STREAM_BYTES, MOST_RAW_BYTES
from tensorcas_mlflow.file_formats._hdf5_file import Chunks, DataSet, Filters
from tensorcas_mlflow.file_formats._source import ByteSource
from tensorcas_mlflow.file_formats._tape import MAX_PEEK_BYTES

_CHECKSUM_BYTES = 4
_MOST_INFLATION = 1032
"""Bytes that DEFLATE makes of one byte at most."""
_MOST_KEPT_BYTES = 32 << 20
"""Bytes of chunks that a reader keeps: the chunks of one row are read for each of its rows."""
_LEAST_CHUNK_BYTES = 1024
"""Smaller chunks take more time than they are worth: each one costs some calls."""
_MOST_GAP_BYTES = 256 << 10
"""Most bytes between two chunks of a stretch. More are likely another data set."""


# --- without filters, at random


def most_filtered_bytes(chunk_bytes: int) -> int:
    """Return the most bytes that a stored chunk of a size may have; DEFLATE hardly adds any."""
    return chunk_bytes + (chunk_bytes >> 8) + 1024


def unfiltered(stored: memoryview, filters: Filters, chunk_bytes: int) -> Any:
    """Undo the filters of a chunk.

    Args:
        stored: The chunk as the file has it.
        filters: Its filters.
        chunk_bytes: Its size without them; no more memory is taken.

    Returns:
        The chunk's bytes.

    Raises:
        FormatError: They do not match their checksum, or have another size.
        zlib.error: The stream is damaged.
    """
    if filters.fletcher32:
        data, checksum = stored[:-_CHECKSUM_BYTES], stored[-_CHECKSUM_BYTES:]
        if fletcher32(data) != int.from_bytes(checksum, "little"):
            raise FormatError("a chunk does not match its checksum")
        stored = data
    raw: bytes | memoryview = stored
    if filters.level is not None:
        engine = zlib.decompressobj()
        raw = engine.decompress(stored, chunk_bytes)
        more = b"" if engine.eof else engine.decompress(engine.unconsumed_tail, 1)
        if more or not engine.eof or engine.unused_data:
            raise FormatError("a compressed chunk has another size than its data set says")
    if len(raw) != chunk_bytes:
        raise FormatError("a chunk has another size than its data set says")
    chunk = np.frombuffer(raw, np.uint8)
    if filters.shuffle > 1:
        if chunk_bytes % filters.shuffle:
            raise FormatError("the filter shuffle has elements of another size")
        chunk = np.ascontiguousarray(chunk.reshape(filters.shuffle, -1).T).reshape(-1)
    return chunk


def put_together(source: ByteSource, data_set: DataSet, chunks: Chunks) -> ByteSource:
    """Return the bytes of a data set in C order; it is not empty, and all its chunks exist.

    Raises:
        FormatError: A chunk has an impossible size.
    """
    assert data_set.dtype is not None
    at = chunks.starts
    if chunks.filters is not None and chunks.is_filtered:
        unfiltered_source = _UnfilteredSource(source, chunks, chunks.filters)
        source, at = unfiltered_source, unfiltered_source.places
    inner = data_set.shape[len(chunks.sides) :]
    sides, at = (*chunks.sides, *inner), at.reshape(*at.shape, *[1] * len(inner))
    return _ChunkedSource(source, data_set.dtype, data_set.shape, sides, at)


class _UnfilteredSource(ByteSource):
    """The chunks of a data set one after the other, without their filters."""

    def __init__(self, source: ByteSource, chunks: Chunks, filters: Filters) -> None:
        """Stand for chunks; raises as `put_together`."""
        most = _MOST_INFLATION if filters.level is not None else 1
        added = _CHECKSUM_BYTES if filters.fletcher32 else 0
        sizes = chunks.sizes.reshape(-1)
        if (sizes > most_filtered_bytes(chunks.n_bytes)).any() or int((sizes - added).min()) * most < chunks.n_bytes:
            raise FormatError("a filtered chunk has an impossible size")
        self.name = source.name
        self.size = sizes.size * chunks.n_bytes
        self.places = chunks.n_bytes * np.arange(sizes.size).reshape(chunks.starts.shape)
        """First byte of each chunk in this source."""
        self._source = source
        self._filters = filters
        self._chunk_bytes = chunks.n_bytes
        self._starts = chunks.starts.reshape(-1)
        self._sizes = sizes
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._lock = Lock()

    def read_into(self, start: int, out: memoryview) -> None:
        while len(out):
            number, begin = divmod(start, self._chunk_bytes)
            piece = self._chunk(number)[begin : begin + len(out)]
            out[: len(piece)] = piece.data
            start, out = start + len(piece), out[len(piece) :]

    def _chunk(self, number: int) -> Any:
        with self._lock:
            if number in self._kept:
                self._kept.move_to_end(number)
                return self._kept[number]
        stored = self._source.read(int(self._starts[number]), int(self._sizes[number]))
        try:
            chunk = unfiltered(stored, self._filters, self._chunk_bytes)
        except (FormatError, zlib.error) as error:
            raise CorruptError(self.name, f"at byte {self._starts[number]}, {error}") from error
        with self._lock:
            self._kept[number] = chunk
            while len(self._kept) > 1 and len(self._kept) * self._chunk_bytes > _MOST_KEPT_BYTES:
                self._kept.popitem(last=False)
        return chunk


class _ChunkedSource(ByteSource):
    """The bytes of a data set in C order, put together from its chunks."""

    def __init__(self, source: ByteSource, dtype: Any, shape: tuple[int, ...], sides: tuple[int, ...], at: Any) -> None:
        """Stand for the bytes.

        Args:
            source: The file.
            dtype: The elements'.
            shape: Shape of the data set; it is not empty.
            sides: Sides of a chunk.
            at: Positions of the chunks, with a side for each dimension.
        """
        self.name = source.name
        self.size = math.prod(shape) * dtype.itemsize
        self._source = source
        self._dtype = dtype
        self._shape = shape
        self._sides = sides
        self._at = at

    def read_into(self, start: int, out: memoryview) -> None:
        stop = start + len(out)
        if stop > self.size:
            raise CorruptError(self.name, f"it ends before byte {stop}")
        if not len(out):
            return
        row_bytes = self.size // self._shape[0]
        first, last = start // row_bytes, -(-stop // row_bytes)
        if last - first == 1 and len(self._shape) > 1:
            self._row(first).read_into(start - first * row_bytes, out)
            return
        block = np.empty((last - first, *self._shape[1:]), self._dtype)
        step = self._sides[0]
        for nth in range(first // step, -(-last // step)):
            low, high = max(first, nth * step), min(last, (nth + 1) * step)
            for place in np.ndindex(self._at.shape[1:]):
                begin = int(self._at[(nth, *place)])
                box = tuple(
                    slice(at * side, min((at + 1) * side, whole))
                    for at, side, whole in zip(place, self._sides[1:], self._shape[1:], strict=True)
                )
                chunk = self._rows(begin, low - nth * step, high - nth * step)
                own = tuple(slice(each.stop - each.start) for each in box)
                block[(slice(low - first, high - first), *box)] = chunk[(slice(None), *own)]
        out[:] = bytes_of(block)[start - first * row_bytes : stop - first * row_bytes]

    def _row(self, nth: int) -> _ChunkedSource:
        """Return the source of one row, of which a reader may want small pieces."""
        chunk, own = divmod(nth, self._sides[0])
        at = self._at[chunk] + own * math.prod(self._sides[1:]) * self._dtype.itemsize
        return _ChunkedSource(self._source, self._dtype, self._shape[1:], self._sides[1:], at)

    def _rows(self, begin: int, low: int, high: int) -> Any:
        """Read some rows of a chunk."""
        row_bytes = math.prod(self._sides[1:]) * self._dtype.itemsize
        data = self._source.read(begin + low * row_bytes, (high - low) * row_bytes)
        return np.frombuffer(data, self._dtype).reshape(high - low, *self._sides[1:])


# --- as a function of the tensor


class Stretch(NamedTuple):
    """Consecutive bytes of a file that hold the chunks of some rows."""

    start: int
    """Position of the first chunk."""
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
    if chunks is None or chunks.filters is None or not data_set.wanted_bytes or chunks.filters.level == 0:
        return False
    return _LEAST_CHUNK_BYTES <= chunks.n_bytes <= MAX_PEEK_BYTES


def plan_stretch(data_set: DataSet, first_chunk: int) -> Stretch | None:
    """Find the longest stretch of whole rows that begins with a chunk.

    Args:
        data_set: A data set of `may_derive`.
        first_chunk: Number of the first chunk, which begins a row of chunks.

    Returns:
        None if a row of chunks is spread over the file, or too long; and for rows that follow each other in
        C order without filters: those are the tensor as it is.
    """
    chunks, shape, dtype = data_set.chunks, data_set.shape, data_set.dtype
    assert chunks is not None
    assert chunks.filters is not None
    assert dtype is not None
    grid = chunks.starts.shape
    starts, sizes = chunks.starts.reshape(-1)[first_chunk:], chunks.sizes.reshape(-1)[first_chunk:]
    order = np.argsort(starts, kind="stable")
    begins, stored = starts[order], sizes[order]
    # The first chunks in the file are all chunks of some rows, so far as the largest number among them is their count.
    band, n = math.prod(grid[1:]), len(order)
    counts = np.arange(1, n + 1)
    is_whole = (np.maximum.accumulate(order) + 1 == counts) & (counts % band == 0)
    gaps = np.diff(begins) - stored[:-1]
    breaks = np.flatnonzero(gaps > _MOST_GAP_BYTES)
    masked = np.flatnonzero(chunks.masks.reshape(-1)[first_chunk:][order])
    bad = np.flatnonzero((stored <= 0) | (stored > most_filtered_bytes(chunks.n_bytes)))
    most = min([n, *(breaks[:1] + 1), *masked[:1], *bad[:1], MOST_RAW_BYTES // chunks.n_bytes])
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
    try:
        function = Hdf5Chunks(
            shape=(min(last_row, shape[0]) - first_row, *shape[1:]),
            sides=(*chunks.sides, *shape[len(chunks.sides) :]),
            itemsize=dtype.itemsize,
            shuffle=chunks.filters.shuffle,
            level=chunks.filters.level,
            fletcher32=chunks.filters.fletcher32,
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
