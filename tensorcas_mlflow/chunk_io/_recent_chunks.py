"""Chunks that this process has stored last, decoded (``docs/design/caches.md``)."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Sequence

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.base.digest import Buffer, Digests, digest_each
from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.chunk_io._places import Places
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, FormatError
from tensorcas_mlflow.layout.packs import STORED_DIGEST_BYTES, Entries, pack_key

MOST_SAVED_BYTES = 1 << 20
"""Bound of a remembered save: for a larger one, decoding its bases takes little beside the rest of it."""
_MOST_BYTES = 4 * MOST_SAVED_BYTES
"""The bases of the largest remembered save, and the few links of its chains to choose from."""


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
        return chunks if digest_each(chunks).tobytes() == digests.tobytes() else None

    def has(self, digests: Digests) -> bool:
        """Tell whether all of some chunks are remembered."""
        with self._lock:
            return all(row.tobytes() in self._chunks for row in digests)

    def are_whole(self, levels: Sequence[Places]) -> bool:
        """Read the stored bytes of the found copies, and check that they are unchanged.

        A remote copy is trusted, like the copy of any chunk that a save shares: a check takes a request for each pack.
        """
        if self._backend.is_remote:
            return True
        payloads: list[Buffer] = []
        wanted: list[bytes] = []
        try:
            for places in levels:
                for pack, rows in places.by_pack(places.found.nonzero()[0]):
                    payloads += self._stored(pack, places.entries[rows])
                    wanted.append(places.entries["stored_digest"][rows].tobytes())
        except (BlobNotFoundError, FormatError, BackendError):
            return False
        return digest_each(payloads)[:, :STORED_DIGEST_BYTES].tobytes() == b"".join(wanted)

    def _stored(self, pack: str, entries: Entries) -> list[Buffer]:
        """Read payloads of one pack, all at once if they are neighbours."""
        begins: list[int] = entries["offset"].tolist()
        sizes: list[int] = entries["stored_bytes"].tolist()
        ends = list(map(operator.add, begins, sizes))
        first, last = min(begins), max(ends)
        if last - first > 2 * sum(sizes) and len(entries) > 1:
            return [payload for at in range(len(entries)) for payload in self._stored(pack, entries[at : at + 1])]
        area = memoryview(bytearray(last - first))
        self._backend.read_into(pack_key(pack), first, area)
        return [area[begin - first : end - first] for begin, end in zip(begins, ends, strict=True)]
