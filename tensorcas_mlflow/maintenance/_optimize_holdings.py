"""What the packs of a store hold, and which chunks have been optimized already."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tensorcas_mlflow import threads
from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.digest import DIGEST_BYTES, Digests
from tensorcas_mlflow.errors import BlobNotFoundError, CorruptError
from tensorcas_mlflow.index import EMPTY, NOWHERE, Mask, Table, as_names, base_rows, make_table, merge_tables, pack_key
from tensorcas_mlflow.maintenance._gc import DEFAULT_MAX_WASTE
from tensorcas_mlflow.pack import MAX_DEPTH, Entries, bases_of, is_delta
from tensorcas_mlflow.store import protocol as p

_MOST_TABLES = 8


class Holdings:
    """The tables of all packs, read once each: they never change.

    A chunk is *done* if a copy of it has the effort that is wanted, and can be decoded.
    """

    def __init__(self, backend: Backend, effort: int) -> None:
        """Read the tables of all packs there are.

        Args:
            backend: Where they are.
            effort: What is wanted; see `Payload.effort`.
        """
        self._backend = backend
        self._effort = effort
        self._entries: dict[str, Entries] = {}
        self._needed: Digests | None = None
        self.wasteful: frozenset[str] = frozenset()
        """Packs that no collection can rewrite though they waste much: nothing is to need them any more."""
        self.refresh()

    def refresh(self) -> None:
        """Look again which packs are there; what somebody has condemned counts for nothing."""
        condemned = p.read_condemned(self._backend).packs
        there = dict(p.list_packs(self._backend))
        self._entries = {name: self._entries[name] for name in self._entries.keys() & there.keys()}

        def read(name: str) -> Entries | None:
            try:
                return p.read_pack_table(self._backend, name, size=there[name])
            except (BlobNotFoundError, CorruptError):
                return None  # what lies in a damaged one a collection finds out, if it is needed

        new = sorted(there.keys() - self._entries.keys())
        tables = threads.ordered_map(read, new, waits=True) if self._backend.is_remote else map(read, new)
        self._entries |= {name: entries for name, entries in zip(new, tables, strict=True) if entries is not None}
        self._needs = {name: _base_packs(entries) for name, entries in self._entries.items()}
        table = make_table({name: self._entries[name] for name in sorted(self._entries.keys() - condemned)})
        base = base_rows(table)
        is_optimized = (table.entries["effort"] >= self._effort) & (base != NOWHERE)
        self.wasteful = self._find_wasteful(table, base, is_optimized)
        in_wasteful = np.array([name in self.wasteful for name in table.packs], dtype=bool)
        needs_wasteful = in_wasteful[table.pack] if len(table) else np.zeros(0, dtype=bool)
        # Else the pack would stay for the sake of deltas against what lies in it.
        deltas = np.flatnonzero(base >= 0)
        for _ in range(MAX_DEPTH if self.wasteful else 0):
            needs_wasteful[deltas] |= needs_wasteful[base[deltas]]
        self._done = [_rows_of(table, is_optimized & ~needs_wasteful)]
        self.n_bytes = sum(there.values())
        """Of all packs."""

    def need(self, digests: Digests) -> None:
        """Say what refs need.

        Chunks of packs that are needed in little part, and stay for a base, are then not done, nor what is stored
        against those.

        Args:
            digests: Different ones, ascending.
        """
        self._needed = digests
        self.refresh()

    def _find_wasteful(self, table: Table, base: Any, is_optimized: Mask) -> frozenset[str]:
        """Name the packs that no collection can rewrite, as they hold a base, though it would for what they waste.

        What is not optimized will be, in another pack, and is waste.
        """
        if self._needed is None or len(table) == 0:
            return frozenset()
        wanted = is_among(table.entries["digest"], self._needed) & is_optimized
        is_base = np.zeros(len(table), dtype=bool)
        of = np.unique(base[wanted & (base >= 0)])
        while len(of) and not is_base[of].all():
            is_base[of] = True
            of = np.unique(base[of][base[of] >= 0])
        n, stored = len(table.packs), table.entries["stored_bytes"].astype(np.int64)
        total = np.bincount(table.pack, weights=stored, minlength=n)
        unneeded = np.bincount(table.pack, weights=stored * ~(wanted | is_base), minlength=n)
        stays = np.bincount(table.pack, weights=is_base, minlength=n) > 0
        return frozenset(table.packs[at] for at in np.flatnonzero(stays & (unneeded > DEFAULT_MAX_WASTE * total)))

    def add(self, name: str, entries: Entries) -> None:
        """Take up a pack that has just been written, all of it with the effort that is wanted."""
        self._entries[name] = entries
        self._needs[name] = _base_packs(entries)
        self._done.append(make_table({name: entries}))
        if len(self._done) > _MOST_TABLES:
            self._done = [merge_tables(self._done)]

    def optimized_packs(self) -> frozenset[str]:
        """Name the packs that hold nothing that is not done: copies in these are the ones to keep."""
        return frozenset(
            name
            for name, rows in self._entries.items()
            if name not in self.wasteful and (rows["effort"] >= self._effort).all()
        )

    @property
    def n_left(self) -> int:
        """How many chunks are not done that refs needed when `need` was called, and that some pack holds."""
        if self._needed is None:
            return 0
        left = self._needed[~self.are_done(self._needed)]
        return int((make_table(self._entries).find(left) >= 0).sum()) if len(left) else 0

    def are_done(self, digests: Digests) -> Mask:
        """For each chunk whether it is done."""
        is_done = np.zeros(len(digests), dtype=bool)
        for table in self._done:
            is_done |= table.find(digests) >= 0
        return is_done

    def find(self, digests: Digests) -> tuple[list[str | None], Any]:
        """Say where chunks lie that are done.

        Returns:
            For each the name of its pack, None for one that is not done; and for each its depth, 0 for those.
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
        """Add to packs those in which the bases of their deltas lie, and of those."""
        found: set[str] = set()
        waiting = list(packs)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += self._needs.get(name, ())
        return found

    def sizes_of(self, digests: Digests) -> tuple[int, int]:
        """Count bytes: of some different chunks, and of what they are stored in; those that no pack has left out."""
        table = make_table(self._entries)
        entries = table.entries[(rows := table.find(digests))[rows >= 0]]
        return int(entries["raw_bytes"].astype(np.int64).sum()), int(entries["stored_bytes"].astype(np.int64).sum())

    def there(self, packs: set[str]) -> set[str]:
        """Those of some packs that may be relied on: they are there, and their bases, and nobody has condemned any.

        Asked when an intent names them.
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


def is_among(digests: Digests, others: Digests) -> Mask:
    """For each of some digests whether it is one of others."""
    both: Mask = np.isin(_as_keys(digests), _as_keys(others))
    return both


def _as_keys(digests: Digests) -> Any:
    return np.ascontiguousarray(digests).view(f"V{DIGEST_BYTES}").ravel()


def _rows_of(table: Table, keep: Mask) -> Table:
    if len(table) == 0:
        return EMPTY
    return Table(packs=table.packs, pack=table.pack[keep], entries=table.entries[keep], prefix=table.prefix[keep])
