"""Packs of a store, every chunk of them read and judged, for a repair."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np

from tensorcas_mlflow.base.digest import Digests, as_keys
from tensorcas_mlflow.base.engines import Engine
from tensorcas_mlflow.base.progress import Watcher, counted, ignore
from tensorcas_mlflow.errors import BackendError, CorruptError, StarvedError
from tensorcas_mlflow.layout.packs import Entries, Table, is_delta, make_table, pack_key, with_bases
from tensorcas_mlflow.maintenance._chunks import Shard, Verdict
from tensorcas_mlflow.maintenance._inventory import NO_ENTRIES, PackTables, links_of
from tensorcas_mlflow.maintenance._salvage import Clues
from tensorcas_mlflow.maintenance._workers import check_all
from tensorcas_mlflow.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPack:
    """One pack whose chunks were all read and judged."""

    size: int
    entries: Entries
    """Entries of its good chunks."""
    damage: str | None = None
    """Reason why it is damaged; None if it is not."""
    bad: Entries = field(default_factory=lambda: NO_ENTRIES)
    """Chunks in its table, or in the guess of one, whose bytes were read and are not as they were written."""
    failure: str | None = None
    """Reason why it could not be read whole. Nobody knows what the rest holds, so a repair leaves the pack alone."""
    unread: Entries = field(default_factory=lambda: NO_ENTRIES)
    """Chunks in its table that could not be read; there is a ``failure`` then."""
    baseless: Entries = field(default_factory=lambda: NO_ENTRIES)
    """Deltas in its table whose bases are lost: neither good nor damaged."""
    has_table: bool = True
    """True if its own table can be read."""


class CheckedPacks:
    """All packs of a store, each read once: a pack never changes."""

    def __init__(
        self,
        store: Store,
        clues: Callable[[Set[str]], Clues],
        *,
        given_up: frozenset[str] = frozenset(),
        engine: Engine | None = None,
    ) -> None:
        """Read nothing yet; see `look`.

        Args:
            store: Store of the packs.
            clues: Called with the names of packs whose table is damaged.
            given_up: Keys of packs whose unreadable parts count as damaged.
            engine: Workers that read; see `check_all`.
        """
        self.packs: dict[str, CheckedPack] = {}
        self._store = store
        self._backend = store.backend
        self._tables = PackTables(store.backend)
        self._engine = engine
        self._clues = clues
        self._given_up = given_up
        self._replaced: set[str] = set()

    def look(self, watch: Watcher = ignore) -> None:
        """Read and judge new packs, and forget packs that are gone.

        Args:
            watch: Told the bytes of chunks that have been read.
        """
        self._tables.refresh()
        sizes = self._tables.sizes
        self.packs = {name: pack for name, pack in self.packs.items() if name in sizes}
        tables: dict[str, Entries] = {}
        without: dict[str, str] = {}
        for name in [name for name in sizes if name not in self.packs]:
            fault = self._tables.faults.get(name)
            if fault is None:
                tables[name] = self._tables.entries[name]
            elif not isinstance(fault, CorruptError | BackendError):
                raise fault
            elif isinstance(fault, CorruptError) or pack_key(name) in self._given_up:
                without[name] = fault.reason
            else:
                self.packs[name] = CheckedPack(size=sizes[name], entries=NO_ENTRIES, failure=fault.reason)
        self._judge(tables, watch)
        if without:
            clues = self._clues(without.keys())
            guesses: dict[str, Entries] = {}
            for name in without:
                try:
                    guesses[name] = clues.of(name, sizes[name], is_given_up=self.is_given_up(name))
                except BackendError as error:
                    if isinstance(error, StarvedError):
                        raise
                    self.packs[name] = CheckedPack(size=sizes[name], entries=NO_ENTRIES, failure=error.reason)
            self._judge(guesses, watch, without=without)

    def table(self, names: frozenset[str] | None = None) -> Table:
        """Return all good chunks of some packs, or of all; a delta only if its base is among them."""
        chosen = {name: pack.entries for name, pack in self.packs.items() if names is None or name in names}
        return with_bases(make_table(chosen))

    def dependents(self, names: Set[str]) -> Digests:
        """Return the chunks that some pack holds as deltas, and that take a chunk of some packs to decode."""
        table = self.table()
        links = links_of(table)
        needs = links.with_dependents(np.array([name in names for name in table.packs], dtype=bool)[table.pack])
        deltas = np.flatnonzero(links.base >= 0)
        chosen = deltas[needs[links.base[deltas]]]
        return np.ascontiguousarray(table.entries["digest"][chosen])

    def good(self, names: frozenset[str] | None = None) -> Any:
        """Return the digests of all good chunks of some packs, or of all, each as one value."""
        return as_keys(self.table(names).entries["digest"])

    def damaged(self) -> frozenset[str]:
        """Return the packs that should go: those with damage, whose bytes were all read."""
        return frozenset(name for name, pack in self.packs.items() if pack.damage and pack.failure is None)

    def is_given_up(self, name: str) -> bool:
        """Tell whether the unreadable parts of a pack count as damaged."""
        return pack_key(name) in self._given_up or name in self._replaced

    def unread(self) -> Digests:
        """Return the chunks that could not be read, of packs whose table could."""
        return _digests_of([pack.unread for pack in self.packs.values()])

    def baseless(self) -> Digests:
        """Return the chunks that some pack holds as deltas whose bases are lost; other packs may hold them too."""
        return _digests_of([pack.baseless for pack in self.packs.values()])

    def give_up_replaced(self) -> frozenset[str]:
        """Count the unreadable parts of packs as damaged, where each such chunk is good in another pack.

        A collection goes by the packs' tables: it would keep the pack that cannot be read, and delete the others.

        Returns:
            Names of those packs.
        """
        for name in self.replaceable():
            pack = self.packs[name]
            bad = np.concatenate([pack.bad, pack.unread])
            damage = pack.damage or pack.failure
            self.packs[name] = replace(pack, damage=damage, bad=bad, unread=NO_ENTRIES, failure=None)
            self._replaced.add(name)
        return frozenset(self._replaced)

    def replaceable(self) -> frozenset[str]:
        """Return the packs with unreadable chunks, each of which is good in another pack."""
        good = self.good()
        with_unread = {name: pack for name, pack in self.packs.items() if len(pack.unread)}
        return frozenset(
            name for name, pack in with_unread.items() if np.isin(as_keys(_digests_of([pack.unread])), good).all()
        )

    def has_deltas(self) -> bool:
        """Tell whether some chunk is stored as a delta, as far as tables can be read."""
        packs = self.packs.values()
        return any(is_delta(each).any() for pack in packs for each in (pack.entries, pack.unread, pack.baseless))

    def _judge(self, tables: dict[str, Entries], watch: Watcher, *, without: dict[str, str] | None = None) -> None:
        """Check all chunks of some packs.

        Args:
            tables: Their tables; for packs without one, guesses. This call empties it.
            watch: Told the bytes of chunks that have been read.
            without: Reasons why those have no table.
        """
        names, sizes = tuple(tables), self._tables.sizes
        lengths = [len(table) for table in tables.values()]
        entries: Entries = np.concatenate([NO_ENTRIES, *tables.values()])
        parts = dict(zip(names, np.split(entries, np.cumsum(lengths)[:-1]), strict=True)) if names else {}
        if without is None:
            # All tables take hundreds of bytes for each chunk, so they are held once.
            self._tables.entries.update(parts)
        tables.clear()
        pack = np.repeat(np.arange(len(names)), lengths)
        shard = Shard(packs=names, pack=pack, entries=entries, row=np.arange(len(entries)))
        on_read = counted(watch, shard.stored_bytes)
        checked = check_all(self._store, shard, decode=True, engine=self._engine, on_read=on_read)
        begins = dict(zip(names, accumulate(lengths, initial=0), strict=False))
        not_good: dict[str, list[int]] = {name: [] for name in names}
        bad, unread, baseless = ({name: list[int]() for name in names} for _ in range(3))
        failures: dict[str, str] = {}
        reasons = dict(without or {})
        gone: set[str] = set()
        for row, fault in checked.faults.items():
            name = names[int(pack[row])]
            at = row - begins[name]
            not_good[name].append(at)
            is_given_up = fault.verdict is Verdict.FAILED and fault.key in self._given_up
            if fault.verdict is Verdict.GONE:
                gone.add(name)
            elif fault.verdict is Verdict.BASELESS or (is_given_up and fault.is_of_base):
                baseless[name].append(at)
            elif fault.verdict is Verdict.FAILED and pack_key(name) not in self._given_up:
                failures.setdefault(name, fault.reason)
                unread[name].append(at)
            else:
                bad[name].append(at)
                if without is None:  # a guess that is wrong says nothing of the pack
                    reasons.setdefault(name, fault.reason)
        for name, table in parts.items():
            if name not in gone:
                judged = CheckedPack(
                    size=sizes[name],
                    entries=np.delete(table, not_good[name]) if not_good[name] else table,
                    damage=reasons.get(name),
                    bad=table[bad[name]],
                    failure=failures.get(name),
                    has_table=without is None,
                )
                if without is None:
                    judged = replace(judged, unread=table[unread[name]], baseless=table[baseless[name]])
                self.packs[name] = judged


def _digests_of(entries: Sequence[Entries]) -> Digests:
    digests: Digests = np.concatenate([NO_ENTRIES, *entries])["digest"]
    return np.ascontiguousarray(digests)
