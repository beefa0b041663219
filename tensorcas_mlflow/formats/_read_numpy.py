"""NumPy's files: ``.npy`` of one array, and ``.npz``, a zip archive of such.

The format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html. numpy reads an array of a file, not
a place in it; the header is read by `tensorcas_mlflow.containers`, which needs it for files that pass by, too.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from tensorcas_mlflow.containers import NpyHeader, Tape, fields_of, is_npy, read_npy_header
from tensorcas_mlflow.dtypes import dtype_name
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.formats._listing import Listing
from tensorcas_mlflow.formats._pickle_places import spread
from tensorcas_mlflow.formats._places import Places
from tensorcas_mlflow.formats._source import ByteSource, SourceStream
from tensorcas_mlflow.formats._zip_directory import Member

ONLY = "array"
"""What the array of an ``.npy`` file is called: it has no name there."""

_LENGTH_BYTES = 12
_LOOK_BYTES = 512
"""Of a deflated member; that most headers are in."""
_MAX_HEADER_BYTES = 16 << 10
"""No header that numpy reads is longer."""
_RAW_DEFLATE = -15


def list_npy(source: ByteSource) -> Listing:
    """List the one array of an ``.npy`` file.

    Refused is, besides what is no header of numpy's, anything behind the array.

    Raises:
        FormatError: It is not sound. So does a `struct.error` say.
    """
    header = read_npy_header(Tape(SourceStream(source), block_bytes=_LOOK_BYTES))
    places = Places()
    if header.array_bytes is not None and header.n_bytes + header.array_bytes != source.size:
        raise FormatError(f"it has {source.size} bytes, of which {header.array_bytes} are its array")
    _add(places, ONLY, header, start=header.n_bytes, n_bytes=header.array_bytes or 0, file_bytes=source.size)
    return Listing(format="npy", sources=[source], places=places, left_out=places.left_out)


def list_npz(source: ByteSource, members: Sequence[Member]) -> Listing:
    """List the arrays of an ``.npz`` file, each by its member's name without ``.npy``.

    What is no array is left out, and so are arrays of objects, which are pickles. Whether a member has its CRC-32 is
    looked at when its array is read.

    Raises:
        FormatError: It is not sound. So do a `struct.error` and a `zlib.error` say.
    """
    places = Places()
    for member in members:
        add_npy(places, source, member, member.name.removesuffix(".npy"))
    return Listing(format="npz", sources=[source], places=places, left_out=places.left_out)


def add_npy(places: Places, source: ByteSource, member: Member, name: str) -> None:
    """Add the array of an archive's member, or leave it out; raises as `list_npz`."""
    head = _head(source, member)
    if not member.name.endswith(".npy") or not is_npy(memoryview(head)):
        places.leave_out(name, "no array")
        return
    header = read_npy_header(Tape(io.BytesIO(head)))
    if header.array_bytes is not None and header.n_bytes + header.array_bytes != member.raw_bytes:
        raise FormatError(
            f"{member.name[:80]!r} has {member.raw_bytes} bytes, of which {header.array_bytes} are its array"
        )
    if member.is_deflated:
        start, n_bytes, deflated, before = member.start, member.n_bytes, header.n_bytes, 0
    else:
        start, n_bytes, deflated = member.start + header.n_bytes, member.n_bytes - header.n_bytes, None
        before = zlib.crc32(head[: header.n_bytes])
    _add(
        places,
        name,
        header,
        start=start,
        n_bytes=n_bytes,
        file_bytes=source.size,
        deflated=deflated,
        checksum=(member.crc32, before),
    )


def _add(
    places: Places,
    name: str,
    header: NpyHeader,
    *,
    start: int,
    n_bytes: int,
    file_bytes: int,
    deflated: int | None = None,
    checksum: tuple[int, int] | None = None,
) -> None:
    """Add an array, or leave it out."""
    dtype = _dtype_of(header)
    shape, strides = header.shape, None
    fields = fields_of(header.dtype) if dtype is None and not header.is_fortran else ()
    if fields:
        dtype, shape = "uint8", (*shape, header.dtype.itemsize)
    if dtype is None:
        places.leave_out(name, "objects" if header.dtype.hasobject else str(header.dtype))
        return
    if header.is_fortran:
        shape = header.shape[::-1]
        is_both = sum(side != 1 for side in shape) < 2 or 0 in shape
        strides = None if is_both else tuple(accumulate(shape[:-1], mul, initial=1))
    for each in spread(name, dtype, shape, strides, fields, 0):
        places.add(
            each.name,
            each.dtype,
            each.shape,
            start=start if deflated is not None else start + each.start,
            n_bytes=n_bytes if deflated is not None else each.n_bytes,
            file_bytes=file_bytes,
            strides=each.strides,
            deflated=None if deflated is None else deflated + each.start,
            # A field alone does not tell the checksum of all of them.
            checksum=None if fields else checksum,
        )


def _dtype_of(header: NpyHeader) -> str | None:
    try:
        return dtype_name(header.dtype)
    except ValueError:
        return None


def _head(source: ByteSource, member: Member) -> bytes:
    """Read the header of the array that a member may be, and of a member that is stored no byte more."""
    head = b""
    wanted = _LENGTH_BYTES
    for look in (_LOOK_BYTES, _MAX_HEADER_BYTES):
        if member.is_deflated:
            raw = source.read(member.start, min(look, member.n_bytes))
            head = zlib.decompressobj(_RAW_DEFLATE).decompress(raw, _MAX_HEADER_BYTES)
        else:
            head = bytes(source.read(member.start, min(wanted, member.n_bytes)))
        width = 2 if head[6:7] == b"\1" else 4
        wanted = min(8 + width + int.from_bytes(head[8 : 8 + width], "little"), _MAX_HEADER_BYTES)
        if len(head) >= wanted or not is_npy(memoryview(head)):
            break
    return head
