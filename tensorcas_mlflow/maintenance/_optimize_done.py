"""Chunks of a store that have been optimized already."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.base.digest import DIGEST_BYTES, Digests, distinct_digests
from tensorcas_mlflow.errors import CorruptError
from tensorcas_mlflow.layout.packs import (
    EMPTY,
    NOWHERE,
    Entries,
    Mask,
    Table,
    as_names,
    bases_of,
    is_delta,
    make_table,
    merge_tables,
    pack_key,
)
from tensorcas_mlflow.maintenance._defaults import DEFAULT_MAX_WASTE
from tensorcas_mlflow.maintenance._inventory import (
    BaseLinks,
    PackTables,
    is_among,
    links_of,
)
from tensorcas_mlflow.maintenance._optimize_tree import SHALLOW_DEPTH
from tensorcas_mlflow.store import protocol as p

_MOST_TABLES = 8


class DoneChunks:
    """Chunks of a store that are *done*: a copy has the wanted effort, can be decoded, and is not too deep."""

    def __init__(self, backend: Backend, effort: int) -> None:
        """Read the tables of all packs.

        Args:
            backend: Backend of the store.
            effort: Effort that is wanted; see `Payload.effort`.
        """
        self._backend = backend
        self._effort = effort
        self._tables = PackTables(backend)
        self._every: Table | None = None
        self._needed: Digests | None = None
        self._shallow: Digests = np.empty((0, DIGEST_BYTES), np.uint8)
        self.wasteful: frozenset[str] = frozenset()
        """Packs to replace: those that waste much and that no collection can rewrite, and those with a deep copy of a
        chunk that must be shallow. Nothing should need them any more."""
        self.max_waste = DEFAULT_MAX_WASTE
        """Share of a pack that may be unneeded before the pack is wasteful."""
        self.is_undone = False
        """Whether the packs written last are gone again."""
        self.new_packs: set[str] = set()
        """Packs written since the last collection."""
        self.refresh()

    def refresh(self) -> None:
        """List the packs again. Copies in condemned packs do not count."""
        condemned = p.read_condemned(self._backend).packs
        self._tables.refresh(again=True)
        for fault in self._tables.faults.values():
            if not isinstance(fault, CorruptError):  # a collection reports a damaged pack if it is needed
                raise fault
        self._base_packs = {name: _base_packs(entries) for name, entries in self._tables.entries.items()}
        names = sorted(self._tables.entries.keys() - condemned)
        table = make_table({name: self._tables.entries[name] for name in names})
        links = links_of(table)
        self._every = None
        is_optimized = (table.entries["effort"] >= self._effort) & (links.base != NOWHERE)
        # A reader may find a deep copy by a hint as long as its pack exists, so the whole pack goes.
        self.wasteful = self._find_wasteful(table, links, is_optimized) | self._find_deep(table)
        in_wasteful = np.array([name in self.wasteful for name in table.packs], dtype=bool)
        # Else such a pack would stay for deltas against its chunks.
        needs_wasteful = links.with_dependents(in_wasteful[table.pack] if len(table) else np.zeros(0, dtype=bool))
        self._done = [_rows_of(table, is_optimized & ~needs_wasteful)]
        self.n_bytes = sum(self._tables.sizes.values())
        """Bytes of all packs."""

    def need(self, digests: Digests, *, shallow: Digests | None = None) -> None:
        """Set what refs need.

        Then chunks are not done that lie in packs that waste much and stay for a base, nor the deltas against them.

        Args:
            digests: Distinct digests, ascending.
            shallow: Those of them that are to be read with `SHALLOW_DEPTH` bases at most. Then no chunk is done in a
                pack that holds a deeper copy of one of them, nor any delta against such a chunk.
        """
        self._needed = digests
        if shallow is not None:
            self._shallow = shallow
        self.refresh()

    def base_digests(self) -> Digests:
        """Return the distinct bases of the deltas that refs need, ascending."""
        table = self._all()
        wanted = np.ones(len(table), dtype=bool)
        if self._needed is not None and len(table):
            wanted = is_among(np.ascontiguousarray(table.entries["digest"]), self._needed)
        bases = links_of(table).bases_of(wanted)
        return distinct_digests([np.ascontiguousarray(table.entries["digest"][bases])])

    @property
    def gives_room_later(self) -> bool:
        """Whether packs are to be replaced, or chunks are to be read with few bases at the cost of room."""
        return bool(self.wasteful or len(self._shallow))

    def must_be_shallow(self, digests: Digests) -> Mask:
        """Return for each chunk whether it is to be read with `SHALLOW_DEPTH` bases at most; see `need`."""
        return is_among(digests, self._shallow)

    def _find_deep(self, table: Table) -> frozenset[str]:
        if len(self._shallow) == 0 or len(table) == 0:
            return frozenset()
        deep = np.flatnonzero(table.entries["depth"] > SHALLOW_DEPTH)
        deep = deep[self.must_be_shallow(np.ascontiguousarray(table.entries["digest"][deep]))]
        return frozenset(table.packs[at] for at in np.unique(table.pack[deep]).tolist())

    def _find_wasteful(self, table: Table, links: BaseLinks, is_optimized: Mask) -> frozenset[str]:
        """Find the packs that a collection would rewrite for what they waste, and cannot, as they hold a base.

        A chunk that is not optimized is waste: it will be, in another pack.
        """
        if self._needed is None or len(table) == 0:
            return frozenset()
        digests = np.ascontiguousarray(table.entries["digest"])
        wanted = is_among(digests, self._needed) & is_optimized
        is_base = links.bases_of(wanted)
        n, stored = len(table.packs), table.entries["stored_bytes"].astype(np.int64)
        total = np.bincount(table.pack, weights=stored, minlength=n)
        unneeded = np.bincount(table.pack, weights=stored * ~(wanted | is_base), minlength=n)
        stays = np.bincount(table.pack, weights=is_base, minlength=n) > 0
        return frozenset(table.packs[at] for at in np.flatnonzero(stays & (unneeded > self.max_waste * total)))

    def add(self, name: str, entries: Entries) -> None:
        """Add a pack that has just been written, all of it with the effort that is wanted."""
        self._tables.entries[name] = entries
        self.new_packs.add(name)
        self._every = None
        self._base_packs[name] = _base_packs(entries)
        self._done.append(make_table({name: entries}))
        if len(self._done) > _MOST_TABLES:
            self._done = [merge_tables(self._done)]

    def optimized_packs(self) -> frozenset[str]:
        """Return the packs in which every chunk is done: their copies are the ones to keep."""
        return frozenset(
            name
            for name, rows in self._tables.entries.items()
            if name not in self.wasteful and (rows["effort"] >= self._effort).all()
        )

    @property
    def n_left(self) -> int:
        """Number of chunks that refs need (see `need`), that some pack holds, and that are not done."""
        if self._needed is None:
            return 0
        left = self._needed[~self.are_done(self._needed)]
        return int((self._all().find(left) >= 0).sum()) if len(left) else 0

    def are_done(self, digests: Digests) -> Mask:
        """Return for each chunk whether it is done."""
        is_done = np.zeros(len(digests), dtype=bool)
        for table in self._done:
            is_done |= table.find(digests) >= 0
        return is_done

    def find(self, digests: Digests) -> tuple[list[str | None], Any]:
        """Find the packs of chunks that are done.

        Returns:
            For each chunk its pack, None if it is not done; and for each its depth, 0 if it is not done.
        """
        packs: list[str | None] = [None] * len(digests)
        depth = np.zeros(len(digests), dtype=np.int64)
        for table in self._done:
            rows = table.find(digests)
            for at in np.flatnonzero(rows >= 0).tolist():
                packs[at] = table.packs[int(table.pack[rows[at]])]
            depth[rows >= 0] = table.entries["depth"][rows[rows >= 0]]
        return packs, depth

    def with_bases(self, packs: Iterable[str]) -> set[str]:
        """Add to some packs the packs of their bases, and of the bases of those."""
        found: set[str] = set()
        waiting = list(packs)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += self._base_packs.get(name, ())
        return found

    def sizes_of(self, digests: Digests) -> tuple[int, int]:
        """Return the decoded and the stored bytes of distinct chunks, without chunks that no pack holds."""
        table = self._all()
        entries = table.entries[(rows := table.find(digests))[rows >= 0]]
        return int(entries["raw_bytes"].astype(np.int64).sum()), int(entries["stored_bytes"].astype(np.int64).sum())

    def stored_bytes(self, digests: Digests) -> Any:
        """Return for each chunk its stored bytes in a pack; -1 if no pack holds it."""
        table = self._all()
        rows = table.find(digests)
        n_bytes = np.full(len(digests), -1, dtype=np.int64)
        n_bytes[rows >= 0] = table.entries["stored_bytes"][rows[rows >= 0]]
        return n_bytes

    def _all(self) -> Table:
        """Return the chunks of all packs."""
        if self._every is None:
            self._every = self._tables.table()
        return self._every

    def there(self, packs: set[str]) -> set[str]:
        """Return the packs to rely on: they exist with the packs of their bases, and none is condemned.

        Call it when an intent names them.
        """
        condemned = p.read_condemned(self._backend).packs
        gone = self._backend.missing(map(pack_key, packs - condemned))
        lost = condemned | {name for name in packs if pack_key(name) in gone}
        return {name for name in packs if not self.with_bases([name]) & lost}


def _base_packs(entries: Entries) -> frozenset[str]:
    deltas = entries[is_delta(entries)]
    if len(deltas) == 0:
        return frozenset()
    _, first = np.unique(as_names(deltas["base_pack"]), return_index=True)
    return frozenset(base.pack for base in bases_of(deltas[first]))


def _rows_of(table: Table, keep: Mask) -> Table:
    if len(table) == 0:
        return EMPTY
    return Table(packs=table.packs, pack=table.pack[keep], entries=table.entries[keep], prefix=table.prefix[keep])
