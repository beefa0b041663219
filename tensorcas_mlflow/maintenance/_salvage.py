"""Guesses of where chunks lie in packs whose table is damaged. A repair hashes each chunk before it believes one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from contextlib import suppress

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.codecs import CODECS
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError, NewerFormatError, StarvedError
from tensorcas_mlflow.layout.manifests import Manifest, read_hints
from tensorcas_mlflow.layout.packs import (
    ENTRY,
    MAX_SEGMENT_BYTES,
    PACK_MAGIC,
    TABLE_ENTRY,
    Entries,
    Table,
    is_delta,
    is_possible,
    list_segments,
    pack_key,
    read_segment,
)
from tensorcas_mlflow.maintenance._inventory import NO_ENTRIES
from tensorcas_mlflow.maintenance._quarantine import read_with_holes

_TAIL_BYTES = 4 << 20
"""Bytes at the end of a pack in which rows of its table are looked for: some 60,000; more if these are all rows."""
_NEAR_BYTES = 256 << 10
_N_FIRST = 64


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

    def of(self, name: str, size: int, *, is_given_up: bool) -> Entries:
        """Return possible entries of a pack: from segments, hints, and the rest of its own table.

        Args:
            name: Name of the pack.
            size: Its bytes.
            is_given_up: Whether to do without what cannot be read of its table.

        Raises:
            BackendError: Its table cannot be read.
        """
        parts = [NO_ENTRIES]
        for table in self._segments:
            if name in table.packs:
                parts.append(table.entries[table.pack == table.packs.index(name)])
        parts += self._hints.get(name, [])
        parts.append(_rows_of_table(self._backend, name, size, is_given_up=is_given_up))
        return _possible(np.concatenate(parts), size)


def _segments(backend: Backend) -> Iterator[Table]:
    for info in list_segments(backend):
        try:
            yield read_segment(info.key, backend.get(info.key, max_bytes=MAX_SEGMENT_BYTES))
        except StarvedError:
            raise
        except (BlobNotFoundError, CorruptError, NewerFormatError, BackendError):
            continue


def _rows_of_table(backend: Backend, name: str, size: int, *, is_given_up: bool) -> Entries:
    """Read the bytes at the end of a pack as rows of a table."""
    n_bytes = _TAIL_BYTES
    while True:
        start = max(len(PACK_MAGIC), size - n_bytes)
        block = _read(backend, name, start, size, is_given_up=is_given_up)
        # If the end is cut off, or more bytes follow it, rows begin elsewhere than the size says. The bytes near the
        # end tell where: farther ahead lie chunks, which may look like rows.
        near = block[-_NEAR_BYTES:]
        phase = max(range(TABLE_ENTRY.itemsize), key=lambda phase: len(_possible(_rows(near, phase), size)))
        rows = _rows(block, phase)
        if start == len(PACK_MAGIC) or len(_possible(rows[:_N_FIRST], size)) == 0:
            return _possible(rows, size)
        n_bytes *= 4


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


def _read(backend: Backend, name: str, start: int, stop: int, *, is_given_up: bool) -> bytes:
    block = bytearray(max(0, stop - start))
    try:
        backend.read_into(pack_key(name), start, memoryview(block))
    except (BlobNotFoundError, CorruptError):
        return b""
    except BackendError as error:
        if isinstance(error, StarvedError) or not is_given_up:
            raise
        with suppress(BlobNotFoundError):
            return bytes(read_with_holes(backend, pack_key(name), start, len(block)))
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
