"""Safetensors files.

The format: https://github.com/huggingface/safetensors#format. A header in JSON says of each tensor its dtype, its
shape, and where in the rest of the file it lies; there are no holes, and nothing lies in two tensors.

The header is read by patterns, one tensor at a time, and never made into objects as a whole: those of a hostile one
could take many times its size.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tensorcas_mlflow.containers._parts import MIN_TENSOR_BYTES, Part, Skeleton, Tensor
from tensorcas_mlflow.containers._tape import MAX_PEEK_BYTES, Tape
from tensorcas_mlflow.dtypes import parse_dtype
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.tensor import MAX_DIMENSIONS

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
"""The others are packed, several elements to a byte, which has no name in a manifest."""
SAFETENSORS_DTYPES = {name: code for code, name in _DTYPES.items()}
"""By the dtype's name in a manifest what safetensors calls it."""
_ITEM_BYTES = {dtype: parse_dtype(name).itemsize for dtype, name in _DTYPES.items()}

_SPACE = rb"[ \t\r\n]*+"
_TEXT = rb'"[^"\\\x00-\x1f]*+(?:\\[^\x00-\x1f][^"\\\x00-\x1f]*+)*+"'
_PAIR = _SPACE + _TEXT + _SPACE + rb":" + _SPACE + _TEXT + _SPACE
_PAIRS = rb"(?:" + _PAIR + rb"(?:," + _PAIR + rb")*+)?+"
_METADATA = re.compile(_SPACE + rb'"__metadata__"' + _SPACE + rb":" + _SPACE + rb"\{" + _PAIRS + _SPACE + rb"\}")
_TENSOR = re.compile(_SPACE + rb"(" + _TEXT + rb")" + _SPACE + rb":" + _SPACE + rb"(\{[^{}]{0,4096}+\})")
# As the library writes it, with or without spaces: read without the detour through objects, there may be many.
_USUAL = re.compile(
    rb'\{"dtype": ?"([A-Z0-9_]+)", ?"shape": ?\[([0-9, ]*)\], ?"data_offsets": ?\[([0-9]+), ?([0-9]+)\]\}'
)
_EMPTY = re.compile(rb"\{" + _SPACE + rb"\}" + _SPACE)
_BLANK = re.compile(_SPACE)
_BETWEEN = re.compile(_SPACE + rb"([,}])")


def is_safetensors(head: memoryview) -> bool:
    """Tell a safetensors file by its first bytes: a length that is possible, and an object."""
    return bytes(head[8:9]) == b"{" and int.from_bytes(head[:_LENGTH_BYTES], "little") <= _MAX_HEADER_BYTES


def split_safetensors(tape: Tape) -> Iterator[Part]:
    """Announce the header, and the tensors in the order in which they lie.

    Raises:
        FormatError: The header is longer than a splitter may look ahead, or is not sound.
    """
    n_bytes = int.from_bytes(tape.peek(_LENGTH_BYTES), "little")
    if n_bytes > MAX_PEEK_BYTES - _LENGTH_BYTES:
        raise FormatError(f"a safetensors header of {n_bytes} bytes")
    header = tape.peek(_LENGTH_BYTES + n_bytes)[_LENGTH_BYTES:]
    if len(header) < n_bytes:
        raise FormatError("a safetensors file that ends in its header")
    places = _tensors_in_order(header)
    yield Skeleton(n_bytes=_LENGTH_BYTES + n_bytes)
    for place in places.tolist():
        match = _TENSOR.match(header, place)
        assert match is not None
        fact = _Fact.of(match)
        n_bytes = fact.end - fact.begin
        if n_bytes >= MIN_TENSOR_BYTES:
            yield Tensor(n_bytes=n_bytes, name=fact.name, dtype=fact.dtype, shape=fact.shape)
        elif n_bytes:
            yield Skeleton(n_bytes=n_bytes)


def _tensors_in_order(header: memoryview) -> NDArray[np.int64]:
    """Find where in the header each tensor is described, in the order in which the tensors lie.

    No more is kept of a tensor than four numbers, so that a header costs little more than it is long.
    """
    numbers = array("q")
    for place, match in _tensors(header):
        fact = _Fact.of(match)
        numbers.extend((place, fact.begin, fact.end, hash(fact.name)))
    places, begins, ends, names = np.frombuffer(numbers, np.int64).reshape(-1, 4).T
    order = np.lexsort((ends, begins))
    # Each begins where the one before ends, the first at 0.
    if not np.array_equal(begins[order][1:], ends[order][:-1]) or begins[order][:1].any():
        raise FormatError("a safetensors file with holes, or with bytes in two tensors")
    if len(np.unique(names)) < len(names):
        raise FormatError("a safetensors file with two tensors of one name")
    return places[order]


def _tensors(header: memoryview) -> Iterator[tuple[int, re.Match[bytes]]]:
    """Find each tensor in a header, and see that there is nothing else but the metadata, which are passed over."""
    at, has_metadata = 1, False
    if _EMPTY.fullmatch(header):
        return
    while True:
        match = _TENSOR.match(header, at)
        if match and match[1] != b'"__metadata__"':
            yield at, match
        else:
            match = _METADATA.match(header, at)
            if not match or has_metadata:
                raise FormatError(f"a safetensors header that is unsound at byte {at}")
            has_metadata = True
        between = _BETWEEN.match(header, match.end())
        if not between:
            raise FormatError(f"a safetensors header that is unsound at byte {match.end()}")
        at = between.end()
        if between[1] == b"}":
            break
    if not _BLANK.fullmatch(header, at):
        raise FormatError(f"a safetensors header that goes on after byte {at}")


@dataclass(frozen=True, slots=True)
class _Fact:
    """What a header says of one tensor."""

    name: str
    dtype: str | None
    shape: tuple[int, ...] | None
    begin: int
    """First byte, counted from the end of the header."""
    end: int
    """One past the last."""

    @classmethod
    def of(cls, match: re.Match[bytes]) -> _Fact:
        name = json.loads(match[1]) if b"\\" in match[1] else match[1][1:-1].decode()
        usual = _USUAL.fullmatch(match[2])
        if usual:
            dtype, sides, begin, end = usual[1].decode(), usual[2], int(usual[3]), int(usual[4])
            shape = tuple(map(int, sides.split(b","))) if sides else ()
        else:
            fields = json.loads(match[2])
            dtype, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
            if any(type(number) is not int for number in (begin, end, *shape)):
                raise FormatError(f"a safetensors file in which a size of {name[:80]!r} is no number")
        item_bytes = _ITEM_BYTES.get(dtype)
        if not 0 <= begin <= end or len(shape) > MAX_DIMENSIONS or min(shape, default=0) < 0:
            raise FormatError(f"a safetensors file in which {name[:80]!r} has an impossible place or shape")
        if item_bytes is None:
            return cls(name, None, None, begin, end)
        if math.prod(shape) * item_bytes != end - begin:
            raise FormatError(f"a safetensors file in which {name[:80]!r} has not the size of its shape")
        return cls(name, _DTYPES[dtype], shape, begin, end)
