"""Packs whose table is damaged: what may lie where, from all who might know it. None of it is believed unhashed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.blob_names import list_blobs
from tensorcas_mlflow.codecs import codec_numbered
from tensorcas_mlflow.digest import unique_rows
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError, FormatError, NewerFormatError
from tensorcas_mlflow.hints import read_hints
from tensorcas_mlflow.index import MAX_SEGMENT_BYTES, Table, pack_key, read_segment
from tensorcas_mlflow.maintenance._inventory import NO_ENTRIES
from tensorcas_mlflow.manifest import Manifest
from tensorcas_mlflow.pack import ENTRY, FOOTER_BYTES, MAGIC, MAX_ENTRIES, TABLE_ENTRY, Entries, is_delta

_BLOCK_ROWS = 4096


class Clues:
    """What index segments and manifests say of where chunks lie."""

    def __init__(self, backend: Backend, manifests: Iterable[Manifest], *, of: Set[str]) -> None:
        """Gather what there is.

        Args:
            backend: Whose index.
            manifests: Of the store.
            of: Names of the packs that are asked for.
        """
        self._backend = backend
        self._segments = list(_segments(backend))
        self._hints: dict[str, list[Entries]] = {}
        for manifest in manifests:
            hints = read_hints(manifest.hints, unique_rows(manifest.digests)[0]) if manifest.hints else None
            for number, name in enumerate(hints.packs if hints is not None else ()):
                assert hints is not None
                if name not in of:
                    continue
                self._hints.setdefault(name, []).append(hints.entries[hints.pack == number])

    def of(self, name: str, size: int) -> Entries:
        """Give entries of a pack that may be true: from segments, from hints, from what is left of its own table."""
        parts = [NO_ENTRIES]
        for table in self._segments:
            if name in table.packs:
                parts.append(table.entries[table.pack == table.packs.index(name)])
        parts += self._hints.get(name, [])
        parts.append(_rows_of_table(self._backend, name, size))
        return _possible(np.concatenate(parts), size)


def _segments(backend: Backend) -> Iterator[Table]:
    for info in list(list_blobs(backend, "index")):
        if info.key.endswith(".arrow"):
            try:
                yield read_segment(info.key, backend.get(info.key, max_bytes=MAX_SEGMENT_BYTES))
            except (BlobNotFoundError, CorruptError, NewerFormatError, BackendError):
                continue


def _rows_of_table(backend: Backend, name: str, size: int) -> Entries:
    """Read backwards from the end of a pack, as long as there is what looks like rows of a table."""
    stop = min(size, max(size - FOOTER_BYTES, len(MAGIC)))
    block = _read(backend, name, max(len(MAGIC), stop - _BLOCK_ROWS * TABLE_ENTRY.itemsize), size)
    # Where the end is cut off, or more was put behind it, rows begin elsewhere than the size says.
    by_phase = [_possible(_rows(block, phase), size) for phase in range(TABLE_ENTRY.itemsize)]
    phase = max(range(TABLE_ENTRY.itemsize), key=lambda phase: len(by_phase[phase]))
    parts = [by_phase[phase]]
    stop = size - len(block) + (len(block) - phase) % TABLE_ENTRY.itemsize if len(block) else 0
    n_rows = len(by_phase[phase])
    while n_rows and stop > len(MAGIC) and sum(map(len, parts)) < MAX_ENTRIES:
        start = max(len(MAGIC), stop - _BLOCK_ROWS * TABLE_ENTRY.itemsize)
        start += (stop - start) % TABLE_ENTRY.itemsize
        found = _possible(_rows(_read(backend, name, start, stop), 0), size)
        parts.append(found)
        n_rows, stop = len(found), start
    return np.concatenate([NO_ENTRIES, *parts])


def _rows(block: bytes, phase: int) -> Entries:
    """Cut bytes into rows that end so many bytes before the end."""
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
    """Leave out what cannot be true of a pack of some size, and what is said twice."""
    ends = entries["offset"] + entries["stored_bytes"]
    fits = (entries["offset"] >= len(MAGIC)) & (ends <= size) & (ends > entries["offset"]) & (entries["raw_bytes"] > 0)
    known = np.zeros(256, dtype=bool)
    for number in range(256):
        try:
            codec_numbered(number)
            known[number] = True
        except FormatError:
            continue
    # Nothing tells what a delta is to be added to if its table does not.
    is_whole = ~is_delta(entries) | entries["base_pack"].any(axis=1)
    entries = entries[fits & known[entries["codec"]] & is_whole]
    bare = entries.copy()
    bare["stored_digest"] = bare["typesize"] = bare["effort"] = 0  # hints do not say them
    _, first = np.unique(bare.view(f"V{ENTRY.itemsize}"), return_index=True)
    kept: Entries = entries[np.sort(first)]
    return kept
