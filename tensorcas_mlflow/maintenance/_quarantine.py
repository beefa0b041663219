"""Quarantine: damaged bytes that a repair puts aside (``docs/design/caches.md``, Quarantine)."""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.base.digest import DIGEST_BYTES, Buffer, digest
from tensorcas_mlflow.errors import BlobNotFoundError, CorruptError
from tensorcas_mlflow.layout import ENTRY, MAX_BYTES, STORED_DIGEST_BYTES, is_possible, list_blobs

PREFIX = "quarantine"
MAX_HEAD_BYTES = 4096
_KEY = re.compile(r"quarantine/([0-9a-f]{32})-([0-9a-f]{1,16})-([0-9a-f]{1,16})\.[0-9a-f]{8}")
_PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Stretch of a blob to keep."""

    key: str
    """Key of the blob."""
    start: int
    n_bytes: int
    reason: str
    entry: Any = None
    """Entry of the chunk that should be there; None if nothing says one."""
    content: bytes = b""
    """Digest of the bytes, where other bytes may get this key. The name of a pack is never used again, so a pack
    needs none."""


class Quarantine:
    """Damaged bytes that a store keeps."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._kept = {place for info in list_blobs(backend, PREFIX) if (place := _place(info.key)) is not None}

    def keep(self, piece: Piece) -> bool:
        """Keep a stretch of a blob, unless it is kept already.

        Returns:
            Whether this call kept it.

        Raises:
            BlobNotFoundError: The blob is gone.
            BackendError: It cannot be read, or its copy cannot be written.
        """
        place = (_name_of(piece), piece.start, piece.n_bytes)
        if place in self._kept:
            return False
        key = f"{PREFIX}/{place[0]}-{piece.start:x}-{piece.n_bytes:x}.{uuid.uuid4().hex[:8]}"
        self._backend.put_new(key, self._pieces(piece))
        self._kept.add(place)
        return True

    def chunks(self) -> Iterator[tuple[str, Any, int]]:
        """Yield the chunks in quarantine: key, entry, and the offset of the bytes in the blob."""
        for info in list(list_blobs(self._backend, PREFIX)):
            try:
                head = bytearray(min(info.size, MAX_HEAD_BYTES))
                self._backend.read_into(info.key, 0, memoryview(head))
            except (BlobNotFoundError, CorruptError):
                continue
            line, newline, _ = bytes(head).partition(b"\n")
            entry = _entry_in(line) if newline else None
            if entry is not None and len(line) + 1 + int(entry["stored_bytes"]) <= info.size:
                yield info.key, entry, len(line) + 1

    def _pieces(self, piece: Piece) -> Iterator[Buffer]:
        record: dict[str, Any] = {
            "format": 1,
            "key": piece.key,
            "offset": piece.start,
            "n_bytes": piece.n_bytes,
            "reason": piece.reason[:1000],
        }
        if piece.entry is not None:
            record |= {
                "digest": piece.entry["digest"].tobytes().hex(),
                "stored_digest": piece.entry["stored_digest"].tobytes().hex(),
                "raw_bytes": int(piece.entry["raw_bytes"]),
                "codec": int(piece.entry["codec"]),
                "typesize": int(piece.entry["typesize"]),
            }
        yield json.dumps(record, sort_keys=True).encode() + b"\n"
        for start in range(0, piece.n_bytes, _PIECE_BYTES):
            block = bytearray(min(_PIECE_BYTES, piece.n_bytes - start))
            self._backend.read_into(piece.key, piece.start + start, memoryview(block))
            yield block


def keep_blob(quarantine: Quarantine, backend: Backend, key: str, reason: str) -> None:
    """Keep a whole blob, if it exists."""
    with contextlib.suppress(BlobNotFoundError):
        data = backend.get(key, max_bytes=MAX_BYTES)
        quarantine.keep(Piece(key=key, start=0, n_bytes=len(data), reason=reason, content=digest(data)))


def stretches(size: int, taken: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield start and stop of the gaps that some spans leave in a blob."""
    at = 0
    for start, stop in sorted(taken):
        if start > at:
            yield at, start
        at = max(at, stop)
    if size > at:
        yield at, size


def _name_of(piece: Piece) -> str:
    """Hash the key of a blob to 32 hex digits, for the key of its piece."""
    return digest(piece.key.encode() + b"\0" + piece.content).hex()[:32]


def _place(key: str) -> tuple[str, int, int] | None:
    found = _KEY.fullmatch(key)
    return None if found is None else (found[1], int(found[2], 16), int(found[3], 16))


def _entry_in(line: bytes) -> Any:
    """Read the entry in a header; return None if there is none, or if it is impossible."""
    try:
        record = json.loads(line)
        entry = np.zeros((), ENTRY)
        name, stored = bytes.fromhex(record["digest"]), bytes.fromhex(record["stored_digest"])
        if len(name) != DIGEST_BYTES or len(stored) != STORED_DIGEST_BYTES:
            return None
        entry["digest"] = np.frombuffer(name, np.uint8)
        entry["stored_digest"] = np.frombuffer(stored, np.uint8)
        entry["stored_bytes"] = record["n_bytes"]
        for field in ("raw_bytes", "codec", "typesize"):
            entry[field] = record[field]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return entry if is_possible(entry) else None
