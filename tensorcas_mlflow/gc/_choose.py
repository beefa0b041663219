"""Which packs can go, decided from a survey alone."""

from __future__ import annotations

import numpy as np

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
    condemned = state.condemned_packs()
    n_packs = len(state.packs)
    stored = state.stored_bytes
    wanted = state.live_rows() & ~state.rows_in(condemned)
    weight = np.bincount(state.pack[wanted], weights=stored[wanted], minlength=n_packs)
    rank = np.empty(n_packs, dtype=np.int64)
    rank[np.argsort(-weight, kind="stable")] = np.arange(n_packs)
    rows = np.flatnonzero(wanted)
    rows = rows[np.argsort(rank[state.pack[rows]], kind="stable")]
    kept = rows[np.unique(state.chunk[rows], return_index=True)[1]]
    n_kept = np.bincount(state.pack[kept], minlength=n_packs)
    needed = np.bincount(state.pack[kept], weights=stored[kept], minlength=n_packs)
    total = np.bincount(state.pack, weights=stored, minlength=n_packs)
    doomed = [name for name in state.unreadable if name not in condemned]
    rewrites: dict[str, int] = {}
    for number, name in enumerate(state.packs):
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
    live = state.live_rows()
    safe = state.has_row(live & ~state.rows_in(state.condemned_packs() | ours))
    at_risk = live & ~safe[state.chunk]
    return frozenset(state.packs[number] for number in np.unique(state.pack[at_risk])) & ours
