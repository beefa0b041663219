"""The members of a zip archive that lies anywhere, and where their bytes are.

The format: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT. `zipfile` reads the directory; what it lets
pass is refused here, since an archive that says two things is read differently by different readers: bytes before,
between and behind the members, members within each other, two of one name, and a local header that is not as the
directory has it.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from typing import NamedTuple

from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.formats._source import ByteSource

_LOCAL = struct.Struct("<4s2xHHH2xIIIHH")
_LOCAL_MAGIC = b"PK\x03\x04"
_END = struct.Struct("<4s16xH")
_END_MAGIC = b"PK\x05\x06"
_IN_EXTRA = 0xFFFFFFFF
_ENCRYPTED = 1 << 0 | 1 << 6 | 1 << 13
_STREAMED = 1 << 3
_UTF_8 = 1 << 11
_RAW_DEFLATE = -15
_MAX_DESCRIPTOR_BYTES = 24
_MAX_DIRECTORY_BYTES = 32 << 20
"""Of some four hundred thousand members."""


class Member(NamedTuple):
    """One file of an archive."""

    name: str
    start: int
    """Its first byte, after the local header."""
    n_bytes: int
    """As they lie, which may be deflated."""
    raw_bytes: int
    """Once they are inflated."""
    is_deflated: bool
    crc32: int


def list_members(source: ByteSource) -> list[Member]:
    """List an archive's members, in the order in which they lie.

    Raises:
        FormatError: The archive is not sound, or encrypted, or compressed by another method than DEFLATE.
    """
    try:
        with zipfile.ZipFile(_File(source)) as archive:
            infos, end, comment = archive.infolist(), archive.start_dir, archive.comment
    except (zipfile.BadZipFile, NotImplementedError, struct.error, UnicodeDecodeError, EOFError) as error:
        raise FormatError(f"its directory cannot be read: {error}") from error
    _check_end(source, len(comment))
    infos.sort(key=lambda info: info.header_offset)
    if len({info.filename for info in infos}) < len(infos):
        raise FormatError("two of its members have one name")
    members: list[Member] = []
    at = gap = 0
    for info in infos:
        if not 0 <= info.header_offset - at <= gap:
            raise FormatError(f"member {info.filename[:80]!r} does not begin where the one before it ends")
        member = _member(source, info, end)
        at, gap = member.start + member.n_bytes, _MAX_DESCRIPTOR_BYTES if info.flag_bits & _STREAMED else 0
        members.append(member)
    if not 0 <= end - at <= gap:
        raise FormatError("its directory does not begin where the last member ends")
    return members


def read_member(source: ByteSource, member: Member, max_bytes: int) -> bytes:
    """Read a member that is not long.

    Raises:
        FormatError: It is long, or has another size than the directory says. So does a `zlib.error` say.
    """
    if member.raw_bytes > max_bytes or member.n_bytes > max_bytes:
        raise FormatError(f"{member.name[:80]!r} has {member.raw_bytes} bytes")
    data = bytes(source.read(member.start, member.n_bytes))
    if member.is_deflated:
        data = zlib.decompressobj(_RAW_DEFLATE).decompress(data, max_bytes)
    if len(data) != member.raw_bytes:
        raise FormatError(f"{member.name[:80]!r} does not have the size that the directory says")
    return data


def _check_end(source: ByteSource, n_comment_bytes: int) -> None:
    start = source.size - n_comment_bytes - _END.size
    if start < 0 or _END.unpack(source.read(start, _END.size)) != (_END_MAGIC, n_comment_bytes):
        raise FormatError("bytes follow the end of the archive")


def _member(source: ByteSource, info: zipfile.ZipInfo, end: int) -> Member:
    """Find a member's bytes, which is only known from its local header."""
    name = info.filename[:80]
    if info.orig_filename != info.filename or "\0" in info.orig_filename:
        raise FormatError(f"no member can be called {info.orig_filename[:80]!r}")
    if info.flag_bits & _ENCRYPTED or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise FormatError(f"member {name!r} is encrypted, or compressed by method {info.compress_type}")
    is_deflated = info.compress_type == zipfile.ZIP_DEFLATED
    if not is_deflated and info.compress_size != info.file_size:
        raise FormatError(f"member {name!r} is stored, and has two sizes")
    raw_name = info.orig_filename.encode("utf-8" if info.flag_bits & _UTF_8 else "cp437")
    if info.header_offset + _LOCAL.size + len(raw_name) > end:
        raise FormatError(f"member {name!r} lies outside of the file")
    # No byte more: what follows is a tensor's, and of a file in a store its whole chunk would be read.
    head = source.read(info.header_offset, _LOCAL.size + len(raw_name))
    magic, flags, method, _, crc, n_bytes, raw_bytes, n_name_bytes, n_extra_bytes = _LOCAL.unpack_from(head)
    is_same = n_name_bytes == len(raw_name) and head[_LOCAL.size :] == raw_name
    is_same &= (magic, method) == (_LOCAL_MAGIC, info.compress_type)
    if not flags & _STREAMED:
        is_same &= crc == info.CRC
        is_same &= n_bytes in (info.compress_size, _IN_EXTRA) and raw_bytes in (info.file_size, _IN_EXTRA)
    start = info.header_offset + _LOCAL.size + n_name_bytes + n_extra_bytes
    if not is_same or flags != info.flag_bits:
        raise FormatError(f"member {name!r} has a header that is not as the directory has it")
    if start + info.compress_size > end:
        raise FormatError(f"member {name!r} goes on into the directory")
    return Member(info.filename, start, info.compress_size, info.file_size, is_deflated, info.CRC)


class _File(io.RawIOBase):
    """A source as `zipfile` reads it."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._source.size}[whence]
        if base + offset < 0:
            raise OSError("no file has a place before its beginning")
        self._at = base + offset
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        n_left = max(0, self._source.size - self._at)
        n_bytes = n_left if size is None or size < 0 else min(size, n_left)
        if n_bytes > _MAX_DIRECTORY_BYTES:
            raise zipfile.BadZipFile(f"it has {n_bytes} bytes")
        data = bytes(self._source.read(self._at, n_bytes)) if n_bytes else b""
        self._at += n_bytes
        return data
