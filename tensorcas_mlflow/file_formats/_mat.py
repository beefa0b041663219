"""MAT-files of version 5 (``.mat``), as MATLAB and `scipy.io.savemat` write them.

Source: MathWorks' "MAT-File Format". A header of 128 bytes, then one element for each variable: a tag of type and size,
and the contents, padded to 8 bytes. A variable is an element of elements: flags, dimensions, name, numbers. It may be
compressed as a whole, with zlib. Arrays are in Fortran order: a row of the store has the shape of the transpose.

Files of version 7.3 are HDF5.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from tensorcas_mlflow.base.tensors import MAX_DIMENSIONS, MAX_NAME_BYTES
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._deflated import Ahead, find_deflated
from tensorcas_mlflow.file_formats._headers import check_shape, item_bytes, tensor_or_skeleton
from tensorcas_mlflow.file_formats._listing import Listing, LocationTable, fortran_strides
from tensorcas_mlflow.file_formats._source import ByteSource
from tensorcas_mlflow.file_formats._tape import UNREADABLE, FilePart, PlainBytes, Skeleton, Tape

_HEADER_BYTES = 128
_LITTLE, _BIG = b"\0\1IM", b"\1\0MI"
"""The version and the byte order at the header's end."""
_TAG_BYTES = 8
_HEAD_BYTES = 16 << 10
"""The tags, the dimensions and the name of a variable take fewer."""
_MAX_VARIABLES = 1 << 20
_ZLIB_HEADER_BYTES, _ZLIB_TRAILER_BYTES = 2, 4

_INT8, _INT32, _UINT32, _MATRIX, _COMPRESSED = 1, 5, 6, 14, 15
_DTYPES = {
    1: "int8",
    2: "uint8",
    3: "int16",
    4: "uint16",
    5: "int32",
    6: "uint32",
    7: "float32",
    9: "float64",
    12: "int64",
    13: "uint64",
}
"""Dtypes by the type of an element. MATLAB writes doubles that are small whole numbers as such."""
_NUMERIC = range(6, 16)
_CLASSES = {1: "cell", 2: "struct", 3: "object", 4: "text", 5: "sparse", 16: "function", 17: "object"}
_IS_COMPLEX = 0x0800
_SUBSYSTEM = "subsystem"
"""Name of the variable without a name in which MATLAB keeps the contents of objects."""


class _Variable(NamedTuple):
    """One variable, as far as its head tells."""

    name: str
    kind: str
    """Dtype of the numbers, or the type of a variable that is no array."""
    shape: tuple[int, ...]
    head_bytes: int
    """Number of bytes before the numbers, in the variable."""
    n_bytes: int
    """Size of the numbers; 0 for a variable that is no array."""


def is_mat(head: memoryview) -> bool:
    """Recognise a MAT-file of version 5 by the end of its header."""
    return bytes(head[_HEADER_BYTES - 4 : _HEADER_BYTES]) in (_LITTLE, _BIG)


def split_mat(tape: Tape) -> Iterator[FilePart]:
    """Announce the variables, and the tags around them.

    Raises:
        FormatError: The file is malformed, or in big-endian order.
    """
    _check_order(tape.peek(_HEADER_BYTES))
    yield Skeleton(n_bytes=_HEADER_BYTES)
    yield from _split_elements(tape)


def _split_elements(tape: Tape) -> Iterator[FilePart]:
    while not tape.is_at_end():
        kind, n_bytes, _ = _tag(tape.peek(_TAG_BYTES), 0)
        if kind == _COMPRESSED:
            yield from _split_compressed(tape, n_bytes)
            continue
        if kind != _MATRIX:
            yield PlainBytes(n_bytes=_TAG_BYTES + n_bytes)
            continue
        variable = _read_variable(tape.peek(_TAG_BYTES + min(n_bytes, _HEAD_BYTES))[_TAG_BYTES:], n_bytes)
        if not variable.n_bytes:
            yield Skeleton(n_bytes=_TAG_BYTES + n_bytes)
            continue
        yield Skeleton(n_bytes=_TAG_BYTES + variable.head_bytes)
        yield from tensor_or_skeleton(variable.n_bytes, variable.name, variable.kind, variable.shape[::-1])
        rest = n_bytes - variable.head_bytes - variable.n_bytes
        if rest:
            yield Skeleton(n_bytes=rest)


def _split_compressed(tape: Tape, n_bytes: int) -> Iterator[FilePart]:
    """Announce the parts of a compressed variable: its tag, and a zlib stream."""
    head_bytes = _TAG_BYTES + _ZLIB_HEADER_BYTES
    stream = find_deflated(Ahead(tape, head_bytes), n_bytes - _ZLIB_HEADER_BYTES - _ZLIB_TRAILER_BYTES, _split_variable)
    if stream is None:
        yield PlainBytes(n_bytes=_TAG_BYTES + n_bytes)
        return
    yield Skeleton(n_bytes=head_bytes)
    yield stream
    yield Skeleton(n_bytes=_ZLIB_TRAILER_BYTES)


def _split_variable(content: Tape, n_bytes: int) -> Iterator[FilePart]:
    """Announce the parts of an inflated variable; a malformed one is plain bytes."""
    with suppress(*UNREADABLE):
        yield from _split_elements(content)
    if content.position < n_bytes:
        yield PlainBytes(n_bytes=n_bytes - content.position)


def list_mat(source: ByteSource) -> Listing:
    """List the variables that are arrays of real numbers, compressed ones too.

    Left out are complex and sparse arrays, texts, cells, structures and objects.

    Raises:
        FormatError: The file is malformed, or in big-endian order. A `zlib.error` and a `UnicodeDecodeError` say the
            same.
    """
    _check_order(source.read(0, min(_HEADER_BYTES, source.size)))
    table = LocationTable(source)
    at = _HEADER_BYTES
    for _ in range(_MAX_VARIABLES):
        if at == source.size:
            return table.listing("mat")
        kind, n_bytes, _ = _tag(source.read(at, min(_TAG_BYTES, source.size - at)), 0)
        start, at = at + _TAG_BYTES, at + _TAG_BYTES + n_bytes
        if kind not in (_MATRIX, _COMPRESSED) or at > source.size:
            raise FormatError(f"an element of type {kind} with {n_bytes} bytes at byte {start - _TAG_BYTES}")
        head = source.read(start, min(n_bytes, _HEAD_BYTES))
        begin, size = 0, n_bytes
        if kind == _COMPRESSED:
            head = memoryview(zlib.decompressobj().decompress(head, _HEAD_BYTES))
            kind, size, begin = _tag(head, 0)
            if kind != _MATRIX:
                raise FormatError(f"a compressed element of type {kind}")
            _add(table, _read_variable(head[begin:], size), start, begin, n_bytes)
        else:
            _add(table, _read_variable(head, size), start, 0, None)
    raise FormatError(f"it has more than {_MAX_VARIABLES} variables")


def _add(table: LocationTable, variable: _Variable, start: int, begin: int, compressed_bytes: int | None) -> None:
    """Add a variable.

    Args:
        table: Receives it.
        variable: The variable.
        start: Position of the variable, or of the zlib stream that holds it.
        begin: First byte of the variable in that stream.
        compressed_bytes: Size of the stream; None for a variable that is not compressed.
    """
    name = variable.name or table.unused(_SUBSYSTEM)
    if variable.kind not in _DTYPES.values() or not variable.name:
        table.leave_out(name, variable.kind if variable.name else _SUBSYSTEM)
        return
    head_bytes, strides = begin + variable.head_bytes, fortran_strides(variable.shape)
    if compressed_bytes is None or not variable.n_bytes:
        place = start + head_bytes if variable.n_bytes else 0
        table.add(name, variable.kind, variable.shape, start=place, n_bytes=variable.n_bytes, strides=strides)
    else:
        table.add(
            name,
            variable.kind,
            variable.shape,
            start=start,
            n_bytes=compressed_bytes,
            strides=strides,
            deflated=head_bytes,
            whole_bytes=-(-(head_bytes + variable.n_bytes) // _TAG_BYTES) * _TAG_BYTES,
        )


def _check_order(header: memoryview) -> None:
    if bytes(header[_HEADER_BYTES - 4 :]) != _LITTLE:
        raise FormatError("its numbers are in big-endian order, or it is no MAT-file of version 5")


def _tag(view: memoryview, at: int) -> tuple[int, int, int]:
    """Read an element's type and size, and the position of its contents; small contents lie in the tag."""
    if at + _TAG_BYTES > len(view):
        raise FormatError("it ends in a tag")
    first = int.from_bytes(view[at : at + 4], "little")
    if first >> 16:
        return first & 0xFFFF, first >> 16, at + 4
    return first, int.from_bytes(view[at + 4 : at + 8], "little"), at + 8


def _read_variable(head: memoryview, n_bytes: int) -> _Variable:
    """Read the beginning of a variable of a size; a file may be cut off in it."""
    if not n_bytes:
        return _Variable("", "empty", (), 0, 0)
    flags, at = _part(head, 0, _UINT32)
    sides, at = _part(head, at, _INT32)
    text, at = _part(head, at, _INT8)
    name, word = bytes(text).decode("ascii"), int.from_bytes(flags[:4], "little")
    shape = tuple(int.from_bytes(sides[nth : nth + 4], "little") for nth in range(0, len(sides), 4))
    if len(flags) != 8 or len(sides) % 4 or not 2 <= len(shape) <= MAX_DIMENSIONS or len(name) > MAX_NAME_BYTES:
        raise FormatError(f"variable {name[:80]!r} has impossible flags or dimensions")
    number = word & 0xFF
    if number not in _NUMERIC or word & _IS_COMPLEX:
        other = "complex" if number in _NUMERIC else _CLASSES.get(number, f"class {number}")
        return _Variable(name, other, shape, n_bytes, 0)
    if not math.prod(shape) and at == n_bytes:
        return _Variable(name, "float64", shape, n_bytes, 0)
    kind, size, at = _tag(head, at)
    dtype = _DTYPES.get(kind)
    if dtype is None or at + size > n_bytes:
        raise FormatError(f"variable {name[:80]!r} has numbers of type {kind}, or more than its size")
    check_shape(name, shape, item_bytes(dtype), size)
    return _Variable(name, dtype, shape, at, size)


def _part(view: memoryview, at: int, wanted: int) -> tuple[memoryview, int]:
    """Read a small element of a variable, and return it with the position behind its padding."""
    kind, n_bytes, start = _tag(view, at)
    end = start + n_bytes
    if kind != wanted or end > len(view):
        raise FormatError(f"a variable with an element of type {kind} and {n_bytes} bytes")
    return view[start:end], at + _TAG_BYTES if start == at + 4 else end + -n_bytes % 8
