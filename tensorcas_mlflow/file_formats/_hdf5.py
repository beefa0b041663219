"""HDF5 files, the weights of Keras among them.

`split_hdf5` reads a file forward. HDF5 has pointers in both directions: a group's names may stand behind its data sets.
So the splitter does not follow pointers from the root. It searches each stretch between tensors for the headers of data
sets, which libraries write before the elements, and announces the elements where a header says that they are. It keeps
the stretches. At the end it walks the groups in them, and says the names.

A data set whose elements lie before its header stays part of a stretch; so do chunks whose index lies behind them.
"""

from __future__ import annotations

import heapq
import math
import re
import struct
from bisect import bisect_right
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.base.tensors import DEFAULT_CHUNK_BYTES, bytes_of
from tensorcas_mlflow.errors import CorruptError, FormatError
from tensorcas_mlflow.file_formats._hdf5_chunks import find_chunks
from tensorcas_mlflow.file_formats._hdf5_file import NOWHERE, Hdf5File, UnknownTypeError, user_block
from tensorcas_mlflow.file_formats._hdf5_filters import UnfilteredSource
from tensorcas_mlflow.file_formats._hdf5_groups import walk
from tensorcas_mlflow.file_formats._hdf5_headers import Chunks, DataSet, read_data_set, read_messages
from tensorcas_mlflow.file_formats._hdf5_stretches import Stretch, may_derive, plan_stretch, take_apart
from tensorcas_mlflow.file_formats._hdf5_trees import Node, read_node
from tensorcas_mlflow.file_formats._headers import name_or_none
from tensorcas_mlflow.file_formats._listing import Listing, LocationTable, record_fields
from tensorcas_mlflow.file_formats._source import ByteSource
from tensorcas_mlflow.file_formats._tape import (
    MAX_PEEK_BYTES,
    MIN_TENSOR_BYTES,
    UNREADABLE,
    DerivedBytes,
    FilePart,
    Learned,
    PlainBytes,
    Skeleton,
    Tape,
    Tensor,
)

_HEAD_BYTES = 4096
_WINDOW_BYTES = 256 << 10
_AHEAD_BYTES = 64 << 10
"""Bytes behind a window in which a header that begins in the window may go on."""
_FREE_AHEAD_BYTES = MAX_PEEK_BYTES
"""Bytes that looks ahead for an index of chunks may read. An index may lie between the chunks."""
_MAX_NODES = 1 << 14
_MAX_KEPT_BYTES = 32 << 20
"""Bytes between tensors that are kept until the end; with more, some tensors have no names."""
_MAX_FALSE = 50_000
"""Stretches that look like a header and are none, or a group's."""
_MAX_PENDING = 1 << 17
_MIN_CUT_BYTES = 64 << 10

# A header of version 1: the version, the number of messages, of references, and of bytes, and padding. A header of
# version 2. Blocks of an index of chunks.
_STRUCTURE = re.compile(
    rb"\x01\x00[\x00-\xff][\x00\x01][\x01-\xff]\x00{3}[\x00-\xff]{2}[\x00-\x0f]\x00{5}"
    rb"|OHDR\x02|TREE\x01|FADB\x00|EA[ID]B\x00"
)
_STRUCTURE_BYTES = 16
_MIN_PLAIN_BYTES = 64 << 10
_STRUCTURE_EVERY_BYTES = 16 << 10
"""A long stretch with fewer structures has elements, which no index before them announces."""
_IN_STRUCTURES = bytes(3)
"""Bytes of each structure: its numbers have 8 bytes and are small. Compressed elements mostly lack them."""


def is_hdf5(head: memoryview) -> bool:
    """Recognise an HDF5 file by its signature, perhaps behind a user block."""
    return user_block(head) is not None


# --- as the file passes by


class _Pending(NamedTuple):
    """Elements that come later."""

    start: int
    n_bytes: int
    data_set: DataSet
    first_row: int | None
    """First row of chunks that are rows of the tensor; None for other chunks, 0 for contiguous elements."""
    stretch: Stretch | None = None
    """The chunks, if a function may make them of the tensor."""


def split_hdf5(tape: Tape) -> Iterator[FilePart | Learned]:
    """Announce the data sets that lie behind their headers, and at the end what they are called.

    Raises:
        FormatError: The superblock is malformed, or too much of the file looks like headers and is none.
    """
    yield from _Passing(tape).parts()


class _Passing:
    """One file as it passes by."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._kept_at: list[int] = []
        self._kept: list[bytearray] = []
        self._n_kept_bytes = 0
        self._window = memoryview(b"")
        self._pending: list[tuple[int, int, int, _Pending]] = []
        self._n_noted = 0
        self._n_false = 0
        self._n_ahead_bytes = 0
        self._n_known_bytes = 0
        self._trees: dict[int, DataSet] = {}
        """Data sets by the positions of nodes of their indexes that come later."""
        self._arrays: dict[int, DataSet] = {}
        """Data sets by the addresses of the arrays of their chunks."""
        self._announced: dict[str, tuple[DataSet, Tensor, int | None]] = {}
        self._file = Hdf5File(self._read, tape.peek(_HEAD_BYTES), lambda: self._n_known_bytes)

    def parts(self) -> Iterator[FilePart | Learned]:
        while not self._tape.is_at_end():
            at = self._tape.position
            while self._pending and self._pending[0][0] < at:
                heapq.heappop(self._pending)
            if self._pending and self._pending[0][0] == at:
                yield from self._elements(heapq.heappop(self._pending)[3])
            else:
                yield self._stretch(at)
        yield from self._names()

    # --- between data sets

    def _stretch(self, at: int) -> Skeleton | PlainBytes:
        """Announce bytes up to the next elements, and search them for headers."""
        self._window = window = self._tape.peek(_WINDOW_BYTES + _AHEAD_BYTES)
        self._n_known_bytes = max(self._n_known_bytes, at + len(window))
        stop = self._until_elements(at, min(len(window), _WINDOW_BYTES))
        may_hold = _IN_STRUCTURES in bytes(window[: stop + _STRUCTURE_BYTES])
        begin = n_found = 0
        while may_hold and (found := self._next_structure(window, begin, stop)) is not None:
            begin = found + 1
            n_found += 1
            self._note(at + found)
            stop = self._until_elements(at, stop)
        if may_hold:
            self._keep(at, window[:stop])
        self._window = memoryview(b"")
        is_plain = not may_hold or (stop >= _MIN_PLAIN_BYTES and stop > n_found * _STRUCTURE_EVERY_BYTES)
        return PlainBytes(n_bytes=stop) if is_plain else Skeleton(n_bytes=stop)

    def _next_structure(self, window: memoryview, begin: int, stop: int) -> int | None:
        """Find the next place that looks like a structure, from ``begin`` to ``stop``."""
        match = _STRUCTURE.search(window, begin, min(len(window), stop + _STRUCTURE_BYTES))
        return match.start() if match and match.start() < stop else None

    def _until_elements(self, at: int, stop: int) -> int:
        while self._pending and self._pending[0][0] <= at:
            heapq.heappop(self._pending)
        return min(stop, self._pending[0][0] - at) if self._pending else stop

    def _keep(self, at: int, data: memoryview) -> None:
        if self._n_kept_bytes + len(data) > _MAX_KEPT_BYTES:
            return
        self._n_kept_bytes += len(data)
        if self._kept and self._kept_at[-1] + len(self._kept[-1]) == at:
            self._kept[-1] += data
        else:
            self._kept_at.append(at)
            self._kept.append(bytearray(data))

    def _read(self, at: int, n_bytes: int) -> memoryview:
        begin = at - self._tape.position
        if 0 <= begin <= len(self._window) - n_bytes:
            return self._window[begin : begin + n_bytes]
        if 0 <= begin <= MAX_PEEK_BYTES - n_bytes and self._n_ahead_bytes <= _FREE_AHEAD_BYTES + 4 * at:
            self._n_ahead_bytes += begin + n_bytes - len(self._window)
            self._window = self._tape.peek(begin + n_bytes)
            if begin + n_bytes <= len(self._window):
                return self._window[begin:]
        nth = bisect_right(self._kept_at, at) - 1
        if nth >= 0:
            begin = at - self._kept_at[nth]
            if begin + n_bytes <= len(self._kept[nth]):
                return memoryview(bytes(memoryview(self._kept[nth])[begin : begin + n_bytes]))
        raise FormatError(f"the bytes from {at} to {at + n_bytes} have passed, or come later")

    # --- headers

    def _note(self, at: int) -> None:
        """Remember what a header of a data set or a block of an index leads to."""
        try:
            is_one = self._is_noted(at, bytes(self._read(at, 4)))
        except UNREADABLE:
            is_one = False
        self._n_false += not is_one
        if self._n_false > _MAX_FALSE:
            raise FormatError(f"it has more than {_MAX_FALSE} headers of nothing")

    def _is_noted(self, at: int, kind: bytes) -> bool:
        """Remember a structure; tell whether it was one."""
        address = at - self._file.base
        if kind == b"TREE":
            owner = self._trees.pop(at, None)
            if owner is not None:
                self._note_node(owner, address)
            return owner is not None
        if kind in (b"FADB", b"EAIB", b"EADB"):
            owner = self._arrays.get(struct.unpack("<Q", self._read(at + 6, 8))[0])
            if owner is not None:
                self._note_addresses(owner)
            return owner is not None
        messages = read_messages(self._file, address, is_partial=True)
        data_set = read_data_set(self._file, address, messages, is_partial=True)
        if data_set is None or (data_set.dtype is None and data_set.shape is None and not data_set.kind):
            return False
        if data_set.chunks is not None:
            self._note_layout(data_set, data_set.chunks)
        elif data_set.start is not None and data_set.n_bytes:
            self._await(data_set.start, data_set.n_bytes, data_set, 0)
        return True

    def _note_layout(self, data_set: DataSet, chunks: Chunks) -> None:
        if chunks.address == NOWHERE or data_set.shape is None or self._note_stretch(data_set, 0):
            return
        self._note_tensor(data_set, chunks)

    def _note_stretch(self, data_set: DataSet, first_chunk: int) -> bool:
        """Remember the next stretch of a data set that a function may make; tell whether there is one."""
        if not may_derive(data_set):
            return False
        try:
            places = find_chunks(self._file, data_set, is_partial=True)
        except FormatError:
            return False
        stretch = plan_stretch(data_set, places, first_chunk, self._tape.position - self._file.base)
        if stretch is not None:
            self._await(stretch.start, stretch.n_bytes, data_set, None, stretch)
        return stretch is not None

    def _note_tensor(self, data_set: DataSet, chunks: Chunks) -> None:
        """Remember the chunks of a data set that are the tensor, or parts of it."""
        if chunks.is_filtered:
            return
        if chunks.index == 0:
            self._note_node(data_set, chunks.address)
            return
        if chunks.index in (3, 4) and len(self._arrays) < _MAX_PENDING:
            self._arrays[chunks.address] = data_set
        self._note_addresses(data_set)

    def _note_addresses(self, data_set: DataSet) -> None:
        """Remember the chunks of an array of addresses, as far as it can be read yet."""
        chunks = data_set.chunks
        assert chunks is not None
        addresses = find_chunks(self._file, data_set, is_partial=True).addresses
        is_rows = _is_rows(data_set, chunks)
        flat = addresses.reshape(-1)
        ahead = np.flatnonzero(flat >= self._tape.position - self._file.base)
        order = ahead[np.argsort(flat[ahead], kind="stable")]
        starts = flat[order]
        breaks = np.diff(starts) != chunks.chunk_bytes
        if is_rows:
            breaks |= np.diff(order) != 1
        edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(order)]
        for begin, end in pairwise(edges if len(order) else []):
            first_row = int(order[begin]) * chunks.sides[0] if is_rows else None
            self._await(int(starts[begin]), (end - begin) * chunks.chunk_bytes, data_set, first_row)

    def _note_node(self, data_set: DataSet, address: int) -> None:
        """Remember the chunks of a tree, as far as it can be read yet."""
        chunks = data_set.chunks
        assert chunks is not None
        waiting = [address]
        for at in waiting:
            try:
                node = read_node(self._file, at, 1, 16 + 8 * len(chunks.sides))
            except FormatError:
                if self._file.base + at >= self._tape.position and len(self._trees) < _MAX_PENDING:
                    self._trees[self._file.base + at] = data_set
                continue
            if not node.level:
                self._note_leaf(data_set, chunks, node)
            elif len(waiting) < _MAX_NODES:
                waiting += node.children

    def _note_leaf(self, data_set: DataSet, chunks: Chunks, node: Node) -> None:
        """Remember the chunks of a node, those that follow each other as one stretch."""
        is_rows = _is_rows(data_set, chunks)
        begin = n_bytes = row = first_row = 0
        for key, start in zip(node.keys, node.children, strict=True):
            size, mask, own_row = struct.unpack_from("<IIQ", key)
            if size != chunks.chunk_bytes or mask:
                raise FormatError("a chunk has another size than its data set says")
            if n_bytes and start == begin + n_bytes and (not is_rows or own_row == row + chunks.sides[0]):
                n_bytes += size
            else:
                self._await(begin, n_bytes, data_set, first_row if is_rows else None)
                begin, n_bytes, first_row = start, size, own_row
            row = own_row
        self._await(begin, n_bytes, data_set, first_row if is_rows else None)

    def _await(
        self, start: int, n_bytes: int, data_set: DataSet, first_row: int | None, stretch: Stretch | None = None
    ) -> None:
        position = self._file.base + start
        if n_bytes and position >= self._tape.position and len(self._pending) < _MAX_PENDING:
            self._n_noted += 1
            pending = _Pending(position, n_bytes, data_set, first_row, stretch)
            # Of two stretches with one start the longer one comes first.
            heapq.heappush(self._pending, (position, -n_bytes, self._n_noted, pending))

    # --- elements

    def _elements(self, found: _Pending) -> Iterator[FilePart]:
        """Announce elements. Their dtype and name are said at the end, of all at once."""
        data_set, left = found.data_set, found.n_bytes
        chunks, wanted = data_set.chunks, data_set.wanted_bytes
        name = f"@{data_set.address}"
        if found.stretch is not None:
            yield from self._derived(data_set, found.stretch)
            return
        if chunks is None:
            if data_set.is_compact:
                self._keep(found.start, self._tape.peek(left))  # a part of the header, which is read again
            yield from self._tensor(name, data_set, left, 0 if left == wanted else None)
            return
        cuts = None
        if found.first_row is None or wanted is None or not data_set.shape:
            if chunks.chunk_bytes >= _MIN_CUT_BYTES and left % chunks.chunk_bytes == 0:
                cuts = range(chunks.chunk_bytes, left + 1, chunks.chunk_bytes)
            yield from self._tensor(f"{name}[{found.start}]", data_set, left, None, cuts)
            return
        # The last chunk has rows beyond the last one of the tensor.
        begin = found.first_row * (wanted // max(1, data_set.shape[0]))
        n_bytes = max(0, min(left, wanted - begin))
        yield from self._part_of_tensor(data_set, begin, n_bytes)
        if left > n_bytes:
            yield Skeleton(n_bytes=left - n_bytes)

    def _derived(self, data_set: DataSet, stretch: Stretch) -> Iterator[FilePart]:
        """Announce chunks as bytes that a function makes of a part of the tensor, or else as what they are."""
        assert data_set.chunks is not None
        assert data_set.dtype is not None
        data, at = self._tape.peek(stretch.n_bytes), self._tape.position
        content = take_apart(stretch, data) if len(data) == stretch.n_bytes else None
        if content is None:
            self._note_tensor(data_set, data_set.chunks)
            return
        self._window = data
        self._n_known_bytes = max(self._n_known_bytes, at + len(data))
        for begin, end in stretch.gaps:
            self._keep(at + begin, data[begin:end])
            while (place := self._next_structure(data, begin, end)) is not None:
                begin = place + 1
                self._note(at + place)
        self._window = memoryview(b"")
        yield DerivedBytes(
            n_bytes=stretch.n_bytes,
            function="hdf5_chunks",
            params=stretch.chunks.params(),
            content=Tape.over(content),
            parts=self._content_of(data_set, stretch),
        )
        if stretch.stop_chunk < math.prod(
            -(-side // step) for side, step in zip(data_set.shape or (), data_set.chunks.sides, strict=False)
        ) and not self._note_stretch(data_set, stretch.stop_chunk):
            self._note_tensor(data_set, data_set.chunks)

    def _content_of(self, data_set: DataSet, stretch: Stretch) -> Iterator[FilePart]:
        chunks, grid_rows = stretch.chunks, stretch.chunks.n_chunks // stretch.chunks.grid[0]
        assert data_set.dtype is not None
        assert data_set.shape is not None
        row_bytes = math.prod(data_set.shape[1:]) * data_set.dtype.itemsize
        first_row = stretch.first_chunk // grid_rows * chunks.sides[0]
        yield from self._part_of_tensor(data_set, first_row * row_bytes, chunks.element_bytes)
        if chunks.other_bytes:
            yield Skeleton(n_bytes=chunks.other_bytes)

    def _part_of_tensor(self, data_set: DataSet, begin: int, n_bytes: int) -> Iterator[FilePart]:
        """Announce some rows of a tensor."""
        name, wanted = f"@{data_set.address}", data_set.wanted_bytes
        if begin:
            # Rows that do not begin the tensor are cut where the chunks of the whole tensor end.
            lead = min(-begin % DEFAULT_CHUNK_BYTES, n_bytes)
            if lead:
                yield from self._tensor(f"{name}[{begin}]", data_set, lead, None)
            begin, n_bytes = begin + lead, n_bytes - lead
        if n_bytes:
            is_whole = n_bytes == wanted
            yield from self._tensor(
                name if is_whole else f"{name}[{begin}]", data_set, n_bytes, 0 if is_whole else None
            )

    def _tensor(
        self, name: str, data_set: DataSet, n_bytes: int, whole: int | None, cuts: Any = None
    ) -> Iterator[FilePart]:
        if n_bytes < MIN_TENSOR_BYTES:
            yield Skeleton(n_bytes=n_bytes)
            return
        tensor = Tensor(n_bytes=n_bytes, name=name, cuts=cuts)
        self._announced[name] = data_set, tensor, whole
        yield tensor

    # --- names

    def _names(self) -> Iterator[Learned]:
        """Walk the groups in the bytes that were kept."""
        if not self._announced:
            return
        try:
            found, _ = walk(self._file, is_partial=True)
        except UNREADABLE:
            found = {}
        learned: dict[str, Tensor] = {}
        for announced, (early, tensor, whole) in self._announced.items():
            path = found.get(early.address)
            data_set = early if path is None else path.data_set
            dtype = None if data_set.dtype is None else name_or_none(data_set.dtype)
            base = f"@{early.address}" if path is None else path.names[0]
            name = base + announced[len(f"@{early.address}") :]
            item_bytes = 1 if data_set.dtype is None else data_set.dtype.itemsize
            if dtype is None or tensor.n_bytes % item_bytes:
                learned[announced] = Tensor(n_bytes=tensor.n_bytes, name=name, cuts=tensor.cuts)
                continue
            is_whole = whole is not None and data_set.wanted_bytes == tensor.n_bytes
            shape = data_set.shape if is_whole else (tensor.n_bytes // item_bytes,)
            learned[announced] = Tensor(n_bytes=tensor.n_bytes, name=name, dtype=dtype, shape=shape, cuts=tensor.cuts)
        yield Learned(tensors=learned)


def _is_rows(data_set: DataSet, chunks: Chunks) -> bool:
    """Tell whether each chunk is some whole rows of the tensor."""
    return data_set.shape is not None and data_set.shape[1 : len(chunks.sides)] == chunks.sides[1:]


# --- at random


def list_hdf5(source: ByteSource) -> Listing:
    """List the data sets of a file by their paths, in the order of their elements.

    A data set with two hard links is listed for both. Left out are data sets with other filters than shuffle, deflate
    and Fletcher-32, virtual ones, ones in other files, ones that nobody has written (in part), and types without a
    numpy dtype. Attributes are not listed.

    Raises:
        FormatError: The file is malformed. The others of `UNREADABLE` say the same.
    """
    file = Hdf5File(partial(_read, source), source.read(0, min(_HEAD_BYTES, source.size)), lambda: source.size)
    if file.end > source.size:  # the library lets bytes follow, too
        raise FormatError(f"it has {source.size} bytes, and should have {file.end}")
    found, elsewhere = walk(file)
    table = LocationTable(source)
    ranges: list[tuple[int, int]] = []
    ordered = sorted(found.values(), key=lambda each: _position(each.data_set))
    for data_set, names in ((each.data_set, each.names) for each in ordered):
        place = _Place(file, source, data_set)
        ranges += place.ranges
        for name in names:
            if place.kind:
                table.leave_out(name, place.kind)
            else:
                place.add(table, name)
    for name, kind in elsewhere.items():
        table.leave_out(name, kind)
    ranges.sort()
    if any(begin < end for (_, end), (begin, _) in pairwise(ranges)):
        raise FormatError("two of its data sets share bytes")
    return table.listing("hdf5")


def _position(data_set: DataSet) -> int:
    if data_set.start is not None:
        return data_set.start
    return data_set.address if data_set.chunks is None else data_set.chunks.address


def _read(source: ByteSource, at: int, n_bytes: int) -> memoryview:
    if at < 0 or at + n_bytes > source.size:
        raise FormatError(f"it ends before byte {at + n_bytes}")
    # Mapped bytes would kill the process if another one cuts the file off.
    return source.read(at, n_bytes)


class _Place:
    """Place of the elements of one data set."""

    def __init__(self, file: Hdf5File, source: ByteSource, data_set: DataSet) -> None:
        self.kind = data_set.kind
        """Reason for which it is left out; "" if it is listed."""
        self.ranges: list[tuple[int, int]] = []
        """Stretches of the file that hold elements."""
        self._source: _ChunkedSource | None = None
        self._number: int | None = None
        self._start = 0
        dtype, shape, wanted = data_set.dtype, data_set.shape, data_set.wanted_bytes
        if self.kind:
            return
        if dtype is None or shape is None or wanted is None:
            raise FormatError("a data set has no type or no shape")
        self._shape = shape
        self._dtype = name_or_none(dtype)
        self._fields = record_fields(dtype) if self._dtype is None else ()
        if self._dtype is None and not self._fields:
            self.kind = str(dtype)
        elif not wanted:
            pass
        elif data_set.chunks is not None:
            self._find_chunks(file, source, data_set, data_set.chunks)
        elif data_set.start is None:
            self.kind = "not written"
        elif data_set.n_bytes != wanted:
            raise FormatError(f"a data set has {data_set.n_bytes} bytes, and its shape and type want {wanted}")
        else:
            self._start = file.base + data_set.start
            self.ranges.append((self._start, self._start + wanted))

    def add(self, table: LocationTable, name: str) -> None:
        """Add the data set to a listing, under one of its names."""
        if self._source is not None and self._number is None:
            self._number = len(table.sources)
            table.sources.append(self._source)
        table.add_array(
            name, self._dtype or "", self._shape, start=self._start, source=self._number or 0, fields=self._fields
        )

    def _find_chunks(self, file: Hdf5File, source: ByteSource, data_set: DataSet, chunks: Chunks) -> None:
        dtype = data_set.dtype
        assert dtype is not None
        inner = self._shape[len(chunks.sides) :]
        sides = (*chunks.sides, *inner)
        if math.prod(sides) * dtype.itemsize != chunks.chunk_bytes:
            raise FormatError("the chunks of a data set have another size than their shape and type want")
        grid = tuple(-(-side // step) for side, step in zip(self._shape, chunks.sides, strict=False))
        least_bytes = 1 if chunks.is_filtered else chunks.chunk_bytes
        if math.prod(grid) > source.size // least_bytes:
            self.kind = "not written in part"
            return
        try:
            places = find_chunks(file, data_set)
        except UnknownTypeError as error:
            self.kind = str(error)
            return
        if not places.is_whole:
            self.kind = "not written in part"
            return
        if places.masks.any():
            self.kind = "filtered in part"
            return
        order = np.argsort(places.addresses, axis=None)
        starts, sizes = places.addresses.reshape(-1)[order] + file.base, places.sizes.reshape(-1)[order]
        gaps = np.diff(starts) - sizes[:-1]
        if (sizes <= 0).any() or (starts + sizes).max() > source.size or (gaps < 0).any():
            raise FormatError("the chunks of a data set share bytes, or are outside of the file")
        # Stretches, not chunks: there may be a million.
        breaks = np.flatnonzero(gaps)
        begins, ends = starts[[0, *(breaks + 1)]], (starts + sizes)[[*breaks, -1]]
        self.ranges += zip(begins.tolist(), ends.tolist(), strict=True)
        at = places.addresses + file.base
        if chunks.filters is not None:
            unfiltered_source = UnfilteredSource(source, chunks.filters, chunks.chunk_bytes, at, places.sizes)
            source, at = unfiltered_source, unfiltered_source.places
        self._source = _ChunkedSource(source, dtype, self._shape, sides, at.reshape(*grid, *[1] * len(inner)))


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
