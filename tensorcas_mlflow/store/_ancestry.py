"""Copies of some chunks, and the chains of bases behind deltas."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.digest import Digests
from tensorcas_mlflow.index import Mask
from tensorcas_mlflow.pack import ENTRY, is_delta
from tensorcas_mlflow.store._catalog import Catalog
from tensorcas_mlflow.store._lookup import Places


@dataclass(frozen=True, slots=True, kw_only=True)
class Ancestry:
    """Copies of some chunks, their bases, and so on, up to the chunks stored in full."""

    levels: Sequence[Places]
    """First the chunks themselves, then their bases: one row a chunk in each, not found after the end of its chain.
    Depths descend from level to level, and every chain is complete."""

    @classmethod
    def of(cls, catalog: Catalog, digests: Digests, excluded: Collection[str] = ()) -> Ancestry:
        """Look chunks up.

        Args:
            catalog: The store's.
            digests: The chunks, shape ``(n, 32)``.
            excluded: Packs to ignore.
        """
        levels = [catalog.find_sound(digests, excluded)]
        while True:
            level = levels[-1]
            rows = np.flatnonzero(level.found & is_delta(level.entries))
            if len(rows) == 0:
                return cls(levels=levels)
            bases = catalog.find_bases(level.entries[rows], excluded)
            found, pack = np.zeros(len(digests), dtype=bool), np.zeros(len(digests), dtype=np.int64)
            entries = np.zeros(len(digests), dtype=ENTRY)
            found[rows], pack[rows], entries[rows] = bases.found, bases.pack, bases.entries
            levels.append(Places(found=found, pack=pack, packs=bases.packs, entries=entries))

    @property
    def packs(self) -> frozenset[str]:
        """Return all packs with any of these copies."""
        return frozenset(
            level.packs[number] for level in self.levels for number in np.unique(level.pack[level.found]).tolist()
        )

    def some(self, rows: Any) -> Ancestry:
        """Return the ancestry of some of the chunks, by number."""
        return Ancestry(levels=[level.some(rows) for level in self.levels])

    def up_to(self, depth: int) -> Ancestry:
        """Begin each chain with its nearest chunk within a depth; there is one, unless nothing is found."""
        levels = list(self.levels)
        while True:
            deep = np.flatnonzero(levels[0].found & (levels[0].entries["depth"] > depth))
            if len(deep) == 0:
                return Ancestry(levels=levels)
            nothing = levels[-1].some(deep).nowhere()
            behind = [level.some(deep) for level in levels[1:]] + [nothing]
            levels = [level.replaced(deep, next_) for level, next_ in zip(levels, behind, strict=True)]

    def lies_in(self, packs: Collection[str]) -> Mask:
        """Return for each chunk whether it was found, with all of its chain in some packs."""
        lies: Mask = self.levels[0].found.copy()
        for level in self.levels:
            lies &= level.found_in(packs) | ~level.found
        return lies

    def chain(self, row: int) -> list[tuple[int, bytes]]:
        """Return the depth and the digest of a chunk, and then of each base behind it; empty if it is not stored."""
        entries = [level.entries[row] for level in self.levels if level.found[row]]
        return [(int(entry["depth"]), entry["digest"].tobytes()) for entry in entries]
