"""Places of chunks in packs, and their search in tables: copies, the bases of deltas, and whole chains."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.base.digest import Digests
from tensorcas_mlflow.base.tensors import distinct
from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.layout.packs import ENTRY, Entries, Mask, Positions, Segment, Table, as_names, as_rows, is_delta

Searched = Table | Segment
"""What a lookup searches."""

_N_REMEMBERED = 4


class Places(NamedTuple):
    """Places of some chunks."""

    found: Mask
    """For each chunk whether a copy is known."""
    pack: Any
    """For each chunk the position of its pack in ``packs``."""
    packs: list[str]
    entries: Entries
    chain: Sequence[Places] | None = None
    """The result of `follow`, if the lookup has followed every delta to a chunk in full; otherwise None."""

    def some(self, rows: Any) -> Places:
        """Return the places of some chunks, by number."""
        return Places(found=self.found[rows], pack=self.pack[rows], packs=self.packs, entries=self.entries.take(rows))

    def nowhere(self) -> Places:
        """Return the same chunks with none of them found."""
        found, entries = np.zeros(len(self.found), dtype=bool), np.zeros(len(self.found), ENTRY)
        return self._replace(found=found, entries=entries, chain=None)

    def spread(self, rows: Any, among: Places) -> Places:
        """Return these places at some rows among as many as others have, and nothing found in the other rows."""
        found, pack = np.zeros(len(among.found), dtype=bool), np.zeros(len(among.found), dtype=np.int64)
        entries = np.zeros(len(among.found), dtype=ENTRY)
        found[rows], pack[rows], entries[rows] = self.found, self.pack, self.entries
        return Places(found=found, pack=pack, packs=self.packs, entries=entries)

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
            entries=np.concatenate([as_rows(part.entries) for part in parts]).view(ENTRY),
        )

    def found_in(self, packs: Collection[str]) -> Mask:
        """Return for each chunk whether it was found in one of some packs."""
        found = self.found.copy()
        held = np.array([name in packs for name in self.packs], dtype=bool)
        found[found] = held[self.pack[found]]
        return found

    def by_pack(self, rows: Any) -> list[tuple[str, Any]]:
        """Group some chunks by their packs."""
        numbers = self.pack[rows]
        return [(self.packs[number], rows[numbers == number]) for number in distinct(numbers).tolist()]


def find_places(tables: Sequence[Searched], digests: Digests, without: Collection[str] = ()) -> Places:
    """Look up many digests at once.

    Args:
        tables: Tables to search, the last one first.
        digests: The digests to find, shape ``(n, 32)``.
        without: Packs to ignore, together with deltas based on them.
    """
    places = _find(tables, digests, without)
    levels = follow(tables, places, without)
    broken = (places.found & ~_are_whole(places, levels)).nonzero()[0]
    if len(broken) == 0:
        return places._replace(chain=levels)
    waiting = [(broken, frozenset(without))]
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


def find_bases(tables: Sequence[Searched], deltas: Entries, without: Collection[str] = ()) -> Places:
    """Look up the bases of some deltas: for each the copy named in its entry.

    Args:
        tables: Tables to search.
        deltas: Entries of the deltas.
        without: Packs to ignore.
    """
    bases = np.ascontiguousarray(deltas["base_digest"])
    names = as_names(deltas["base_pack"]).tolist()
    order: dict[bytes, int] = {}
    pack = np.array([order.setdefault(name, len(order)) for name in names], dtype=np.int64)
    packs = [name.hex() for name in order]
    usable = np.array([name not in without for name in packs], dtype=bool)[pack]
    found, entries = np.zeros(len(deltas), dtype=bool), np.zeros(len(deltas), dtype=ENTRY)
    for table in tables:
        number = np.array([table.numbers.get(name, -1) for name in packs], dtype=np.int64)[pack]
        open_ = (usable & ~found & (number >= 0)).nonzero()[0]
        if len(open_) == 0:
            continue
        hits = table.look_up(bases[open_], packs=number[open_])
        at = open_[hits.at]
        entries.put(at, hits.entries)
        # Depths descend, so no chain is long and none is a ring.
        found[at] = entries["depth"][at] < deltas["depth"][at]
    return Places(found=found, pack=pack, packs=packs, entries=entries)


def find_chains(tables: Sequence[Searched], places: Places, without: Collection[str] = ()) -> tuple[Mask, set[str]]:
    """Follow deltas to their bases, and those to theirs.

    Args:
        tables: Tables to search for bases.
        places: Places of chunks.
        without: Packs to ignore.

    Returns:
        For each found chunk whether every chunk needed to decode it is known; and the packs of these.
    """
    levels = follow(tables, places, without) if without or places.chain is None else places.chain
    packs = {level.packs[number] for level in levels for number in distinct(level.pack[level.found]).tolist()}
    return _are_whole(places, levels), packs


def follow(tables: Sequence[Searched], places: Places, without: Collection[str] = ()) -> list[Places]:
    """Return the bases of chunks, then the bases of these, and so on: one row a chunk in each.

    Depths descend from level to level. Nothing is found in the row of a chunk in full, or of a delta without its base.
    """
    levels: list[Places] = []
    level = places
    while len(rows := (level.found & is_delta(level.entries)).nonzero()[0]):
        bases = find_bases(tables, level.entries[rows], without)
        level = bases if len(rows) == len(level.found) else bases.spread(rows, level)
        levels.append(level)
    return levels


def _are_whole(places: Places, levels: Sequence[Places]) -> Mask:
    """Return for each found chunk whether every chunk needed to decode it is known, given the result of `follow`."""
    is_whole = places.found.copy()
    for level, bases in pairwise([places, *levels]):
        is_whole &= ~level.found | ~is_delta(level.entries) | bases.found
    return is_whole


def rows_that_take(tables: Sequence[Searched], places: Places, copies: Collection[tuple[str, bytes]]) -> Positions:
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


def _find(tables: Sequence[Searched], digests: Digests, without: Collection[str]) -> Places:
    """Look up digests, ignoring whether the bases of deltas are known."""
    packs: list[str] = []
    found = np.zeros(len(digests), dtype=bool)
    pack = np.zeros(len(digests), dtype=np.int64)
    entries = np.zeros(len(digests), dtype=ENTRY)
    for table in reversed(tables):
        open_ = (~found).nonzero()[0]
        if len(open_) == 0:
            break
        hits = table.look_up(digests[open_], table.without(without))
        at = open_[hits.at]
        found[at] = True
        entries.put(at, hits.entries)
        pack[at] = hits.pack.astype(np.int64) + len(packs)
        packs.extend(hits.packs)
    return Places(found=found, pack=pack, packs=packs, entries=entries)


class LastLookups:
    """The recent lookups and their results, by digests. For many threads at once."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._found: OrderedDict[bytes, tuple[tuple[Sequence[Searched], set[str]], Places]] = OrderedDict()

    def find(self, tables: Sequence[Searched], digests: Digests, without: set[str]) -> Places:
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
