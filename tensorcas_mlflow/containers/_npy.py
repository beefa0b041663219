"""NumPy's file of one array, `.npy`, versions 1 to 3.

The format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

from __future__ import annotations

import ast
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.lib.format import descr_to_dtype

from tensorcas_mlflow.containers._parts import MIN_TENSOR_BYTES, Part, Skeleton, Tensor
from tensorcas_mlflow.containers._tape import Tape
from tensorcas_mlflow.dtypes import DType, dtype_name
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.tensor import MAX_DIMENSIONS, MAX_TENSOR_BYTES

_MAGIC = b"\x93NUMPY"
_VERSIONS = {1: struct.Struct("<H"), 2: struct.Struct("<I"), 3: struct.Struct("<I")}
_MAX_HEADER_BYTES = 10_000  # as many as numpy reads unless it is told to trust a file

_TYPE = re.compile(r"[<>=|]?[biufcmMOSUV]\d{0,9}(?:\[\d{0,9}[A-Za-z]{1,2}\])?")
_PLAIN_HEADER = re.compile(
    rf"\{{'descr': '({_TYPE.pattern})', 'fortran_order': (True|False), "
    r"'shape': \(((?:\d{1,17}, )*+(?:\d{1,17},?)?)\), \} *+\n"
)
# Constants and brackets, and nothing that nests without them: what is parsed has a bounded depth.
_LITERAL = re.compile(r"(?>'[^'\\\n]*+'|\d{1,17}\b|True|False|None|[][(){},: ]++)*+\n")
_MAX_DEPTH = 20
_MAX_LITERAL_BYTES = 2 << 20
"""Of all headers of a file that are parsed as literals: some four thousand arrays of records. It takes a second."""
_literal_bytes: WeakKeyDictionary[Tape, int] = WeakKeyDictionary()
"""How many there were so far in the files that are being read."""

_NONSENSE = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, SyntaxError, MemoryError)

_REST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class NpyHeader:
    """What stands before an array's bytes, and says what they are."""

    n_bytes: int
    """Of the header itself, with all that comes before the array."""
    dtype: DType
    shape: tuple[int, ...]
    """Of the bytes in C order: for an array in Fortran order, the shape of its transpose."""
    is_fortran: bool = False

    @property
    def array_bytes(self) -> int | None:
        """How many bytes the array has; None for an array of objects, which is a pickle of any length."""
        return None if self.dtype.hasobject else math.prod(self.shape) * self.dtype.itemsize


def is_npy(head: memoryview) -> bool:
    """Tell an `.npy` file by its first bytes."""
    return head[:6] == _MAGIC and len(head) > 7 and head[6] in _VERSIONS and head[7] == 0


def read_npy_header(tape: Tape) -> NpyHeader:
    """Read the header that the tape is at, without taking it.

    Raises:
        FormatError: It is not one, or is longer or larger than any array's.
    """
    head = tape.peek(12)
    if not is_npy(head):
        raise FormatError("not an .npy file")
    length = _VERSIONS[head[6]]
    (n_text,) = length.unpack_from(head, 8)
    start = 8 + length.size
    if n_text > _MAX_HEADER_BYTES:
        raise FormatError(f"an .npy header of {n_text} bytes")
    text = bytes(tape.peek(start + n_text)[start:])
    try:
        dtype, shape, is_fortran = _parse(text.decode("utf-8" if head[6] == 3 else "latin-1"), tape)
    except _NONSENSE as error:
        raise FormatError(f"not an .npy header: {error}") from error
    sides = math.prod(side for side in shape if side)
    if (
        len(shape) > MAX_DIMENSIONS
        or min(shape, default=0) < 0
        or dtype.itemsize == 0
        or sides * dtype.itemsize > MAX_TENSOR_BYTES
    ):
        raise FormatError(f"an array of {len(shape)} dimensions and {sides} elements of {dtype.itemsize} bytes")
    return NpyHeader(n_bytes=start + n_text, dtype=dtype, shape=shape, is_fortran=is_fortran)


def npy_parts(header: NpyHeader, name: str) -> Iterator[Part]:
    """Announce the header and the array, which must not be one of objects."""
    yield Skeleton(n_bytes=header.n_bytes)
    n_bytes = header.array_bytes
    assert n_bytes is not None
    if n_bytes >= MIN_TENSOR_BYTES:
        dtype = _name_of(header.dtype)
        yield Tensor(n_bytes=n_bytes, name=name, dtype=dtype, shape=header.shape if dtype else None)
    elif n_bytes:
        yield Skeleton(n_bytes=n_bytes)


def split_npy(tape: Tape) -> Iterator[Part]:
    """Announce the parts of an `.npy` file, or of several in one, as `numpy.save` appends them."""
    while is_npy(tape.peek(8)):
        header = read_npy_header(tape)
        if header.array_bytes is None:
            while not tape.is_at_end():
                yield Skeleton(n_bytes=_REST_BYTES)
        else:
            yield from npy_parts(header, "")


def _parse(text: str, tape: Tape) -> tuple[DType, tuple[int, ...], bool]:
    match = _PLAIN_HEADER.fullmatch(text)
    if match:
        descr, order, sides = match.groups()
        shape = tuple(map(int, sides.replace(",", "").split()))
        return _dtype_of(descr), shape[::-1] if order == "True" else shape, order == "True"
    _literal_bytes[tape] = _literal_bytes.get(tape, 0) + len(text)
    if _literal_bytes[tape] > _MAX_LITERAL_BYTES:
        raise FormatError("a file with too much in its .npy headers")
    return _parse_literal(text)


@lru_cache(maxsize=16)
def _parse_literal(text: str) -> tuple[DType, tuple[int, ...], bool]:
    """Read a header that is not as numpy writes that of a simple type: mostly that of an array of records."""
    if not _LITERAL.fullmatch(text) or not _is_shallow(text):
        raise ValueError("not a literal")
    fields = ast.literal_eval(text)
    shape, order = fields["shape"], fields["fortran_order"]
    if not isinstance(shape, tuple) or not all(type(side) is int for side in shape):
        raise ValueError("no shape")
    return _dtype_of(fields["descr"]), shape[::-1] if order is True else shape, order is True


def _is_shallow(text: str) -> bool:
    depths = accumulate(1 if bracket in "[({" else -1 for bracket in re.findall(r"[][(){}]", text))
    return max(depths, default=0) <= _MAX_DEPTH


def _dtype_of(descr: Any) -> DType:
    """Make a dtype as `descr_to_dtype` does, which is given nothing but what it expects."""
    if isinstance(descr, str):
        return _simple_dtype(descr)
    _check_descr(descr)
    return descr_to_dtype(descr)


@lru_cache(maxsize=256)
def _simple_dtype(descr: str) -> DType:
    if not _TYPE.fullmatch(descr):
        raise ValueError(f"no dtype is called {descr[:80]!r}")
    return np.dtype(descr)


def _check_descr(descr: Any) -> None:
    if isinstance(descr, str):
        _simple_dtype(descr)
    elif isinstance(descr, tuple):
        _check_descr(descr[0])
    elif isinstance(descr, list):
        for field in descr:
            _check_descr(field[1])
    else:
        raise TypeError(f"not a dtype: {descr}")


def _name_of(dtype: DType) -> str | None:
    try:
        return dtype_name(dtype)
    except ValueError:
        return None
