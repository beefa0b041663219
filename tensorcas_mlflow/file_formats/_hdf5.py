"""HDF5 files, the weights of Keras among them.

h5py tells where the data sets lie (`_hdf5_file`). The bytes come from the file itself: the splitter announces each data
set where it passes by, and a wrong place costs deduplication and never a byte.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tensorcas_mlflow.base.tensors import DEFAULT_CHUNK_BYTES
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._hdf5_chunks import Stretch, may_derive, plan_stretch, put_together, take_apart
from tensorcas_mlflow.file_formats._hdf5_file import Chunks, DataSet, check_library, read_data_sets, user_block
from tensorcas_mlflow.file_formats._headers import name_or_none
from tensorcas_mlflow.file_formats._listing import Listing, LocationTable, record_fields
from tensorcas_mlflow.file_formats._source import ByteSource, MemorySource, spool
from tensorcas_mlflow.file_formats._tape import (
    MIN_TENSOR_BYTES,
    DerivedBytes,
    FilePart,
    PlainBytes,
    Skeleton,
    Tape,
    Tensor,
)

_MIN_CUT_BYTES = 64 << 10
_MAX_INDEX_BYTES = 16 << 10
"""Most bytes of structures between filtered chunks that are stored as one stretch."""


def is_hdf5(head: memoryview) -> bool:
    """Recognise an HDF5 file by its signature, perhaps behind a user block."""
    return user_block(head) is not None


def split_hdf5(tape: Tape) -> Iterator[FilePart]:
    """Announce the data sets of a file.

    Raises:
        FormatError: The file is malformed, or h5py is not installed. The others of `UNREADABLE` say the same.
    """
    check_library()  # before the file is copied
    source = spool(tape)
    yield from _Passing(tape, source.size, read_data_sets(source)[0]).parts()


class _Pending(NamedTuple):
    """Elements that come later."""

    start: int
    number: int
    """Number of its own, which settles the order."""
    n_bytes: int
    data_set: DataSet
    first_chunk: int
    stretch: Stretch | None
    """The chunks, if a function may make them of the tensor."""


class _Passing:
    """One file as it passes by."""

    def __init__(self, tape: Tape, file_bytes: int, data_sets: Iterable[DataSet]) -> None:
        self._tape = tape
        self._file_bytes = file_bytes
        self._pending: list[_Pending] = []
        self._n_noted = 0
        for data_set in data_sets:
            if data_set.chunks is not None:
                self._note_chunks(data_set, 0)
            elif data_set.start is not None:
                self._note(data_set, data_set.start, data_set.n_bytes)

    def parts(self) -> Iterator[FilePart]:
        while self._pending:
            found = heapq.heappop(self._pending)
            if found.start < self._tape.position:
                continue  # it lies between chunks of another data set
            yield from _skeleton(found.start - self._tape.position)
            if found.stretch is not None:
                yield from self._derived(found.data_set, found.stretch)
            elif found.data_set.chunks is not None:
                yield from self._run(found, found.data_set.chunks)
            else:
                yield from _tensor(found.data_set, found.n_bytes)
        yield from _skeleton(self._file_bytes - self._tape.position)

    def _note(
        self, data_set: DataSet, start: int, n_bytes: int, first_chunk: int = 0, stretch: Stretch | None = None
    ) -> None:
        self._n_noted += 1
        if n_bytes >= MIN_TENSOR_BYTES:
            heapq.heappush(self._pending, _Pending(start, self._n_noted, n_bytes, data_set, first_chunk, stretch))

    def _note_chunks(self, data_set: DataSet, first_chunk: int) -> None:
        """Remember the next chunks that a function may make, from a number on; or else all chunks as they are."""
        stretch = plan_stretch(data_set, first_chunk) if may_derive(data_set) else None
        if stretch is not None:
            self._note(data_set, stretch.start, stretch.n_bytes, first_chunk, stretch)
        else:
            self._note_runs(data_set)

    def _note_runs(self, data_set: DataSet) -> None:
        """Remember chunks that follow each other; filtered ones with what little lies between them."""
        chunks = data_set.chunks
        assert chunks is not None
        starts, ends = chunks.starts.reshape(-1), (chunks.starts + chunks.sizes).reshape(-1)
        order = np.argsort(starts, kind="stable")
        order = order[starts[order] >= self._tape.position]
        breaks = starts[order][1:] - ends[order][:-1] > (_MAX_INDEX_BYTES if chunks.is_filtered else 0)
        if _is_rows(data_set):
            breaks |= np.diff(order) != 1
        edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(order)]
        for begin, end in pairwise(edges if len(order) else []):
            first = int(order[begin])
            self._note(data_set, int(starts[first]), int(ends[order[end - 1]] - starts[first]), first)

    # --- elements

    def _run(self, found: _Pending, chunks: Chunks) -> Iterator[FilePart]:
        """Announce chunks that follow each other as what they are."""
        data_set, n_bytes = found.data_set, found.n_bytes
        if chunks.is_filtered:
            yield PlainBytes(n_bytes=n_bytes)
        elif _is_rows(data_set):
            # The last chunk has rows beyond the last one of the tensor.
            begin = found.first_chunk * chunks.n_bytes
            n_own = min(n_bytes, data_set.wanted_bytes - begin)
            yield from _part_of_tensor(data_set, begin, n_own)
            yield from _skeleton(n_bytes - n_own)
        else:
            is_cut = chunks.n_bytes >= _MIN_CUT_BYTES
            cuts = range(chunks.n_bytes, n_bytes + 1, chunks.n_bytes) if is_cut else None
            yield from _tensor(data_set, n_bytes, f"[{found.start}]", cuts)

    def _derived(self, data_set: DataSet, stretch: Stretch) -> Iterator[FilePart]:
        """Announce chunks as bytes that a function makes of a part of the tensor, or else as what they are."""
        data = self._tape.peek(stretch.n_bytes)
        content = take_apart(stretch, data) if len(data) == stretch.n_bytes else None
        if content is None:
            self._note_runs(data_set)
            return
        yield DerivedBytes(
            n_bytes=stretch.n_bytes,
            function="hdf5_chunks",
            params=stretch.chunks.params(),
            content=Tape.over(content),
            parts=_content_of(data_set, stretch),
        )
        self._note_chunks(data_set, stretch.stop_chunk)


def _content_of(data_set: DataSet, stretch: Stretch) -> Iterator[FilePart]:
    chunks = stretch.chunks
    first_row = stretch.first_chunk // math.prod(chunks.grid[1:]) * chunks.sides[0]
    yield from _part_of_tensor(data_set, first_row * (chunks.element_bytes // chunks.shape[0]), chunks.element_bytes)
    yield from _skeleton(chunks.other_bytes)


def _part_of_tensor(data_set: DataSet, begin: int, n_bytes: int) -> Iterator[FilePart]:
    """Announce some rows of a tensor."""
    # Rows that do not begin the tensor are cut where the chunks of the whole tensor end.
    lead = min(-begin % DEFAULT_CHUNK_BYTES, n_bytes)
    for at, size in ((begin, lead), (begin + lead, n_bytes - lead)):
        yield from _tensor(data_set, size, "" if size == data_set.wanted_bytes else f"[{at}]")


def _tensor(data_set: DataSet, n_bytes: int, suffix: str = "", cuts: Sequence[int] | None = None) -> Iterator[FilePart]:
    """Announce elements, or bytes of them, under the data set's first name."""
    if n_bytes < MIN_TENSOR_BYTES:
        yield from _skeleton(n_bytes)
        return
    dtype, shape = None if data_set.dtype is None else name_or_none(data_set.dtype), None
    if data_set.dtype is None or n_bytes % data_set.dtype.itemsize:
        dtype = None
    if dtype is not None and not suffix and n_bytes == data_set.wanted_bytes:
        shape = data_set.shape
    yield Tensor(n_bytes=n_bytes, name=f"{data_set.names[0]}{suffix}", dtype=dtype, shape=shape, cuts=cuts)


def _skeleton(n_bytes: int) -> Iterator[FilePart]:
    if n_bytes:
        yield Skeleton(n_bytes=n_bytes)


def _is_rows(data_set: DataSet) -> bool:
    """Tell whether each chunk is some whole rows of the tensor."""
    chunks = data_set.chunks
    return (
        chunks is not None and data_set.dtype is not None and data_set.shape[1 : len(chunks.sides)] == chunks.sides[1:]
    )


# --- at random


def list_hdf5(source: ByteSource) -> Listing:
    """List the data sets of a file by their paths, in the order of their elements.

    A data set with two hard links is listed for both. Left out are data sets with other filters than shuffle, deflate
    and Fletcher-32, virtual ones, ones in other files, ones that nobody has written (in part), and types without a
    numpy dtype. Attributes are not listed.

    Raises:
        FormatError: The file is malformed, or h5py is not installed. The others of `UNREADABLE` say the same.
    """
    data_sets, elsewhere = read_data_sets(source)
    table = LocationTable(source)
    for data_set in data_sets:
        dtype = None if data_set.dtype is None else name_or_none(data_set.dtype)
        fields = record_fields(data_set.dtype) if data_set.dtype is not None and dtype is None else ()
        kind, number, start = data_set.kind or ("" if dtype or fields else str(data_set.dtype)), 0, 0
        if not kind and data_set.wanted_bytes:
            kind, own, start = _elements(source, data_set)
            if own is not source and not kind:
                number = len(table.sources)
                table.sources.append(own)
        for name in data_set.names:
            if kind:
                table.leave_out(name, kind)
            else:
                table.add_array(name, dtype or "", data_set.shape, start=start, source=number, fields=fields)
    for name, kind in elsewhere.items():
        table.leave_out(name, kind)
    return table.listing("hdf5")


def _elements(source: ByteSource, data_set: DataSet) -> tuple[str, ByteSource, int]:
    """Find the elements of a data set.

    Returns:
        The reason for which it is left out, or ""; the source of its elements in C order, and the first of their bytes.
    """
    chunks = data_set.chunks
    if data_set.compact is not None:
        return "", MemorySource(source.name, data_set.compact), 0
    if chunks is None:
        if data_set.start is not None and data_set.n_bytes != data_set.wanted_bytes:
            raise FormatError(f"a data set has {data_set.n_bytes} bytes, and should have {data_set.wanted_bytes}")
        return "not written" if data_set.start is None else "", source, data_set.start or 0
    if chunks.filters is None:
        return "compressed", source, 0
    if chunks.masks.any():
        return "filtered in part", source, 0
    return "", put_together(source, data_set, chunks), 0
