"""Records of a log and tombstones: bytes to values and back (``docs/format.md``, Logs)."""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import blake3
import zstandard

from tensorcas_mlflow.backends._contract import check_key
from tensorcas_mlflow.errors import CorruptError, NewerFormatError

VERSION = 1
HEADER_BYTES = 64
LOG_MAGIC = b"\x89TCLG\r\n\x01"
_HEADER = struct.Struct("<8s16s8x")
ALIGNMENT = 64
"""A blob in a body starts at a multiple of this, so that its tensors can be memory-mapped."""

_MAGIC = b"TCLR"
_HEAD = struct.Struct("<4sBBHIIIIIQ8s4x")
_DIGEST_BYTES = 16
HEAD_BYTES = _HEAD.size + _DIGEST_BYTES
_ROW = struct.Struct("<BBHIII")
_IN_META, _IN_BODY, _CONSUMED = 0, 1, 2
MAX_META_BYTES = 64 << 20
_LEVEL = 3
_GUESSED_BYTES = 4096
"""Bytes to read at the start of a record: they hold the meta of most."""
_AHEAD_BYTES = 256 << 10
"""Bytes to read at the start of a record after a small one."""
_PACKED_FROM = 128
_JOINED_BYTES = 1 << 20
"""Bound of a body written in one call with the rest of its record."""

TOMBSTONE = struct.Struct("<QII")
CLOSED = 0xFFFFFFFF
"""Row of the tombstone that closes a log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogBlob:
    """One blob to write into a record."""

    key: str
    data: bytes
    is_commit: bool = False
    version: int = 0
    in_body: bool = False


class LogRow(NamedTuple):
    """One blob of a record that has been read; a tuple, since an opened store has many."""

    number: int
    key: str
    is_commit: bool
    version: int
    size: int
    in_body: bool
    start: int
    """Start of the blob in the log, or of a blob in the meta its start there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record that has been read, without its body."""

    offset: int
    end: int
    body_start: int
    body_digest: bytes
    durable_before: int
    written_s: float
    keyframe: int
    """Offset of the record that is the prefix of this one's meta; 0 if there is none."""
    meta: bytes
    rows: tuple[LogRow, ...]
    consumed: tuple[str, ...]
    """Keys of intents."""


def header(log_id: str) -> bytes:
    """Return the first bytes of a log."""
    head = _HEADER.pack(LOG_MAGIC, bytes.fromhex(log_id))
    return head + blake3.blake3(head).digest()


def check_header(log_id: str, data: bytes, key: str) -> bool:
    """Check the first bytes of a log; return whether they are all there.

    Raises:
        NewerFormatError: A later release wrote the log.
        CorruptError: They are damaged, or those of another log.
    """
    if len(data) < HEADER_BYTES:
        return False
    head = data[: _HEADER.size]
    is_sound = blake3.blake3(head).digest() == data[_HEADER.size : HEADER_BYTES]
    magic, found = _HEADER.unpack(head)
    if is_sound and magic[:7] == LOG_MAGIC[:7] and magic[7] > LOG_MAGIC[7]:
        raise NewerFormatError(key, magic[7], LOG_MAGIC[7])
    if not any(data[:HEADER_BYTES]):  # a power cut: the name survived, and no byte
        return False
    if not is_sound or magic != LOG_MAGIC or found.hex() != log_id:
        raise CorruptError(key, "its header is damaged")
    return True


def encode_record(
    log_id: str,
    offset: int,
    blobs: Sequence[LogBlob],
    consumed: Iterable[str],
    *,
    durable_before: int,
    keyframe: tuple[int, bytes] | None,
    written_s: float | None = None,
) -> tuple[list[bytes], Record]:
    """Lay out a record.

    Args:
        log_id: Name of the log.
        offset: Place of the record in it.
        blobs: Its blobs.
        consumed: Keys of the intents it consumes.
        durable_before: Every earlier byte of the log is durable.
        keyframe: Offset and meta of the record whose meta is the prefix of this one's.
        written_s: Time of writing; now unless given.

    Returns:
        The bytes to write, and the record as `read_record` returns it.
    """
    intents = tuple(consumed)
    keys = [blob.key.encode() for blob in blobs] + [key.encode() for key in intents]
    inline = [blob for blob in blobs if not blob.in_body]
    n_rows = len(keys)
    data_start = n_rows * _ROW.size + sum(map(len, keys))
    meta_bytes = data_start + sum(len(blob.data) for blob in inline)
    body, starts, n_body = [], {}, 0
    # The stored size of the meta decides where the body starts, and the table in the meta names starts. So starts
    # count from the first aligned byte after the record's head; see `_body_start`.
    for number, blob in enumerate(blobs):
        if blob.in_body:
            pad = -n_body % ALIGNMENT
            starts[number] = n_body + pad
            body += [bytes(pad), blob.data]
            n_body += pad + len(blob.data)
    table = bytearray()
    rows, at = [], data_start
    for number, (blob, key) in enumerate(zip(blobs, keys, strict=False)):
        kind = _IN_BODY if blob.in_body else _IN_META
        start = starts.get(number, 0)
        table += _ROW.pack(kind, blob.is_commit, len(key), blob.version, len(blob.data), start)
        rows.append((number, blob, at if not blob.in_body else start))
        at += 0 if blob.in_body else len(blob.data)
    for key in keys[len(blobs) :]:
        table += _ROW.pack(_CONSUMED, 0, len(key), 0, 0, 0)
    meta = b"".join([bytes(table), *keys, *(blob.data for blob in inline)])
    assert len(meta) == meta_bytes
    stored, is_packed, prefix_at = meta, 0, 0
    if len(meta) >= _PACKED_FROM:
        prefix = None if keyframe is None else _as_dict(keyframe[1])
        packed = zstandard.ZstdCompressor(level=_LEVEL, dict_data=prefix).compress(meta)
        if len(packed) < len(meta):
            stored, is_packed, prefix_at = packed, 1, keyframe[0] if keyframe else 0
    body_at = offset + HEAD_BYTES + len(stored)
    pad = -body_at % ALIGNMENT if body else 0
    if pad:
        body.insert(0, bytes(pad))
    hasher = blake3.blake3()
    for piece in body:
        hasher.update(piece)
    body_digest = hasher.digest()[:8]
    written_ms = int((time.time() if written_s is None else written_s) * 1000)
    head = _HEAD.pack(
        _MAGIC,
        VERSION,
        is_packed,
        n_rows,
        len(stored),
        len(meta),
        pad + n_body,
        offset - prefix_at if prefix_at else 0,
        offset - durable_before,
        written_ms,
        body_digest,
    )
    head += _head_digest(log_id, offset, head, stored)
    record = Record(
        offset=offset,
        end=body_at + pad + n_body,
        body_start=body_at,
        body_digest=body_digest,
        durable_before=durable_before,
        written_s=written_ms / 1000,
        keyframe=prefix_at,
        meta=meta,
        rows=tuple(
            LogRow(
                number=number,
                key=blob.key,
                is_commit=blob.is_commit,
                version=blob.version,
                size=len(blob.data),
                in_body=blob.in_body,
                start=body_at + pad + start if blob.in_body else start,
            )
            for number, blob, start in rows
        ),
        consumed=intents,
    )
    return [b"".join([head, stored, *body])] if pad + n_body <= _JOINED_BYTES else [head + stored, *body], record


def _head_digest(log_id: str, offset: int, head: bytes, stored: bytes) -> bytes:
    named = b"".join([bytes.fromhex(log_id), offset.to_bytes(8, "little"), head, stored])
    return blake3.blake3(named).digest(length=_DIGEST_BYTES)


def _as_dict(prefix: bytes) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(prefix, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


class LogReader:
    """Records of one open log, by their places."""

    def __init__(self, log_id: str, descriptor: int, key: str) -> None:
        """Read from an open file, which the caller closes.

        Args:
            log_id: Name of the log.
            descriptor: The file.
            key: Name of the log in errors.
        """
        self._id = log_id
        self._descriptor = descriptor
        self._key = key
        self._prefix: tuple[int, zstandard.ZstdDecompressor] = 0, zstandard.ZstdDecompressor()
        self._window = b""
        self._window_at = 0

    def records(self, start: int, size: int) -> tuple[list[Record], int, CorruptError | None]:
        """Read the records that count, from a known end on.

        Args:
            start: End of the last known record that counts; 0 for the start of the log.
            size: Size of the file, or less.

        Returns:
            The records, and the end of the last one; and the damage after it, if a later record says that a broken one
            was durable.

        Raises:
            CorruptError: The header is damaged, or a record has impossible contents.
            NewerFormatError: A later release wrote a record.
        """
        if start == 0:
            if not check_header(self._id, os.pread(self._descriptor, HEADER_BYTES, 0), self._key):
                return [], 0, None
            start = HEADER_BYTES
        records: list[Record] = []
        at = durable = start
        n_ahead = _AHEAD_BYTES
        while at < size and (record := self.record(at, size, n_ahead=n_ahead)) is not None:
            records.append(record)
            n_ahead = _AHEAD_BYTES if record.end - at <= _GUESSED_BYTES else _GUESSED_BYTES
            durable = max(durable, record.durable_before)
            at = record.end
        for number, record in enumerate(records):
            if record.end > durable and not self._has_body(record):
                del records[number:]
                at = record.offset
                break
        is_damaged = at < size and not self._is_torn(at, size)
        return records, at, CorruptError(self._key, f"the record at byte {at} is damaged") if is_damaged else None

    def record(self, at: int, size: int, *, n_ahead: int = _GUESSED_BYTES) -> Record | None:
        """Read one record, without its body; None if it is not whole."""
        if at + HEAD_BYTES > size:
            return None
        data = self._bytes(at, HEAD_BYTES, n_ahead)
        if len(data) < HEAD_BYTES or data[:4] != _MAGIC:
            return None
        _, version, is_packed, n_rows, stored_meta, meta_bytes, body_bytes, back, undurable, written, body_digest = (
            _HEAD.unpack_from(data)
        )
        end = at + HEAD_BYTES + stored_meta + body_bytes
        if end > size or stored_meta > MAX_META_BYTES:
            return None
        stored = self._bytes(at + HEAD_BYTES, stored_meta, 0)
        if len(stored) < stored_meta:
            return None
        if _head_digest(self._id, at, data[: _HEAD.size], stored) != data[_HEAD.size : HEAD_BYTES]:
            return None
        if version > VERSION:
            raise NewerFormatError(self._key, version, VERSION)
        meta = self._unpacked(at, stored, meta_bytes, at - back if back else 0) if is_packed else stored
        if len(meta) != meta_bytes or undurable > at:
            raise self._impossible(at)
        body_start = at + HEAD_BYTES + stored_meta
        rows, consumed = self._rows(at, meta, n_rows, body_start, end)
        return Record(
            offset=at,
            end=end,
            body_start=body_start,
            body_digest=body_digest,
            durable_before=at - undurable,
            written_s=written / 1000,
            keyframe=at - back if back else 0,
            meta=meta,
            rows=rows,
            consumed=consumed,
        )

    def _bytes(self, at: int, n_bytes: int, n_ahead: int) -> bytes:
        """Read bytes, and some behind them for the next call."""
        skipped = at - self._window_at
        if skipped < 0 or skipped + n_bytes > len(self._window):
            self._window = os.pread(self._descriptor, max(n_bytes, n_ahead), at)
            self._window_at, skipped = at, 0
        return self._window[skipped : skipped + n_bytes]

    def _rows(
        self, at: int, meta: bytes, n_rows: int, body_start: int, end: int
    ) -> tuple[tuple[LogRow, ...], tuple[str, ...]]:
        keys_at = n_rows * _ROW.size
        if keys_at > len(meta):
            raise self._impossible(at)
        table = list(_ROW.iter_unpack(meta[:keys_at]))
        data_at = keys_at + sum(key_bytes for _, _, key_bytes, *_ in table)
        aligned = body_start + -body_start % ALIGNMENT
        rows: list[LogRow] = []
        consumed: list[str] = []
        try:
            keys = meta[keys_at:data_at].decode("ascii")
            key_at = 0
            for number, (kind, is_commit, key_bytes, version, size, start) in enumerate(table):
                key = check_key(keys[key_at : key_at + key_bytes])
                key_at += key_bytes
                if kind == _CONSUMED:
                    consumed.append(key)
                    continue
                in_body = kind == _IN_BODY
                place = aligned + start if in_body else data_at
                if kind not in (_IN_META, _IN_BODY) or place + size > (end if in_body else len(meta)):
                    raise self._impossible(at)
                data_at += 0 if in_body else size
                rows.append(LogRow(number, key, bool(is_commit), version, size, in_body, place))
        except ValueError:
            raise self._impossible(at) from None
        return tuple(rows), tuple(consumed)

    def _unpacked(self, at: int, stored: bytes, meta_bytes: int, keyframe: int) -> bytes:
        if keyframe != self._prefix[0]:
            found = self.record(keyframe, at) if HEADER_BYTES <= keyframe < at else None
            if keyframe and (found is None or found.keyframe):
                raise CorruptError(self._key, f"the record at byte {at} needs the damaged one at byte {keyframe}")
            prefix = None if found is None else _as_dict(found.meta)
            self._prefix = keyframe, zstandard.ZstdDecompressor(dict_data=prefix)
        if meta_bytes > MAX_META_BYTES:
            raise self._impossible(at)
        try:
            return self._prefix[1].decompress(stored, max_output_size=meta_bytes)
        except zstandard.ZstdError:
            raise self._impossible(at) from None

    def _impossible(self, at: int) -> CorruptError:
        return CorruptError(self._key, f"the record at byte {at} has impossible contents")

    def _has_body(self, record: Record) -> bool:
        hasher = blake3.blake3()
        at = record.body_start
        while at < record.end:
            piece = os.pread(self._descriptor, min(1 << 20, record.end - at), at)
            if not piece:
                return False
            hasher.update(piece)
            at += len(piece)
        return hasher.digest()[:8] == record.body_digest

    def _is_torn(self, at: int, size: int) -> bool:
        """Tell whether no whole record behind a broken one says that the broken one was durable."""
        begin, rest = at, b""
        while begin < size:
            piece = os.pread(self._descriptor, 1 << 20, begin)
            if not piece:
                break
            window, origin = rest + piece, begin - len(rest)
            found = window.find(_MAGIC)
            while found >= 0:
                place = origin + found
                if place > at and (record := self._sound(place, size)) is not None and record > at:
                    return False
                found = window.find(_MAGIC, found + 1)
            begin += len(piece)
            rest = window[-3:]
        return True

    def _sound(self, at: int, size: int) -> int | None:
        """Return the first byte that may not have been durable before a record, if its head is whole."""
        data = os.pread(self._descriptor, HEAD_BYTES, at)
        if len(data) < HEAD_BYTES:
            return None
        _, _, _, _, stored_meta, _, _, _, undurable, _, _ = _HEAD.unpack_from(data)
        if stored_meta > min(MAX_META_BYTES, size - at):
            return None
        stored = os.pread(self._descriptor, stored_meta, at + HEAD_BYTES)
        is_sound = _head_digest(self._id, at, data[: _HEAD.size], stored) == data[_HEAD.size :]
        return at - int(undurable) if is_sound else None


def tombstone(log_id: str, offset: int, row: int) -> bytes:
    """Return the bytes that delete one blob of a log, or close the log."""
    head = TOMBSTONE.pack(offset, row, 0)[:12]
    return head + zlib.crc32(head, zlib.crc32(bytes.fromhex(log_id))).to_bytes(4, "little")


def read_tombstones(log_id: str, data: bytes, key: str) -> tuple[list[tuple[int, int]], int]:
    """Parse tombstones: the record's offset and the row of each; and the size of what was parsed.

    Raises:
        CorruptError: One is damaged.
    """
    found: list[tuple[int, int]] = []
    n_bytes = len(data) // TOMBSTONE.size * TOMBSTONE.size
    named = zlib.crc32(bytes.fromhex(log_id))
    for number, (offset, row, check) in enumerate(TOMBSTONE.iter_unpack(data[:n_bytes])):
        at = number * TOMBSTONE.size
        if zlib.crc32(data[at : at + 12], named) == check:
            found.append((offset, row))
        elif offset or row or check:
            raise CorruptError(key, f"the tombstone at byte {at} is damaged")
    return found, n_bytes
