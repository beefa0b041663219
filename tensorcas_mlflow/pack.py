"""Packs: immutable blobs of many encoded chunks, with the table that finds them (``docs/format.md``, Packs)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.chunking import MAX_CHUNK_BYTES
from tensorcas_mlflow.codecs import RAW, Buffer, Codec, codec_numbered
from tensorcas_mlflow.digest import digest
from tensorcas_mlflow.errors import CorruptError, FormatError, NewerFormatError

MAGIC = b"\x89TCPK\r\n\x01"
TABLE_MAGIC = b"TCPTBL\r\x01"
_VERSION = TABLE_MAGIC[-1]
RAW_ALIGNMENT = 64
STORED_DIGEST_BYTES = 16
MAX_ENTRIES = 1 << 24
TARGET_BYTES = 256 << 20
"""A writer ends a pack when its payloads reach this, and begins the next."""

ENTRY = np.dtype(
    [
        ("digest", "u1", (32,)),
        ("stored_digest", "u1", (STORED_DIGEST_BYTES,)),
        ("offset", "<u8"),
        ("stored_bytes", "<u4"),
        ("raw_bytes", "<u4"),
        ("codec", "u1"),
        ("typesize", "u1"),
        ("zero", "<u2"),
    ]
)
Entries = np.ndarray[Any, np.dtype[np.void]]
"""Entries of a pack's table, of dtype `ENTRY`."""

_FOOTER = struct.Struct("<8sIIQQ32s")
FOOTER_BYTES = _FOOTER.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """One encoded chunk on its way into a pack."""

    digest: bytes
    raw_bytes: int
    codec: Codec
    typesize: int
    data: Buffer
    begins_row: bool
    """Whether this is the first chunk written of its tensor: a raw one is then aligned, so that it can be mapped."""


class PackWriter:
    """Lays out one pack: yields its bytes in order, and has its table when they are all drawn."""

    def __init__(self) -> None:
        self._rows: list[tuple[bytes, bytes, int, int, int, int, int, int]] = []
        self.n_bytes = 0

    def pieces(self, payloads: Iterable[Payload]) -> Iterator[Buffer]:
        """Yield a pack's bytes, holding one payload at a time."""
        yield MAGIC
        at = len(MAGIC)
        for payload in payloads:
            gap = -at % RAW_ALIGNMENT if payload.codec is RAW and payload.begins_row else 0
            if gap:
                yield bytes(gap)
                at += gap
            size = memoryview(payload.data).nbytes
            stored = payload.digest if payload.codec is RAW else digest(payload.data)
            self._rows.append(
                (
                    payload.digest,
                    stored[:STORED_DIGEST_BYTES],
                    at,
                    size,
                    payload.raw_bytes,
                    payload.codec.number,
                    payload.typesize,
                    0,
                )
            )
            yield payload.data
            at += size
        table = self.entries().tobytes()
        head = _FOOTER.pack(TABLE_MAGIC, ENTRY.itemsize, len(self._rows), at, 0, b"")[:32]
        yield table
        yield head + digest(table + head)
        self.n_bytes = at + len(table) + FOOTER_BYTES

    def entries(self) -> Entries:
        """The table so far."""
        out = np.zeros(len(self._rows), dtype=ENTRY)
        if self._rows:
            columns = list(zip(*self._rows, strict=True))
            out["digest"] = np.frombuffer(b"".join(columns[0]), np.uint8).reshape(-1, 32)
            out["stored_digest"] = np.frombuffer(b"".join(columns[1]), np.uint8).reshape(-1, STORED_DIGEST_BYTES)
            for field, column in zip(ENTRY.names[2:] if ENTRY.names else (), columns[2:], strict=True):
                out[field] = column
        return out


def read_table(key: str, size: int, read: Callable[[int, int], Buffer]) -> Entries:
    """Read a pack's table.

    Args:
        key: The pack's key, for errors.
        size: The pack's size in bytes.
        read: Called with a start and a stop; returns those bytes of the pack.

    Raises:
        CorruptError: The pack is cut short or damaged.
        NewerFormatError: A later release wrote it.
    """
    if size < len(MAGIC) + FOOTER_BYTES:
        raise CorruptError(key, f"a pack cannot have only {size} bytes")
    footer = bytes(read(size - FOOTER_BYTES, size))
    magic, entry_bytes, n_entries, offset, _, wanted = _FOOTER.unpack(footer)
    if magic != TABLE_MAGIC:
        if magic[:-1] == TABLE_MAGIC[:-1] and magic[-1] > _VERSION and not _would_be_ours(footer, size, read):
            raise NewerFormatError(f"the pack {key!r}", magic[-1], _VERSION)
        raise CorruptError(key, "it does not end with a pack's footer")
    if entry_bytes < ENTRY.itemsize or n_entries > MAX_ENTRIES:
        raise CorruptError(key, "its footer says impossible sizes")
    table_bytes = entry_bytes * n_entries
    if offset + table_bytes != size - FOOTER_BYTES:
        raise CorruptError(key, "its table does not end where its footer begins")
    table = bytes(read(offset, offset + table_bytes))
    if digest(table + footer[:32]) != wanted:
        raise CorruptError(key, "its table does not hash to the digest in its footer")
    rows = np.frombuffer(table, dtype=np.uint8).reshape(n_entries, entry_bytes)[:, : ENTRY.itemsize]
    entries: Entries = np.ascontiguousarray(rows).view(ENTRY).ravel()
    ends = entries["offset"] + entries["stored_bytes"]
    if n_entries and (entries["offset"].min() < len(MAGIC) or ends.max() > offset or (ends < entries["offset"]).any()):
        raise CorruptError(key, "its table points outside of it")
    return entries


def _would_be_ours(footer: bytes, size: int, read: Callable[[int, int], Buffer]) -> bool:
    """Tell whether a pack is whole but for the version that its footer says: then that is damaged, and not later."""
    _, entry_bytes, n_entries, offset, _, wanted = _FOOTER.unpack(footer)
    end = size - FOOTER_BYTES
    if n_entries > MAX_ENTRIES or not 0 <= offset <= end or offset + entry_bytes * n_entries != end:
        return False
    return digest(bytes(read(offset, end)) + TABLE_MAGIC + footer[len(TABLE_MAGIC) : 32]) == bytes(wanted)


def fault_of(entry: Any, stored: Any) -> str | None:
    """Say what is wrong with a chunk as it is stored, if anything is.

    Args:
        entry: Of a pack's table; what it says is believed of nothing.
        stored: The bytes that lie where it says.
    """
    n_raw = int(entry["raw_bytes"])
    if n_raw > MAX_CHUNK_BYTES:
        return f"its entry says {n_raw} bytes"
    raw: Any = stored
    if int(entry["codec"]) != RAW.number or len(stored) != n_raw:
        raw = memoryview(bytearray(n_raw))
        try:
            codec_numbered(int(entry["codec"])).decode_into(stored, raw)
        except FormatError as error:
            return str(error)
    actual = digest(raw)
    return None if actual == entry["digest"].tobytes() else f"its bytes hash to {actual.hex()}"


def payload_of(entry: Any, stored: Any, *, begins_row: bool) -> Payload:
    """Give a chunk in which no fault was found as another pack takes it."""
    return Payload(
        digest=entry["digest"].tobytes(),
        raw_bytes=int(entry["raw_bytes"]),
        codec=codec_numbered(int(entry["codec"])),
        typesize=int(entry["typesize"]),
        data=stored,
        begins_row=begins_row,
    )
