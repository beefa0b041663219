"""Sources of a save's bytes. A save reads them twice: to hash them and, if they are new, to store them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.base.digest import DIGEST_BYTES, Digests, copy_and_digest, digest_all, digest_each, hex_of
from tensorcas_mlflow.base.dtypes import DType
from tensorcas_mlflow.base.tensors import Offsets, bytes_of, chunk_begins, chunk_counts, chunk_sizes, offsets_of
from tensorcas_mlflow.base.threads import Lazy
from tensorcas_mlflow.errors import ChunkNotFoundError, FencedError
from tensorcas_mlflow.layout.manifests import Columns, Row, Rows, Specs, row_cuts
from tensorcas_mlflow.layout.packs import Mask

_SMALL_BYTES = 4096
"""Copying arrays of at most this size costs less than viewing them."""
_MOST_KEPT_BYTES = 8 << 20
"""Bound of the copies of small arrays kept between hashing and storing."""
_GROUP_BYTES = 8 << 20
_GROUP_PIECES = 1 << 14
_WATCHED_BYTES = 64 << 20
"""Bytes hashed between two calls of the watcher."""

ReadRows = Callable[[Any, Any], list[Any]]
"""Returns the bytes of chunks, given their numbers over all rows and their rows."""
ReadStored = Callable[[Digests, int], memoryview]
"""Returns the bytes of a stored chunk, given its digest and its size."""
CountBytes = Callable[[int], None]
"""Called with the number of bytes processed since the last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Some chunks of a source and their bytes, one entry a chunk."""

    chunks: Any
    """Their numbers, counted over all rows, ascending."""
    rows: Any
    """The row of each."""
    data: list[Any]
    """Their bytes: a buffer each. In a live source, any buffer that is not of type bytes may still change."""
    digests: Digests
    itemsizes: Any
    """Size of an element of each, for codecs; 1 for text."""
    begins_row: Any
    """Flags of the chunks: True for the first of its row among all requested ones."""
    are_hashed: bool = False
    """True if ``data`` are the very bytes that were hashed, and nobody can have changed them since."""

    def some(self, part: slice) -> Pieces:
        """Return neighbours among these chunks."""
        if part == slice(0, len(self.data)):
            return self
        return Pieces(
            chunks=self.chunks[part],
            rows=self.rows[part],
            data=self.data[part],
            digests=self.digests[part],
            itemsizes=self.itemsizes[part],
            begins_row=self.begins_row[part],
            are_hashed=self.are_hashed,
        )


class Words(NamedTuple):
    """Sketches of some rows."""

    rows: Any
    """Their numbers, ascending."""
    words: Any
    """The words of each, shape ``(n, 32)``; 0 for a word that is not known."""


class Moves(NamedTuple):
    """Chunks of an earlier version of a row, one for each of the row's chunks."""

    digests: Digests
    sizes: Offsets
    """Their sizes; 0 for a chunk without one."""
    offsets: Offsets
    """The places in them where the row's chunks are likely to begin."""


class Source(ABC):
    """The rows of one checkpoint or file, and their bytes."""

    rows: Sequence[Row]
    sizes: Offsets
    """Sizes of the chunks of all rows, one after the other."""
    is_live: bool = False
    """True if the bytes may have changed after hashing; if so, they are hashed again before they are stored."""
    first_row: int | None = None
    """Number of the first row in its file; None if names alone identify rows."""
    known_words: Sequence[Words] = ()
    """Sketches of rows whose bytes are not here any more."""
    inputs: frozenset[int] = frozenset()
    """Numbers of the rows that derived rows are made of, and that are no part of the checkpoint or file. In a whole
    file they are the last ones."""
    derived: Mapping[int, Any] = MappingProxyType({})
    """Rows found to be derived (`Derived`) when their bytes were here, by the number of the row."""
    carried: frozenset[str] = frozenset()
    """Names of the rows that have the cuts of an earlier checkpoint; all other cuts were given."""
    moves: Mapping[int, Moves] = MappingProxyType({})
    """Rows cut where the chunks of an earlier version end, by the number of the row."""

    @Lazy
    def columns(self) -> Columns:
        """The rows, column by column."""
        return self.rows.columns if isinstance(self.rows, Rows) else Columns.of_rows(self.rows)

    @property
    def content(self) -> Sequence[Row]:
        """The rows of the checkpoint or whole file."""
        return self.rows[: len(self.rows) - len(self.inputs)]

    def origin(self, row: int) -> str | None:
        """Return the owner of a row's bytes, if the owner may change them meanwhile; None if nobody else has them."""
        return f"tensor {self.columns.name(row)!r}" if self.is_live else None

    @Lazy
    def itemsizes(self) -> Any:
        """Size of an element of each row, for codecs; 1 for text."""
        return self.columns.codec_itemsizes

    def pieces(self, chunks: Any, *, most_bytes: int = _GROUP_BYTES, most: int = _GROUP_PIECES) -> Iterator[Pieces]:
        """Yield chunks again, many at a time.

        Args:
            chunks: Ascending numbers, counted over all rows.
            most_bytes: Maximum bytes of one group, unless it is a single chunk.
            most: Maximum number of chunks of one group.
        """
        chunks = np.asarray(chunks, dtype=np.int64)
        rows = self.columns.rows_of(chunks)
        itemsizes = self.itemsizes[rows]
        begins_row = np.empty(len(rows), dtype=bool)
        begins_row[:1] = True
        np.not_equal(rows[1:], rows[:-1], out=begins_row[1:])
        data_of = self._reader()
        for begin, end in pairwise(_borders(self.sizes[chunks], most_bytes, most)):
            part = slice(begin, end)
            yield Pieces(
                chunks=chunks[part],
                rows=rows[part],
                data=data_of(chunks[part], rows[part]),
                digests=self.columns.digests[chunks[part]],
                itemsizes=itemsizes[part],
                begins_row=begins_row[part],
                are_hashed=self._keeps(rows[part]),
            )

    def holds(self, chunks: Any) -> Mask:
        """Return for some chunks whether their bytes are here."""
        return np.ones(len(chunks), dtype=bool)

    def whole(self, row: int) -> memoryview:
        """Return the bytes of a row; all of them are here."""
        chunks = self.columns.chunks_of(np.array([row]))
        return memoryview(b"".join([data for some in self.pieces(chunks) for data in some.data]))

    def _keeps(self, rows: Any) -> bool:
        """Return whether the bytes of some rows have been kept since hashing."""
        return False

    @abstractmethod
    def _reader(self) -> ReadRows:
        """Return a reader of chunks, asked for in their order; it need not keep its results."""


def _digest_watched(pieces: list[memoryview], *, watch: CountBytes) -> Digests:
    """Hash buffers like `digest_all`, and report progress after every batch."""
    stops = np.cumsum([0, *(piece.nbytes for piece in pieces)])
    parts = [np.empty((0, DIGEST_BYTES), dtype=np.uint8)]
    begin = 0
    while begin < len(pieces):
        end = max(begin + 1, int(np.searchsorted(stops, stops[begin] + _WATCHED_BYTES, side="right")) - 1)
        parts.append(digest_all(pieces[begin:end]))
        watch(int(stops[end] - stops[begin]))
        begin = end
    return np.concatenate(parts)


_MAX_LAYOUTS = 16
_MAX_LAYOUT_ROWS = 4096
_Layout = tuple[Specs, Any, Offsets, Any]
Carried = Mapping[str, Offsets]
"""The cuts of an earlier checkpoint, in bytes, by the names of its rows."""
_layouts: dict[Any, _Layout] = {}
"""Recent layouts of arrays without cuts, by everything they are made of: the steps of a training share one."""


def _lay_out(
    tensors: Mapping[str, Array], cuts: Mapping[str, Sequence[int]], chunk_bytes: int, carried: Carried
) -> tuple[Specs, list[Array], Any, Offsets, Any]:
    """Describe arrays and cut them into chunks; see `TensorSource`.

    Returns:
        Their specs; the arrays; their cuts in bytes, if there are any; the number of the first chunk of each, and that
        of all chunks; and the sizes of all chunks.
    """
    names = list(tensors)
    arrays = [np.asarray(array) for array in tensors.values()]
    if cuts or carried or len(names) > _MAX_LAYOUT_ROWS:
        specs, at_bytes, chunk_at, sizes = _new_layout(names, arrays, cuts, chunk_bytes, carried)
        return specs, arrays, at_bytes, chunk_at, sizes
    key = (chunk_bytes, *names, *[array.dtype for array in arrays], *[array.shape for array in arrays])
    layout = _layouts.get(key)
    if layout is None:
        layout = _new_layout(names, arrays, cuts, chunk_bytes, carried)
        specs = layout[0]
        assert specs.have_names_of_their_own  # computed once, like the columns below: the later steps share it
        kept = (specs.names.at, specs.dtype, specs.shape_offsets, specs.sides, specs.codec_itemsizes, specs.is_tensor)
        for each in (*kept, *layout[2:]):
            each.setflags(write=False)
        if len(_layouts) >= _MAX_LAYOUTS:
            _layouts.clear()
        _layouts[key] = layout
    specs, at_bytes, chunk_at, sizes = layout
    return specs, arrays, at_bytes, chunk_at, sizes


def _new_layout(
    names: list[str], arrays: list[Array], cuts: Mapping[str, Sequence[int]], chunk_bytes: int, carried: Carried
) -> _Layout:
    unknown = cuts.keys() - set(names)
    if unknown:
        raise ValueError(f"there are cuts for missing tensors: {sorted(unknown)}")
    specs = Specs.of_arrays(names, arrays)
    at_bytes = None
    if cuts or carried:
        rows: list[Any] = [None] * len(names)
        for name, given in cuts.items():
            row = names.index(name)
            rows[row] = _byte_cuts(specs, row, given)
        for name, at in carried.items():
            rows[names.index(name)] = at
        at_bytes = row_cuts(rows)
    chunk_at = offsets_of(chunk_counts(specs.n_bytes, chunk_bytes, at_bytes))
    return specs, at_bytes, chunk_at, chunk_sizes(specs.n_bytes, chunk_bytes, at_bytes)


class TensorSource(Source):
    """Arrays in memory. They are viewed, not copied, if they are in C order and not small."""

    is_live = True

    def __init__(
        self,
        tensors: Mapping[str, Array],
        cuts: Mapping[str, Sequence[int]],
        chunk_bytes: int,
        *,
        watch: CountBytes | None = None,
        carried: Carried = MappingProxyType({}),
    ) -> None:
        """Hash all arrays.

        Args:
            tensors: The arrays by name.
            cuts: For some of them, row numbers of axis 0 at which a chunk ends (see `Adapter.cuts`).
            chunk_bytes: The store's chunk size.
            watch: Called with progress now and then; it may not cover all bytes.
            carried: See `Store.carried`; for arrays without cuts.

        Raises:
            ValueError: A name or dtype cannot be stored, or cuts are not such row numbers.
        """
        specs, self._arrays, at_bytes, chunk_at, self.sizes = _lay_out(tensors, cuts, chunk_bytes, carried)
        self.carried = frozenset(carried)
        self._ends = chunk_begins(self.sizes, chunk_at) + self.sizes
        self._is_small = (specs.n_bytes <= _SMALL_BYTES) & (chunk_at[1:] - chunk_at[:-1] == 1)
        self._kept: memoryview | None = None
        """The hashed copies of small arrays, one after the other; None if there are many."""
        self._kept_ends = offsets_of(np.where(self._is_small, specs.n_bytes, 0))[1:]
        """For each row the end of its copy."""
        hash_all = digest_all if watch is None else partial(_digest_watched, watch=watch)
        digests = self._hash(chunk_at, hash_all, keeps=int(specs.n_bytes[self._is_small].sum()) <= _MOST_KEPT_BYTES)
        self.rows = Rows(Columns.of_specs(specs, chunk_at=chunk_at, digests=digests, cuts=at_bytes))

    def _hash(self, chunk_at: Offsets, hash_all: Callable[[list[memoryview]], Digests], *, keeps: bool) -> Digests:
        digests = np.empty((len(self.sizes), DIGEST_BYTES), dtype=np.uint8)
        small = self._is_small.nonzero()[0]
        arrays = [self._arrays[row] for row in small.tolist()]
        if keeps:
            chunks = chunk_at[small]
            area, _, digests[chunks] = copy_and_digest(arrays, np.arange(len(arrays) + 1), self.sizes[chunks])
            self._kept = area.data
        else:
            digests[chunk_at[small]] = digest_each(array.tobytes() for array in arrays)
        # Other arrays in C order are hashed together, so many cost one call. The rest are copied, hashed one by one,
        # and the copies are dropped.
        together: list[int] = []
        pieces: list[memoryview] = []
        for row in (~self._is_small & (chunk_at[1:] > chunk_at[:-1])).nonzero()[0].tolist():
            numbers = range(int(chunk_at[row]), int(chunk_at[row + 1]))
            mine = self._cut(bytes_of(self._arrays[row]), numbers)
            if self._arrays[row].flags.c_contiguous:
                together += numbers
                pieces += mine
            else:
                digests[numbers.start : numbers.stop] = hash_all(mine)
        digests[together] = hash_all(pieces)
        return digests

    def whole(self, row: int) -> memoryview:
        return bytes_of(self._arrays[row])

    def elements(self, rows: Any, at: Any, dtype: DType) -> Any:
        """Return elements of arrays.

        Args:
            rows: Numbers of rows of one dtype.
            at: For each row the positions of some elements in C order.
            dtype: The dtype.
        """
        taken = np.empty(at.shape, dtype)
        for out, row, places in zip(taken, rows.tolist(), at, strict=True):
            array = self._arrays[row]
            if array.flags.c_contiguous:
                array.take(places, None, out, "clip")  # with "raise", numpy copies the result once more
            else:
                out[:] = array[np.unravel_index(places, array.shape)]
        return taken

    def _small(self, rows: Any) -> list[Any]:
        if self._kept is None:
            return [self._arrays[row].tobytes() for row in rows.tolist()]
        ends = self._kept_ends[rows]
        begins = ends - self.columns.n_bytes[rows]
        return [self._kept[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]

    def _cut(self, data: memoryview, chunks: Sequence[int]) -> list[memoryview]:
        """Cut some consecutive chunks out of the bytes of their row."""
        ends = self._ends[chunks[0] : chunks[-1] + 1].tolist()
        begins = [ends[0] - int(self.sizes[chunks[0]]), *ends[:-1]]
        return [data[begin:end] for begin, end in zip(begins, ends, strict=True)]

    def _keeps(self, rows: Any) -> bool:
        return self._kept is not None and bool(self._is_small[rows].all())

    def _reader(self) -> ReadRows:
        copied: tuple[int, Any] = (-1, None)

        def data_of(chunks: Any, rows: Any) -> list[Any]:
            nonlocal copied
            is_small = self._is_small[rows]
            if is_small.all():
                return self._small(rows)
            small = iter(self._small(rows[is_small]))
            pieces: list[Any] = []
            for row, end, size in zip(
                rows.tolist(), self._ends[chunks].tolist(), self.sizes[chunks].tolist(), strict=True
            ):
                array = self._arrays[row]
                if self._is_small[row]:
                    pieces.append(next(small))
                    continue
                if array.flags.c_contiguous:
                    pieces.append(bytes_of(array)[end - size : end])
                    continue
                # Copied once for all its chunks, and kept by none of them.
                if copied[0] != row:
                    copied = row, bytes_of(array)
                pieces.append(bytes(copied[1][end - size : end]))
            return pieces

        return data_of


class TensorCopy(Source):
    """Copies of arrays, for a save that begins later: the caller may change the arrays at once.

    One pass copies and hashes them. A chunk that has not changed since an earlier copy is not copied again: if that
    copy is stored, so is the chunk, and otherwise this copy reads the chunk from the earlier one.
    """

    def __init__(
        self,
        tensors: Mapping[str, Array],
        cuts: Mapping[str, Sequence[int]],
        chunk_bytes: int,
        *,
        before: TensorCopy | None = None,
        read: ReadStored | None = None,
        carried: Carried = MappingProxyType({}),
    ) -> None:
        """Copy and hash all arrays; see `TensorSource` for the other arguments and the errors.

        Args:
            before: A copy of the state before; if it is stored already, its checkpoint must still exist.
            read: Reads a chunk of that checkpoint that no pack holds on which a save may rely, such as one that a
                collector is about to delete. None if there is no such reader.
            carried: See `TensorSource`.
        """
        specs, arrays, at_bytes, chunk_at, self.sizes = _lay_out(tensors, cuts, chunk_bytes, carried)
        self.carried = frozenset(carried)
        if before is not None and not np.array_equal(before.sizes, self.sizes):
            before = None
        known = None if before is None else before.columns.digests
        self._area, self._is_copied, digests = copy_and_digest(arrays, chunk_at, self.sizes, known=known)
        self._begins = offsets_of(self.sizes)[:-1]
        self._before = before
        self._read = read
        self.n_copied_bytes = int(self.sizes[self._is_copied].sum())
        """Memory of the copies, until they are stored."""
        self.is_stored = False
        """True if a checkpoint with all chunks has been committed."""
        self.stored_at: tuple[int, ...] | None = None
        """`Catalog.doubts` before that save; None if unknown."""
        self.rows = Rows(Columns.of_specs(specs, chunk_at=chunk_at, digests=digests, cuts=at_bytes))

    def note_stored(self, doubts: tuple[int, ...] | None = None, *, derived: Sequence[int] = ()) -> None:
        """Free the copies, except those of derived rows: a checkpoint with all other chunks has been committed.

        Args:
            doubts: Those of the catalog before the save; None if unknown.
            derived: Numbers of the derived rows. Their chunks are not stored, and a later copy may need them.
        """
        chunks = self.columns.chunks_of(np.array(derived, dtype=np.int64))
        kept = chunks[self.holds(chunks)]
        area = np.frombuffer(b"".join([self._piece(chunk) for chunk in kept.tolist()]), dtype=np.uint8)
        self.is_stored = True
        self.stored_at = doubts
        self._is_copied = np.zeros(len(self.sizes), dtype=bool)
        self._is_copied[kept] = True
        self._begins[kept] = offsets_of(self.sizes[kept])[:-1]
        self._area = area
        self._before = None

    @property
    def stored_digests(self) -> Digests:
        """The digests of the chunks that the store holds, or that a save stores."""
        digests = self.columns.digests
        return digests[~self._is_copied] if self.is_stored else digests

    def holds(self, chunks: Any) -> Mask:
        is_here: Mask = self._is_copied[chunks]
        return is_here if self._before is None else is_here | self._before.holds(chunks)

    def _keeps(self, rows: Any) -> bool:
        return True

    def _reader(self) -> ReadRows:
        return lambda chunks, _rows: [self._piece(chunk) for chunk in chunks.tolist()]

    def _piece(self, chunk: int) -> memoryview:
        if self._is_copied[chunk]:
            begin = int(self._begins[chunk])
            piece: memoryview = self._area.data[begin : begin + int(self.sizes[chunk])]
            return piece
        if self._before is not None:
            return self._before._piece(chunk)
        # The chunk was stored when the state was copied.
        if self._read is not None:
            with suppress(ChunkNotFoundError):
                return self._read(self.columns.digests[chunk : chunk + 1], int(self.sizes[chunk]))
        raise FencedError(1)  # its checkpoint was dropped and collected since


class NoSource(Source):
    """A manifest with all chunks stored already and no bytes of its own."""

    def __init__(self, rows: Sequence[Row], chunk_bytes: int, read: ReadStored | None = None) -> None:
        """Describe the rows.

        Args:
            rows: The rows of the manifest.
            chunk_bytes: Its chunk size.
            read: Reads a chunk that no pack holds on which a save may rely; None if there is no such reader.
        """
        self.rows = rows
        self._read = read
        # Without rows no column is built: Arrow would import more than a program may want.
        self.sizes = self.columns.chunk_sizes(chunk_bytes) if len(rows) else np.empty(0, dtype=np.int64)

    def holds(self, chunks: Any) -> Mask:
        return np.zeros(len(chunks), dtype=bool)

    def _reader(self) -> ReadRows:
        def elsewhere(chunks: Any, _rows: Any) -> list[Any]:
            digests, read = self.columns.digests, self._read
            if read is None:
                raise ChunkNotFoundError(hex_of(digests[chunks[0]]), len(chunks))
            return [read(digests[chunk : chunk + 1], int(self.sizes[chunk])) for chunk in chunks.tolist()]

        return elsewhere


def _byte_cuts(specs: Specs, row: int, cuts: Sequence[int]) -> Any:
    """Convert row numbers of axis 0 to byte offsets; None, or a single cut at the end, is the fixed grid."""
    if specs.n_bytes[row] == 0 or len(cuts) == 0:
        return None
    shape = specs.shape(row)
    n_rows = shape[0] if shape else 0
    at = np.asarray(cuts, dtype=np.int64)
    if at.ndim != 1 or at[0] <= 0 or (np.diff(at) <= 0).any() or at[-1] != n_rows:
        raise ValueError(f"cuts of {specs.name(row)!r} must be ascending row numbers, the last one its {n_rows} rows")
    return None if len(at) == 1 else at * (int(specs.n_bytes[row]) // n_rows)


def _borders(sizes: Any, most_bytes: int, most: int) -> list[int]:
    """Split chunks, given by their sizes, into groups of neighbours; return each start and, last, the end of all."""
    if not len(sizes):
        return []
    ends = sizes.cumsum()
    if ends[-1] <= most_bytes and len(sizes) <= most:
        return [0, len(sizes)]
    borders = [0]
    while (begin := borders[-1]) < len(sizes):
        before = int(ends[begin - 1]) if begin else 0
        end = int(np.searchsorted(ends, before + most_bytes, side="right"))
        borders.append(min(max(end, begin + 1), begin + most))
    return borders
