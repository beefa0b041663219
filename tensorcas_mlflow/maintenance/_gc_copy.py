"""Copies of what is needed, out of packs that a collection deletes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.base.digest import unique_rows
from tensorcas_mlflow.base.progress import Watcher, counted, ignore
from tensorcas_mlflow.errors import (
    BackendError,
    BlobNotFoundError,
    CorruptChunkError,
    CorruptError,
    FormatError,
    NotFoundError,
)
from tensorcas_mlflow.layout.packs import (
    TARGET_BYTES,
    Entries,
    Mask,
    PackWriter,
    Payload,
    Table,
    is_delta,
    make_table,
    pack_key,
    payload_of,
)
from tensorcas_mlflow.maintenance._chunks import Verdict, read_chunks, shard_of
from tensorcas_mlflow.maintenance._gc_survey import Survey
from tensorcas_mlflow.maintenance._inventory import read_tables
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store import protocol as p

_log = logging.getLogger(__name__)


class Copied(NamedTuple):
    """New packs with copies of what is needed."""

    packs: frozenset[str]
    """Names."""
    n_bytes: int


def copy_out(
    store: Store, state: Survey, *, doomed: frozenset[str], sources: frozenset[str], watch: Watcher = ignore
) -> Copied:
    """Copy what is needed, and would have no copy left, out of some packs into new ones.

    A pack that is damaged, or that another collector deletes meanwhile, is left alone: the next survey finds what was
    not copied needed, and spares its pack. A delta stays one if its base stays where it is; else it is written in full.

    Args:
        store: Store that is collected.
        state: Survey of the store, before anything is condemned.
        doomed: Packs whose copies will not count.
        sources: Packs among them to copy from. What is a delta against a chunk in one of them is copied too, wherever
            it lies.
        watch: Told the stored bytes of the chunks that have been copied.
    """
    going = state.condemned_packs() | doomed
    has_copy = state.has_row(state.live_rows() & state.copies(but=going))
    lacking = state.live & ~has_copy
    sources |= _holders_of_dependents(state, lacking, going=going, sources=sources)
    table = _tables(store.backend, state, sources, lacking)
    chunk = state.inventory.find(table.entries["digest"])
    lacks = (chunk >= 0) & lacking[chunk]
    written: dict[str, int] = {}
    on_copied = counted(watch, int(table.entries["stored_bytes"][lacks].sum()))
    while True:
        usable = np.array([name in sources for name in table.packs], dtype=bool)
        rows = _next_rows(table, lacks & usable[table.pack] if len(table) else lacks)
        if len(rows) == 0:
            return Copied(frozenset(written), sum(written.values()))
        name = p.new_pack_name(store.backend)
        writer = PackWriter()
        try:
            store.backend.put_new(
                pack_key(name), writer.pieces(_payloads(store, table, rows, going=going, on_copied=on_copied))
            )
        except _UnreadableError as error:
            if not isinstance(error.__cause__, BlobNotFoundError | None):
                _log.warning("pack %s is not rewritten: %s", error.pack, error.__cause__)
            sources -= {error.pack}
            continue
        p.mark_loose(store.backend, name)
        store.catalog.add(name, writer.entries())
        written[name] = writer.n_bytes
        lacking[chunk[rows]] = False
        lacks = (chunk >= 0) & lacking[chunk]


def _holders_of_dependents(
    state: Survey, lacking: Mask, *, going: frozenset[str], sources: frozenset[str]
) -> frozenset[str]:
    """Return the packs that hold deltas of chunks that lack a copy because a base is in one of the sources.

    Such a pack may stay where it is, but the base cannot go before its deltas are written in full.
    """
    held = state.rows
    rows = lacking[held.chunk] & (held.links.base >= 0) & state.copies(but=going - sources)
    return frozenset(held.packs[number] for number in np.unique(held.pack[rows]))


class _UnreadableError(Exception):
    """Ends the writing of a pack; the cause says why. Without a cause, the pack is gone."""

    def __init__(self, pack: str) -> None:
        super().__init__(pack)
        self.pack = pack


def _tables(backend: Backend, state: Survey, sources: frozenset[str], lacking: Mask) -> Table:
    """Read, once more, the tables of the sources that hold a chunk that lacks a copy."""
    held = state.rows
    packs = {held.packs[number] for number in np.unique(held.pack[lacking[held.chunk]])} & sources
    tables: dict[str, Entries] = {}
    for name, found in read_tables(backend, {name: state.sizes[name] for name in sorted(packs)}):
        if isinstance(found, CorruptError):
            _log.warning("pack %s is not rewritten: %s", name, found)
        elif isinstance(found, FormatError | BackendError):
            raise found
        elif found is not None:
            tables[name] = found
    return make_table(tables)


def _next_rows(table: Table, wanted: Any) -> Any:
    """Choose rows for one pack: each chunk once, stored in full if possible, in the order they lie in."""
    rows = np.flatnonzero(wanted)
    rows = rows[np.argsort(is_delta(table.entries[rows]), kind="stable")]
    _, first, _ = unique_rows(np.ascontiguousarray(table.entries["digest"][rows]))
    rows = rows[first]
    rows = rows[np.lexsort((table.entries["offset"][rows], table.pack[rows]))]
    total = np.cumsum(table.entries["stored_bytes"][rows].astype(np.int64))
    return rows[: max(1, int(np.searchsorted(total, TARGET_BYTES)))]


def _payloads(
    store: Store, table: Table, rows: Any, *, going: frozenset[str], on_copied: Callable[[int], None]
) -> Iterator[Payload]:
    """Read chunks as they are stored, in the order they lie in.

    Args:
        store: Store that is collected.
        table: Table of the sources.
        rows: Rows of it.
        going: Packs that may be deleted: a delta against a chunk in one of them is given in full.
        on_copied: Told the stored bytes of each chunk that has been taken.
    """
    bases = p.Bases(store.backend)
    end = (-1, -1)
    reads = read_chunks(store.backend, shard_of(table, rows), decode=False, is_strict=True)
    for look in (look for _, looks in reads for look in looks):
        entry, number = table.entries[look.row], int(table.pack[look.row])
        name = table.packs[number]
        if look.fault is not None:
            cause = CorruptChunkError(entry["digest"].tobytes().hex(), pack_key(name), look.fault.reason)
            raise _UnreadableError(name) from (None if look.fault.verdict is Verdict.GONE else cause)
        # What lay without a gap stays so: the chunks of one raw tensor can still be mapped as one.
        begin = (number, int(entry["offset"]))
        begins_row, end = begin != end, (number, begin[1] + int(entry["stored_bytes"]))
        try:
            if bases.packs(entry) & going:
                yield bases.payload(entry, look.stored, begins_row=begins_row)
            else:
                yield payload_of(entry, look.stored, begins_row=begins_row)
        except (FormatError, NotFoundError) as error:
            raise _UnreadableError(name) from error
        on_copied(int(entry["stored_bytes"]))
