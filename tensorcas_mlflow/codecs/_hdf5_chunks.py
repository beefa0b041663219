"""Chunks of an HDF5 data set as a file stores them, made of the data set's elements (``docs/format.md``, HDF5 chunks).

The filters are those of the HDF5 library: shuffle, deflate, Fletcher-32, in this order.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np

from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.codecs._deflate import LEVELS, deflate

_MOST_CHUNKS = 1 << 20
_MOST_CHUNK_BYTES = 1 << 30
_MOST_PADDED_BYTES = 1 << 32
"""Chunks with their padding are no larger together."""
_MOST_DIMENSIONS = 64
_MOST_INFLATION = 1032
"""DEFLATE expands no stream more often (zlib's technical details)."""
_CHECKSUM_BYTES = 4
_ZLIB_HEADER_BYTES, _ZLIB_TRAILER_BYTES = 2, 4
_BLOCK_WORDS = 1 << 15
"""Words of one step of a checksum; their weighted sum fits in 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hdf5Chunks:
    """The function ``hdf5_chunks``: parameters that fit each other."""

    shape: Sequence[int]
    """Sides of the elements' array."""
    sides: Sequence[int]
    """Sides of a chunk."""
    itemsize: int
    """Size of an element in bytes."""
    shuffle: int
    """Bytes that the filter shuffle takes for an element; 1 without the filter."""
    level: int | None
    """Level of the filter deflate; None without it."""
    fletcher32: bool
    """Whether a checksum follows each chunk."""
    runs: Sequence[Sequence[int]]
    """Consecutive chunks: the number of other bytes before them, the number of the first chunk, and of the chunks."""

    def __post_init__(self) -> None:
        """Check the parameters.

        Raises:
            ValueError: They do not fit each other, or name too much.
        """
        lists: tuple[Any, ...] = (self.shape, self.sides, self.runs)
        runs: Any = self.runs
        flag: Any = self.fletcher32
        if not all(isinstance(each, list | tuple) for each in lists) or len(self.shape) != len(self.sides):
            raise ValueError("shape and sides differ in length, or are no lists")
        runs_are_lists = all(isinstance(run, list | tuple) and len(run) == 3 for run in runs)
        if not runs_are_lists or not 1 <= len(self.shape) <= _MOST_DIMENSIONS:
            raise ValueError("there is a run without three numbers, or no side")
        level = 1 if self.level is None else self.level
        numbers = [self.itemsize, self.shuffle, level, *self.shape, *self.sides]
        if not all(type(each) is int and 0 < each < _MOST_PADDED_BYTES for each in numbers):
            raise ValueError("a number is not positive, or too large")
        if not all(type(each) is int and 0 <= each < _MOST_PADDED_BYTES for run in self.runs for each in run):
            raise ValueError("a run has a number below 0, or one that is too large")
        if level not in LEVELS or type(flag) is not bool or self.chunk_bytes % self.shuffle:
            raise ValueError("a filter has another parameter")
        n = self.n_chunks
        if self.chunk_bytes > _MOST_CHUNK_BYTES or n > _MOST_CHUNKS or n * self.chunk_bytes > _MOST_PADDED_BYTES:
            raise ValueError(f"{n} chunks of {self.chunk_bytes} bytes are too large")
        at = 0
        for first, count in sorted((run[1], run[2]) for run in self.runs):
            if first != at or not count:
                raise ValueError("a chunk is missing, or there twice")
            at += count
        if at != n:
            raise ValueError("a chunk is missing, or there twice")

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Hdf5Chunks:
        """Read the parameters of a manifest; raise `ValueError` as the constructor does."""
        return cls(**params)

    def params(self) -> dict[str, Any]:
        """Return the parameters as a manifest has them."""
        return {
            name: list(map(_plain, each)) if isinstance(each, list | tuple) else each
            for name, each in asdict(self).items()
        }

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each axis."""
        return tuple(-(-whole // side) for whole, side in zip(self.shape, self.sides, strict=True))

    @property
    def n_chunks(self) -> int:
        """Number of chunks."""
        return math.prod(self.grid)

    @property
    def chunk_bytes(self) -> int:
        """Size of a chunk before the filters."""
        return math.prod(self.sides) * self.itemsize

    @property
    def element_bytes(self) -> int:
        """Size of all elements."""
        return math.prod(self.shape) * self.itemsize

    @property
    def other_bytes(self) -> int:
        """Size of all bytes between chunks."""
        return sum(run[0] for run in self.runs)

    def fits(self, n_input_bytes: int, n_bytes: int) -> bool:
        """Tell whether inputs of a size give a result of a size, as far as the parameters tell."""
        if n_input_bytes != self.element_bytes + self.other_bytes:
            return False
        n_stored_bytes = n_bytes - self.other_bytes
        if self.level is not None:
            return self.n_chunks * self.chunk_bytes <= _MOST_INFLATION * n_stored_bytes
        return n_stored_bytes == self.n_chunks * (self.chunk_bytes + _CHECKSUM_BYTES * self.fletcher32)


class ChunkedElements:
    """The elements of an array, chunk by chunk. Chunks are filled up with zeros behind the array's end."""

    def __init__(self, chunks: Hdf5Chunks, elements: Any) -> None:
        """Stand for elements.

        Args:
            chunks: Shape, chunks and filters.
            elements: The elements as bytes, in C order; `put` writes them.
        """
        # Words are copied faster than bytes.
        unit = next(size for size in (8, 4, 2, 1) if chunks.itemsize % size == 0)
        n = chunks.itemsize // unit
        self._array = elements.view(f"u{unit}").reshape(*chunks.shape[:-1], chunks.shape[-1] * n)
        self._sides = (*chunks.sides[:-1], chunks.sides[-1] * n)
        self._grid = chunks.grid
        self._chunks = chunks
        self._room = np.empty(most_stored_bytes(chunks.chunk_bytes), np.uint8).data

    def put(self, number: int, raw: Any) -> None:
        """Write a chunk's elements, without those behind the array's end.

        Args:
            number: Number of the chunk, in C order of the grid.
            raw: The chunk's bytes before the filters.
        """
        view = self._view(number)
        view[...] = raw.view(view.dtype).reshape(self._sides)[tuple(map(slice, view.shape))]

    def stored(self, number: int) -> memoryview:
        """Return a chunk as a file stores it. The next call overwrites it.

        Args:
            number: Number of the chunk, in C order of the grid.
        """
        chunks, room = self._chunks, self._room
        data = self._whole(self._view(number)).reshape(-1).view(np.uint8)
        if chunks.shuffle > 1:
            data = np.ascontiguousarray(data.reshape(-1, chunks.shuffle).T).reshape(-1)
        n_bytes = len(data)
        if chunks.level is None:
            room[:n_bytes] = data.data
        else:
            made = deflate(data.data, chunks.level, room[_ZLIB_HEADER_BYTES:-_ZLIB_TRAILER_BYTES])
            assert made is not None
            room[:_ZLIB_HEADER_BYTES] = _zlib_header(chunks.level)
            n_bytes = _ZLIB_HEADER_BYTES + made + _ZLIB_TRAILER_BYTES
            room[n_bytes - _ZLIB_TRAILER_BYTES : n_bytes] = zlib.adler32(data.data).to_bytes(4, "big")
        if chunks.fletcher32:
            checksum = fletcher32(room[:n_bytes]).to_bytes(_CHECKSUM_BYTES, "little")
            room[n_bytes : n_bytes + _CHECKSUM_BYTES] = checksum
            n_bytes += _CHECKSUM_BYTES
        return room[:n_bytes]

    def _whole(self, view: Any) -> Any:
        if view.shape == self._sides:
            return np.ascontiguousarray(view)
        chunk = np.zeros(self._sides, view.dtype)
        chunk[tuple(map(slice, view.shape))] = view
        return chunk

    def _view(self, number: int) -> Any:
        place = np.unravel_index(number, self._grid)
        at = zip(place, self._sides, strict=True)
        return self._array[tuple(slice(int(nth) * side, (int(nth) + 1) * side) for nth, side in at)]


def make_chunks(chunks: Hdf5Chunks, inputs: Sequence[Any], made: Any) -> None:
    """Evaluate the function.

    Args:
        chunks: Its parameters.
        inputs: The elements, then the other bytes; as bytes, together of the right size.
        made: Room for the result, of the right size if nothing is deflated.
    """
    if len(inputs[0]) != chunks.element_bytes:
        inputs = [np.concatenate(inputs)]
    other = np.concatenate([inputs[0][chunks.element_bytes :], *inputs[1:]])
    elements = ChunkedElements(chunks, inputs[0][: chunks.element_bytes])
    at = other_at = 0
    for n_other, first, count in chunks.runs:
        pieces = chain([other[other_at : other_at + n_other].data], map(elements.stored, range(first, first + count)))
        other_at += n_other
        for piece in pieces:
            n = min(len(piece), len(made) - at)
            made[at : at + n] = np.frombuffer(piece[:n], np.uint8)
            at += n
            if n < len(piece):
                return  # digests tell that the result is longer
    made[at:] = 0


def most_stored_bytes(n_bytes: int) -> int:
    """Return the most bytes that a chunk of a size takes: DEFLATE adds five bytes to some thousands at most."""
    return n_bytes + (n_bytes >> 8) + 1024


def fletcher32(data: Buffer) -> int:
    """Return the checksum that HDF5's filter writes: of 16-bit words, high byte first."""
    raw = np.frombuffer(data, np.uint8)
    n_words = -(-len(raw) // 2)
    first = second = n_left = 0
    n_left = n_words
    for at in range(0, n_words, _BLOCK_WORDS):
        block = raw[2 * at : 2 * (at + _BLOCK_WORDS)]
        if len(block) % 2:
            block = np.append(block, np.uint8(0))
        words = block.view(">u2").astype(np.uint64)
        total = int(words.sum())
        weighted = int((words * np.arange(len(words), dtype=np.uint64)).sum())
        first += total
        second += n_left * total - weighted
        n_left -= len(words)
    return _folded(second) << 16 | _folded(first)


def _folded(total: int) -> int:
    """Return a sum of 16-bit words with the carries added at the low end."""
    return (total - 1) % 0xFFFF + 1 if total else 0


def _zlib_header(level: int) -> bytes:
    """Return the first two bytes of zlib's stream (RFC 1950)."""
    rank = 0 if level < 2 else 1 if level < 6 else 2 if level == 6 else 3
    head = 0x78 << 8 | rank << 6
    return (head + 31 - head % 31).to_bytes(2, "big")


def _plain(each: Any) -> Any:
    return list(each) if isinstance(each, tuple) else each
