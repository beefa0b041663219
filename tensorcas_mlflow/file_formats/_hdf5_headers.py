"""Object headers of HDF5: their messages, and the header of a data set (section IV.A)."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tensorcas_mlflow.base.dtypes import DType
from tensorcas_mlflow.base.tensors import MAX_DIMENSIONS, MAX_TENSOR_BYTES
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._hdf5_file import (
    MAX_BLOCK_BYTES,
    MAX_TEXT_BYTES,
    NOWHERE,
    Hdf5File,
    UnknownTypeError,
    check_address,
    u32,
    u64,
)
from tensorcas_mlflow.file_formats._hdf5_types import opaque_dtype, read_type

_MAX_MESSAGES = 1 << 16
_MAX_BLOCKS = 4096
"""Blocks of one object header."""

# Section IV.A.2: the kinds of messages.
SYMBOLS, LINK, LINK_INFO = 0x11, 0x6, 0x2
_SPACE, _TYPE, _EXTERNAL, _LAYOUT, _FILTERS, _ATTRIBUTE, _CONTINUED = 0x1, 0x3, 0x7, 0x8, 0xB, 0xC, 0x10
_IS_SHARED = 2

_DEFLATE, _SHUFFLE, _FLETCHER32 = 1, 2, 3
_ORDER = (_SHUFFLE, _DEFLATE, _FLETCHER32)
"""The filters in the order in which h5py applies them."""
_FIRST_NAMED = 256
"""Filters from this number on have a name in each version of the message."""


class Message(NamedTuple):
    """A message of an object header."""

    kind: int
    flags: int
    at: int
    """Address of its data."""
    data: memoryview


class Filters(NamedTuple):
    """The filters of chunks, in the order in which a writer applies them."""

    shuffle: int
    """Size of an element for the filter shuffle; 1 without it."""
    level: int | None
    """Level of the filter deflate; None without it."""
    fletcher32: bool
    """Whether a checksum follows each chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """The chunked layout of a data set."""

    sides: tuple[int, ...]
    """Sides of a chunk."""
    chunk_bytes: int
    index: int
    """0 for a B-tree of version 1, else the number of the index in the specification."""
    address: int
    """Address of the index, or of the chunks themselves."""
    max_shape: tuple[int, ...]
    """Largest shape of the data set; `NOWHERE` for a side without a limit."""
    is_filtered: bool
    filters: Filters | None
    """The filters of filtered chunks; None if one of them is unknown."""
    single: tuple[int, int] | None
    """Size and filter mask of a single filtered chunk, which has no index; None for others."""


@dataclass(slots=True, kw_only=True)
class DataSet:
    """The header of a data set."""

    address: int
    dtype: DType | None = None
    kind: str = ""
    """Reason for which the data set cannot be listed; "" if there is none."""
    shape: tuple[int, ...] | None = None
    start: int | None = None
    """Address of contiguous elements."""
    n_bytes: int = 0
    """Size of contiguous elements."""
    is_compact: bool = False
    """True if the elements lie in the header."""
    chunks: Chunks | None = None

    @property
    def wanted_bytes(self) -> int | None:
        """Size of the elements; None if the header does not say it."""
        if self.dtype is None or self.shape is None:
            return None
        return math.prod(self.shape) * self.dtype.itemsize


def read_messages(file: Hdf5File, address: int, *, is_partial: bool = False) -> list[Message]:
    """Read the messages of an object header.

    Args:
        address: The header's.
        is_partial: Whether blocks that cannot be read are passed over.
    """
    prefix = file.read(address, 6)
    found: list[Message] = []
    n_bytes = 0
    if bytes(prefix[:4]) == b"OHDR":
        at = 6 + (16 if prefix[5] & 32 else 0) + (4 if prefix[5] & 16 else 0)
        width = 1 << (prefix[5] & 3)
        block = (address + at + width, int.from_bytes(file.read(address + at, width), "little"))
        long_bytes = 6 if prefix[5] & 4 else 4
    elif bytes(prefix[:2]) == b"\x01\x00":
        block = (address + 16, u32(file.read(address, 16), 8))
        long_bytes = 0
    else:
        raise FormatError(f"there is no object at the address {address}")
    blocks = [block]
    for start, size in blocks:
        n_bytes += size
        if n_bytes > MAX_BLOCK_BYTES or len(blocks) > _MAX_BLOCKS:
            raise FormatError(f"the object at the address {address} has a header of too many bytes")
        try:
            data = file.read(start, size)
        except FormatError:
            if is_partial and found:
                continue
            raise
        if long_bytes and found and bytes(data[:4]) == b"OCHK":
            start, data = start + 4, data[4:-4]
        new = [*(_messages_2(data, start, long_bytes) if long_bytes else _messages_1(data, start))]
        found += new
        if len(found) > _MAX_MESSAGES:
            raise FormatError(f"the object at the address {address} has too many messages")
        blocks += [(u64(each.data, 0), u64(each.data, 8)) for each in new if each.kind == _CONTINUED]
    return found


def read_data_set(
    file: Hdf5File, address: int, messages: Sequence[Message], *, is_partial: bool = False
) -> DataSet | None:
    """Read the header of a data set; None if the object is none.

    Args:
        address: The header's.
        messages: Its messages.
        is_partial: Whether some of them may be missing.

    Raises:
        FormatError: The header is malformed.
    """
    by_kind = {each.kind: each for each in reversed(messages)}
    layout = by_kind.get(_LAYOUT)
    if layout is None or (not is_partial and not {_SPACE, _TYPE} <= by_kind.keys()):
        return None
    made = DataSet(address=address)
    filters = by_kind.get(_FILTERS)
    max_shape: tuple[int, ...] = ()
    if _SPACE in by_kind:
        shape = _shape_of(by_kind[_SPACE].data)
        if shape is None:
            made.kind = "no elements"
        else:
            made.shape, max_shape = shape
    if _TYPE in by_kind:
        try:
            dtype = _dtype(file, by_kind[_TYPE], messages)
            made.dtype = dtype.base
            if made.shape is not None:
                made.shape += dtype.shape
        except UnknownTypeError as error:
            made.kind = made.kind or str(error)
    if made.shape is not None and (
        len(made.shape) > MAX_DIMENSIONS
        or (made.dtype is not None and math.prod(filter(None, made.shape)) * made.dtype.itemsize > MAX_TENSOR_BYTES)
    ):
        raise FormatError(f"the data set at the address {address} has an impossible shape")
    if _EXTERNAL in by_kind:
        made.kind = made.kind or "in another file"
    else:
        _lay_out(made, layout, max_shape, None if filters is None else filters.data)
    return made


def _dtype(file: Hdf5File, message: Message, messages: Sequence[Message]) -> DType:
    data = message.data
    if message.flags & _IS_SHARED:
        # Section IV.A.2, "Shared Message": a type that has a name is an object of its own.
        if data[0] not in (1, 2, 3) or (data[0] == 3 and data[1] != 2):
            raise UnknownTypeError("a shared type")
        address = u64(data, 8 if data[0] == 1 else 2)
        types = [each for each in read_messages(file, address) if each.kind == _TYPE and not each.flags & _IS_SHARED]
        if not types:
            raise FormatError(f"there is no type at the address {address}")
        data = types[0].data
    if data[0] & 15 == 5:
        dtype = opaque_dtype(u32(data, 4), _text_attribute(file, messages, "dtype"))
    else:
        dtype = read_type(data)[0]
    if not dtype.itemsize:
        raise UnknownTypeError("elements without bytes")
    return dtype


def _text_attribute(file: Hdf5File, messages: Sequence[Message], name: str) -> str:
    """Read a short text of a header's attributes; "" if there is none (section IV.A.2.m)."""
    for each in messages:
        data = each.data
        if each.kind != _ATTRIBUTE or len(data) < 9 or data[0] not in (1, 2, 3):
            continue
        name_bytes, type_bytes, space_bytes = struct.unpack_from("<HHH", data, 2)
        at, sizes = 9 if data[0] == 3 else 8, [name_bytes, type_bytes, space_bytes]
        if data[0] == 1:
            sizes = [-(-size // 8) * 8 for size in sizes]
        own = bytes(data[at : at + name_bytes]).split(b"\0")[0]
        kind, value = data[at + sizes[0] :], data[at + sum(sizes) :]
        if own != name.encode() or len(kind) < 8:
            continue
        if kind[0] & 15 == 3:
            return bytes(value[: min(u32(kind, 4), MAX_TEXT_BYTES)]).split(b"\0")[0].decode("ascii", "replace")
        if kind[0] & 15 == 9 and len(value) >= 16:
            return _heap_text(file, u64(value, 4), u32(value, 12))
    return ""


def _heap_text(file: Hdf5File, address: int, number: int) -> str:
    """Read a text of a global heap (section III.E)."""
    head = file.read(address, 16)
    size = u64(head, 8)
    if bytes(head[:4]) != b"GCOL" or size > MAX_BLOCK_BYTES:
        return ""
    heap = file.read(address, size)
    at = 16
    while at + 16 <= len(heap):
        nth, n_bytes = struct.unpack_from("<H6xQ", heap, at)
        if not nth:
            break
        if nth == number:
            return bytes(heap[at + 16 : at + 16 + min(n_bytes, MAX_TEXT_BYTES)]).decode("ascii", "replace")
        at += 16 + -(-n_bytes // 8) * 8
    return ""


def _messages_1(data: memoryview, start: int) -> Iterator[Message]:
    at = 0
    while at + 8 <= len(data):
        kind, size, flags = struct.unpack_from("<HHB", data, at)
        if at + 8 + size > len(data):
            raise FormatError("a message exceeds its header")
        yield Message(kind, flags, start + at + 8, data[at + 8 : at + 8 + size])
        at += 8 + size


def _messages_2(data: memoryview, start: int, head_bytes: int) -> Iterator[Message]:
    at = 0
    while at + head_bytes < len(data):
        kind, size, flags = struct.unpack_from("<BHB", data, at)
        if at + head_bytes + size > len(data):
            raise FormatError("a message exceeds its header")
        yield Message(kind, flags, start + at + head_bytes, data[at + head_bytes : at + head_bytes + size])
        at += head_bytes + size


def _shape_of(data: memoryview) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Read a data space: its shape and largest shape; None for a space without elements (section IV.A.2.b)."""
    version, rank, flags = data[0], data[1], data[2]
    if version not in (1, 2) or rank > 32:
        raise FormatError("a data set has an unknown shape")
    if version == 2 and data[3] == 2:
        return None
    at = 8 if version == 1 else 4
    shape = struct.unpack_from(f"<{rank}Q", data, at)
    return shape, struct.unpack_from(f"<{rank}Q", data, at + 8 * rank) if flags & 1 else shape


def _lay_out(made: DataSet, message: Message, max_shape: tuple[int, ...], filters: memoryview | None) -> None:
    """Read the layout of a data set (section IV.A.2.i)."""
    data = message.data
    version = data[0]
    is_old = version in (1, 2)
    layout = data[2 if is_old else 1]
    if not 1 <= version <= 5:
        made.kind = made.kind or f"a layout of version {version}"
    elif layout == 0:
        at = 12 + 4 * data[1] if is_old else 4
        made.n_bytes = u32(data, at - 4) if is_old else int.from_bytes(data[2:4], "little")
        made.start, made.is_compact = message.at + at, True
        if made.n_bytes > len(data) - at:
            raise FormatError("the elements of a data set exceed its header")
    elif layout == 1:
        # The old message has no size, and cuts large sides off.
        start, made.n_bytes = (u64(data, 8), made.wanted_bytes or 0) if is_old else (u64(data, 2), u64(data, 10))
        if start != NOWHERE:
            made.start = check_address(start)
            check_address(start + made.n_bytes)
    elif layout == 2:
        made.chunks = chunks = _chunks_of(data, version, max_shape, filters)
        if chunks.is_filtered and chunks.filters is None:
            made.kind = made.kind or "compressed"
    else:
        made.kind = made.kind or "virtual"


def _chunks_of(data: memoryview, version: int, max_shape: tuple[int, ...], filters: memoryview | None) -> Chunks:
    is_filtered, single = filters is not None and filters[1] > 0, None
    if version <= 3:
        rank, at = (data[2], 3) if version == 3 else (data[1], 8)
        address, sides, index = u64(data, at), struct.unpack_from(f"<{rank}I", data, at + 8), 0
    else:
        flags, rank, width = data[2], data[3], data[4]
        if not 1 <= width <= 8:
            raise FormatError("a chunk has impossible sides")
        sides = tuple(int.from_bytes(data[at : at + width], "little") for at in range(5, 5 + rank * width, width))
        at = 5 + rank * width
        index = data[at]
        more = {1: 12 if flags & 2 else 0, 2: 0, 3: 1, 4: 5, 5: 6}.get(index)
        if more is None:
            raise FormatError(f"chunks have an index of the kind {index}")
        address = u64(data, at + 1 + more)
        if index == 1 and more:
            single = u64(data, at + 1), u32(data, at + 9)
    if rank < 2 or 0 in sides or len(sides) != rank or (max_shape and len(max_shape) != rank - 1):
        raise FormatError("a chunk has impossible sides")
    return Chunks(
        sides=sides[:-1],
        chunk_bytes=math.prod(sides),
        index=index,
        address=address,
        max_shape=max_shape,
        is_filtered=is_filtered,
        filters=_filters_of(filters) if filters is not None and is_filtered else None,
        single=single,
    )


def _filters_of(data: memoryview) -> Filters | None:
    """Read the filters of a data set (section IV.A.2.l); None if one is unknown, or their order is."""
    version, n_filters = data[0], data[1]
    if version not in (1, 2):
        return None
    at, found = 8 if version == 1 else 2, dict[int, tuple[int, ...]]()
    for _ in range(n_filters):
        number = int.from_bytes(data[at : at + 2], "little")
        name_bytes = int.from_bytes(data[at + 2 : at + 4], "little") if version == 1 or number >= _FIRST_NAMED else 0
        at += 4 if version == 1 or number >= _FIRST_NAMED else 2
        n_values = int.from_bytes(data[at + 2 : at + 4], "little")
        at += 4 + name_bytes + (-name_bytes % 8 if version == 1 else 0)
        if number in found:
            return None
        found[number] = struct.unpack_from(f"<{n_values}I", data, at)
        at += 4 * (n_values + (n_values % 2 if version == 1 else 0))
    if not found.keys() <= {_DEFLATE, _SHUFFLE, _FLETCHER32} or list(found) != sorted(found, key=_ORDER.index):
        return None
    sizes, levels = found.get(_SHUFFLE, (1,)), found.get(_DEFLATE, (None,))
    if len(sizes) != 1 or len(levels) != 1 or not sizes[0]:
        return None
    return Filters(sizes[0], levels[0], _FLETCHER32 in found)
