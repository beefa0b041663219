"""Compressed streams that can be made again from their content: members of zip archives, gzip files, zlib files.

A stream of zlib's `deflate` is a function of its content and a level (``docs/format.md``, Deflate). One changed number
changes all bytes of a stream behind it. So the store keeps the content, in which it finds equal and similar tensors.
The function has to give the very bytes of the stream. Other libraries, and zlib with unusual settings, write other
streams; those are stored as they are.

`numpy.savez_compressed`, `gzip`, and joblib with ``compress`` use zlib. The formats: RFC 1950 (zlib), 1951 (DEFLATE),
1952 (gzip).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

from tensorcas_mlflow.codecs import deflates_to
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._tape import (
    MAX_PEEK_BYTES,
    DerivedBytes,
    FilePart,
    Learned,
    PlainBytes,
    Skeleton,
    Tape,
)
from tensorcas_mlflow.file_formats._zip import RAW_DEFLATE

LEAST_STREAM_BYTES = 64 << 10
"""A shorter stream is not worth a row."""
MOST_RAW_BYTES = 128 << 20
"""Longest content. A reader evaluates the function in memory, whole."""
_MOST_INFLATION = 16
"""Content of a stream for each of its bytes. A longer content has nothing to share that is worth the time."""

_GZIP = b"\x1f\x8b\x08"
_GZIP_HEADER_BYTES, _GZIP_TRAILER_BYTES = 10, 8
_ZLIB_HEADER_BYTES, _ZLIB_TRAILER_BYTES = 2, 4
_HAS_CRC, _HAS_EXTRA, _HAS_NAME, _HAS_COMMENT = 1 << 1, 1 << 2, 1 << 3, 1 << 4
_MOST_HEADER_BYTES = 4096
_STEP_BYTES = 1 << 20

SplitContent = Callable[[Tape, int], "Iterator[FilePart | Learned]"]
"""Announces the parts of inflated bytes, to their end; takes a tape, and their number."""

_LEVELS = (6, 9, 3, 1, 5, 4, 7, 8, 2)
"""All levels; the defaults of usual writers first."""
_last_level = _LEVELS[0]
"""The level of the stream before: a program mostly writes with one."""


def find_deflated(tape: Tape, n_bytes: int | None, split_content: SplitContent) -> DerivedBytes | None:
    """Describe the next bytes as a stream that the function ``deflate`` makes.

    Args:
        tape: The file, at the first byte of a raw stream.
        n_bytes: Size of the stream; None if only the stream tells where it ends.
        split_content: Takes its content apart.

    Returns:
        None for another stream, a short or a long one, and a damaged one.
    """
    if n_bytes is not None and not LEAST_STREAM_BYTES <= n_bytes <= MAX_PEEK_BYTES:
        return None
    inflated = _inflate(tape, n_bytes)
    if inflated is None:
        return None
    n_stream, raw = inflated
    level = _level_of(tape.peek(n_stream), raw)
    if level is None:
        return None
    content = Tape.over(raw)
    parts = map(_plain_if_derived, split_content(content, len(raw)))
    return DerivedBytes(n_bytes=n_stream, function="deflate", params={"level": level}, content=content, parts=parts)


def _inflate(tape: Tape, n_bytes: int | None) -> tuple[int, bytes] | None:
    """Inflate the next bytes; return the size of the stream, and its content; None for no stream of that size."""
    most_stream = MAX_PEEK_BYTES if n_bytes is None else n_bytes
    engine, found, n_raw, fed = zlib.decompressobj(RAW_DEFLATE), [], 0, 0
    try:
        while not engine.eof and fed < most_stream:
            # The steps double, like the buffer of the tape.
            end = min(max(_STEP_BYTES, 2 * fed), most_stream)
            block = tape.peek(end)[fed:]
            most = min(MOST_RAW_BYTES, _MOST_INFLATION * (fed + len(block))) - n_raw
            if not block or most < 0:
                return None
            found.append(engine.decompress(block, most + 1))
            n_raw += len(found[-1])
            if engine.unconsumed_tail or len(found[-1]) > most:
                return None
            fed += len(block)
    except zlib.error:
        return None
    n_stream = fed - len(engine.unused_data)
    if not engine.eof or n_stream < LEAST_STREAM_BYTES or n_bytes not in (None, n_stream):
        return None
    return n_stream, b"".join(found)


def _level_of(stream: memoryview, raw: bytes) -> int | None:
    """Return the level with which a content gives a stream. A wrong one shows in the first block."""
    global _last_level
    last = _last_level
    for level in (last, *(each for each in _LEVELS if each != last)):
        if deflates_to(raw, level, stream):
            _last_level = level
            return level
    return None


def _plain_if_derived(part: FilePart | Learned) -> FilePart | Learned:
    """Keep derived bytes within a stream as they are: the inputs of a function are stored."""
    return PlainBytes(n_bytes=part.n_bytes) if isinstance(part, DerivedBytes) else part


def is_compressed(head: memoryview) -> bool:
    """Recognise a gzip file, or a zlib file by its first two bytes; three others in a thousand have such, too."""
    return _is_gzip(head) or _is_zlib(head)


def _is_gzip(head: memoryview) -> bool:
    return bytes(head[:3]) == _GZIP


def _is_zlib(head: memoryview) -> bool:
    # DEFLATE with a window of 32 KiB, without a preset dictionary.
    return len(head) > 1 and head[0] == 0x78 and not head[1] & 0x20 and (head[0] << 8 | head[1]) % 31 == 0


def split_compressed(tape: Tape, split_content: SplitContent) -> Iterator[FilePart | Learned]:
    """Announce the parts of a gzip file, member after member, or of a zlib file.

    Args:
        tape: The file.
        split_content: Takes the content of a stream apart.

    Raises:
        FormatError: The header of a member is malformed.
    """
    while is_compressed(head := tape.peek(_MOST_HEADER_BYTES)):
        is_gzip = _is_gzip(head)
        header_bytes = _gzip_header_bytes(bytes(head)) if is_gzip else _ZLIB_HEADER_BYTES
        before = Ahead(tape, header_bytes)
        stream = find_deflated(before, None, split_content)
        if stream is None:
            return
        yield Skeleton(n_bytes=header_bytes)
        yield stream
        yield Skeleton(n_bytes=_GZIP_TRAILER_BYTES if is_gzip else _ZLIB_TRAILER_BYTES)


class Ahead(Tape):
    """A tape some bytes ahead of another one, to look and not to take."""

    def __init__(self, tape: Tape, n_bytes: int) -> None:
        self._tape = tape
        self._n_skipped = n_bytes

    def peek(self, n_bytes: int) -> memoryview:
        return self._tape.peek(min(n_bytes + self._n_skipped, MAX_PEEK_BYTES))[self._n_skipped :]


def _gzip_header_bytes(head: bytes) -> int:
    """Return the size of a member's header."""
    if len(head) < _GZIP_HEADER_BYTES:
        raise FormatError("a gzip file that ends in a header")
    flags, at = head[3], _GZIP_HEADER_BYTES
    if flags & _HAS_EXTRA:
        at += 2 + int.from_bytes(head[at : at + 2], "little")
    for flag in (_HAS_NAME, _HAS_COMMENT):
        if flags & flag:
            at = head.find(b"\0", at) + 1
            if at == 0:
                raise FormatError("a gzip header without an end")
    at += 2 if flags & _HAS_CRC else 0
    if at > len(head):
        raise FormatError(f"a gzip header of {at} bytes")
    return at
