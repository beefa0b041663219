"""Zip archives: read forward by local headers, at random by the directory, and written with known sizes.

The format: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT (6.3.10), sections 4.3 and 4.5.3.

- *Forward*: an entry's size stands in its local header, or else, in an archive written to a stream, in the *descriptor*
  behind the entry. A descriptor (section 4.3.9) belongs to an entry if the size in it is the distance from the entry's
  first byte, and another entry or the directory follows. Archives within archives have descriptors at other distances.
- *At random*: `zipfile` reads the directory. This module refuses what `zipfile` lets pass, because different readers
  read an ambiguous archive differently: bytes before, between and behind the members, members within each other, two
  members of one name, and a local header that differs from the directory.
- *Written*: `zipfile` writes stored members at multiples of 64 bytes; this module computes their sizes in advance.
"""

from __future__ import annotations

import io
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from tensorcas_mlflow.base.tensors import ALIGNMENT, Spec
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._layout import Feed, FileLayout
from tensorcas_mlflow.file_formats._source import ByteSource, FileRange
from tensorcas_mlflow.file_formats._tape import FilePart, PlainBytes, Skeleton, Tape

LOCAL = b"PK\x03\x04"
CENTRAL = b"PK\x01\x02"
DESCRIPTOR = b"PK\x07\x08"
END = b"PK\x05\x06"
RAW_DEFLATE = -15
_END_64 = b"PK\x06\x06"
_LOCATOR_64 = b"PK\x06\x07"

_LOCAL_HEADER = struct.Struct("<4s2xHHH2xIIIHH")
_CENTRAL_HEADER = struct.Struct("<28xHHH12x")
_END_HEADER = struct.Struct("<4s16xH")
_LOCATOR_64_BYTES = 20
_DESCRIPTOR = struct.Struct("<8xI4x")
_DESCRIPTOR_64 = struct.Struct("<8xQ8x")
_MAX_DESCRIPTOR_BYTES = _DESCRIPTOR_64.size
_DESCRIPTOR_LOOK_BYTES = _DESCRIPTOR_64.size + len(LOCAL)
_CANDIDATE = re.compile(rb"PK\x07\x08(?=.{12}PK(?:\x01\x02|\x03\x04)|.{20}PK(?:\x01\x02|\x03\x04))", re.DOTALL)
_IN_EXTRA = 0xFFFFFFFF
_ENCRYPTED = 1 << 0 | 1 << 6 | 1 << 13
_STREAMED = 1 << 3
_UTF_8 = 1 << 11

_MAX_END_64_BYTES = 64 << 10
_DIRECTORY_LOOK_BYTES = 256 << 10
_FIRST_LOOK_BYTES = 4 << 10
_WINDOW_BYTES = 1 << 20
_MAX_FALSE = 100_000
_MAX_DIRECTORY_BYTES = 32 << 20
"""Enough for some four hundred thousand members."""

_END_64_BYTES = 56 + 20
_LOCAL_64_BYTES = 20
_FILLER_BYTES = 4
_FILLER = b"FB"
"""The extra field with which torch aligns a member; nobody reads it."""
_LARGE_BYTES = 1 << 30
"""From this size on a written member has sizes of 8 bytes. `zipfile` would switch somewhat below 2 GiB."""


# --- forward, as the archive passes by


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEntry:
    """The local header of an entry."""

    name: str
    header_bytes: int
    n_bytes: int | None
    """None: the descriptor behind the bytes has it."""
    is_stored: bool
    """Neither compressed nor encrypted."""
    is_deflated: bool
    """Compressed with DEFLATE, and not encrypted."""
    is_streamed: bool
    """True if a descriptor may follow the bytes."""


def read_entry(tape: Tape) -> LocalEntry:
    """Read the local header at the tape's position, without taking it; raises `FormatError`."""
    fields = _LOCAL_HEADER.unpack_from(tape.peek(_LOCAL_HEADER.size))
    _, flags, method, _, _, n_bytes, raw_bytes, name_bytes, extra_bytes = fields
    header_bytes = _LOCAL_HEADER.size + name_bytes + extra_bytes
    header = bytes(tape.peek(header_bytes))
    if len(header) < header_bytes:
        raise FormatError("a zip archive that ends in a local header")
    if n_bytes == _IN_EXTRA:
        n_bytes = _size_in_extra(header[header_bytes - extra_bytes :], after_raw=raw_bytes == _IN_EXTRA)
    is_streamed = bool(flags & _STREAMED)
    return LocalEntry(
        name=header[_LOCAL_HEADER.size : _LOCAL_HEADER.size + name_bytes].decode("utf-8", "backslashreplace"),
        header_bytes=header_bytes,
        n_bytes=None if is_streamed and n_bytes == 0 else n_bytes,
        is_stored=method == 0 and not flags & _ENCRYPTED,
        is_deflated=method == zipfile.ZIP_DEFLATED and not flags & _ENCRYPTED,
        is_streamed=is_streamed,
    )


def _size_in_extra(extra: bytes, *, after_raw: bool) -> int:
    """Find the compressed size in a zip64 field, which follows the raw size if that is there."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            return int(struct.unpack_from("<Q", extra, at + (12 if after_raw else 4))[0])
        at += 4 + size
    raise FormatError("a zip entry of 4 GiB or more without its size")


def directory_parts(tape: Tape, kind: type[Skeleton | PlainBytes]) -> Iterator[FilePart]:
    """Announce the central directory and the end of the archive."""
    while True:
        window = tape.peek(_DIRECTORY_LOOK_BYTES)
        n_bytes = _records(window)
        signature = window[n_bytes : n_bytes + 4]
        if n_bytes:
            yield kind(n_bytes=n_bytes)
        elif signature == _END_64:
            n_bytes = 12 + struct.unpack_from("<4xQ", window)[0]
            if n_bytes > _MAX_END_64_BYTES:
                raise FormatError(f"the end of a zip archive has {n_bytes} bytes")
            yield kind(n_bytes=n_bytes)
        elif signature == _LOCATOR_64:
            yield kind(n_bytes=_LOCATOR_64_BYTES)
        elif signature == END:
            yield kind(n_bytes=_END_HEADER.size + _END_HEADER.unpack_from(window)[1])
            return
        else:
            raise FormatError("a zip archive without an end")


def _records(window: memoryview) -> int:
    """Return the size of the directory's whole records at the beginning of a window."""
    at = 0
    while window[at : at + 4] == CENTRAL and at + _CENTRAL_HEADER.size <= len(window):
        after = at + _CENTRAL_HEADER.size + sum(_CENTRAL_HEADER.unpack_from(window, at))
        if after > len(window):
            break
        at = after
    return at


def descriptor_bytes(tape: Tape, entry_bytes: int) -> int:
    """Return the size of the descriptor at the tape's position.

    Raises:
        FormatError: There is none, or it belongs to an entry of another size.
    """
    size = _descriptor_size_at(tape.peek(_DESCRIPTOR_LOOK_BYTES), 0, entry_bytes)
    if not size:
        raise FormatError(f"a zip entry of {entry_bytes} bytes without its descriptor")
    return size


class EntryEnds:
    """Search for the ends of one archive's entries, which visits every byte about once."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._n_false = 0

    def look_ahead(self, max_bytes: int = _WINDOW_BYTES) -> int | None:
        """Return the size of the entry at the tape's position; None if it exceeds ``max_bytes``."""
        begun, looked = 0, min(_FIRST_LOOK_BYTES, max_bytes)
        while begun < max_bytes:
            window = self._tape.peek(looked + _DESCRIPTOR_LOOK_BYTES)
            end = self._find(window, begun, looked, passed_bytes=0)
            if end is not None or len(window) < looked:
                return end
            begun, looked = looked, min(4 * looked, max_bytes)
        return None

    def stretch(
        self, n_bytes: int | None, first: Callable[..., FilePart], more: Callable[..., FilePart]
    ) -> Iterator[FilePart]:
        """Announce an entry of one kind.

        Args:
            n_bytes: Its size; None if only its descriptor has it.
            first: Makes the first part.
            more: Makes the further parts of an entry of unknown size.
        """
        if n_bytes is not None:
            if n_bytes:
                yield first(n_bytes=n_bytes)
            return
        passed_bytes, end = 0, None
        while end is None and not self._tape.is_at_end():
            window = self._tape.peek(_WINDOW_BYTES + _DESCRIPTOR_LOOK_BYTES)
            end = self._find(window, 0, _WINDOW_BYTES, passed_bytes=passed_bytes)
            n_next = _WINDOW_BYTES if end is None else end
            if n_next:
                yield (more if passed_bytes else first)(n_bytes=n_next)
            passed_bytes += n_next

    def _find(self, window: memoryview, start: int, stop: int, *, passed_bytes: int) -> int | None:
        """Find the end of the entry between two positions of a window; ``passed_bytes`` of the entry came before it."""
        for match in _CANDIDATE.finditer(window, start):
            at = match.start()
            if at >= stop:
                break
            if _descriptor_size_at(window, at, passed_bytes + at):
                return at
            self._n_false += 1
            if self._n_false > _MAX_FALSE:
                raise FormatError(f"a zip archive with more than {_MAX_FALSE} false descriptors")
        return None


def _descriptor_size_at(window: memoryview, at: int, entry_bytes: int) -> int:
    """Return the size of the descriptor of an entry of this size; 0 if there is none."""
    data = bytes(window[at : at + _DESCRIPTOR_LOOK_BYTES])
    if data[:4] == DESCRIPTOR:
        # A small entry behind the fourth gigabyte has the long form, too.
        for sizes in (_DESCRIPTOR_64, _DESCRIPTOR):
            if data[sizes.size : sizes.size + 4] in (LOCAL, CENTRAL) and sizes.unpack_from(data)[0] == entry_bytes:
                return sizes.size
    return 0


# --- at random, by the directory


def list_members(source: ByteSource) -> list[FileRange]:
    """List an archive's members, in the order of their positions.

    Raises:
        FormatError: The archive is malformed or encrypted, or compressed by another method than DEFLATE.
    """
    try:
        with zipfile.ZipFile(_SeekableSource(source)) as archive:
            infos, end, comment = archive.infolist(), archive.start_dir, archive.comment
    except (zipfile.BadZipFile, NotImplementedError, struct.error, UnicodeDecodeError, EOFError) as error:
        raise FormatError(f"its directory cannot be read: {error}") from error
    _check_end(source, len(comment))
    infos.sort(key=lambda info: info.header_offset)
    if len({info.filename for info in infos}) < len(infos):
        raise FormatError("two of its members have one name")
    members: list[FileRange] = []
    at = gap = 0
    for info in infos:
        if not 0 <= info.header_offset - at <= gap:
            raise FormatError(f"member {info.filename[:80]!r} does not begin where the one before it ends")
        member = _checked_member(source, info, end)
        at, gap = member.start + member.n_bytes, _MAX_DESCRIPTOR_BYTES if info.flag_bits & _STREAMED else 0
        members.append(member)
    if not 0 <= end - at <= gap:
        raise FormatError("its directory does not begin where the last member ends")
    return members


def read_member(source: ByteSource, member: FileRange, max_bytes: int) -> bytes:
    """Read a short member.

    Raises:
        FormatError: It exceeds ``max_bytes``, or its size differs from the directory's. A `zlib.error` says the same.
    """
    if member.raw_bytes > max_bytes or member.n_bytes > max_bytes:
        raise FormatError(f"{member.name[:80]!r} has {member.raw_bytes} bytes")
    data = bytes(source.read(member.start, member.n_bytes))
    if member.is_deflated:
        data = zlib.decompressobj(RAW_DEFLATE).decompress(data, max_bytes)
    if len(data) != member.raw_bytes:
        raise FormatError(f"{member.name[:80]!r} does not have the size that the directory gives")
    return data


def _check_end(source: ByteSource, n_comment_bytes: int) -> None:
    start = source.size - n_comment_bytes - _END_HEADER.size
    if start < 0 or _END_HEADER.unpack(source.read(start, _END_HEADER.size)) != (END, n_comment_bytes):
        raise FormatError("bytes follow the end of the archive")


def _checked_member(source: ByteSource, info: zipfile.ZipInfo, end: int) -> FileRange:
    """Check a member against its local header, which alone tells where its bytes begin."""
    name = info.filename[:80]
    if info.orig_filename != info.filename or "\0" in info.orig_filename:
        raise FormatError(f"no member can be called {info.orig_filename[:80]!r}")
    if info.flag_bits & _ENCRYPTED or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise FormatError(f"member {name!r} is encrypted, or compressed by method {info.compress_type}")
    is_deflated = info.compress_type == zipfile.ZIP_DEFLATED
    if not is_deflated and info.compress_size != info.file_size:
        raise FormatError(f"member {name!r} is stored, and has two sizes")
    raw_name = info.orig_filename.encode("utf-8" if info.flag_bits & _UTF_8 else "cp437")
    if info.header_offset + _LOCAL_HEADER.size + len(raw_name) > end:
        raise FormatError(f"member {name!r} lies outside of the file")
    # Not a byte more: the next bytes are a tensor's, and reading them from a store would read a whole chunk.
    head = source.read(info.header_offset, _LOCAL_HEADER.size + len(raw_name))
    magic, flags, method, _, crc, n_bytes, raw_bytes, n_name_bytes, n_extra_bytes = _LOCAL_HEADER.unpack_from(head)
    is_same = n_name_bytes == len(raw_name) and head[_LOCAL_HEADER.size :] == raw_name
    is_same &= (magic, method) == (LOCAL, info.compress_type)
    if not flags & _STREAMED:
        is_same &= crc == info.CRC
        is_same &= n_bytes in (info.compress_size, _IN_EXTRA) and raw_bytes in (info.file_size, _IN_EXTRA)
    start = info.header_offset + _LOCAL_HEADER.size + n_name_bytes + n_extra_bytes
    if not is_same or flags != info.flag_bits:
        raise FormatError(f"member {name!r} has a header that differs from the directory")
    if start + info.compress_size > end:
        raise FormatError(f"member {name!r} reaches into the directory")
    return FileRange(info.filename, start, info.compress_size, info.file_size, is_deflated, info.CRC)


class _SeekableSource(io.RawIOBase):
    """A source as a file object for `zipfile`."""

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


# --- written


@dataclass(frozen=True, slots=True, kw_only=True)
class NewMember:
    """A member to be written."""

    name: str
    head: bytes
    """Its first bytes; all of them, if it holds no tensor."""
    spec: Spec | None = None
    """The tensor that follows."""

    @property
    def n_bytes(self) -> int:
        """Its size."""
        return len(self.head) + (0 if self.spec is None else self.spec.n_bytes)


class ZipLayout(FileLayout):
    """Layout of an archive."""

    def __init__(self, members: Sequence[NewMember]) -> None:
        """Lay out an archive, its members in this order."""
        self.name = ""
        self.specs = [member.spec for member in members if member.spec is not None]
        self._members = members
        self._fillers: list[bytes] = []
        end = directory_bytes = 0
        for member in members:
            name_bytes = len(member.name.encode())
            is_large = member.n_bytes >= _LARGE_BYTES
            begin = end + _LOCAL_HEADER.size + name_bytes + (_LOCAL_64_BYTES if is_large else 0) + _FILLER_BYTES
            filler = bytes(-begin % ALIGNMENT)
            self._fillers.append(_FILLER + len(filler).to_bytes(2, "little") + filler)
            n_64 = (16 if member.n_bytes > zipfile.ZIP64_LIMIT else 0) + (8 if end > zipfile.ZIP64_LIMIT else 0)
            directory_bytes += _CENTRAL_HEADER.size + name_bytes + (4 + n_64 if n_64 else 0)
            end = begin + len(filler) + member.n_bytes
        needs_64 = max(end, directory_bytes) > zipfile.ZIP64_LIMIT or len(members) > zipfile.ZIP_FILECOUNT_LIMIT
        self.n_bytes = end + directory_bytes + _END_HEADER.size + (_END_64_BYTES if needs_64 else 0)

    def write(self, out: BinaryIO, feed: Feed) -> None:
        with zipfile.ZipFile(out, "w") as archive:
            for member, filler in zip(self._members, self._fillers, strict=True):
                info = zipfile.ZipInfo(member.name)  # with a fixed time, so that equal tensors make equal files
                info.extra = filler
                with archive.open(info, "w", force_zip64=member.n_bytes >= _LARGE_BYTES) as file:
                    file.write(member.head)
                    if member.spec is not None:
                        for piece in feed.pieces(member.spec):
                            file.write(piece)
                info.extra = b""  # the member has the filler, the directory has not
