"""Copying what is needed out of packs that are to go."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np

from tensorcas_mlflow import threads
from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.digest import digest, unique_rows
from tensorcas_mlflow.errors import BlobNotFoundError, CorruptChunkError, CorruptError, FormatError, NotFoundError
from tensorcas_mlflow.index import Mask, Table, make_table, pack_key
from tensorcas_mlflow.maintenance._gc_survey import Survey
from tensorcas_mlflow.pack import STORED_DIGEST_BYTES, TARGET_BYTES, Entries, PackWriter, Payload, is_delta, payload_of
from tensorcas_mlflow.readplan import Extent, plan_reads
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store import protocol as p

_log = logging.getLogger(__name__)

_WINDOW = 8
"""Reads of a remote store under way at once, of some 8 MiB each."""


def copy_out(store: Store, state: Survey, *, doomed: frozenset[str], sources: frozenset[str]) -> int:
    """Copy what is needed, and would have no copy left, out of some packs into new ones.

    A pack that is damaged or that another collector deletes meanwhile is left alone: what was not copied is found to be
    needed later, and so spares its pack. A delta stays one if its base stays where it is; else it is written in full.

    Args:
        store: Which.
        state: Of the store, before anything is condemned.
        doomed: Packs whose copies will not count.
        sources: Those of them to copy from. What is a delta against a chunk in one of them is copied too, wherever it
            lies.

    Returns:
        Bytes of the new packs.
    """
    going = state.condemned_packs() | doomed
    has_copy = state.has_row(state.live_rows() & state.copies(but=going))
    lacking = state.live & ~has_copy
    sources |= _holders_of_dependents(state, lacking, going=going, sources=sources)
    table = _tables(store.backend, state, sources, lacking)
    chunk = state.facts.find(table.entries["digest"])
    lacks = (chunk >= 0) & lacking[chunk]
    written_bytes = 0
    while True:
        usable = np.array([name in sources for name in table.packs], dtype=bool)
        rows = _next_rows(table, lacks & usable[table.pack] if len(table) else lacks)
        if len(rows) == 0:
            return written_bytes
        name = p.new_pack_name(store.backend)
        writer = PackWriter()
        try:
            store.backend.put_new(pack_key(name), writer.pieces(_payloads(store, table, rows, going=going)))
        except _UnreadableError as error:
            if not isinstance(error.__cause__, BlobNotFoundError):
                _log.warning("pack %s is not rewritten: %s", error.pack, error.__cause__)
            sources -= {error.pack}
            continue
        p.mark_loose(store.backend, name)
        store.catalog.add(name, writer.entries())
        written_bytes += writer.n_bytes
        lacking[chunk[rows]] = False
        lacks = (chunk >= 0) & lacking[chunk]


def _holders_of_dependents(
    state: Survey, lacking: Mask, *, going: frozenset[str], sources: frozenset[str]
) -> frozenset[str]:
    """Give the packs that hold deltas of what lacks a copy because a base is in one of the sources.

    Such a pack may stay where it is, but the base cannot go before they are written in full.
    """
    rows = lacking[state.chunk] & (state.base >= 0) & state.copies(but=going - sources)
    return frozenset(state.packs[number] for number in np.unique(state.pack[rows]))


class _UnreadableError(Exception):
    """Ends the writing of a pack; the cause says why."""

    def __init__(self, pack: str) -> None:
        super().__init__(pack)
        self.pack = pack


def _tables(backend: Backend, state: Survey, sources: frozenset[str], lacking: Mask) -> Table:
    """Read, once more, where chunks lie in those packs that hold some of what lacks a copy."""
    packs = {state.packs[number] for number in np.unique(state.pack[lacking[state.chunk]])} & sources
    tables: dict[str, Entries] = {}
    for name in sorted(packs):
        try:
            tables[name] = p.read_pack_table(backend, name, size=state.sizes[name])
        except BlobNotFoundError:
            continue
        except CorruptError as error:
            _log.warning("pack %s is not rewritten: %s", name, error)
    return make_table(tables)


def _next_rows(table: Table, wanted: Any) -> Any:
    """Rows for one pack: each chunk once, if possible stored in full, in the order they lie in."""
    rows = np.flatnonzero(wanted)
    rows = rows[np.argsort(is_delta(table.entries[rows]), kind="stable")]
    _, first, _ = unique_rows(np.ascontiguousarray(table.entries["digest"][rows]))
    rows = rows[first]
    rows = rows[np.lexsort((table.entries["offset"][rows], table.pack[rows]))]
    total = np.cumsum(table.entries["stored_bytes"][rows].astype(np.int64))
    return rows[: max(1, int(np.searchsorted(total, TARGET_BYTES)))]


def _payloads(store: Store, table: Table, rows: Any, *, going: frozenset[str]) -> Iterator[Payload]:
    """Read chunks as they are stored, near ones together, in the order they lie in.

    Args:
        store: Which.
        table: Where they lie.
        rows: Rows of it, in that order.
        going: Packs that may be deleted: what is a delta against a chunk in one of them is given in full.
    """
    backend, entries = store.backend, table.entries[rows]
    bases = p.Bases(backend)
    end = (-1, -1)

    def read(extent: Extent) -> bytearray:
        block = bytearray(extent.stop - extent.start)
        try:
            backend.read_into(pack_key(table.packs[extent.pack]), extent.start, memoryview(block))
        except (BlobNotFoundError, CorruptError) as error:
            raise _UnreadableError(table.packs[extent.pack]) from error
        return block

    extents = list(plan_reads(table.pack[rows], entries["offset"], entries["stored_bytes"]))
    blocks = threads.ordered_map(read, extents, window=_WINDOW, waits=True) if backend.is_remote else map(read, extents)
    for extent, block in zip(extents, blocks, strict=True):
        name = table.packs[extent.pack]
        for member in extent.members.tolist():
            entry = entries[member]
            begin = (extent.pack, int(entry["offset"]))
            # What lay without a gap stays so: the chunks of one raw tensor can still be mapped as one.
            begins_row, end = begin != end, (begin[0], begin[1] + int(entry["stored_bytes"]))
            at = begin[1] - extent.start
            data = memoryview(block)[at : at + int(entry["stored_bytes"])]
            wanted = entry["digest"].tobytes()
            try:
                if digest(data)[:STORED_DIGEST_BYTES] != entry["stored_digest"].tobytes():
                    reason = "its stored bytes do not hash to what the pack's table says"
                    raise CorruptChunkError(wanted.hex(), pack_key(name), reason)
                if bases.packs(entry) & going:
                    yield bases.payload(entry, data, begins_row=begins_row)
                else:
                    yield payload_of(entry, data, begins_row=begins_row)
            except (FormatError, NotFoundError) as error:
                raise _UnreadableError(name) from error
