"""Records of a log and tombstones: bytes to values and back (``docs/format.md``, Logs)."""

from __future__ import annotations

import os
import re
import struct
import time
import zlib
from binascii import hexlify
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import blake3
import zstandard

from tensorcas_mlflow.backends._contract import check_key
from tensorcas_mlflow.backends._log_digests import PACK, RECORD, WORD_BYTES, pack_words, without_digests
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.errors import CorruptError, NewerFormatError

VERSION = 1
HEADER_BYTES = 64
LOG_MAGIC = b"\x89TCLG\r\n\x01"
_HEADER = struct.Struct("<8s16sQ")
ALIGNMENT = 64
"""A blob in a body starts at a multiple of this, so that its tensors can be memory-mapped."""

_MAGIC = b"TCLR"
_HEAD = struct.Struct("<4sBBHIIIII")
_DIGEST_BYTES = 16
HEAD_BYTES = _HEAD.size + _DIGEST_BYTES
_FACTS = struct.Struct("<Q8s")
"""Begin of a meta: the time of writing, and the digest of the body."""
_ROW = struct.Struct("<BBHIII")
_IN_META, _IN_BODY, _CONSUMED = 0, 1, 2
_PACKS = "packs/"
_IN_META_KINDS = frozenset({_IN_META, PACK, RECORD})
MAX_META_BYTES = 64 << 20
_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(
    3, format=zstandard.FORMAT_ZSTD1_MAGICLESS, write_content_size=False
)
_GUESSED_BYTES = 4096
"""Bytes to read at the start of a record: they hold the meta of most."""
_AHEAD_BYTES = 256 << 10
"""Bytes to read at the start of a record after a small one."""
_PACKED_FROM = 128
_JOINED_BYTES = 1 << 20
"""Bound of a body written in one call with the rest of its record."""
MAX_PREFIXES = 16
"""Bound of the records needed to read the meta of another one."""
_KEPT_METAS = 20
"""Metas that a reader keeps: nearly all prefixes are among them."""
_KEPT_META_BYTES = 256 << 10
"""Bound of the metas that are kept between two readings of a log."""
_HEX = re.compile(rb"[0-9a-f]{16,}")
_RUN = struct.Struct("<II")
_N_RUNS = struct.Struct("<H")
_MOST_RUNS = 0xFFFF

TOMBSTONE = struct.Struct("<QII")
CLOSED = 0xFFFFFFFF
"""Row of the tombstone that closes a log."""


class LogBlob(NamedTuple):
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
    kind: int
    start: int
    """Start of the blob in the log, or of a blob in the meta its start there."""
    words: bytes = b""
    """The words of a pack in the body."""

    def data_in(self, meta: bytes) -> bytes:
        """Return a blob that lies in a meta, as it lies there."""
        return meta[self.start : self.start + self.size]

    @property
    def in_body(self) -> bool:
        """True if the blob lies in the body."""
        return self.kind == _IN_BODY


def meta_bytes(row: LogRow) -> int:
    """Return the bytes that a blob takes in the meta of its record."""
    return _ROW.size + len(row.key) + (len(row.words) if row.in_body else row.size)


class Record(NamedTuple):
    """A record that has been read, without its body; a tuple, since an opened log has many."""

    offset: int
    end: int
    body_start: int
    body_digest: bytes
    durable_before: int
    written_s: float
    prefix: int
    """Offset of the record whose meta is the prefix of this one's; 0 if there is none."""
    meta: bytes
    rows: tuple[LogRow, ...]
    consumed: tuple[str, ...]
    """Keys of intents."""


def header(log_id: str, inode: int) -> bytes:
    """Return the first bytes of a log, in the file with an inode."""
    head = _HEADER.pack(LOG_MAGIC, bytes.fromhex(log_id), inode)
    return head + blake3.blake3(head).digest()


def inode_in(data: bytes) -> int:
    """Return the inode of the file in which a log was created, from the first bytes of the log."""
    inode: int = _HEADER.unpack_from(data)[2]
    return inode


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
    magic, found, _ = _HEADER.unpack(head)
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
    prefix: tuple[int, bytes] | None,
    written_s: float | None = None,
) -> tuple[list[bytes], Record]:
    """Lay out a record.

    Args:
        log_id: Name of the log.
        offset: Place of the record in it.
        blobs: Its blobs.
        consumed: Keys of the intents it consumes.
        durable_before: Every earlier byte of the log is durable.
        prefix: Offset and meta of the record whose meta is the prefix of this one's.
        written_s: Time of writing; now unless given.

    Returns:
        The bytes to write, and the record as `LogReader` returns it.
    """
    intents = tuple(consumed)
    keys = [blob.key.encode() for blob in blobs] + [key.encode() for key in intents]
    n_rows = len(keys)
    # The stored size of the meta decides where the body starts, and the table in the meta names starts. So starts
    # count from the first aligned byte after the record's head.
    body: list[bytes] = []
    n_body = 0
    at = _FACTS.size + n_rows * _ROW.size + sum(map(len, keys))
    table, inline, rows = bytearray(), list[bytes](), list[LogRow]()
    for number, (blob, key) in enumerate(zip(blobs, keys, strict=False)):
        start, words = at, b""
        if blob.in_body:
            pad = -n_body % ALIGNMENT
            kind, data, start = _IN_BODY, blob.data, n_body + pad
            body += [bytes(pad), data]
            n_body = start + len(data)
            words = pack_words(_IN_BODY, data) if blob.key.startswith(_PACKS) else b""
            inline.append(words)
        else:
            kind, data = _shortened(blob)
            inline.append(data)
        at += len(inline[-1])
        told = len(words) // WORD_BYTES or blob.version
        table += _ROW.pack(kind, blob.is_commit, len(key), told, len(data), start if blob.in_body else 0)
        rows.append(LogRow(number, blob.key, blob.is_commit, blob.version, len(data), kind, start, words))
    for key in keys[len(blobs) :]:
        table += _ROW.pack(_CONSUMED, 0, len(key), 0, 0, 0)
    hasher = blake3.blake3()
    written_ms = round((time.time() if written_s is None else written_s) * 1000)
    rest = b"".join([bytes(table), *keys, *inline])
    # The leading zero bytes depend on the size of the packed meta, so the digest in the meta leaves them out.
    for piece in body:
        hasher.update(piece)
    body_digest = hasher.digest()[:8]
    meta = _FACTS.pack(written_ms, body_digest) + rest
    stored, is_packed, prefix_at = meta, 0, 0
    if len(meta) >= _PACKED_FROM:
        text_bytes = len(meta) - sum(len(blob.data) for blob in blobs if not blob.in_body and not blob.is_commit)
        packed = _compressor(None if prefix is None else prefix[1]).compress(_shrunk(meta, text_bytes))
        if len(packed) < len(meta):
            stored, is_packed, prefix_at = packed, 1, prefix[0] if prefix else 0
    body_at = offset + HEAD_BYTES + len(stored)
    pad = -body_at % ALIGNMENT if body else 0
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
    )
    head += _head_digest(log_id, offset, head, stored)
    record = Record(
        offset=offset,
        end=body_at + pad + n_body,
        body_start=body_at + pad,
        body_digest=body_digest,
        durable_before=durable_before,
        written_s=written_ms / 1000,
        prefix=prefix_at,
        meta=meta,
        rows=tuple(row._replace(start=body_at + pad + row.start) if row.in_body else row for row in rows),
        consumed=intents,
    )
    pieces = [head, stored, bytes(pad), *body]
    return [b"".join(pieces)] if n_body <= _JOINED_BYTES else [b"".join(pieces[:3]), *body], record


def _shortened(blob: LogBlob) -> tuple[int, bytes]:
    """Leave the digests out of a blob for the meta; return its kind and bytes."""
    kind = PACK if blob.key.startswith(_PACKS) else RECORD
    data = without_digests(kind, blob.data) if kind == PACK or blob.is_commit else None
    return (_IN_META, blob.data) if data is None else (kind, data)


def _shrunk(meta: bytes, text_bytes: int) -> bytes:
    """Write the hex digits of a meta as bytes, two digits each.

    Args:
        meta: The meta.
        text_bytes: Bytes at its begin to search for hex digits.
    """
    runs, out, at = [], [], 0
    for found in _HEX.finditer(meta, 0, text_bytes):
        begin, end = found.span()
        end -= (end - begin) % 2
        runs.append(_RUN.pack(begin - at, end - begin))
        out += [meta[at:begin], bytes.fromhex(meta[begin:end].decode())]
        at = end
        if len(runs) == _MOST_RUNS:
            break
    return b"".join([_N_RUNS.pack(len(runs)), *runs, *out, meta[at:]])


def _grown(shrunk: bytes) -> bytes:
    """Undo `_shrunk`.

    Raises:
        struct.error: It is too short.
    """
    (n_runs,) = _N_RUNS.unpack_from(shrunk)
    at = _N_RUNS.size + n_runs * _RUN.size
    out: list[bytes] = []
    for gap, n_digits in _RUN.iter_unpack(shrunk[_N_RUNS.size : at]):
        begin = at + gap
        out += (shrunk[at:begin], hexlify(shrunk[begin : (at := begin + n_digits // 2)]))
    return b"".join([*out, shrunk[at:]])


def _compressor(prefix: bytes | None) -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(
        compression_params=_PARAMETERS, dict_data=None if prefix is None else _as_dict(prefix)
    )


def _head_digest(log_id: str, offset: int, head: bytes, stored: bytes) -> bytes:
    named = b"".join((bytes.fromhex(log_id), offset.to_bytes(8, "little"), head, stored))
    return digest(named)[:_DIGEST_BYTES]


def _as_dict(prefix: bytes) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(prefix, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


class LogReader:
    """Records of one open log, by their places."""

    def __init__(self, log_id: str, descriptor: int, key: str, *, metas: Mapping[int, bytes] | None = None) -> None:
        """Read from an open file, which the caller closes.

        Args:
            log_id: Name of the log.
            descriptor: The file.
            key: Name of the log in errors.
            metas: Metas of records that count, as `metas` returned them before.
        """
        self._id = log_id
        self._descriptor = descriptor
        self._key = key
        self._metas: OrderedDict[int, bytes] = OrderedDict(metas or {})
        """Metas of the last records, by offset."""
        self._decompressors: OrderedDict[int, zstandard.ZstdDecompressor] = OrderedDict()
        """Decompressors by the offset of their prefix."""
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
                # A durable record has a durable header.
                is_damaged = not self._is_torn(HEADER_BYTES, size)
                return [], 0, CorruptError(self._key, "its header is damaged") if is_damaged else None
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

    def metas(self, end: int) -> dict[int, bytes]:
        """Return the metas of the last records before a byte, by offset: those after it may need them as prefixes."""
        found: dict[int, bytes] = {}
        n_bytes = 0
        for at, meta in reversed(self._metas.items()):
            n_bytes += len(meta)
            if n_bytes > _KEPT_META_BYTES:
                break
            if at < end:
                found[at] = meta
        return dict(reversed(found.items()))

    def salvage(self, size: int) -> tuple[list[Record], list[tuple[int, int]]]:
        """Read every whole record, also behind damage.

        Returns:
            The records; and for each lost part its first byte and one past its last.

        Raises:
            NewerFormatError: A later release wrote a record.
        """
        records: list[Record] = []
        lost: list[tuple[int, int]] = []
        at = HEADER_BYTES
        while at < size:
            record = self._whole(at, size)
            if record is None:
                if self._is_torn(at, size):
                    break
                found = (self._whole(place, size) for place in self._magics(at + 1, size))
                record = next((each for each in found if each is not None), None)
                if record is None:
                    break
                lost.append((at, record.offset))
            records.append(record)
            at = record.end
        if at < size and not self._is_torn(at, size):
            lost.append((at, size))
        durable = max((record.durable_before for record in records), default=0)
        return [record for record in records if record.end <= durable or self._has_body(record)], lost

    def _whole(self, at: int, size: int) -> Record | None:
        """Return the record at a place; None if it is torn or damaged."""
        try:
            return self.record(at, size)
        except CorruptError:
            return None

    def record(
        self, at: int, size: int, *, n_ahead: int = _GUESSED_BYTES, most_prefixes: int = MAX_PREFIXES
    ) -> Record | None:
        """Read one record, without its body; None if it is not whole."""
        if at + HEAD_BYTES > size:
            return None
        data = self._bytes(at, HEAD_BYTES, n_ahead)
        if len(data) < HEAD_BYTES or data[:4] != _MAGIC:
            return None
        _, version, is_packed, n_rows, stored_meta, meta_bytes, body_bytes, back, undurable = _HEAD.unpack_from(data)
        body_start = at + HEAD_BYTES + stored_meta
        end = body_start + body_bytes
        if end > size or stored_meta > MAX_META_BYTES:
            return None
        stored = self._bytes(at + HEAD_BYTES, stored_meta, 0)
        if len(stored) < stored_meta:
            return None
        if _head_digest(self._id, at, data[: _HEAD.size], stored) != data[_HEAD.size : HEAD_BYTES]:
            return None
        if version > VERSION:
            raise NewerFormatError(self._key, version, VERSION)
        if undurable > at or back >= at:
            raise self._impossible(at)
        prefix = at - back if back else 0
        meta = self._unpacked(at, stored, meta_bytes, prefix, most_prefixes) if is_packed else stored
        if len(meta) != meta_bytes or meta_bytes < _FACTS.size:
            raise self._impossible(at)
        written_ms, body_digest = _FACTS.unpack_from(meta)
        body_start += -body_start % ALIGNMENT if body_bytes else 0
        rows, consumed = self._rows(at, meta, n_rows, body_start, end)
        self._metas[at] = meta
        if len(self._metas) > _KEPT_METAS:
            self._metas.popitem(last=False)
        return Record(
            offset=at,
            end=end,
            body_start=body_start,
            body_digest=body_digest,
            durable_before=at - undurable,
            written_s=written_ms / 1000,
            prefix=prefix,
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
        """Parse a meta; return the rows of the blobs and the keys of the consumed intents."""
        keys_at = _FACTS.size + n_rows * _ROW.size
        if keys_at > len(meta):
            raise self._impossible(at)
        table = list(_ROW.iter_unpack(meta[_FACTS.size : keys_at]))
        data_at = keys_at + sum([row[2] for row in table])
        rows: list[LogRow] = []
        consumed: list[str] = []
        try:
            keys = meta[keys_at:data_at].decode("ascii")
            key_at = 0
            for number, (kind, is_commit, key_bytes, version, size, start) in enumerate(table):
                key = check_key(keys[key_at : (key_at := key_at + key_bytes)])
                if kind == _CONSUMED:
                    consumed.append(key)
                    continue
                in_body = kind == _IN_BODY
                n_words = version * WORD_BYTES if in_body and not is_commit else 0
                place = body_start + start if in_body else data_at
                if not (in_body or kind in _IN_META_KINDS) or place + size > (end if in_body else len(meta)):
                    raise self._impossible(at)
                words = meta[data_at : data_at + n_words]
                data_at += n_words if in_body else size
                if data_at > len(meta):
                    raise self._impossible(at)
                if n_words:
                    version = 0
                rows.append(LogRow(number, key, bool(is_commit), version, size, kind, place, words))
        except ValueError:
            raise self._impossible(at) from None
        return tuple(rows), tuple(consumed)

    def _unpacked(self, at: int, stored: bytes, meta_bytes: int, prefix: int, most_prefixes: int) -> bytes:
        """Return the meta of a record from its stored bytes."""
        if meta_bytes > MAX_META_BYTES:
            raise self._impossible(at)
        decompressor = self._decompressors.get(prefix)
        if decompressor is None:
            decompressor = self._decompressors[prefix] = self._decompressor(at, prefix, most_prefixes)
            if len(self._decompressors) > MAX_PREFIXES:
                self._decompressors.popitem(last=False)
        try:
            # A run takes as many bytes as it saves, or fewer.
            return _grown(decompressor.decompress(stored, max_output_size=meta_bytes + _N_RUNS.size))
        except struct.error:
            raise self._impossible(at) from None
        except zstandard.ZstdError as error:
            if "memory" in str(error):
                raise MemoryError(f"Zstandard: {error}") from error
            raise self._impossible(at) from None

    def _decompressor(self, at: int, prefix: int, most_prefixes: int) -> zstandard.ZstdDecompressor:
        """Return the decompressor for a record with a prefix, which may need an earlier record."""
        if not prefix:
            return zstandard.ZstdDecompressor(format=zstandard.FORMAT_ZSTD1_MAGICLESS)
        meta = self._metas.get(prefix)
        if meta is None:
            if prefix < HEADER_BYTES or most_prefixes == 0:
                raise self._impossible(at)
            window = self._window, self._window_at
            found = self.record(prefix, at, most_prefixes=most_prefixes - 1)
            self._window, self._window_at = window
            if found is None:
                raise CorruptError(self._key, f"the record at byte {at} needs the damaged one at byte {prefix}")
            meta = found.meta
        return zstandard.ZstdDecompressor(dict_data=_as_dict(meta), format=zstandard.FORMAT_ZSTD1_MAGICLESS)

    def _impossible(self, at: int) -> CorruptError:
        """Return the error for a record with right digests and contents that no writer writes."""
        return CorruptError(self._key, f"the record at byte {at} has impossible contents")

    def _has_body(self, record: Record) -> bool:
        """Tell whether the body of a record hashes to its digest."""
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
        ends = (self._sound(place, size) for place in self._magics(at + 1, size))
        return not any(end is not None and end > at for end in ends)

    def _magics(self, begin: int, size: int) -> Iterator[int]:
        """Yield the places at which a record may begin."""
        rest = b""
        while begin < size:
            piece = os.pread(self._descriptor, 1 << 20, begin)
            if not piece:
                break
            window, origin = rest + piece, begin - len(rest)
            found = window.find(_MAGIC)
            while found >= 0:
                yield origin + found
                found = window.find(_MAGIC, found + 1)
            begin += len(piece)
            rest = window[-3:]

    def _sound(self, at: int, size: int) -> int | None:
        """Return the first byte that may not have been durable before a record, if its head is whole."""
        data = os.pread(self._descriptor, HEAD_BYTES, at)
        if len(data) < HEAD_BYTES:
            return None
        _, _, _, _, stored_meta, _, _, _, undurable = _HEAD.unpack_from(data)
        if stored_meta > min(MAX_META_BYTES, size - at):
            return None
        stored = os.pread(self._descriptor, stored_meta, at + HEAD_BYTES)
        is_sound = _head_digest(self._id, at, data[: _HEAD.size], stored) == data[_HEAD.size :]
        return at - int(undurable) if is_sound else None


def tombstone(log_id: str, offset: int, row: int) -> bytes:
    """Return the bytes that delete one blob of a log, or close the log."""
    head = TOMBSTONE.pack(offset, row, 0)[:12]
    return head + zlib.crc32(head, zlib.crc32(bytes.fromhex(log_id))).to_bytes(4, "little")


def read_tombstones(
    log_id: str, data: bytes, key: str, *, lost: list[int] | None = None
) -> tuple[list[tuple[int, int]], int]:
    """Parse tombstones.

    Args:
        log_id: Name of the log.
        data: The tombstones.
        key: Name of their file in errors.
        lost: Receives the places of damaged ones; None refuses them.

    Returns:
        The record's offset and the row of each; and the size of what was parsed.

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
        elif (offset or row or check) and lost is not None:
            lost.append(at)
        elif offset or row or check:
            raise CorruptError(key, f"the tombstone at byte {at} is damaged")
    return found, n_bytes
