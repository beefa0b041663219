"""Guesses of where chunks lie in packs whose table is damaged. A repair hashes each chunk before it believes one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.codecs import codec_numbered
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError, FormatError, NewerFormatError
from tensorcas_mlflow.layout import (
    ENTRY,
    FOOTER_BYTES,
    MAX_ENTRIES,
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

_BLOCK_ROWS = 4096


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
    """Read backwards from the end of a pack, as long as the bytes look like rows of a table."""
    stop = min(size, max(size - FOOTER_BYTES, len(PACK_MAGIC)))
    block = _read(backend, name, max(len(PACK_MAGIC), stop - _BLOCK_ROWS * TABLE_ENTRY.itemsize), size)
    # If the end is cut off, or more bytes follow it, rows begin elsewhere than the size says.
    by_phase = [_possible(_rows(block, phase), size) for phase in range(TABLE_ENTRY.itemsize)]
    phase = max(range(TABLE_ENTRY.itemsize), key=lambda phase: len(by_phase[phase]))
    parts = [by_phase[phase]]
    stop = size - len(block) + (len(block) - phase) % TABLE_ENTRY.itemsize if len(block) else 0
    n_rows = len(by_phase[phase])
    while n_rows and stop > len(PACK_MAGIC) and sum(map(len, parts)) < MAX_ENTRIES:
        start = max(len(PACK_MAGIC), stop - _BLOCK_ROWS * TABLE_ENTRY.itemsize)
        start += (stop - start) % TABLE_ENTRY.itemsize
        found = _possible(_rows(_read(backend, name, start, stop), 0), size)
        parts.append(found)
        n_rows, stop = len(found), start
    return np.concatenate([NO_ENTRIES, *parts])


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
    known = np.zeros(256, dtype=bool)
    for number in range(256):
        try:
            codec_numbered(number)
            known[number] = True
        except FormatError:
            continue
    # Only the table names the base of a delta.
    is_whole = ~is_delta(entries) | entries["base_pack"].any(axis=1)
    entries = entries[fits & known[entries["codec"]] & is_whole]
    bare = entries.copy()
    bare["stored_digest"] = bare["typesize"] = bare["effort"] = 0  # hints lack these fields
    _, first = np.unique(bare.view(f"V{ENTRY.itemsize}"), return_index=True)
    kept: Entries = entries[np.sort(first)]
    return kept
