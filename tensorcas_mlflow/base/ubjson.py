"""UBJSON as XGBoost writes it: a reader of tokens, and a tree of Python values to and from the same bytes.

The format is Universal Binary JSON, draft 12 (https://ubjson.org), in the dialect of XGBoost's ``UBJReader`` and
``UBJWriter`` (``src/common/json.cc``), which its manual calls the model format "ubj". In that dialect

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

The module depends on numpy alone, and its errors are `ValueError`.
"""

from __future__ import annotations

import re
import struct
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

Value = Any
"""None, bool, int, numpy number, str, 1-d ndarray, list or dict with str keys."""

MAX_DEPTH = 32
"""Deepest nesting of arrays and objects. XGBoost's models need 8."""

NUMBER_DTYPES = {
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
"""Types of numbers, by their markers."""
ARRAY_HEAD = re.compile(rb"\[\$([iUIlLdD])#L(.{8})", re.DOTALL)
"""Beginning of a typed array: its type and its count."""
CONSTANTS = {"Z": None, "T": True, "F": False}
_MARKERS = {dtype: marker for marker, dtype in NUMBER_DTYPES.items()}
_LENGTH = struct.Struct(">q")
_MARKED_LENGTH = struct.Struct(">cq")


class TokenReader(ABC):
    """Cursor over the tokens of one document, in memory or in a file that is read forward."""

    position: int
    """Number of bytes read."""
    n_bytes: int
    """Size of the document."""

    @abstractmethod
    def take(self, n_bytes: int) -> bytes:
        """Return the next bytes; raise `ValueError` if the document ends first."""

    def marker(self) -> str:
        """Read the marker of a value."""
        return self.take(1).decode("latin-1")

    def length(self) -> int:
        """Read a length or count that the rest of the document can hold: each counted item takes at least a byte."""
        marker, length = _MARKED_LENGTH.unpack(self.take(_MARKED_LENGTH.size))
        if marker != b"L":
            raise ValueError(f"a length is missing at {self.position - _MARKED_LENGTH.size}")
        if not 0 <= length <= self.n_bytes - self.position:
            raise ValueError(f"a length of {length} is claimed at {self.position} of {self.n_bytes}")
        return int(length)

    def text(self, max_bytes: int | None = None) -> str:
        """Read a text or key, after its marker if it has one."""
        length = self.length()
        if max_bytes is not None and length > max_bytes:
            raise ValueError(f"a key of {length} bytes")
        return self.take(length).decode("utf-8", "surrogateescape")

    def array_head(self) -> tuple[np.dtype[Any] | None, int]:
        """Read the type of an array's numbers, None for any values, and their count, after the array's marker."""
        dtype, mark = None, self.marker()
        if mark == "$":
            kind, mark = self.marker(), self.marker()
            dtype = NUMBER_DTYPES.get(kind)
            if dtype is None:
                raise ValueError(f"an array of the unknown type {kind!r} begins at {self.position - 3}")
        if mark != "#":
            raise ValueError(f"an array without a count begins at {self.position - 1}")
        count = self.length()
        n_bytes = count * (dtype.itemsize if dtype else 1)
        if n_bytes > self.n_bytes - self.position:
            raise ValueError(f"{n_bytes} bytes are claimed at {self.position} of {self.n_bytes}")
        return dtype, count


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
        ValueError: The bytes are not a document of the dialect above, or nest deeper than `MAX_DEPTH`.
    """
    reader = _TreeReader(data)
    value = reader.value(0)
    if reader.position != len(data):
        raise ValueError(f"{len(data) - reader.position} bytes follow the document")
    return value


def write(value: Value) -> bytes:
    """Encode one document as XGBoost would.

    Args:
        value: A tree of the values that `parse` returns; arrays may have any byte order, and any part may be `Encoded`.

    Raises:
        ValueError: UBJSON has no type for a part, or the parts nest deeper than `MAX_DEPTH`.
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


class _TreeReader(TokenReader):
    """Reader of a document in memory.

    A model has thousands of keys and short arrays, so each takes one call. `TokenReader` raises the errors.
    """

    def __init__(self, data: bytes) -> None:
        self.position = 0
        self.n_bytes = len(data)
        self._data = data

    def take(self, n_bytes: int) -> bytes:
        start = self.position
        end = start + n_bytes
        if end > self.n_bytes:
            raise ValueError(f"the document ends at {self.n_bytes}, too early")
        self.position = end
        return self._data[start:end]

    def text(self, max_bytes: int | None = None) -> str:
        start = self.position + _MARKED_LENGTH.size
        if max_bytes is None and start <= self.n_bytes:
            marker, length = _MARKED_LENGTH.unpack_from(self._data, self.position)
            if marker == b"L" and 0 <= length <= self.n_bytes - start:
                self.position = start + length
                return self._data[start : self.position].decode("utf-8", "surrogateescape")
        return super().text(max_bytes)

    def value(self, depth: int) -> Value:
        data, at = self._data, self.position
        found = ARRAY_HEAD.match(data, at) if depth < MAX_DEPTH else None
        if found is not None:
            packed_dtype, count = NUMBER_DTYPES[found[1].decode()], int.from_bytes(found[2], "big", signed=True)
            end = found.end() + count * packed_dtype.itemsize
            if found.end() <= end <= self.n_bytes:
                self.position = end
                return np.frombuffer(data, packed_dtype, count, found.end())
        marker = data[at : at + 1].decode("latin-1") or self.marker()  # raises
        self.position = at + 1
        if marker == "S":
            return self.text()
        if marker in CONSTANTS:
            return CONSTANTS[marker]
        dtype = NUMBER_DTYPES.get(marker)
        if dtype is not None:
            packed = self.take(dtype.itemsize)
            if dtype.kind == "i":
                number = int.from_bytes(packed, "big", signed=True)
                if narrowest(number) == marker:
                    return number
            return np.frombuffer(packed, dtype)[0]
        if depth == MAX_DEPTH:
            raise ValueError(f"the document is deeper than {MAX_DEPTH} levels")
        if marker == "{":
            return self._object(depth)
        if marker == "[":
            _, count = self.array_head()  # refuses a typed array, which is too short here
            return [self.value(depth + 1) for _ in range(count)]
        raise ValueError(f"unknown marker {marker!r} at {self.position - 1}")

    def _object(self, depth: int) -> dict[str, Value]:
        members: dict[str, Value] = {}
        while self._data[self.position : self.position + 1] != b"}":
            key = self.text()
            if key in members:
                raise ValueError(f"key {key!r} occurs twice in one object")
            members[key] = self.value(depth + 1)
        self.position += 1
        return members


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
        pieces.append(marker.encode() + value.to_bytes(NUMBER_DTYPES[marker].itemsize, "big", signed=True))
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
