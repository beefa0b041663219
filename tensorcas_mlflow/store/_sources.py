"""Where the bytes of a save come from. They are asked for twice: to hash them and, if new, to store them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import Any

import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.chunking import chunk_ends
from tensorcas_mlflow.digest import DIGEST_BYTES, Digests, digest_all
from tensorcas_mlflow.errors import ChunkNotFoundError, FencedError
from tensorcas_mlflow.manifest import Columns, Row, Rows
from tensorcas_mlflow.tensor import Spec, bytes_of, pieces_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Some chunks of a source and their bytes, one entry a chunk."""

    chunks: Any
    """Their numbers, counted over all rows, ascending."""
    rows: Any
    """Of which row each is."""
    data: list[Any]
    """Their bytes: a buffer each."""
    digests: Digests
    itemsizes: Any
    """Size of an element of each, for codecs; 1 for text."""
    begins_row: Any
    """Whether each is the first of its row among all that were asked for."""


class Source(ABC):
    """The rows of one checkpoint or file, and their bytes."""

    rows: Sequence[Row]
    sizes: Any
    """Sizes of the chunks of all rows, one after the other: an int64 array."""
    is_live: bool = False
    """Whether the bytes may have been changed since they were hashed: then whoever stores them hashes them again."""

    @cached_property
    def columns(self) -> Columns:
        """The rows, column by column."""
        return self.rows.columns if isinstance(self.rows, Rows) else Columns.of(self.rows)

    @abstractmethod
    def chunks(self, row: int, wanted: Sequence[int]) -> Iterator[Any]:
        """Yield some chunks of a row again, by their ascending numbers in it; one at a time need be held."""

    @abstractmethod
    def origin(self, row: int) -> str | None:
        """Name whose bytes a row's are, if somebody may change them meanwhile; None if nobody else has them."""

    def itemsize(self, row: int) -> int:
        """Size of a row's elements, for codecs; 1 for text."""
        spec = self.rows[row].spec
        return 1 if spec.dtype is None or spec.dtype[0] in "SU" else spec.numpy_dtype.itemsize

    def by_row(self, chunks: Any) -> Iterator[tuple[int, Any]]:
        """Split chunks, given by ascending numbers over all rows, into rows and the chunks' numbers in each."""
        counts = np.array([len(row.digests) for row in self.rows], dtype=np.int64)
        row_begin = counts.cumsum() - counts
        row_of = np.repeat(np.arange(len(counts)), counts)[chunks]
        borders = [*np.flatnonzero(np.diff(row_of, prepend=-1)).tolist(), len(chunks)]
        for begin, end in pairwise(borders):
            row = int(row_of[begin])
            yield row, chunks[begin:end] - row_begin[row]

    def pieces(self, chunks: Any, *, most_bytes: int, most: int) -> Iterator[Pieces]:
        """Yield chunks again, many at a time.

        Args:
            chunks: Which: ascending numbers, counted over all rows.
            most_bytes: How many bytes are given together at most, unless it is a single chunk.
            most: How many chunks are given together at most.
        """
        rows = self.columns.rows_of(chunks)
        begins_row = np.diff(rows, prepend=-1) != 0
        itemsizes = np.array([self.itemsize(row) for row in rows.tolist()], dtype=np.int64)
        data = (piece for row, wanted in self.by_row(chunks) for piece in self.chunks(row, wanted.tolist()))
        ends = np.cumsum(self.sizes[chunks])
        begin = 0
        while begin < len(chunks):
            before = int(ends[begin - 1]) if begin else 0
            end = min(max(int(np.searchsorted(ends, before + most_bytes, side="right")), begin + 1), begin + most)
            end = min(end, len(chunks))
            part = slice(begin, end)
            yield Pieces(
                chunks=chunks[part],
                rows=rows[part],
                data=list(islice(data, end - begin)),
                digests=self.columns.digests[chunks[part]],
                itemsizes=itemsizes[part],
                begins_row=begins_row[part],
            )
            begin = end

    def detached(self, chunks: Any) -> Source:
        """Copy some chunks, given by ascending numbers over all rows, so that this source's own bytes may change."""
        return _CopiedSource(self, chunks)


class _CopiedSource(Source):
    """Some chunks of another source, copied."""

    def __init__(self, source: Source, chunks: Any) -> None:
        self.rows = source.rows
        self.sizes = source.sizes
        # The bytes may have been changed between hashing and copying.
        self.is_live = source.is_live
        self._origins = [source.origin(row) for row in range(len(self.rows))]
        self._copies = {
            (row, number): bytes(piece)
            for row, wanted in source.by_row(chunks)
            for number, piece in zip(wanted.tolist(), source.chunks(row, wanted.tolist()), strict=True)
        }

    def chunks(self, row: int, wanted: Sequence[int]) -> Iterator[Any]:
        for number in wanted:
            if (row, number) not in self._copies:
                # A chunk that was there when the save began: a collector gave the save up and deleted it.
                raise FencedError(1)
            yield self._copies[row, number]

    def origin(self, row: int) -> str | None:
        return self._origins[row]


class TensorSource(Source):
    """Arrays in memory. They are viewed, not copied, where they lie in C order."""

    is_live = True

    def __init__(self, tensors: Mapping[str, Array], cuts: Mapping[str, Sequence[int]], chunk_bytes: int) -> None:
        """Hash all arrays.

        Args:
            tensors: The arrays by name.
            cuts: For some of them, row numbers of axis 0 at which a chunk ends (see `Adapter.cuts`).
            chunk_bytes: The store's chunk size.

        Raises:
            ValueError: A name or dtype cannot be stored, or cuts are not such row numbers.
        """
        unknown = cuts.keys() - tensors.keys()
        if unknown:
            raise ValueError(f"there are cuts for tensors that are not there: {sorted(unknown)}")
        self._arrays = [np.asarray(array) for array in tensors.values()]
        self._chunk_bytes = chunk_bytes
        specs = [Spec.of(name, array) for name, array in zip(tensors, self._arrays, strict=True)]
        all_cuts = [_byte_cuts(spec, cuts.get(spec.name)) for spec in specs]
        ends = [chunk_ends(spec.n_bytes, chunk_bytes, cut) for spec, cut in zip(specs, all_cuts, strict=True)]
        digests = self._hash(ends)
        self.sizes = chunk_sizes(ends)
        self.rows = [
            Row(spec=spec, cuts=cut, digests=part) for spec, cut, part in zip(specs, all_cuts, digests, strict=True)
        ]

    def _hash(self, ends: Sequence[Any]) -> list[Digests]:
        # Arrays in C order are hashed together, so that many small ones cost one call. Others are copied, so they
        # are hashed one by one and the copy is dropped.
        out: list[Digests] = [np.empty((0, DIGEST_BYTES), np.uint8)] * len(ends)
        together: list[int] = []
        pieces: list[memoryview] = []
        for at, array in enumerate(self._arrays):
            if array.flags.c_contiguous:
                together.append(at)
                pieces.extend(pieces_of(bytes_of(array), ends[at]))
            else:
                out[at] = digest_all(pieces_of(bytes_of(array), ends[at]))
        flat = digest_all(pieces)
        begin = 0
        for at in together:
            out[at] = flat[begin : begin + len(ends[at])]
            begin += len(ends[at])
        return out

    def chunks(self, row: int, wanted: Sequence[int]) -> Iterator[Any]:
        pieces = pieces_of(bytes_of(self._arrays[row]), self.rows[row].ends(self._chunk_bytes))
        for number in wanted:
            yield pieces[number]

    def origin(self, row: int) -> str | None:
        return f"tensor {self.rows[row].spec.name!r}"


class NoSource(Source):
    """A manifest whose chunks are all stored already, and whose bytes are nowhere else."""

    def __init__(self, rows: Sequence[Row], chunk_bytes: int) -> None:
        self.rows = rows
        self.sizes = chunk_sizes([row.ends(chunk_bytes) for row in rows])

    def chunks(self, row: int, wanted: Sequence[int]) -> Iterator[Any]:
        raise ChunkNotFoundError(self.rows[row].digests[wanted[0]].tobytes().hex(), len(wanted))

    def origin(self, row: int) -> str | None:
        return None


def chunk_sizes(ends: Sequence[Any]) -> Any:
    """Give the sizes of chunks, from where they end in each row."""
    if not ends:
        return np.empty(0, dtype=np.int64)
    flat = np.concatenate(ends)
    starts = np.concatenate([[0], flat[:-1]]) if len(flat) else flat
    first = np.cumsum([0, *map(len, ends[:-1])])
    starts[first[first < len(flat)]] = 0
    return flat - starts


def _byte_cuts(spec: Spec, cuts: Sequence[int] | None) -> Any:
    """Turn row numbers of axis 0 into byte offsets; None, or a single cut at the end, is the fixed grid."""
    if cuts is None or spec.n_bytes == 0 or len(cuts) == 0:
        return None
    n_rows = spec.shape[0] if spec.shape else 0
    at = np.asarray(cuts, dtype=np.int64)
    if at.ndim != 1 or at[0] <= 0 or (np.diff(at) <= 0).any() or at[-1] != n_rows:
        raise ValueError(f"cuts of {spec.name!r} must be ascending row numbers, the last one its {n_rows} rows")
    return None if len(at) == 1 else at * (spec.n_bytes // n_rows)
