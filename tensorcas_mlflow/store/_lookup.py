"""Where chunks lie, looked up in tables of packs: a delta counts only where all is known that it takes to decode it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tensorcas_mlflow.codecs import RAW
from tensorcas_mlflow.digest import Digests
from tensorcas_mlflow.index import Mask, Positions, Table, as_names
from tensorcas_mlflow.pack import ENTRY, Entries, as_rows, is_delta
from tensorcas_mlflow.threads import Lock

_N_REMEMBERED = 4


def distinct(numbers: Any) -> list[int]:
    """Say which small numbers there are among some, ascending. The first `numpy.unique` of a process takes 16 ms."""
    which: list[int] = np.flatnonzero(np.bincount(numbers)).tolist()
    return which


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where some chunks lie."""

    found: Mask
    """For each chunk whether a copy is known."""
    pack: Any
    """For each chunk a position in ``packs``."""
    packs: list[str]
    entries: Entries

    def some(self, rows: Any) -> Places:
        """The places of some of the chunks, by number."""
        return Places(found=self.found[rows], pack=self.pack[rows], packs=self.packs, entries=self.entries.take(rows))

    def nowhere(self) -> Places:
        """The same chunks, none of them found."""
        return replace(self, found=np.zeros(len(self.found), dtype=bool), entries=np.zeros(len(self.found), ENTRY))

    def replaced(self, rows: Any, others: Places) -> Places:
        """Put others in the place of some."""
        found, pack, entries = self.found.copy(), self.pack.copy(), self.entries.copy()
        used, number = np.unique(others.pack, return_inverse=True)
        found[rows], pack[rows], entries[rows] = others.found, number + len(self.packs), others.entries
        names = [others.packs[at] for at in used.tolist()] if others.packs else [""] * len(used)
        return Places(found=found, pack=pack, packs=[*self.packs, *names], entries=entries)

    @classmethod
    def joined(cls, parts: Sequence[Places]) -> Places:
        """The places of several, one after the other; a pack that several name is one pack."""
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
        """The same places, as if what is stored there were chunks stored raw: to read it without decoding it."""
        entries = self.entries.copy()
        entries["codec"], entries["raw_bytes"] = RAW.number, entries["stored_bytes"]
        return Places(found=self.found, pack=self.pack, packs=self.packs, entries=entries)

    def found_in(self, packs: Collection[str]) -> Mask:
        """For each chunk whether it was found, in one of some packs."""
        found = self.found.copy()
        held = np.array([name in packs for name in self.packs], dtype=bool)
        found[found] = held[self.pack[found]]
        return found

    def by_pack(self, rows: Any) -> list[tuple[str, Any]]:
        """Part some chunks by the pack in which each lies."""
        numbers = self.pack[rows]
        return [(self.packs[number], rows[numbers == number]) for number in distinct(numbers)]


def find_places(tables: Sequence[Table], digests: Digests, without: Collection[str] = ()) -> Places:
    """Look up many digests at once.

    Args:
        tables: The last is asked first.
        digests: What to look for, shape ``(n, 32)``.
        without: Packs whose copies do not count, nor deltas against them.
    """
    places = _find(tables, digests, without)
    waiting = [(np.flatnonzero(places.found & is_delta(places.entries)), frozenset(without))]
    while waiting:
        rows, besides = waiting.pop()
        is_whole, _ = find_chains(tables, places.some(rows), without)
        # A collection leaves deltas without their bases where the chunk has another copy. Which packs are passed over
        # is a matter of each chunk: what one finds broken may hold the copy of another.
        for pack, again in places.by_pack(rows[places.found[rows] & ~is_whole]):
            others = besides | {pack}
            places = places.replaced(again, _find(tables, digests[again], others))
            waiting.append((again, others))
    return places


def find_bases(tables: Sequence[Table], deltas: Entries, without: Collection[str] = ()) -> Places:
    """Look up what some deltas are to be added to: for each the copy of its base that its entry names.

    Args:
        tables: Where to look.
        deltas: Their entries.
        without: Packs whose copies do not count.
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
        tables: Where to look for bases.
        places: Of chunks.
        without: Packs whose copies do not count.

    Returns:
        For each chunk that was found whether all is known that it takes to be decoded; and the packs that holds.
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
    """Give the chunks that it takes one of some copies to decode, or that lie there themselves.

    Args:
        tables: Where to look for bases.
        places: Of chunks.
        copies: The pack and the digest of each.
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
    """Look up digests, whatever it takes to decode what is found."""
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
    """The last look-ups, by the digests that were asked for: where, and what was found. For many threads at once."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._found: OrderedDict[bytes, tuple[tuple[Sequence[Table], set[str]], Places]] = OrderedDict()

    def find(self, digests: Digests, tables: Sequence[Table], without: set[str]) -> Places:
        """Look digests up, as `find_places` does, unless that was done lately in the same tables."""
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
