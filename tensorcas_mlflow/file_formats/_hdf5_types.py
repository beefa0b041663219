"""Data types of HDF5 as numpy dtypes (section IV.A.2.d)."""

from __future__ import annotations

import math
import struct

import numpy as np

from tensorcas_mlflow.base.dtypes import DType, parse_dtype
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._hdf5_file import MAX_TEXT_BYTES, UnknownTypeError, u32, width

_MAX_MEMBERS = 1000

_FLOATS = {
    (2, 10, 5, 0, 10, 15): "float16",
    (2, 7, 8, 0, 7, 127): "bfloat16",
    (4, 23, 8, 0, 23, 127): "float32",
    (8, 52, 11, 0, 52, 1023): "float64",
}
_KINDS = {2: "time", 4: "bits", 5: "opaque", 7: "references", 9: "of variable length"}


def read_type(data: memoryview, depth: int = 0) -> tuple[DType, int]:
    """Read a data type.

    Returns:
        Its dtype, and the size of its description.

    Raises:
        UnknownTypeError: It has no dtype.
        FormatError: It is malformed.
    """
    kind, version, bits, size = data[0] & 15, data[0] >> 4, int.from_bytes(data[1:4], "little"), u32(data, 4)
    if depth > 4 or not 1 <= version <= 5:
        raise UnknownTypeError("an unknown type")
    if kind == 0:
        offset, precision = struct.unpack_from("<HH", data, 8)
        if offset or precision != 8 * size or size not in (1, 2, 4, 8) or bits & 6:
            raise UnknownTypeError(f"whole numbers of {precision} bits")
        order = ">" if bits & 1 and size > 1 else "<"
        return np.dtype(f"{order}{'i' if bits & 8 else 'u'}{size}"), 12
    if kind == 1:
        return _float_type(data, bits, size), 20
    if kind == 3:
        if bits & 15 != 1 or not size:
            raise UnknownTypeError("text")
        return np.dtype(f"S{size}"), 8
    if kind == 6:
        return _record_type(data, version, bits & 0xFFFF, size, depth)
    if kind == 8:
        return _enum_type(data, version, bits & 0xFFFF, depth)
    if kind == 10 and version in (2, 3, 4, 5):
        rank = data[8]
        at = 12 if version == 2 else 9
        sides = struct.unpack_from(f"<{rank}I", data, at)
        at += 4 * rank * (2 if version == 2 else 1)
        inner, n_bytes = read_type(data[at:], depth + 1)
        if inner.subdtype or rank > 32 or math.prod(sides) * inner.itemsize != size:
            raise UnknownTypeError("arrays of arrays")
        return np.dtype((inner, sides)), at + n_bytes
    if kind == 11:
        inner, n_bytes = read_type(data[8:], depth + 1)
        if inner.kind == "f" and inner.itemsize in (4, 8) and size == 2 * inner.itemsize:
            return np.dtype(f"{inner.byteorder}c{size}"), 8 + n_bytes
        raise UnknownTypeError("complex numbers")
    raise UnknownTypeError(_KINDS.get(kind, f"of the class {kind}"))


def _float_type(data: memoryview, bits: int, size: int) -> DType:
    offset, precision, *places, bias = struct.unpack_from("<HHBBBBI", data, 8)
    name = _FLOATS.get((size, *places, bias))
    if name is None or offset or precision != 8 * size or bits & 0x40 or bits >> 8 & 0xFF != precision - 1:
        raise UnknownTypeError(f"floating-point numbers of {precision} bits")
    if bits >> 4 & 3 != 2:
        raise UnknownTypeError("floating-point numbers that are not normalized")
    if name == "bfloat16":
        if bits & 1:
            raise UnknownTypeError("bfloat16 of the other byte order")
        return parse_dtype(name)
    return np.dtype(name).newbyteorder(">" if bits & 1 else "<")


def opaque_dtype(size: int, said: str) -> DType:
    """Return the dtype of bytes of no type that an attribute names, as Keras does (``saving_lib.py``)."""
    if said == "bfloat16" and size == 2:
        return parse_dtype(said)
    if said in ("float8_e4m3fn", "float8_e5m2") and size == 1:
        return parse_dtype(said)
    raise UnknownTypeError("opaque")


def _record_type(data: memoryview, version: int, n_members: int, size: int, depth: int) -> tuple[DType, int]:
    if not 1 <= n_members <= _MAX_MEMBERS:
        raise UnknownTypeError("records")
    names: list[str] = []
    formats: list[DType] = []
    offsets: list[int] = []
    at = 8
    offset_bytes = width(size) if version >= 3 else 4
    for _ in range(n_members):
        name, n_bytes = _name_in(data[at:], is_padded=version < 3)
        at += n_bytes
        offset = int.from_bytes(data[at : at + offset_bytes], "little")
        at += offset_bytes
        if version == 1:
            if data[at]:
                raise UnknownTypeError("records of arrays")
            at += 28
        inner, n_bytes = read_type(data[at:], depth + 1)
        at += n_bytes
        names.append(name)
        formats.append(inner)
        offsets.append(offset)
    first = formats[0]
    is_pair = names == ["r", "i"] and offsets == [0, first.itemsize] and size == 2 * first.itemsize
    if is_pair and formats[1] == first and first.kind == "f" and first.itemsize in (4, 8):
        return np.dtype(f"{first.byteorder}c{size}"), at
    if size > 1 << 20:
        raise UnknownTypeError("records")
    ends = sorted(zip(offsets, formats, strict=True), key=lambda each: each[0])
    for (begin, inner), (after, _) in zip(ends, [*ends[1:], (size, None)], strict=True):
        if begin + inner.itemsize > after:
            raise FormatError("the fields of a record share bytes")
    try:
        return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size}), at
    except (ValueError, TypeError) as error:
        raise UnknownTypeError("records") from error


def _enum_type(data: memoryview, version: int, n_members: int, depth: int) -> tuple[DType, int]:
    inner, n_bytes = read_type(data[8:], depth + 1)
    at = 8 + n_bytes
    names: list[str] = []
    for _ in range(n_members):
        name, n_bytes = _name_in(data[at:], is_padded=version < 3)
        names.append(name)
        at += n_bytes
    values = bytes(data[at : at + n_members * inner.itemsize])
    at += n_members * inner.itemsize
    if inner.kind not in "iu":
        raise UnknownTypeError("names of numbers")
    if inner.itemsize == 1 and names == ["FALSE", "TRUE"] and values == b"\0\1":
        return np.dtype(np.bool_), at
    return inner, at


def _name_in(data: memoryview, *, is_padded: bool) -> tuple[str, int]:
    """Read a text that ends with NUL, and return it with its size, perhaps padded to a multiple of 8."""
    raw = bytes(data[:MAX_TEXT_BYTES])
    end = raw.find(b"\0")
    if end < 0:
        raise FormatError("a name does not end")
    return raw[:end].decode("utf-8"), -(-(end + 1) // 8) * 8 if is_padded else end + 1
