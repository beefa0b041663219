"""Records of the database, and compact keys: values to bytes and back (``docs/format.md``, The database)."""

from __future__ import annotations

import re
import struct
from binascii import hexlify
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple
from zlib import crc32

import zstandard

from tensorcas_mlflow.backends._contract import MOST_SHARED_BYTES, check_key
from tensorcas_mlflow.backends._implied_digests import JSON, PACK, with_digests, without_digests
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.errors import CorruptError

_PACKS = "packs/"
_MOST_SHARED_OTHERS = 64 << 10
"""Bound of a blob other than a pack in a shared record."""
_MOST_TOGETHER_BYTES, _MOST_TOGETHER = 256 << 10, 1000
"""Bounds of a shared record."""
_MOST_CONTENT_BYTES = 8 << 20
"""Bound of the content of a record; a reader refuses more."""
RAW, PACKED = 0, 1
"""Forms of the data of a record: as it is, or one Zstandard frame."""
_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(
    3, format=zstandard.FORMAT_ZSTD1_MAGICLESS, write_content_size=False
)
_HEX = re.compile(rb"[0-9a-f]{16,}")
_RUN = struct.Struct("<II")
_N_RUNS = struct.Struct("<H")
_MOST_RUNS = 0xFFFF
_COUNT = struct.Struct("<H")
_ROW = struct.Struct("<BHI")
_PLAIN = 0
_CHECK_BYTES = 8
DIGEST_BYTES = 16
"""Size of the digests in commits."""

_KEY_HEX = re.compile("[0-9a-f]{8,}")
_RUN_MARK = 0x80
_MOST_PAIRS = 0x7F


class NewBlob(NamedTuple):
    """A blob to be written."""

    key: str
    data: bytes


class Part(NamedTuple):
    """A blob in a record, by the record's own table."""

    key: str
    kind: int
    start: int
    """Start of its stored bytes in the content."""
    size: int

    def data_in(self, content: bytes) -> bytes:
        """Return the blob.

        Raises:
            CorruptError: It is not of its kind.
        """
        stored = content[self.start : self.start + self.size]
        try:
            return with_digests(self.kind, stored)
        except ValueError as error:
            raise CorruptError(self.key, f"its record is no record of such a blob: {error}") from error


# --- keys


@lru_cache(maxsize=4096)
def packed_key(key: str) -> bytes:
    """Write a key, or a prefix of whole segments, with its hex digits as bytes.

    A run of at least eight digits is a byte 0x80 + n and n bytes, two digits each; no key has other bytes from 0x80 on.
    """
    out, at = [], 0
    for found in _KEY_HEX.finditer(key):
        begin, end = found.span()
        n_pairs = min((end - begin) // 2, _MOST_PAIRS)
        out += [
            key[at:begin].encode(),
            bytes((_RUN_MARK + n_pairs,)),
            bytes.fromhex(key[begin : (at := begin + 2 * n_pairs)]),
        ]
    return b"".join([*out, key[at:].encode()])


@lru_cache(maxsize=4096)
def key_of(packed: bytes) -> str:
    """Undo `packed_key`.

    Raises:
        CorruptError: The bytes are of no key.
    """
    out, at = [], 0
    for place, byte in enumerate(packed):
        if place < at or byte < _RUN_MARK:
            continue
        end = place + 1 + byte - _RUN_MARK
        out += [packed[at:place], hexlify(packed[place + 1 : end])]
        at = end
    try:
        return check_key(b"".join([*out, packed[at:]]).decode("ascii"))
    except ValueError as error:
        raise CorruptError("blobs.db", f"it has a blob without a key: {packed[:80]!r}") from error


def name_of(key: str) -> int:
    """Return the 8 bytes by which commits of a key are looked up."""
    return as_int(digest(key.encode())[:8])


def short_digest(data: bytes) -> bytes:
    """Return the digest of bytes as commits have it."""
    return digest(data)[:DIGEST_BYTES]


def as_int(some: bytes) -> int:
    """Return 8 bytes as the signed number that the database stores."""
    return int.from_bytes(some, "little", signed=True)


def row_check(key: bytes, born: int, record: int, start: int, size: int) -> int:
    """Return the CRC-32 of a row of the table ``blobs``."""
    return crc32(b"%d %d %d %d" % (born, record, start, size), crc32(key))


# --- records


def records_of(blobs: Iterable[NewBlob]) -> tuple[list[list[NewBlob]], list[NewBlob]]:
    """Distribute blobs to records: small ones share records, with the packs last; each other one has its own."""
    small: list[NewBlob] = []
    alone: list[NewBlob] = []
    for blob in blobs:
        most = MOST_SHARED_BYTES if blob.key.startswith(_PACKS) else _MOST_SHARED_OTHERS
        (small if len(blob.data) <= most else alone).append(blob)
    small.sort(key=lambda blob: blob.key.startswith(_PACKS))
    shared: list[list[NewBlob]] = []
    n_bytes = 0
    for blob in small:
        if not shared or n_bytes + len(blob.data) > _MOST_TOGETHER_BYTES or len(shared[-1]) == _MOST_TOGETHER:
            shared.append([])
            n_bytes = 0
        shared[-1].append(blob)
        n_bytes += len(blob.data)
    return shared, alone


def content_of(blobs: Sequence[NewBlob]) -> tuple[bytes, list[Part]]:
    """Lay out the content of a record: its table, the keys and the blobs, without the digests that follow from them."""
    keys = [blob.key.encode() for blob in blobs]
    stored = [_without_digests(blob) for blob in blobs]
    rows = [_ROW.pack(kind, len(key), len(data)) for key, (kind, data) in zip(keys, stored, strict=True)]
    head = b"".join([_COUNT.pack(len(blobs)), *rows, *keys])
    parts: list[Part] = []
    at = len(head)
    for blob, (kind, data) in zip(blobs, stored, strict=True):
        parts.append(Part(blob.key, kind, at, len(data)))
        at += len(data)
    return b"".join([head, *(data for _, data in stored)]), parts


def _without_digests(blob: NewBlob) -> tuple[int, bytes]:
    """Return the kind of a blob, and its bytes without the digests that a reader computes."""
    if len(blob.data) > MOST_SHARED_BYTES:
        return _PLAIN, blob.data
    kind = PACK if blob.key.startswith(_PACKS) else JSON
    data = without_digests(kind, blob.data)
    return (_PLAIN, blob.data) if data is None else (kind, data)


def parts_of(content: bytes) -> list[Part]:
    """Read the table of a record.

    Raises:
        CorruptError: It does not fit the content.
    """
    try:
        (n_blobs,) = _COUNT.unpack_from(content)
        at = _COUNT.size + n_blobs * _ROW.size
        rows = list(_ROW.iter_unpack(content[_COUNT.size : at]))
        keys = []
        for _, key_bytes, _ in rows:
            keys.append(check_key(content[at : at + key_bytes].decode("ascii")))
            at += key_bytes
        parts = []
        for key, (kind, _, size) in zip(keys, rows, strict=True):
            parts.append(Part(key, kind, at, size))
            at += size
    except (struct.error, ValueError) as error:
        raise CorruptError("blobs.db", f"a record has no table: {error}") from error
    if at != len(content):
        raise CorruptError("blobs.db", "a record is not as long as its table says")
    return parts


def encode(content: bytes, base: bytes | None) -> tuple[int, bytes]:
    """Encode the content of a record; return the form, and the data to store.

    Args:
        base: The content of the record that it is a difference from.
    """
    if base is None and len(content) > MOST_SHARED_BYTES and _is_noise(content):
        return RAW, content
    packed = zstandard.ZstdCompressor(
        compression_params=_PARAMETERS, dict_data=None if base is None else _as_dict(base)
    ).compress(_shrunk(content))
    return (PACKED, packed) if len(packed) < len(content) else (RAW, content)


def _is_noise(content: bytes) -> bool:
    """Tell whether a sample of some content does not shrink: most large packs are compressed already."""
    sample = content[len(content) // 2 :][:4096]
    return len(zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress(sample)) > 0.95 * len(sample)


def decode(form: int, data: bytes, size: int, base: bytes | None) -> bytes:
    """Decode the data of a record, whose digest the caller has checked.

    Raises:
        CorruptError: It is no data of such a record.
    """
    if not 0 < size <= _MOST_CONTENT_BYTES:
        raise CorruptError("blobs.db", f"a record says that it has {size} bytes")
    try:
        if form == PACKED:
            # `decompress` believes the size that a frame claims.
            reader = zstandard.ZstdDecompressor(
                format=zstandard.FORMAT_ZSTD1_MAGICLESS,
                dict_data=None if base is None else _as_dict(base),
                max_window_size=_MOST_CONTENT_BYTES,
            ).stream_reader(data)
            shrunk = reader.read(size + _N_RUNS.size + 1)
            data = _grown(shrunk)
        elif form != RAW:
            raise CorruptError("blobs.db", f"a record has the form {form}")
    except (zstandard.ZstdError, struct.error) as error:
        raise CorruptError("blobs.db", f"a record cannot be unpacked: {error}") from error
    if len(data) != size:
        raise CorruptError("blobs.db", f"a record has {len(data)} bytes and not {size}")
    return data


def _as_dict(base: bytes) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(_shrunk(base), dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def _shrunk(content: bytes) -> bytes:
    """Write the runs of hex digits in a content as bytes, two digits each, with the places of the runs in front."""
    runs, out, at = [], [], 0
    for found in _HEX.finditer(content):
        begin, end = found.span()
        end -= (end - begin) % 2
        runs.append(_RUN.pack(begin - at, end - begin))
        out += [content[at:begin], bytes.fromhex(content[begin:end].decode())]
        at = end
        if len(runs) == _MOST_RUNS:
            break
    return b"".join([_N_RUNS.pack(len(runs)), *runs, *out, content[at:]])


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


def record_check(number: int, base: int | None, depth: int, form: int, size: int, data: bytes) -> int:
    """Return the check of a row of the table ``records``: the first 8 bytes of a BLAKE3 hash."""
    facts = b"%d %d %d %d %d\n" % (number, base or 0, depth, form, size)
    return as_int(digest(facts + data)[:_CHECK_BYTES])
