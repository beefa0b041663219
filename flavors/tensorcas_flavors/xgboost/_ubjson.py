"""UBJSON as XGBoost writes it: bytes to a tree of Python values, and back to the same bytes.

The format is Universal Binary JSON, draft 12 (https://ubjson.org), in the dialect of XGBoost's ``UBJReader`` and
``UBJWriter`` (``src/common/json.cc``), which its manual names as the model format "ubj". In that dialect

* all numbers are big-endian, and all lengths are int64 (marker ``L``);
* an object is ``{``, keys (a length, then bytes) each followed by its value, ``}``;
* an array is ``[#L``, a count and that many values, or, if typed, ``[$``, a type, ``#L``, a count and packed numbers;
  neither has an end marker;
* an integer takes the first of the types ``i``, ``I``, ``l``, ``L`` whose range holds it *strictly* (127 is an ``I``).

`parse` accepts this dialect alone, so `write` returns exactly the bytes that `parse` read:

========================  ============================================================================================
UBJSON                    Python
========================  ============================================================================================
``Z``, ``T``, ``F``       None, True, False
``S``                     str; bytes that are not UTF-8 become surrogates (``surrogateescape``)
``i I l L``               int; a numpy integer of that width if XGBoost would choose another
``U``                     numpy.uint8
``d``, ``D``              numpy.float32, numpy.float64
typed array               1-d ndarray, read-only, big-endian, a view of the bytes
array, object             list, dict in the order of the keys
========================  ============================================================================================
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import Any

import numpy as np

Value = Any
"""None, bool, int, numpy number, str, 1-d ndarray, list or dict with str keys."""
MAX_DEPTH = 32
"""Deepest nesting of arrays and objects. XGBoost's models need 8."""
_DTYPES = {
    marker: np.dtype(code)
    for marker, code in {
        "i": ">i1",
        "U": ">u1",
        "I": ">i2",
        "l": ">i4",
        "L": ">i8",
        "d": ">f4",
        "D": ">f8",
    }.items()
}
_MARKERS = {dtype: marker for marker, dtype in _DTYPES.items()}
_CONSTANTS = {"Z": None, "T": True, "F": False}
_ARRAY_HEADS = {b"$" + marker.encode() + b"#": dtype for marker, dtype in _DTYPES.items()}
_LENGTH = struct.Struct(">q")
_MARKED_LENGTH = struct.Struct(">cq")


class Encoded(bytes):
    """Encoded value, which `write` copies."""


def array_head(dtype: np.dtype[Any]) -> bytes:
    """Return the bytes before the length and the packed numbers of a typed array.

    Raises:
        ValueError: UBJSON has no such type.
    """
    return b"[$" + _marker(dtype) + b"#L"


def encoded_key(key: str) -> bytes:
    """Return the bytes before the value of a member of an object."""
    return _text(key)


def encoded_list_head(count: int) -> bytes:
    """Return the bytes before the values of an untyped array."""
    return b"[#" + _length(count)


def parse(data: bytes) -> Value:
    """Read one document.

    Memory stays within a small multiple of ``len(data)``, whatever lengths the bytes claim.

    Args:
        data: The whole document. Arrays of the result are views of it.

    Raises:
        ValueError: These bytes are not a document of the dialect above, or nest deeper than `MAX_DEPTH`.
    """
    reader = _Reader(data)
    value = reader.value(0)
    if reader.position != len(data):
        raise ValueError(f"{len(data) - reader.position} bytes follow the document")
    return value


def write(value: Value) -> bytes:
    """Encode one document as XGBoost would.

    Args:
        value: Result of `parse`; arrays may have any byte order, and any part may be `Encoded`.

    Raises:
        ValueError: The format cannot express some part, or it nests deeper than `MAX_DEPTH`.
    """
    pieces: list[bytes] = []
    _write(value, pieces, 0)
    return b"".join(pieces)


def narrowest(value: int) -> str:
    """Return the marker of the type in which XGBoost writes an integer.

    Raises:
        ValueError: It does not fit 64 bits.
    """
    for marker, bits in (("i", 8), ("I", 16), ("l", 32)):
        limit = 2 ** (bits - 1)
        if -limit < value < limit - 1:
            return marker
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{value} does not fit 64 bits")
    return "L"


class _Reader:
    """Cursor over bytes that never reads past their end."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def marker(self) -> str:
        marker = self.data[self.position : self.position + 1]
        if not marker:
            raise ValueError(f"the document ends too early, at {self.position}")
        self.position += 1
        return marker.decode("latin-1")

    def length(self) -> int:
        """Return a length or count that the remaining bytes can hold, at a byte per item or more."""
        end = self.position + _MARKED_LENGTH.size
        if end > len(self.data):
            raise ValueError(f"the document ends too early, at {len(self.data)}")
        marker, length = _MARKED_LENGTH.unpack_from(self.data, self.position)
        if marker != b"L":
            raise ValueError(f"a length is missing at {self.position}")
        if not 0 <= length <= len(self.data) - end:
            raise ValueError(f"a length of {length} is claimed at {self.position} of {len(self.data)}")
        self.position = end
        return int(length)

    def text(self) -> str:
        length = self.length()
        start = self.position
        self.position = end = start + length
        return self.data[start:end].decode("utf-8", "surrogateescape")

    def value(self, depth: int) -> Value:
        marker = self.marker()
        if marker == "S":
            return self.text()
        if marker in _CONSTANTS:
            return _CONSTANTS[marker]
        if marker in _DTYPES:
            return self.number(marker)
        if depth == MAX_DEPTH:
            raise ValueError(f"the document is deeper than {MAX_DEPTH} levels")
        if marker == "{":
            return self.object(depth)
        if marker == "[":
            return self.array(depth)
        raise ValueError(f"unknown marker {marker!r} at {self.position - 1}")

    def number(self, marker: str) -> Value:
        dtype = _DTYPES[marker]
        if dtype.itemsize > len(self.data) - self.position:
            raise ValueError(f"the document ends too early, at {len(self.data)}")
        number = np.frombuffer(self.data, dtype, 1, self.position)[0]
        self.position += dtype.itemsize
        if dtype.kind == "i" and narrowest(int(number)) == marker:
            return int(number)
        return number

    def object(self, depth: int) -> dict[str, Value]:
        members: dict[str, Value] = {}
        while self.data[self.position : self.position + 1] != b"}":
            key = self.text()
            if key in members:
                raise ValueError(f"key {key!r} occurs twice in one object")
            members[key] = self.value(depth + 1)
        self.position += 1
        return members

    def array(self, depth: int) -> Value:
        start = self.position
        if self.data[start : start + 1] == b"#":
            self.position += 1
            return [self.value(depth + 1) for _ in range(self.length())]
        head = self.data[start : start + 3]
        dtype = _ARRAY_HEADS.get(head)
        if dtype is None:
            raise ValueError(f"an array without a count, or of an unknown type, begins at {start}")
        self.position += len(head)
        count = self.length()
        n_bytes = count * dtype.itemsize
        if n_bytes > len(self.data) - self.position:
            raise ValueError(f"{n_bytes} bytes are claimed at {self.position} of {len(self.data)}")
        self.position += n_bytes
        return np.frombuffer(self.data, dtype, count, self.position - n_bytes)


def _length(n: int) -> bytes:
    return b"L" + _LENGTH.pack(n)


def _text(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogateescape")
    return _length(len(encoded)) + encoded


def _marker(dtype: np.dtype[Any]) -> bytes:
    marker = _MARKERS.get(dtype.newbyteorder(">"))
    if marker is None:
        raise ValueError(f"UBJSON has no type for {dtype}")
    return marker.encode()


def _packed(array: np.ndarray[Any, Any] | np.generic) -> bytes:
    return np.asarray(array).astype(array.dtype.newbyteorder(">")).tobytes()


def _write(value: Value, pieces: list[bytes], depth: int) -> None:
    if depth == MAX_DEPTH and isinstance(value, dict | list | np.ndarray):
        raise ValueError(f"the document is deeper than {MAX_DEPTH} levels")
    if value is None:
        pieces.append(b"Z")
    elif isinstance(value, bool):
        pieces.append(b"T" if value else b"F")
    elif isinstance(value, str):
        pieces.append(b"S" + _text(value))
    elif isinstance(value, int):
        marker = narrowest(value)
        pieces.append(marker.encode() + value.to_bytes(_DTYPES[marker].itemsize, "big", signed=True))
    elif isinstance(value, np.generic):
        pieces += (_marker(value.dtype), _packed(value))
    elif isinstance(value, np.ndarray) and value.ndim == 1:
        pieces += (array_head(value.dtype), _LENGTH.pack(len(value)), _packed(value))
    elif isinstance(value, dict):
        pieces.append(b"{")
        for key, member in value.items():
            pieces.append(_text(key))
            _write(member, pieces, depth + 1)
        pieces.append(b"}")
    elif isinstance(value, list):
        pieces.append(encoded_list_head(len(value)))
        for item in value:
            _write(item, pieces, depth + 1)
    elif isinstance(value, Encoded):
        pieces.append(value)
    else:
        raise ValueError(f"UBJSON has no type for a {type(value).__name__}")


def encode_value(value: Any, depth: int = 10) -> Value:
    """Return a plain Python value in the types of UBJSON; `decode_value` inverts it exactly.

    Text, whole numbers, booleans, None and lists stand for themselves, and a float is a float64. All else is an object
    with one or two members, the first of which names the type.

    Raises:
        ValueError: The value is not plain, or nests deeper than ``depth``, in particular if it contains itself.
    """
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        narrowest(value)  # raises if it does not fit
        return value
    if kind is float:
        return np.float64(value)
    if kind is np.ndarray or isinstance(value, np.generic):
        items = np.asarray(value).reshape(-1)
        if items.dtype.isnative and write(items):  # raises if UBJSON has no such type
            return {"array": items, "shape": list(value.shape)} if kind is np.ndarray else {"number": items}
    if depth > 0 and kind is list:
        return [encode_value(item, depth - 1) for item in value]
    if depth > 0 and kind is tuple:
        return {"tuple": [encode_value(item, depth - 1) for item in value]}
    if depth > 0 and kind in (dict, OrderedDict) and all(type(key) is str for key in value):
        return {kind.__name__: {key: encode_value(member, depth - 1) for key, member in value.items()}}
    raise ValueError(f"a {kind.__name__} is not plain")


def decode_value(value: Value) -> Any:
    """Return the value that `encode_value` encoded.

    Raises:
        ValueError: `encode_value` returns no such value.
    """
    match value:
        case np.float64():
            return float(value)
        case np.generic():
            raise ValueError(f"a {type(value).__name__} stands for no value")
        case list():
            return [decode_value(item) for item in value]
        case {"tuple": list(items)}:
            return tuple(decode_value(item) for item in items)
        case {"dict": dict(members)}:
            return {key: decode_value(member) for key, member in members.items()}
        case {"OrderedDict": dict(members)}:
            return OrderedDict((key, decode_value(member)) for key, member in members.items())
        case {"number": np.ndarray() as items} if len(items) == 1:
            return items.astype(items.dtype.newbyteorder("="))[0]
        case {"array": np.ndarray() as items, "shape": [*shape]} if all(type(n) is int for n in shape):
            return items.astype(items.dtype.newbyteorder("=")).reshape(shape)
        case dict() | np.ndarray():
            raise ValueError("an object stands for no value")
        case _:
            return value
