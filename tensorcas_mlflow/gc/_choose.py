"""Which packs can go, decided from a survey alone."""

from __future__ import annotations

import numpy as np

from tensorcas_mlflow.digest import unique_rows
from tensorcas_mlflow.gc._survey import Survey


def choose(state: Survey, max_waste: float) -> tuple[list[str], dict[str, int]]:
    """Choose the packs that can go.

    A chunk with several copies is counted where most is needed, so that the other packs become empty. Copies in packs
    that somebody has condemned do not count.

    Args:
        state: Of the store.
        max_waste: Which part of a pack's payload may be unneeded.

    Returns:
        Packs nothing needs; and packs that waste too much, with the payload bytes that are needed.
    """
    table = state.table
    condemned = state.condemned_packs()
    n_packs = len(table.packs)
    stored = table.entries["stored_bytes"].astype(np.int64)
    wanted = state.live_rows() & ~state.rows_in(condemned)
    weight = np.bincount(table.pack[wanted], weights=stored[wanted], minlength=n_packs)
    rank = np.empty(n_packs, dtype=np.int64)
    rank[np.argsort(-weight, kind="stable")] = np.arange(n_packs)
    rows = np.flatnonzero(wanted)
    rows = rows[np.argsort(rank[table.pack[rows]], kind="stable")]
    _, first, _ = unique_rows(np.ascontiguousarray(table.entries["digest"][rows]))
    kept = rows[first]
    n_kept = np.bincount(table.pack[kept], minlength=n_packs)
    needed = np.bincount(table.pack[kept], weights=stored[kept], minlength=n_packs)
    total = np.bincount(table.pack, weights=stored, minlength=n_packs)
    doomed = [name for name in state.unreadable if name not in condemned]
    rewrites: dict[str, int] = {}
    for number, name in enumerate(table.packs):
        if name in condemned:
            continue
        if n_kept[number] == 0:
            doomed.append(name)
        elif total[number] - needed[number] > max_waste * total[number]:
            rewrites[name] = int(needed[number])
    return doomed, rewrites


def still_needed(state: Survey, ours: frozenset[str]) -> frozenset[str]:
    """Give those of the packs we have condemned that hold the only copy of a needed chunk.

    A copy in a pack that anybody has condemned is none: two collectors may each have chosen the other's.
    """
    keys = state.keys()
    live = state.live_rows()
    safe = live & ~state.rows_in(state.condemned_packs() | ours)
    at_risk = live & ~np.isin(keys, keys[safe])
    return frozenset(state.table.packs[number] for number in np.unique(state.table.pack[at_risk])) & ours
