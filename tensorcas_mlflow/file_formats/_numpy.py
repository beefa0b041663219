"""Files of NumPy: ``.npy``, one array, versions 1 to 3; and ``.npz``, a zip archive of such files.

The format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html. numpy itself reads an array of a
file, not its position. A written archive has the members that `numpy.savez` writes, with the arrays at multiples of 64
bytes, to be memory-mapped.
"""

from __future__ import annotations

import ast
import io
import math
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.lib import format as npy
from numpy.lib.format import descr_to_dtype

from tensorcas_mlflow.base.dtypes import DType
from tensorcas_mlflow.base.tensors import MAX_DIMENSIONS, MAX_TENSOR_BYTES, Spec
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._headers import name_or_none, tensor_or_skeleton
from tensorcas_mlflow.file_formats._layout import FileLayout, refuse
from tensorcas_mlflow.file_formats._listing import Listing, LocationTable, fortran_strides, record_fields
from tensorcas_mlflow.file_formats._source import ByteSource, FileRange, MemberSource, SourceStream
from tensorcas_mlflow.file_formats._tape import FilePart, Skeleton, Tape
from tensorcas_mlflow.file_formats._zip import RAW_DEFLATE, NewMember, ZipLayout

_MAGIC = b"\x93NUMPY"
_VERSIONS = {1: struct.Struct("<H"), 2: struct.Struct("<I"), 3: struct.Struct("<I")}
_MAX_HEADER_BYTES = 10_000  # numpy's own limit for a file that it does not trust
_MAX_MEMBER_HEADER_BYTES = 16 << 10
_LENGTH_BYTES = 12
_LOOK_BYTES = 512
"""Size of a first look into a deflated member; most headers are shorter."""
UNNAMED_ARRAY = "array"
"""Name of an array that is a whole file."""
_FROM_OTHER_PACKAGES = 2
"""Value of `numpy.dtype.isbuiltin` for dtypes that other packages have registered."""

_TYPE = re.compile(r"[<>=|]?[biufcmMOSUV]\d{0,9}(?:\[\d{0,9}[A-Za-z]{1,2}\])?")
_PLAIN_HEADER = re.compile(
    rf"\{{'descr': '({_TYPE.pattern})', 'fortran_order': (True|False), "
    r"'shape': \(((?:\d{1,17}, )*+(?:\d{1,17},?)?)\), \} *+\n"
)
# Constants and brackets. Nothing else nests, so the depth of a parsed text is bounded.
_QUOTED = r"""u?(?>'(?:[^'\\\n]|\\.)*+'|"(?:[^"\\\n]|\\.)*+")"""
_LONG = re.compile(rf"({_QUOTED})|\b(\d++)L\b")
"""A whole number as Python 2 writes one on Windows, or a text, in which nothing is one."""
_LITERAL = re.compile(r"(?>" + _QUOTED + r"|\d{1,17}\b|True|False|None|[][(){},: ]++)*+\n")
_MAX_DEPTH = 20
_MAX_LITERAL_BYTES = 2 << 20
"""Limit for all headers of one file that are parsed as literals: some four thousand arrays of records, a second."""
_literal_bytes: WeakKeyDictionary[Tape, int] = WeakKeyDictionary()
"""Size of such headers so far, of each file that is being read."""

_NONSENSE = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, SyntaxError, MemoryError)

_REST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class NpyHeader:
    """The header of an array."""

    n_bytes: int
    """Number of bytes before the array."""
    dtype: DType
    shape: tuple[int, ...]
    """Shape of the bytes in C order: for an array in Fortran order, the shape of its transpose."""
    is_fortran: bool = False

    @property
    def array_bytes(self) -> int | None:
        """Size of the array; None for an array of objects, which is a pickle of any length."""
        return None if self.dtype.hasobject else math.prod(self.shape) * self.dtype.itemsize


def is_npy(head: memoryview) -> bool:
    """Recognise an ``.npy`` file by its magic number and version."""
    return head[:6] == _MAGIC and len(head) > 7 and head[6] in _VERSIONS and head[7] == 0


def read_npy_header(tape: Tape) -> NpyHeader:
    """Read the header at the tape's position, without taking it.

    Raises:
        FormatError: The header is malformed, too long, or of an impossible array.
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
        words = text.decode("utf-8" if head[6] == 3 else "latin-1")
        dtype, shape, is_fortran = _parse(_LONG.sub(r"\1\2", words) if head[6] < 3 else words, tape)
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


def npy_parts(header: NpyHeader, name: str) -> Iterator[FilePart]:
    """Announce the header and the array, which is not an array of objects."""
    assert header.array_bytes is not None
    yield Skeleton(n_bytes=header.n_bytes)
    yield from tensor_or_skeleton(header.array_bytes, name, name_or_none(header.dtype), header.shape)


def split_npy(tape: Tape) -> Iterator[FilePart]:
    """Announce the parts of an ``.npy`` file, or of several that `numpy.save` has appended to one file."""
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
    """Read a header of an unusual form: mostly that of an array of records."""
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
    """Make a dtype with `descr_to_dtype`, after checking its argument."""
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


def list_npy(source: ByteSource) -> Listing:
    """List the one array of an ``.npy`` file; bytes behind the array are refused.

    Raises:
        FormatError: The file is malformed. A `struct.error` says the same.
    """
    header = read_npy_header(Tape(SourceStream(source), block_bytes=_LOOK_BYTES))
    table = LocationTable(source)
    if header.array_bytes is not None and header.n_bytes + header.array_bytes != source.size:
        raise FormatError(f"it has {source.size} bytes, of which {header.array_bytes} are its array")
    _add_array(table, UNNAMED_ARRAY, header)
    return table.listing("npy")


def is_npz(members: Sequence[FileRange]) -> bool:
    """Recognise an ``.npz`` archive by a member's name; an empty archive is one, too."""
    return not members or any(member.name.endswith(".npy") for member in members)


def list_npz(source: ByteSource, members: Sequence[FileRange]) -> Listing:
    """List the arrays of an ``.npz`` file, each by its member's name without ``.npy``.

    Left out are members that are not arrays, and arrays of objects, which are pickles. Reading an array checks its
    member's CRC-32.

    Raises:
        FormatError: The file is malformed. A `struct.error` and a `zlib.error` say the same.
    """
    table = LocationTable(source)
    for member in members:
        add_npy_member(table, member, member.name.removesuffix(".npy"))
    return table.listing("npz")


def add_npy_member(table: LocationTable, member: FileRange, name: str) -> None:
    """Add the array of a member of the first file, or leave it out; raises as `list_npz`."""
    head = _read_member_head(table.sources[0], member)
    if not member.name.endswith(".npy") or not is_npy(memoryview(head)):
        table.leave_out(name, "no array")
        return
    header = read_npy_header(Tape(io.BytesIO(head), block_bytes=len(head)))
    if header.array_bytes is not None and header.n_bytes + header.array_bytes != member.raw_bytes:
        raise FormatError(
            f"{member.name[:80]!r} has {member.raw_bytes} bytes, of which {header.array_bytes} are its array"
        )
    before = 0 if member.is_deflated else zlib.crc32(head[: header.n_bytes])
    _add_array(table, name, header, member=member, checksum=(member.crc32, before))


def _add_array(
    table: LocationTable,
    name: str,
    header: NpyHeader,
    *,
    member: FileRange | None = None,
    checksum: tuple[int, int] | None = None,
) -> None:
    """Add the array of the file, or of a member of it, or leave it out; see `LocationTable.add_array`."""
    dtype = name_or_none(header.dtype)
    fields = record_fields(header.dtype) if dtype is None and not header.is_fortran else ()
    if dtype is None and not fields:
        table.leave_out(name, "objects" if header.dtype.hasobject else str(header.dtype))
        return
    shape = header.shape[::-1] if header.is_fortran else header.shape
    strides = fortran_strides(shape) if header.is_fortran else None
    start, source, deflated = header.n_bytes, 0, member if member is not None and member.is_deflated else None
    if member is not None and deflated is None:
        if fields:
            # One field alone cannot check the member.
            table.sources.append(MemberSource(table.sources[0], member, is_listed=True))
            source = len(table.sources) - 1
        else:
            start += member.start
    table.add_array(
        name,
        dtype or "",
        shape,
        start=start,
        source=source,
        strides=strides,
        fields=fields,
        member=deflated,
        checksum=checksum,
    )


def _read_member_head(source: ByteSource, member: FileRange) -> bytes:
    """Read the header of a member that may be an array; of a stored member, not a byte more."""
    head = b""
    wanted = _LENGTH_BYTES
    for look in (_LOOK_BYTES, _MAX_MEMBER_HEADER_BYTES):
        if member.is_deflated:
            raw = source.read(member.start, min(look, member.n_bytes))
            head = zlib.decompressobj(RAW_DEFLATE).decompress(raw, _MAX_MEMBER_HEADER_BYTES)
        else:
            head = bytes(source.read(member.start, min(wanted, member.n_bytes)))
        width = 2 if head[6:7] == b"\1" else 4
        wanted = min(8 + width + int.from_bytes(head[8 : 8 + width], "little"), _MAX_MEMBER_HEADER_BYTES)
        if len(head) >= wanted or not is_npy(memoryview(head)):
            break
    return head


def lay_out_npz(specs: Sequence[Spec], metadata: Mapping[str, Any]) -> list[FileLayout]:
    """Lay out one archive; the format stores no metadata.

    The dtypes of the package ml_dtypes (bfloat16, the float8 kinds) are refused: `numpy.load` would return bytes of no
    type.

    Raises:
        ValueError: The format has no such dtype or name.
    """
    names = {spec.name for spec in specs}
    refuse([(spec, f"has the dtype {spec.dtype}") for spec in specs if not _is_numpy_dtype(spec.numpy_dtype)], "npz")
    # numpy.load returns the member x.npy both for "x" and for "x.npy".
    refuse([(spec, f"is {spec.name + '.npy'!r} too") for spec in specs if spec.name + ".npy" in names], "npz")
    members = [NewMember(name=f"{spec.name}.npy", head=_write_npy_header(spec), spec=spec) for spec in specs]
    return [ZipLayout(members)]


def _is_numpy_dtype(dtype: DType) -> bool:
    """Tell whether a dtype and its parts are numpy's own."""
    if dtype.fields is not None:
        return all(_is_numpy_dtype(field[0]) for field in dtype.fields.values())
    return dtype.base.isbuiltin != _FROM_OTHER_PACKAGES


def _write_npy_header(spec: Spec) -> bytes:
    fields = {"descr": npy.dtype_to_descr(spec.numpy_dtype), "fortran_order": False, "shape": spec.shape}
    out = io.BytesIO()
    try:
        npy.write_array_header_1_0(out, fields)
    except ValueError:  # a record of very many fields
        npy.write_array_header_2_0(out, fields)
    return out.getvalue()
