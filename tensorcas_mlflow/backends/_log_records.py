"""Records of a log and tombstones: bytes to values and back (``docs/format.md``, Logs)."""

from __future__ import annotations

import re
import struct
import time
import zlib
from binascii import hexlify
from collections.abc import Iterable, Sequence
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
_HEADER_DIGEST_BYTES = 16
MARK_AT = 48
"""Place of the mark in the header: the process that appends writes it over the last one."""
_MARK = struct.Struct("<Q8s")
ALIGNMENT = 64
"""A blob in a body starts at a multiple of this, so that its tensors can be memory-mapped."""

MAGIC = b"TCLR"
_HEAD = struct.Struct("<4sBBHIIIII")
_DIGEST_BYTES = 16
CHECK_BYTES = 8
"""Size of the first bytes of a record's digest, which name the record."""
HEAD_BYTES = _HEAD.size + _DIGEST_BYTES
LEAST_BYTES = HEAD_BYTES + 2
"""Size of the head of a record and of the first field of its summary; a record without a summary has as many, too."""
_PACKED, _SUMMARIZED, _OTHER_KEYS = 1, 2, 4
"""Flags of a record: its meta is packed; it has a summary; nobody skips it, since a key has an unusual folder."""
USUAL_FOLDERS = ("refs", "manifests", "packs")
_N_WORDS = struct.Struct("<H")
_MOST_WORDS = 0xFFFF
HASH_BYTES = 4
_BODY_DIGEST_BYTES = 8
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
_PACKED_FROM = 128
_JOINED_BYTES = 1 << 20
"""Bound of a body written in one call with the rest of its record."""
MAX_PREFIXES = 16
"""Bound of the records needed to read the meta of another one."""
_HEX = re.compile(rb"[0-9a-f]{16,}")
_RUN = struct.Struct("<II")
_N_RUNS = struct.Struct("<H")
_MOST_RUNS = 0xFFFF

TOMBSTONE = struct.Struct("<Q8sII")
_CRC_AT = TOMBSTONE.size - 4
CLOSED = 0xFFFFFFFF
"""Row of the tombstone that closes a log."""


class Place(NamedTuple):
    """Name of one blob of a log."""

    record: int
    """Offset of its record."""
    row: int
    """Its row in the table of the record."""
    check: bytes
    """Begin of the record's digest: after a power cut, or in a log that was put back, another record may lie there."""


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
    check: bytes
    """Begin of its digest."""

    def place(self, row: int) -> Place:
        """Return the place of a blob."""
        return Place(self.offset, row, self.check)


class SkippedRecord(NamedTuple):
    """A record whose meta has not been read."""

    offset: int
    end: int
    body_start: int
    body_digest: bytes
    """Empty if it has no body."""
    durable_before: int
    keys: bytes
    """The `key_hash` of each blob and of each consumed intent."""
    words: bytes
    """Words of its packs."""
    check: bytes
    """Begin of its digest."""


def key_hash(key: str) -> bytes:
    """Return the hash of a key that a summary has, and the index of a log."""
    return blake3.blake3(key.encode()).digest(length=HASH_BYTES)


def header(log_id: str, inode: int) -> bytes:
    """Return the first bytes of a log, in the file with an inode."""
    head = _HEADER.pack(LOG_MAGIC, bytes.fromhex(log_id), inode)
    return head + _header_digest(head) + bytes(_MARK.size)


def _header_digest(head: bytes) -> bytes:
    return blake3.blake3(head).digest(length=_HEADER_DIGEST_BYTES)


def mark(log_id: str, end: int) -> bytes:
    """Return the mark that says: every byte of a log before this one has been durable."""
    return _MARK.pack(end, blake3.blake3(bytes.fromhex(log_id) + end.to_bytes(8, "little")).digest(length=8))


def marked_end(log_id: str, data: bytes) -> int:
    """Return the end in the mark of a log, from the first bytes of the log; 0 if there is no mark, or half of one."""
    found = data[MARK_AT:HEADER_BYTES]
    if len(found) < _MARK.size:
        return 0
    end: int = _MARK.unpack(found)[0]
    return end if found == mark(log_id, end) else 0


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
    is_sound = _header_digest(head) == data[_HEADER.size : MARK_AT]
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
    is_summarized: bool = True,
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
        is_summarized: Whether other processes will mostly skip the record.

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
    body_digest = hasher.digest()[:_BODY_DIGEST_BYTES]
    meta = _FACTS.pack(written_ms, body_digest) + rest
    stored, flags, prefix_at = meta, 0, 0
    if len(meta) >= _PACKED_FROM:
        text_bytes = len(meta) - sum(len(blob.data) for blob in blobs if not blob.in_body and not blob.is_commit)
        packed = _compressor(None if prefix is None else prefix[1]).compress(_shrunk(meta, text_bytes))
        if len(packed) < len(meta):
            stored, flags, prefix_at = packed, _PACKED, prefix[0] if prefix else 0
    summary = b""
    if is_summarized:
        summary, summary_flags = _summary(keys, blobs, body_digest if body else b"")
        flags |= summary_flags
    body_at = offset + HEAD_BYTES + len(summary) + len(stored)
    pad = -body_at % ALIGNMENT if body else 0
    head = _HEAD.pack(
        MAGIC,
        VERSION,
        flags,
        n_rows,
        len(stored),
        len(meta),
        pad + n_body,
        offset - prefix_at if prefix_at else 0,
        offset - durable_before,
    )
    stored = summary + stored
    head += _head_digest(bytes.fromhex(log_id), offset, head, stored)
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
        check=record_check(head),
    )
    pieces = [head, stored, bytes(pad), *body]
    return [b"".join(pieces)] if n_body <= _JOINED_BYTES else [b"".join(pieces[:3]), *body], record


def _summary(keys: Sequence[bytes], blobs: Sequence[LogBlob], body_digest: bytes) -> tuple[bytes, int]:
    """Return the summary of a record and its flags; nothing if the record has too many words.

    Args:
        keys: Keys of the blobs, and then of the consumed intents.
        blobs: The blobs.
        body_digest: Begin of the digest of the body; empty if there is none.
    """
    pieces = [b"", body_digest]
    for key in keys:
        pieces.append(blake3.blake3(key).digest(length=HASH_BYTES))
    n_words, flags = 0, _SUMMARIZED
    for blob in blobs:
        folder = blob.key.partition("/")[0]
        if folder == "packs":
            pieces.append(pack_words(_IN_META, blob.data))
            n_words += len(pieces[-1]) // WORD_BYTES
        elif folder not in USUAL_FOLDERS:
            flags = _SUMMARIZED | _OTHER_KEYS
    if n_words > _MOST_WORDS:
        return b"", 0
    pieces[0] = _N_WORDS.pack(n_words)
    return b"".join(pieces), flags


def _summary_bytes(data: bytes) -> int:
    """Return the size of a record's summary.

    Args:
        data: The head of the record, and what follows it.
    """
    _, _, flags, n_rows, _, _, body_bytes, _, _ = _HEAD.unpack_from(data)
    if not flags & _SUMMARIZED:
        return 0
    (n_words,) = _N_WORDS.unpack_from(data, HEAD_BYTES)
    n_digest = _BODY_DIGEST_BYTES if body_bytes else 0
    return int(_N_WORDS.size + n_digest + n_rows * HASH_BYTES + n_words * WORD_BYTES)


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


def grown(shrunk: bytes) -> bytes:
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


def most_shrunk_bytes(meta_bytes: int) -> int:
    """Return a bound of the size of a meta after `_shrunk`: a run takes as many bytes as it saves, or fewer."""
    return meta_bytes + _N_RUNS.size


def _compressor(prefix: bytes | None) -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(
        compression_params=_PARAMETERS, dict_data=None if prefix is None else as_dict(prefix)
    )


def _head_digest(log_id: bytes, offset: int, head: bytes, stored: bytes) -> bytes:
    named = b"".join((log_id, offset.to_bytes(8, "little"), head, stored))
    return digest(named)[:_DIGEST_BYTES]


def as_dict(prefix: bytes) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(prefix, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


class Front(NamedTuple):
    """Front of a whole record: its head, its summary and its stored meta."""

    offset: int
    end: int
    meta_end: int
    """End of the stored meta."""
    version: int
    durable_before: int
    prefix: int
    """Offset of the prefix; 0 if there is none."""
    flags: int
    n_rows: int
    meta_bytes: int
    summary_bytes: int
    """Size of the summary; 0 if there is none."""
    stored: bytes
    """The summary, and the stored meta."""
    check: bytes
    """Begin of the digest."""

    @property
    def is_packed(self) -> bool:
        """True if the meta is stored packed."""
        return bool(self.flags & _PACKED)

    @property
    def may_be_skipped(self) -> bool:
        """True if a process that needs none of its blobs and of its words need not read its meta."""
        is_summarized = self.flags & (_SUMMARIZED | _OTHER_KEYS) == _SUMMARIZED
        return is_summarized and self.version <= VERSION and self.durable_before >= 0

    @property
    def has_body(self) -> bool:
        """True if the record has a body."""
        return self.end > self.meta_end

    @property
    def body_start(self) -> int:
        """Begin of the body."""
        return self.meta_end + (-self.meta_end % ALIGNMENT if self.has_body else 0)

    def summary(self) -> SkippedRecord:
        """Return the summary, if there is one."""
        keys_at = _N_WORDS.size + (_BODY_DIGEST_BYTES if self.has_body else 0)
        words_at = keys_at + self.n_rows * HASH_BYTES
        return SkippedRecord(
            self.offset,
            self.end,
            self.body_start,
            self.stored[_N_WORDS.size : keys_at],
            self.durable_before,
            self.stored[keys_at:words_at],
            self.stored[words_at : self.summary_bytes],
            self.check,
        )


def front_bytes(data: bytes) -> int | None:
    """Return the size of the front of a record; None if no record begins here.

    Args:
        data: The first `LEAST_BYTES` of the record, or more.
    """
    if len(data) < LEAST_BYTES or data[:4] != MAGIC:
        return None
    stored_meta = int.from_bytes(data[8:12], "little")
    return HEAD_BYTES + _summary_bytes(data) + stored_meta if stored_meta <= MAX_META_BYTES else None


def read_front(log_id: bytes, at: int, size: int, data: bytes) -> Front | None:
    """Read the front of a record.

    Args:
        log_id: Id of the log.
        at: Place of the record in it.
        size: Size of the log.
        data: The bytes of the record, `front_bytes` in number.

    Returns:
        None if it is damaged, or if the log ends before the record does. The offset of the prefix may be negative, and
        so may the number of durable bytes.
    """
    _, version, flags, n_rows, _, meta_bytes, body_bytes, back, undurable = _HEAD.unpack_from(data)
    stored = data[HEAD_BYTES:]
    meta_end = at + len(data)
    end = meta_end + body_bytes
    if end > size or _head_digest(log_id, at, data[: _HEAD.size], stored) != data[_HEAD.size : HEAD_BYTES]:
        return None
    return Front(
        at,
        end,
        meta_end,
        version,
        at - undurable,
        0 if not back else at - back or -1,
        flags,
        n_rows,
        meta_bytes,
        _summary_bytes(data),
        stored,
        record_check(data),
    )


def record_check(data: bytes) -> bytes:
    """Return the begin of a record's digest, from the first `HEAD_BYTES` of the record."""
    return data[_HEAD.size : _HEAD.size + CHECK_BYTES]


def parse_meta(meta: bytes, front: Front) -> Record:
    """Read a meta.

    Args:
        meta: The meta, unpacked.
        front: The front of its record.

    Raises:
        ValueError: It is one that no writer writes.
    """
    keys_at = _FACTS.size + front.n_rows * _ROW.size
    if len(meta) != front.meta_bytes or keys_at > len(meta):
        raise ValueError("its table is too long")
    written_ms, body_digest = _FACTS.unpack_from(meta)
    body_start = front.body_start
    table = list(_ROW.iter_unpack(meta[_FACTS.size : keys_at]))
    data_at = keys_at + sum([row[2] for row in table])
    rows: list[LogRow] = []
    consumed: list[str] = []
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
        if not (in_body or kind in _IN_META_KINDS) or place + size > (front.end if in_body else len(meta)):
            raise ValueError("a blob lies outside of it")
        words = meta[data_at : data_at + n_words]
        data_at += n_words if in_body else size
        if data_at > len(meta):
            raise ValueError("a blob lies outside of it")
        if n_words:
            version = 0
        rows.append(LogRow(number, key, bool(is_commit), version, size, kind, place, words))
    if front.summary_bytes:
        summary = front.summary()
        hashes = b"".join(map(key_hash, (*(row.key for row in rows), *consumed)))
        if (summary.keys, summary.body_digest) != (hashes, body_digest if front.has_body else b""):
            raise ValueError("its summary is another one's")
        if not front.flags & _OTHER_KEYS and not all(row.key.partition("/")[0] in USUAL_FOLDERS for row in rows):
            raise ValueError("its flags hide a key")
    return Record(
        offset=front.offset,
        end=front.end,
        body_start=body_start,
        body_digest=body_digest,
        durable_before=front.durable_before,
        written_s=written_ms / 1000,
        prefix=front.prefix,
        meta=meta,
        rows=tuple(rows),
        consumed=tuple(consumed),
        check=front.check,
    )


def tombstone(log_id: str, place: Place) -> bytes:
    """Return the bytes that delete one blob of a log."""
    head = TOMBSTONE.pack(place.record, place.check, place.row, 0)[:_CRC_AT]
    return head + zlib.crc32(head, zlib.crc32(bytes.fromhex(log_id))).to_bytes(4, "little")


def closing(log_id: str, end: int) -> bytes:
    """Return the tombstone that closes a log of a known end, or with an end of 0 a log with a failed sync."""
    return tombstone(log_id, Place(end, CLOSED, bytes(CHECK_BYTES)))


def read_tombstones(log_id: str, data: bytes, key: str, *, lost: list[int] | None = None) -> tuple[list[Place], int]:
    """Parse tombstones.

    Args:
        log_id: Name of the log.
        data: The tombstones.
        key: Name of their file in errors.
        lost: Receives the places of damaged ones; None refuses them.

    Returns:
        The place in each; and the size of what was parsed.

    Raises:
        CorruptError: One is damaged.
    """
    found: list[Place] = []
    n_bytes = len(data) // TOMBSTONE.size * TOMBSTONE.size
    named = zlib.crc32(bytes.fromhex(log_id))
    for number, (offset, record, row, check) in enumerate(TOMBSTONE.iter_unpack(data[:n_bytes])):
        at = number * TOMBSTONE.size
        if zlib.crc32(data[at : at + _CRC_AT], named) == check:
            found.append(Place(offset, row, record))
        elif any(data[at : at + TOMBSTONE.size]):
            if lost is None:
                raise CorruptError(key, f"the tombstone at byte {at} is damaged")
            lost.append(at)
    return found, n_bytes
