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
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tensorcas_mlflow.containers._json import SPACE, TEXT, strict_json, whole
from tensorcas_mlflow.containers._parts import Part, Skeleton
from tensorcas_mlflow.containers._tape import MAX_PEEK_BYTES, Tape
from tensorcas_mlflow.containers._tensor_fact import TensorFact, check_shape, item_bytes, parts_of
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.tensor import MAX_DIMENSIONS

LENGTH_BYTES = 8
"""Of the number before the header, which is its size."""
MAX_HEADER_BYTES = 100_000_000

DTYPES = {
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
SAFETENSORS_DTYPES = {name: kind for kind, name in DTYPES.items()}
"""By the dtype's name in a manifest what safetensors calls it."""
PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits of one element."""
_ITEM_BYTES = {kind: item_bytes(dtype) for kind, dtype in DTYPES.items()}
_KNOWN = {kind.encode(): (kind, dtype, _ITEM_BYTES[kind]) for kind, dtype in DTYPES.items()}

_NUMBER = rb"(?:0|[1-9][0-9]{0,18}+)"
_PAIR = SPACE + TEXT + SPACE + rb":" + SPACE + TEXT + SPACE
_PAIRS = rb"(?:" + _PAIR + rb"(?:," + _PAIR + rb")*+)?+"
_METADATA = re.compile(SPACE + rb'"__metadata__"' + SPACE + rb":" + SPACE + rb"(\{" + _PAIRS + SPACE + rb"\})")
_TENSOR = re.compile(SPACE + rb"(" + TEXT + rb")" + SPACE + rb":" + SPACE + rb"(\{[^{}]{0,4096}+\})")
# As the library writes it, with or without spaces: read without the detour through objects, there may be many.
_USUAL = re.compile(
    rb' ?"([^"\\\x00-\x1f]*+)": ?\{"dtype": ?"([A-Z0-9_]++)", ?"shape": ?\[((?:'
    rb"%(n)b, ?)*+%(n)b|)\], ?"
    rb'"data_offsets": ?\[(%(n)b), ?(%(n)b)\]\},?' % {b"n": _NUMBER}
)
_COMMA = ord(",")
_EMPTY = re.compile(rb"\{" + SPACE + rb"\}" + SPACE)
_BLANK = re.compile(SPACE)
_BETWEEN = re.compile(SPACE + rb"([,}])")


def is_safetensors(head: memoryview) -> bool:
    """Tell a safetensors file by its first bytes: a length that is possible, and an object."""
    return bytes(head[8:9]) == b"{" and int.from_bytes(head[:LENGTH_BYTES], "little") <= MAX_HEADER_BYTES


def split_safetensors(tape: Tape) -> Iterator[Part]:
    """Announce the header, and the tensors in the order in which they lie.

    Raises:
        FormatError: The header is longer than a splitter may look ahead, or is not sound.
    """
    n_bytes = int.from_bytes(tape.peek(LENGTH_BYTES), "little")
    if n_bytes > MAX_PEEK_BYTES - LENGTH_BYTES:
        raise FormatError(f"a safetensors header of {n_bytes} bytes")
    header = tape.peek(LENGTH_BYTES + n_bytes)[LENGTH_BYTES:]
    if len(header) < n_bytes:
        raise FormatError("a safetensors file that ends in its header")
    places = _tensors_in_order(header)
    yield Skeleton(n_bytes=LENGTH_BYTES + n_bytes)
    yield from parts_of(_tensor_at(header, place)[0] for place in places.tolist())


def safetensors_header(header: memoryview) -> Iterator[TensorFact | bytes]:
    """Say what a header holds.

    Yields:
        The tensors in the header's order, and once the metadata, if there are any: an object in JSON of nothing but
        texts.

    Raises:
        FormatError: It is not sound. So does a `ValueError` say. Whether tensors leave holes, share bytes or share a
            name is not looked at.
    """
    return (found for _, found in _walk(header))


def _tensors_in_order(header: memoryview) -> NDArray[np.int64]:
    """Find where in the header each tensor is described, in the order in which the tensors lie.

    No more is kept of a tensor than four numbers, so that a header costs little more than it is long.
    """
    numbers = array("q")
    for place, fact in _walk(header):
        if isinstance(fact, TensorFact):
            numbers.extend((place, fact.begin, fact.end, hash(fact.name)))
    places, begins, ends, names = np.frombuffer(numbers, np.int64).reshape(-1, 4).T
    order = np.lexsort((ends, begins))
    # Each begins where the one before ends, the first at 0.
    if not np.array_equal(begins[order][1:], ends[order][:-1]) or begins[order][:1].any():
        raise FormatError("a safetensors file with holes, or with bytes in two tensors")
    if len(np.unique(names)) < len(names):
        raise FormatError("a safetensors file with two tensors of one name")
    return places[order]


def _walk(header: memoryview) -> Iterator[tuple[int, TensorFact | bytes]]:
    """Find each tensor and the metadata in a header, and see that there is nothing else."""
    at, has_metadata = 1, False
    if _EMPTY.fullmatch(header):
        return
    if bytes(header[:1]) != b"{":
        raise FormatError("a safetensors header that does not begin with '{'")
    while True:
        fact, end = _usual_at(header, at)
        match = None if fact else _METADATA.match(header, at)
        if fact:
            yield at, fact
            if header[end - 1] == _COMMA:
                at = end
                continue
        elif match:
            if has_metadata:
                raise FormatError("a safetensors header with its metadata twice")
            has_metadata = True
            yield at, match[1]
            end = match.end()
        else:
            fact, end = _tensor_at(header, at)
            yield at, fact
        between = _BETWEEN.match(header, end)
        if not between:
            raise FormatError(f"a safetensors header that is unsound at byte {end}")
        at = between.end()
        if between[1] == b"}":
            break
    if not _BLANK.fullmatch(header, at):
        raise FormatError(f"a safetensors header that goes on after byte {at}")


def _usual_at(header: memoryview, at: int) -> tuple[TensorFact | None, int]:
    """Read what a header says of one tensor as the library writes it; None for anything else.

    Returns:
        Where it ends, too, after a comma that follows.
    """
    match = _USUAL.match(header, at)
    if not match:
        return None, at
    name, kind, sides, begin_text, end_text = match.groups()
    known = _KNOWN.get(kind)
    shape, size = _shape_of(sides)
    begin, end = int(begin_text), int(end_text)
    if known is None or not size or size * known[2] != end - begin or name == b"__metadata__":
        return None, at
    return TensorFact(name.decode(), known[0], known[1], shape, begin, end), match.end()


@lru_cache(maxsize=1024)
def _shape_of(sides: bytes) -> tuple[tuple[int, ...], int]:
    """Read a shape, and count its elements; 0 where there are too many dimensions."""
    shape = tuple(map(int, sides.split(b","))) if sides else ()
    return shape, math.prod(shape) if len(shape) <= MAX_DIMENSIONS else 0


def _tensor_at(header: memoryview, at: int) -> tuple[TensorFact, int]:
    """Read what a header says of one tensor, and where it ends; see `_usual_at`."""
    usual, end = _usual_at(header, at)
    if usual:
        return usual, end
    match = _TENSOR.match(header, at)
    if not match:
        raise FormatError(f"a safetensors header that is unsound at byte {at}")
    name, fields = json.loads(match[1]), strict_json(match[2])
    if not fields.keys() >= {"dtype", "shape", "data_offsets"} or type(fields["shape"]) is not list:
        raise FormatError(f"a safetensors file that says too little of {name[:80]!r}")
    kind, shape = fields["dtype"], tuple(map(whole, fields["shape"]))
    begin, stop = map(whole, fields["data_offsets"])
    if name == "__metadata__" or type(kind) is not str or begin > stop:
        raise FormatError(f"a safetensors file in which {name[:80]!r} is no tensor")
    n_item_bytes = _ITEM_BYTES.get(kind)
    if n_item_bytes is not None:
        check_shape(name, shape, n_item_bytes, stop - begin)
    return TensorFact(name, kind, DTYPES.get(kind), shape, begin, stop), match.end()
