"""Fields of protobuf's wire format, in which ONNX and TensorFlow write their messages.

Source: protobuf.dev/programming-guides/encoding. A field is a varint of its number and wire type, and its value.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tensorcas_mlflow.errors import FormatError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types."""


def read_fields(message: memoryview) -> Iterator[tuple[int, int, int, memoryview]]:
    """Read a message's fields: number, wire type, value of a varint, and bytes."""
    at = 0
    while at < len(message):
        number, wire_type, value, at = read_field(message, at)
        end = at + value if wire_type == BYTES else at
        if end > len(message):
            raise FormatError("a field exceeds its message")
        yield number, wire_type, value, message[at:end]
        at = end


def read_field(view: memoryview, at: int) -> tuple[int, int, int, int]:
    """Read the beginning of a field.

    Returns:
        The field's number; its wire type; the value of a varint, the length of bytes, or 0; and the position behind
        them, which for bytes is their first.

    Raises:
        FormatError: The bytes do not begin a field.
        IndexError: The view ends first.
    """
    tag = view[at]
    at += 1
    if tag > 127:
        tag, at = read_varint(view, at - 1)
    wire_type = tag & 7
    value = 0
    if wire_type in (VARINT, BYTES):
        value = view[at]
        at += 1
        if value > 127:
            value, at = read_varint(view, at - 1)
    elif wire_type == FIXED32:
        at += 4
    elif wire_type == FIXED64:
        at += 8
    else:
        raise FormatError(f"no field has the wire type {wire_type}")
    if tag < 8:
        raise FormatError("no field has the number 0")
    return tag >> 3, wire_type, value, at


def read_varint(view: memoryview, at: int) -> tuple[int, int]:
    """Read a varint, and return it with the position behind it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = view[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise FormatError("a varint of more than 10 bytes")


def read_varints(data: memoryview) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Read consecutive varints."""
    raw = np.frombuffer(data, np.uint8)
    if not len(raw):
        return np.empty(0, np.uint64)
    ends = np.flatnonzero(raw < 128) + 1
    starts = np.concatenate(([0], ends[:-1]))
    if not len(ends) or ends[-1] != len(raw) or (ends - starts).max() > 10:
        raise FormatError("numbers that do not end")
    nth = np.arange(len(raw)) - np.repeat(starts, ends - starts)
    parts = (raw & 127).astype(np.uint64) << (7 * nth).astype(np.uint64)
    return np.asarray(np.add.reduceat(parts, starts), np.uint64)
