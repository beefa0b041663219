"""Cache of recently stored chunks: the delta bases of a small model's next step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.base.digest import Digests, digest, digest_each
from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.chunk_io._lookup import Places
from tensorcas_mlflow.codecs import Buffer
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, FormatError
from tensorcas_mlflow.layout import STORED_DIGEST_BYTES, pack_key

MOST_SAVED_BYTES = 1 << 20
"""Bound of a remembered save: for a larger one, decoding its bases takes little beside the rest of it."""
_MOST_BYTES = 4 * MOST_SAVED_BYTES
"""The longest chain written by saves, for the largest remembered save, and one more."""


class RecentChunks:
    """Decoded chunks this process has recently stored in one store, or read there as bases. For any thread.

    They save decoding, and nothing else: returned bytes have been hashed again, and `are_whole` checks that the copies
    in packs are readable.
    """

    def __init__(self, backend: Backend) -> None:
        """Create an empty memory for a store's backend."""
        self._backend = backend
        self._lock = Lock()
        self._chunks: OrderedDict[bytes, Buffer] = OrderedDict()
        self._n_bytes = 0

    def note(self, digests: Digests, chunks: Sequence[Buffer]) -> None:
        """Remember chunks with their final bytes; the oldest of too many are forgotten."""
        with self._lock:
            for row, chunk in zip(digests, chunks, strict=True):
                key = row.tobytes()
                if key not in self._chunks:
                    self._n_bytes += memoryview(chunk).nbytes
                    self._chunks[key] = chunk
                self._chunks.move_to_end(key)
            while self._n_bytes > _MOST_BYTES:
                self._n_bytes -= memoryview(self._chunks.popitem(last=False)[1]).nbytes

    def find(self, digests: Digests) -> list[Buffer] | None:
        """Return chunks, each hashed to its digest; None unless all are remembered."""
        keys = [row.tobytes() for row in digests]
        with self._lock:
            if not all(key in self._chunks for key in keys):
                return None
            for key in keys:
                self._chunks.move_to_end(key)  # a base in full may serve many later steps
            chunks = [self._chunks[key] for key in keys]
        return chunks if np.array_equal(digest_each(chunks), digests) else None

    def are_whole(self, places: Places) -> bool:
        """Read the stored bytes of the found copies, and check that they are unchanged."""
        for row in np.flatnonzero(places.found).tolist():
            entry, number = places.entries[row], int(places.pack[row])
            payload = memoryview(bytearray(int(entry["stored_bytes"])))
            try:
                self._backend.read_into(pack_key(places.packs[number]), int(entry["offset"]), payload)
            except (BlobNotFoundError, FormatError, BackendError):
                return False
            if digest(payload)[:STORED_DIGEST_BYTES] != entry["stored_digest"].tobytes():
                return False
        return True
