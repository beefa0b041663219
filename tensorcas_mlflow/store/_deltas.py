"""Deltas for maintenance: reading their bases, moving them and checking them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.chunk_io import find_bases
from tensorcas_mlflow.codecs import encode_best
from tensorcas_mlflow.errors import (
    BackendError,
    ChunkNotFoundError,
    CorruptChunkError,
    CorruptError,
    FormatError,
    NotFoundError,
    StarvedError,
)
from tensorcas_mlflow.layout.packs import (
    DELTA,
    ENTRY,
    Base,
    Entries,
    Payload,
    Table,
    as_names,
    bases_of,
    decode_chunk,
    is_base_of,
    is_delta,
    is_possible,
    make_table,
    pack_key,
    payload_of,
    read_pack_table,
    sizes_text,
)

_MAX_TABLES = 256
_HELD_BYTES = 16 << 20
"""Bound of decoded bases kept in memory: many consecutive deltas may share one, and its chain is decoded once."""


def full_payload(digest: bytes, raw: Buffer, typesize: int, *, begins_row: bool) -> Payload:
    """Encode a chunk in full.

    Args:
        digest: Its digest.
        raw: Its bytes.
        typesize: Size of an element in bytes.
        begins_row: See `Payload`.
    """
    codec, typesize, data = encode_best(raw, typesize)
    return Payload(digest=digest, raw_bytes=len(raw), codec=codec, typesize=typesize, data=data, begins_row=begins_row)


class Bases:
    """Reader of the bases of deltas, one by one, each from the pack its delta names. Shared by threads."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._tables: dict[str, Table] = {}
        """Tables by pack; a pack's table never changes."""
        self._held: dict[tuple[str, bytes], Buffer] = {}
        """Decoded bases, by pack and digest, the most recently used at the end; no pack's bytes ever change."""
        self._held_bytes = 0
        self._lock = Lock()

    def of(self, delta: Any) -> Buffer | None:
        """Read a delta's base, and the chunks needed to decode it.

        Args:
            delta: An entry; None is returned for one in full. Decoding the delta shows whether the base was right.

        Returns:
            The base's bytes, shared with other callers.

        Raises:
            BlobNotFoundError: The pack of the base is gone: a collector may have moved the base, and the chunk.
            ChunkNotFoundError: The pack does not hold it.
            CorruptChunkError: The base is damaged there.
            CorruptError: The pack's table is damaged.
            BackendError: The storage fails to deliver it.
        """
        if not is_delta(delta):
            return None
        [base] = bases_of(delta.reshape(1))
        key, text = pack_key(base.pack), base.digest.hex()
        entry = self._entry(delta, base)
        n_raw, n_stored = int(entry["raw_bytes"]), int(entry["stored_bytes"])
        if n_raw < int(delta["raw_bytes"]) or not is_possible(entry):
            raise CorruptChunkError(text, key, sizes_text(entry))
        if (held := self._find_held((base.pack, base.digest))) is not None:
            return held
        stored = memoryview(bytearray(n_stored))
        self._backend.read_into(key, int(entry["offset"]), stored)
        try:
            return self._hold((base.pack, base.digest), decode_chunk(entry, stored, self.of(entry)))
        except (CorruptError, CorruptChunkError):
            raise
        except FormatError as error:
            raise CorruptChunkError(text, key, str(error)) from error

    def copy(self, base: Base, n_bytes: int) -> Buffer:
        """Read the copy of a chunk a delta would name as its base; raise like `of`.

        If this copy is damaged, an intact copy elsewhere would not help readers of the delta.
        """
        delta = np.zeros(1, dtype=ENTRY)
        delta["codec"], delta["depth"], delta["raw_bytes"] = DELTA, base.depth + 1, n_bytes
        delta["base_pack"] = np.frombuffer(bytes.fromhex(base.pack), np.uint8)
        delta["base_digest"] = np.frombuffer(base.digest, np.uint8)
        raw = self.of(delta[0])
        assert raw is not None
        return raw

    def packs(self, delta: Any) -> set[str]:
        """Return the packs needed to decode a delta, besides its own; raise like `of`."""
        return set(self.chain(delta))

    def chain(self, delta: Any) -> Iterator[str]:
        """Yield the pack of a delta's base, and that of the base's own, to the end of the chain; raise like `of`."""
        while is_delta(delta):
            [base] = bases_of(delta.reshape(1))
            yield base.pack
            delta = self._entry(delta, base)

    def decoded(self, entry: Any, stored: Buffer) -> Buffer:
        """Decode a stored chunk, with its base if it has one; raise like `payload`."""
        return decode_chunk(entry, stored, self.of(entry))

    def table_for(self, entries: Entries) -> Table:
        """Read the tables of the packs that hold the bases of deltas, as far as they can be read.

        Args:
            entries: The deltas, among other entries. The bases of their bases are followed, too.
        """
        tables: dict[str, Entries] = {}
        deltas = entries[is_delta(entries)]
        while len(deltas):
            new: dict[str, Entries] = {}
            for name in {name.tobytes().hex() for name in np.unique(as_names(deltas["base_pack"]))} - tables.keys():
                try:
                    new[name] = self._table(name).entries
                except StarvedError:
                    raise
                except (FormatError, NotFoundError, BackendError):
                    new[name] = entries[:0]
            tables |= new
            bases = find_bases([make_table(tables)], deltas)
            deltas = bases.entries[bases.found & is_delta(bases.entries)]
        return make_table(tables)

    def payload(self, entry: Any, stored: Buffer, *, begins_row: bool) -> Payload:
        """Return a chunk as another pack may take it without relying on a base: a delta is encoded in full.

        Args:
            entry: Entry of a pack's table.
            stored: The verified bytes at the entry's place.
            begins_row: See `Payload`.

        Raises:
            FormatError: It is a delta, and does not decode to the chunk with its base; or see `of`.
            NotFoundError: See `of`.
            BackendError: See `of`.
        """
        if not is_delta(entry):
            return payload_of(entry, stored, begins_row=begins_row)
        return self.in_full(entry, stored, begins_row=begins_row, base=self.of(entry))

    @staticmethod
    def in_full(entry: Any, stored: Buffer, *, begins_row: bool, base: Buffer | None) -> Payload:
        """Decode a delta with any copy of its base, and encode the chunk in full; see `payload`."""
        raw = decode_chunk(entry, stored, base)
        return full_payload(entry["digest"].tobytes(), raw, int(entry["typesize"]), begins_row=begins_row)

    def _find_held(self, name: tuple[str, bytes]) -> Buffer | None:
        with self._lock:
            held = self._held.pop(name, None)
            if held is not None:
                self._held[name] = held
            return held

    def _hold(self, name: tuple[str, bytes], raw: Buffer) -> Buffer:
        with self._lock:
            before = self._held.pop(name, None)
            self._held[name] = raw
            self._held_bytes += memoryview(raw).nbytes - (0 if before is None else memoryview(before).nbytes)
            while self._held_bytes > _HELD_BYTES:
                self._held_bytes -= memoryview(self._held.pop(next(iter(self._held)))).nbytes
        return raw

    def _entry(self, delta: Any, base: Base) -> Any:
        key, text = pack_key(base.pack), base.digest.hex()
        table = self._table(base.pack)
        [row] = table.find(np.frombuffer(base.digest, np.uint8).reshape(1, -1)).tolist()
        if row < 0 or not is_base_of(delta, table.entries[row]):
            raise ChunkNotFoundError(text, 1, suspects=(key,))
        return table.entries[row]

    def _table(self, pack: str) -> Table:
        with self._lock:
            table = self._tables.get(pack)
        if table is None:
            table = make_table({pack: read_pack_table(self._backend, pack)})
            with self._lock:
                if len(self._tables) >= _MAX_TABLES:
                    self._tables.clear()
                self._tables[pack] = table
        return table
