"""Choice of which versions of a chunk are stored in full, and which as deltas against which."""

from __future__ import annotations

from typing import Any

import numpy as np

from tensorcas_mlflow.layout.packs import MAX_DEPTH, Mask
from tensorcas_mlflow.store import CLEARLY_SMALLER, MAX_PASSES

Sizes = np.ndarray[Any, np.dtype[np.float64]]

IN_FULL = -1
SHALLOW_DEPTH = 1
"""Maximum depth of a chunk of a checkpoint that is to be restored fast."""
_SHALLOW_SHARE = 2 / 3
"""Share of its size in full below which such a chunk is stored as a delta: a reader also reads its base."""
_PRICE = 0.02
"""Share of its size in full that a version may grow for each pass saved in decoding."""
_N_STARTS = 3


def choose_bases(
    full: Sizes, sizes: Sizes, passes: Sizes, *, fixed: Any = None, is_shallow: Any = None, price: float = _PRICE
) -> list[int]:
    """Choose a base for each version, so that all of them take little room and none takes long to decode.

    A base may be older or newer. A tree grows from one version in full: each step adds the version that gains most by a
    base in the tree. Where none gains, the version by which the others gain most is the next one in full. The best of
    some trees wins.

    Args:
        full: For each of n versions its size in full.
        sizes: Shape ``(n, n)``: the size of each version (column) as a delta against each other one (row).
        passes: The cost of decoding such a delta without its base; see `MAX_PASSES`, which bounds those of a chain.
        fixed: For each version its depth if it is stored already and stays, else -1. By default none is stored.
        is_shallow: For each version whether it needs at most `SHALLOW_DEPTH` others; by default none.
        price: Share of its size in full that one pass is worth.

    Returns:
        The number of the base of each version; `IN_FULL` for fixed ones, whatever theirs is.
    """
    n = len(full)
    depth = np.full(n, -1) if fixed is None else np.asarray(fixed)
    shallow: Mask = np.zeros(n, dtype=bool) if is_shallow is None else np.asarray(is_shallow)
    clearly = np.where(shallow, _SHALLOW_SHARE, CLEARLY_SMALLER) * full
    gains = np.where(sizes < clearly, full - sizes, -np.inf)
    gains[np.arange(n), np.arange(n)] = -np.inf
    gains[:, depth >= 0] = -np.inf
    most = np.where(shallow, SHALLOW_DEPTH, MAX_DEPTH)
    is_free = depth < 0
    gathered = np.where(is_free, gains.clip(min=0).sum(axis=1), -1)
    starts = np.argsort(-gathered, kind="stable")[: min(_N_STARTS, int(is_free.sum()))].tolist()
    if not is_free.all():
        starts.append(IN_FULL)
    grown = [_grown(gains, passes, price * full, depth, most, start) for start in starts]
    return max(grown, key=lambda each: each[1])[0]


def _grown(gains: Sizes, passes: Sizes, prices: Sizes, fixed: Any, most: Any, start: int) -> tuple[list[int], float]:
    """Grow a tree from the fixed versions, and from one in full unless it is `IN_FULL`; see `choose_bases`.

    Args:
        gains: What each version (column) saves as a delta against each other one; negative infinity if it must not be.
        passes: See `choose_bases`.
        prices: Bytes that one pass is worth to each version.
        fixed: See `choose_bases`.
        most: Maximum depth of each version.
        start: The first version in full.

    Returns:
        The bases; and the bytes that they save, less the price of decoding.
    """
    tree, saved = [IN_FULL] * len(gains), 0.0
    is_left = fixed < 0
    cost = np.where(is_left, np.inf, fixed)
    depth = np.maximum(fixed, 0)
    if start != IN_FULL:
        cost[start], is_left[start] = 0, False
    while is_left.any():
        after = cost[:, None] + passes
        fits = is_left & (after <= MAX_PASSES) & (depth[:, None] < most) & (gains > 0)
        worth = np.where(fits, gains - prices * np.where(fits, after, 0), -np.inf)
        base, at = divmod(int(worth.argmax()), len(gains))
        if worth[base, at] > 0:
            tree[at], cost[at], depth[at] = base, after[base, at], depth[base] + 1
            saved += float(worth[base, at])
        else:
            gathered = gains[:, is_left].clip(min=0).sum(axis=1)
            at = int(np.where(is_left, gathered, -1).argmax())
            cost[at] = 0
        is_left[at] = False
    return tree, saved
