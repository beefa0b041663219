"""Which packs can go, decided from a survey alone."""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from tensorcas_mlflow.gc._survey import Survey


def choose(
    state: Survey, max_waste: float, *, prefer: Set[str] = frozenset(), avoid: Set[str] = frozenset()
) -> tuple[list[str], dict[str, int]]:
    """Choose the packs that can go.

    Of a chunk with several copies one counts: one that needs no pack to be avoided, in a preferred pack, on which most
    was spent, in the pack of which most is needed; what comes first decides. So the other packs become empty, and what
    was optimized is kept. Copies in packs that somebody has condemned do not count. The base of a delta
    that is needed is needed where it lies, so a pack that holds one is not rewritten: its deltas would have to be, in
    full. What it takes to decode a pack is needed too while a save under way may store deltas against that.

    Args:
        state: Of the store.
        max_waste: Which part of a pack's payload may be unneeded.
        prefer: Packs whose copies count first.
        avoid: Packs whose copies count last, and deltas against them.

    Returns:
        Packs nothing needs; and packs that waste too much, with the payload bytes that are needed.
    """
    condemned = state.condemned_packs()
    n_packs = len(state.packs)
    stored = state.stored_bytes
    wanted = state.live_rows() & state.copies(but=condemned)
    weight = np.bincount(state.pack[wanted], weights=stored[wanted], minlength=n_packs)
    is_other = np.array([name not in prefer for name in state.packs], dtype=bool)
    rows = np.flatnonzero(wanted)
    pack, effort = state.pack[rows], state.effort[rows].astype(np.int64)
    is_avoided = state.needing(state.rows_in(frozenset(avoid)))[rows]
    rows = rows[np.lexsort((pack, -weight[pack], -effort, is_other[pack], is_avoided))]
    kept = np.zeros(len(wanted), dtype=bool)
    kept[rows[np.unique(state.chunk[rows], return_index=True)[1]]] = True
    # What nobody can decode stays: the pack of its base may be lost, and come back from a backup; or it is condemned,
    # and who finishes that list writes the chunk in full.
    kept |= state.live_rows() & ~state.has_row(wanted)[state.chunk]
    bases = state.bases_of(kept | state.rows_in(state.pinned))
    holds_base = np.bincount(state.pack[bases], minlength=n_packs) > 0
    kept |= bases
    n_kept = np.bincount(state.pack[kept], minlength=n_packs)
    needed = np.bincount(state.pack[kept], weights=stored[kept], minlength=n_packs)
    total = np.bincount(state.pack, weights=stored, minlength=n_packs)
    doomed = [name for name in state.unreadable if name not in condemned]
    rewrites: dict[str, int] = {}
    for number, name in enumerate(state.packs):
        if name in condemned or name in state.pinned:
            continue
        if n_kept[number] == 0:
            doomed.append(name)
        elif not holds_base[number] and total[number] - needed[number] > max_waste * total[number]:
            rewrites[name] = int(needed[number])
    return doomed, rewrites


def still_needed(state: Survey, ours: frozenset[str]) -> frozenset[str]:
    """Give those of the packs we have condemned that hold the only copy of a needed chunk, or the base of that.

    A copy in a pack that anybody has condemned is none: two collectors may each have chosen the other's. What a save
    under way may store deltas against is needed too, with the bases of what it holds.
    """
    live = state.live_rows()
    safe = state.has_row(live & state.copies(but=state.condemned_packs() | ours))
    at_risk = live & ~safe[state.chunk]
    at_risk |= state.bases_of(at_risk | state.rows_in(state.pinned))
    return (frozenset(state.packs[number] for number in np.unique(state.pack[at_risk])) | state.pinned) & ours
