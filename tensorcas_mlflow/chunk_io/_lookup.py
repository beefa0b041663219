"""Lookup: the places of chunks in the tables of packs; a delta counts only with all of its bases."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tensorcas_mlflow.base.digest import Digests
from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.codecs import RAW
from tensorcas_mlflow.layout import ENTRY, Entries, Mask, Positions, Table, as_names, as_rows, is_delta

_N_REMEMBERED = 4


def distinct(numbers: Any) -> list[int]:
    """Return the distinct small numbers, ascending. The first `numpy.unique` of a process takes 16 ms."""
    which: list[int] = np.flatnonzero(np.bincount(numbers)).tolist()
    return which


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Places of some chunks."""

    found: Mask
    """For each chunk whether a copy is known."""
    pack: Any
    """For each chunk the position of its pack in ``packs``."""
    packs: list[str]
    entries: Entries

    def some(self, rows: Any) -> Places:
        """Return the places of some chunks, by number."""
        return Places(found=self.found[rows], pack=self.pack[rows], packs=self.packs, entries=self.entries.take(rows))

    def nowhere(self) -> Places:
        """Return the same chunks with none of them found."""
        return replace(self, found=np.zeros(len(self.found), dtype=bool), entries=np.zeros(len(self.found), ENTRY))

    def replaced(self, rows: Any, others: Places) -> Places:
        """Replace some places by others."""
        found, pack, entries = self.found.copy(), self.pack.copy(), self.entries.copy()
        used, number = np.unique(others.pack, return_inverse=True)
        found[rows], pack[rows], entries[rows] = others.found, number + len(self.packs), others.entries
        names = [others.packs[at] for at in used.tolist()] if others.packs else [""] * len(used)
        return Places(found=found, pack=pack, packs=[*self.packs, *names], entries=entries)

    @classmethod
    def joined(cls, parts: Sequence[Places]) -> Places:
        """Concatenate places; a pack named by several is one pack."""
        packs = list(dict.fromkeys(name for part in parts for name in part.packs))
        at = {name: number for number, name in enumerate(packs)}
        numbers = [np.array([at[name] for name in part.packs], dtype=np.int64)[part.pack] for part in parts]
        return cls(
            found=np.concatenate([part.found for part in parts]),
            pack=np.concatenate(numbers),
            packs=packs,
            entries=np.concatenate([part.entries for part in parts]),
        )

    def as_bytes(self) -> Places:
        """Return the same places as if their chunks were stored raw, for reading stored bytes without decoding."""
        entries = self.entries.copy()
        entries["codec"], entries["raw_bytes"] = RAW.number, entries["stored_bytes"]
        return Places(found=self.found, pack=self.pack, packs=self.packs, entries=entries)

    def found_in(self, packs: Collection[str]) -> Mask:
        """Return for each chunk whether it was found in one of some packs."""
        found = self.found.copy()
        held = np.array([name in packs for name in self.packs], dtype=bool)
        found[found] = held[self.pack[found]]
        return found

    def by_pack(self, rows: Any) -> list[tuple[str, Any]]:
        """Group some chunks by their packs."""
        numbers = self.pack[rows]
        return [(self.packs[number], rows[numbers == number]) for number in distinct(numbers)]


def find_places(tables: Sequence[Table], digests: Digests, without: Collection[str] = ()) -> Places:
    """Look up many digests at once.

    Args:
        tables: Tables to search, the last one first.
        digests: The digests to find, shape ``(n, 32)``.
        without: Packs to ignore, together with deltas based on them.
    """
    places = _find(tables, digests, without)
    waiting = [(np.flatnonzero(places.found & is_delta(places.entries)), frozenset(without))]
    while waiting:
        rows, besides = waiting.pop()
        is_whole, _ = find_chains(tables, places.some(rows), without)
        # A collection leaves deltas without their bases if the chunk has another copy. The packs to skip differ
        # by chunk: a pack with a broken copy of one may hold the only copy of another.
        for pack, again in places.by_pack(rows[places.found[rows] & ~is_whole]):
            others = besides | {pack}
            places = places.replaced(again, _find(tables, digests[again], others))
            waiting.append((again, others))
    return places


def find_bases(tables: Sequence[Table], deltas: Entries, without: Collection[str] = ()) -> Places:
    """Look up the bases of some deltas: for each the copy named in its entry.

    Args:
        tables: Tables to search.
        deltas: Entries of the deltas.
        without: Packs to ignore.
    """
    bases = np.ascontiguousarray(deltas["base_digest"])
    names, pack = np.unique(as_names(deltas["base_pack"]), return_inverse=True)
    packs = [name.tobytes().hex() for name in names]
    usable = np.array([name not in without for name in packs], dtype=bool)[pack]
    found, entries = np.zeros(len(deltas), dtype=bool), np.zeros(len(deltas), dtype=ENTRY)
    for table in tables:
        number = np.array([table.numbers.get(name, -1) for name in packs], dtype=np.int64)[pack]
        open_ = np.flatnonzero(usable & ~found & (number >= 0))
        if len(open_) == 0:
            continue
        rows = table.find(bases[open_], packs=number[open_])
        hits = rows >= 0
        as_rows(entries)[open_[hits]] = as_rows(table.entries)[rows[hits]]
        # Depths descend, so no chain is long and none is a ring.
        found[open_[hits]] = entries["depth"][open_[hits]] < deltas["depth"][open_[hits]]
    return Places(found=found, pack=pack, packs=packs, entries=entries)


def find_chains(tables: Sequence[Table], places: Places, without: Collection[str] = ()) -> tuple[Mask, set[str]]:
    """Follow deltas to their bases, and those to theirs.

    Args:
        tables: Tables to search for bases.
        places: Places of chunks.
        without: Packs to ignore.

    Returns:
        For each found chunk whether every chunk needed to decode it is known; and the packs of these.
    """
    is_whole, packs = places.found.copy(), set[str]()
    open_ = np.flatnonzero(places.found & is_delta(places.entries))
    deltas = places.entries[open_]
    while len(open_):
        bases = find_bases(tables, deltas, without)
        is_whole[open_[~bases.found]] = False
        packs.update(bases.packs[number] for number in np.unique(bases.pack[bases.found]))
        deeper = bases.found & is_delta(bases.entries)
        open_, deltas = open_[deeper], bases.entries[deeper]
    return is_whole, packs


def rows_that_take(tables: Sequence[Table], places: Places, copies: Collection[tuple[str, bytes]]) -> Positions:
    """Return the chunks whose decoding needs one of some copies, the copies' own chunks included.

    Args:
        tables: Tables to search for bases.
        places: Places of chunks.
        copies: The pack and the digest of each copy.
    """
    packs = {pack for pack, _ in copies}
    takes = np.zeros(len(places.found), dtype=bool)
    at = np.flatnonzero(places.found)
    level = places.some(at)
    while len(at):
        held = np.array([name in packs for name in level.packs], dtype=bool)[level.pack]
        for row in np.flatnonzero(held).tolist():
            takes[at[row]] |= (level.packs[level.pack[row]], level.entries["digest"][row].tobytes()) in copies
        deltas = np.flatnonzero(is_delta(level.entries))
        bases = find_bases(tables, level.entries[deltas])
        at, level = at[deltas[bases.found]], bases.some(np.flatnonzero(bases.found))
    return np.flatnonzero(takes)


def _find(tables: Sequence[Table], digests: Digests, without: Collection[str]) -> Places:
    """Look up digests, ignoring whether the bases of deltas are known."""
    packs: list[str] = []
    found = np.zeros(len(digests), dtype=bool)
    pack = np.zeros(len(digests), dtype=np.int64)
    entries = np.zeros(len(digests), dtype=ENTRY)
    for table in reversed(tables):
        open_ = np.flatnonzero(~found)
        if len(open_) == 0:
            break
        rows = table.find(digests[open_], table.without(without))
        hits = rows >= 0
        at, rows = open_[hits], rows[hits]
        found[at] = True
        as_rows(entries)[at] = as_rows(table.entries)[rows]
        pack[at] = table.pack[rows].astype(np.int64) + len(packs)
        packs.extend(table.packs)
    return Places(found=found, pack=pack, packs=packs, entries=entries)


class LastLookups:
    """The recent lookups and their results, by digests. For many threads at once."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._found: OrderedDict[bytes, tuple[tuple[Sequence[Table], set[str]], Places]] = OrderedDict()

    def find(self, digests: Digests, tables: Sequence[Table], without: set[str]) -> Places:
        """Look up digests like `find_places`; reuse a recent result from the same tables."""
        asked, searched = digests.tobytes(), (tables, without)
        with self._lock:
            last = self._found.get(asked)
        if last is None or last[0] != searched:
            last = searched, find_places(tables, digests, without)
            with self._lock:
                self._found[asked] = last
                self._found.move_to_end(asked)
                if len(self._found) > _N_REMEMBERED:
                    self._found.popitem(last=False)
        return last[1]
