"""Tar archives around other formats, such as NeMo's ``.nemo``.

The format: https://pubs.opengroup.org/onlinepubs/9799919799/utilities/pax.html ("ustar Interchange Format" and "pax
Interchange Format"), and https://www.gnu.org/software/tar/manual/html_node/Standard.html for GNU's long names. A header
of 512 bytes stands before each member, and says its size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._listing import Listing, LocationTable
from tensorcas_mlflow.file_formats._members import ListMember, add_member
from tensorcas_mlflow.file_formats._source import ByteSource, FileRange
from tensorcas_mlflow.file_formats._tape import FilePart, Learned, PlainBytes, Skeleton, SplitMember, Tape, below

_BLOCK = 512
_LAST_BYTES = 20 * _BLOCK
_MAX_END_BYTES = 1 << 20
_MAX_MEMBERS = 1 << 20
_MAX_EXTENDED_BYTES = 1 << 20
_FILES = b"0\0" + b"7"
_LONG_NAME, _LONG_LINK, _EXTENDED, _GLOBAL = b"LKxg"


class _Header(NamedTuple):
    """Header of a member."""

    name: str
    n_bytes: int
    kind: int


class _Said(NamedTuple):
    """Facts about the next member, in a member of their own."""

    name: str | None = None
    n_bytes: int | None = None


def is_tar(head: memoryview) -> bool:
    """Recognise a tar archive by the magic word and the checksum of its first header."""
    return bytes(head[257:262]) == b"ustar" and len(head) >= _BLOCK and _is_sound(bytes(head[:_BLOCK]))


def split_tar(tape: Tape, members: SplitMember | None = None) -> Iterator[FilePart | Learned]:
    """Announce the headers and the parts of the members.

    Args:
        tape: The file.
        members: Takes members apart.

    Raises:
        FormatError: A header is malformed.
    """
    said = _Said()
    while (block := bytes(tape.peek(_BLOCK))).strip(b"\0"):
        header = _read_header(block)
        if header.kind in (_LONG_NAME, _LONG_LINK, _EXTENDED, _GLOBAL):
            ahead = tape.peek(_BLOCK + _extended_bytes(header))
            said = _read_said(header, bytes(ahead[_BLOCK:]), said)
            yield Skeleton(n_bytes=_BLOCK + _padded(header.n_bytes))
            continue
        header = _with(header, said)
        said = _Said()
        yield Skeleton(n_bytes=_BLOCK)
        if not header.n_bytes:
            continue
        parts = members(tape, header.n_bytes) if members is not None and header.kind in _FILES else None
        if parts is None:
            yield PlainBytes(n_bytes=_padded(header.n_bytes))
            continue
        yield from (below(part, f"{header.name}/") for part in parts)
        if header.n_bytes % _BLOCK:
            yield Skeleton(n_bytes=-header.n_bytes % _BLOCK)
    # The last record is filled up with zeros.
    while len(rest := tape.peek(_LAST_BYTES)) and not bytes(rest).strip(b"\0"):
        yield Skeleton(n_bytes=len(rest))


def list_tar(source: ByteSource, members: ListMember | None = None) -> Listing | None:
    """List the tensors of an archive's members as ``<member>/<name>``; None if no member may hold any.

    Args:
        source: The archive.
        members: Lists a member.

    Raises:
        FormatError: A header is malformed, or the file ends before its archive.
    """
    table = LocationTable(source)
    said = _Said()
    at = n_members = 0
    while at + _BLOCK <= source.size and bytes(block := source.read(at, _BLOCK)).strip(b"\0"):
        header = _read_header(bytes(block))
        at += _BLOCK
        n_members += 1
        if n_members > _MAX_MEMBERS:
            raise FormatError(f"it has more than {_MAX_MEMBERS} members")
        is_fact = header.kind in (_LONG_NAME, _LONG_LINK, _EXTENDED, _GLOBAL)
        if not is_fact:
            header, said = _with(header, said), _Said()
        if at + header.n_bytes > source.size:
            raise FormatError(f"member {header.name[:80]!r} exceeds the file")
        if is_fact:
            said = _read_said(header, bytes(source.read(at, _extended_bytes(header))), said)
        elif header.n_bytes and header.kind not in _FILES:
            table.leave_out(table.unused(header.name), f"of the type {chr(header.kind)!r}")
        elif header.n_bytes and members is not None:
            add_member(table, FileRange(header.name, at, header.n_bytes, header.n_bytes), members)
        at += _padded(header.n_bytes)
    left = source.size - at
    if not 0 <= left <= _MAX_END_BYTES or left % _BLOCK or (left and bytes(source.read(at, left)).strip(b"\0")):
        raise FormatError("bytes follow the end of the archive")
    return table.listing("tar") if table or table.left_out else None


def _is_sound(block: bytes) -> bool:
    try:
        said = _number(block[148:156])
    except FormatError:
        return False
    return said == sum(block[:148]) + 8 * 32 + sum(block[156:])


def _read_header(block: bytes) -> _Header:
    if len(block) < _BLOCK or not _is_sound(block):
        raise FormatError("a header of a tar archive does not have its checksum")
    name, prefix = (_text(each) for each in (block[:100], block[345:500]))
    if block[257:263] == b"ustar\0" and prefix:
        name = f"{prefix}/{name}"
    kind = block[156]
    # A link or a directory may say a size, and has no bytes.
    return _Header(name, 0 if kind in b"12345 6" else _number(block[124:136]), kind)


def _number(data: bytes) -> int:
    """Read a number: octal digits, or, behind a set bit, its bytes."""
    if data[0] == 0x80:
        return int.from_bytes(data[1:], "big")
    digits = data.strip(b" \0")
    if not digits:
        return 0
    if not digits.isdigit():
        raise FormatError("a header of a tar archive has a number that is none")
    try:
        return int(digits, 8)
    except ValueError as error:
        raise FormatError("a header of a tar archive has a number that is none") from error


def _extended_bytes(header: _Header) -> int:
    if header.n_bytes > _MAX_EXTENDED_BYTES:
        raise FormatError(f"a tar archive says {header.n_bytes} bytes of a member")
    return header.n_bytes


def _read_said(header: _Header, data: bytes, said: _Said) -> _Said:
    """Read a long name, or the records of a pax header."""
    if header.kind == _LONG_NAME:
        return said._replace(name=_text(data))
    if header.kind != _EXTENDED:
        return said
    at = 0
    while at < len(data) and data[at]:
        space = data.find(b" ", at, at + 20)
        digits = data[at:space] if space > 0 else b""
        if not digits.isdigit() or not space - at < int(digits) <= len(data) - at:
            raise FormatError("a pax header is malformed")
        key, _, value = data[space + 1 : at + int(digits) - 1].partition(b"=")
        if key == b"path":
            said = said._replace(name=value.decode("utf-8", "backslashreplace"))
        elif key == b"size":
            if not value.isdigit() or len(value) > 20:
                raise FormatError("a pax header is malformed")
            said = said._replace(n_bytes=int(value))
        at += int(digits)
    return said


def _with(header: _Header, said: _Said) -> _Header:
    n_bytes = header.n_bytes if said.n_bytes is None else said.n_bytes
    name = header.name if said.name is None else said.name
    return _Header(name.removeprefix("./"), n_bytes, header.kind)


def _text(data: bytes) -> str:
    return data.split(b"\0")[0].decode("utf-8", "backslashreplace")


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // _BLOCK) * _BLOCK
