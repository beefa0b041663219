"""Guesses of where chunks lie in packs whose table is damaged. A repair hashes each chunk before it believes one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.codecs import CODECS
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError, NewerFormatError
from tensorcas_mlflow.layout import (
    ENTRY,
    MAX_SEGMENT_BYTES,
    PACK_MAGIC,
    TABLE_ENTRY,
    Entries,
    Manifest,
    Table,
    is_delta,
    is_possible,
    list_segments,
    pack_key,
    read_hints,
    read_segment,
)
from tensorcas_mlflow.maintenance._inventory import NO_ENTRIES

_TAIL_BYTES = 4 << 20
"""Bytes at the end of a pack in which rows of its table are looked for: some 60,000."""
_NEAR_BYTES = 256 << 10


class Clues:
    """Places of chunks, from index segments and from the hints of manifests."""

    def __init__(self, backend: Backend, manifests: Iterable[Manifest], *, of: Set[str]) -> None:
        """Read the index and the hints.

        Args:
            backend: Backend of the store.
            manifests: Manifests of the store.
            of: Names of the packs to find.
        """
        self._backend = backend
        self._segments = list(_segments(backend))
        self._hints: dict[str, list[Entries]] = {}
        for manifest in manifests:
            hints = read_hints(manifest.hints, manifest.stored_digests) if manifest.hints else None
            for number, name in enumerate(hints.packs if hints is not None else ()):
                assert hints is not None
                if name not in of:
                    continue
                self._hints.setdefault(name, []).append(hints.entries[hints.pack == number])

    def of(self, name: str, size: int) -> Entries:
        """Return possible entries of a pack: from segments, hints, and the rest of its own table."""
        parts = [NO_ENTRIES]
        for table in self._segments:
            if name in table.packs:
                parts.append(table.entries[table.pack == table.packs.index(name)])
        parts += self._hints.get(name, [])
        parts.append(_rows_of_table(self._backend, name, size))
        return _possible(np.concatenate(parts), size)


def _segments(backend: Backend) -> Iterator[Table]:
    for info in list_segments(backend):
        try:
            yield read_segment(info.key, backend.get(info.key, max_bytes=MAX_SEGMENT_BYTES))
        except (BlobNotFoundError, CorruptError, NewerFormatError, BackendError):
            continue


def _rows_of_table(backend: Backend, name: str, size: int) -> Entries:
    """Read the bytes at the end of a pack as rows of a table."""
    block = _read(backend, name, max(len(PACK_MAGIC), size - _TAIL_BYTES), size)
    # If the end is cut off, or more bytes follow it, rows begin elsewhere than the size says. The bytes near the end
    # tell where: farther ahead lie chunks, which may look like rows.
    near = block[-_NEAR_BYTES:]
    phase = max(range(TABLE_ENTRY.itemsize), key=lambda phase: len(_possible(_rows(near, phase), size)))
    return _possible(_rows(block, phase), size)


def _rows(block: bytes, phase: int) -> Entries:
    """Cut bytes into rows; ``phase`` bytes follow the last one."""
    n = max(0, len(block) - phase) // TABLE_ENTRY.itemsize
    entries = np.zeros((n, ENTRY.itemsize), np.uint8)
    if n:
        stop = len(block) - phase
        said = np.frombuffer(block, np.uint8)[stop - n * TABLE_ENTRY.itemsize : stop]
        entries[:, : TABLE_ENTRY.itemsize] = said.reshape(n, TABLE_ENTRY.itemsize)
    rows: Entries = entries.view(ENTRY).ravel()
    return rows


def _read(backend: Backend, name: str, start: int, stop: int) -> bytes:
    block = bytearray(max(0, stop - start))
    try:
        backend.read_into(pack_key(name), start, memoryview(block))
    except (BlobNotFoundError, CorruptError, BackendError):
        return b""
    return bytes(block)


def _possible(entries: Entries, size: int) -> Entries:
    """Drop entries that are impossible in a pack of some size, and repeated ones."""
    ends = entries["offset"] + entries["stored_bytes"]
    fits = (entries["offset"] >= len(PACK_MAGIC)) & (ends <= size) & (ends > entries["offset"]) & is_possible(entries)
    is_known = np.isin(entries["codec"], list(CODECS))
    # Only the table names the base of a delta.
    is_whole = ~is_delta(entries) | entries["base_pack"].any(axis=1)
    entries = entries[fits & is_known & is_whole]
    bare = entries.copy()
    bare["stored_digest"] = bare["typesize"] = bare["effort"] = 0  # hints lack these fields
    _, first = np.unique(bare.view(f"V{ENTRY.itemsize}"), return_index=True)
    kept: Entries = entries[np.sort(first)]
    return kept
