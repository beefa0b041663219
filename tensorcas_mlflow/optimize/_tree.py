"""Which versions of a tensor are stored in full, and which as deltas against which: a choice by sizes and costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.pack import MAX_DEPTH

Sizes = np.ndarray[Any, np.dtype[np.float64]]

IN_FULL = -1
_LEAST_GAIN = 1e-9
_N_STARS = 3
_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One way to make deltas."""

    sizes: Sizes
    """Shape ``(n, n)``: the size of each version (column) as a delta against each other one (row); may be infinite."""
    cost: float
    """What it takes to decode such a delta, beside what its base takes."""


@dataclass(frozen=True, slots=True)
class Stored:
    """How one version is stored."""

    base: int
    """The version that it is a delta against, or `IN_FULL`."""
    hop: int = 0
    """For a delta the way it is made: a position among the hops."""


def choose_tree(
    full: Sizes,
    hops: Sequence[Hop],
    *,
    full_cost: float,
    most_cost: float,
    price: float = 0.0,
    fixed: Sizes | None = None,
) -> list[Stored]:
    """Choose how versions are stored, so that all of them together take little, and none takes long to decode.

    A base may be older or newer. To find the best trees of bounded depth is hard, so this is a local search from some
    starts: as long as it makes the sum smaller, one version is given another base, or one is stored in full and becomes
    the base of all that are better off with it (a move of Kuehn and Hamburger, "A heuristic program for locating
    warehouses", 1963). What comes out is never worse than to store all in full.

    Args:
        full: For each of n versions its size in full.
        hops: The ways to make deltas.
        full_cost: What it takes to decode a version that is stored in full.
        most_cost: The most that decoding one version may take, its bases included.
        price: How much larger a version may be that takes one less to decode.
        fixed: What decoding takes of versions that are stored already and stay as they are, which costs nothing; NaN
            for the others. Unless given, all are to be stored.

    Returns:
        For each version how it is stored; `IN_FULL` for fixed ones, which says nothing about them.
    """
    if not hops:
        return [Stored(IN_FULL) for _ in full]
    forest = _Forest(full, hops, full_cost, most_cost, price, np.full(len(full), np.nan) if fixed is None else fixed)
    best = forest.descend(forest.all_in_full())
    for star in forest.stars():
        best = min(best, forest.descend(star), key=forest.total)
    for _ in range(_ROUNDS):
        before = forest.total(best)
        for version in np.flatnonzero(forest.is_free).tolist():
            best = min(best, forest.descend(forest.opened(best, version)), key=forest.total)
        if forest.total(best) >= before * (1 - _LEAST_GAIN):
            break
    return [Stored(base, hop) for base, hop in best.tolist()]


_State = Any
"""For each version its base and its hop, shape ``(n, 2)``."""


class _Forest:
    """What the search knows of sizes and costs."""

    def __init__(
        self, full: Sizes, hops: Sequence[Hop], full_cost: float, most_cost: float, price: float, fixed: Sizes
    ) -> None:
        self._n = len(full)
        self.is_free = np.isnan(fixed)
        self._full = np.where(self.is_free, full, 0.0)
        self._root_cost = np.where(self.is_free, full_cost, fixed)
        self._costs = np.array([hop.cost for hop in hops])
        self._most = most_cost + _LEAST_GAIN
        self._price = price
        self._sizes = np.array([hop.sizes for hop in hops], dtype=np.float64)
        self._sizes[:, np.arange(self._n), np.arange(self._n)] = np.inf
        self._sizes[:, :, ~self.is_free] = np.inf

    def all_in_full(self) -> _State:
        return np.stack([np.full(self._n, IN_FULL), np.zeros(self._n, dtype=np.int64)], axis=1)

    def stars(self) -> list[_State]:
        """Forests in which one version is the base of all that gain by it, the best ones first."""
        made = [self.opened(self.all_in_full(), version) for version in range(self._n)]
        return sorted(made, key=self.total)[:_N_STARS]

    def total(self, state: _State) -> float:
        """What is to be made small: the sizes, and the price of decoding."""
        return float(self._sizes_of(state).sum() + self._price * self._shape(state)[0].sum())

    def descend(self, state: _State) -> _State:
        """Make the move that gains most, as long as there is one."""
        total = self.total(state)
        while True:
            after = min(self._moves(state), key=self.total)
            if self.total(after) >= total - _LEAST_GAIN * max(1.0, total):
                return state
            state, total = after, self.total(after)

    def opened(self, state: _State, version: int) -> _State:
        """Store a version in full, and make it the base of all that gain by it."""
        state = self._with(state, version, IN_FULL, 0)
        gains = self._gains(state)[:, version]
        hops = gains.argmax(axis=0)
        chosen = np.flatnonzero(gains.max(axis=0) > 0)
        state[chosen, 0], state[chosen, 1] = version, hops[chosen]
        return state

    def _moves(self, state: _State) -> Iterator[_State]:
        """Give the state itself, and of each kind of move the one that seems to gain most."""
        yield state
        gains = self._gains(state)
        hop, base, version = np.unravel_index(int(gains.argmax()), gains.shape)
        if gains[hop, base, version] > 0:
            yield self._with(state, int(version), int(base), int(hop))
        cost, _, below = self._shape(state)
        cuts = self._sizes_of(state) - self._full + self._price * (cost - self._root_cost) * below.sum(axis=0)
        yield self._with(state, int(cuts.argmax()), IN_FULL, 0)
        gathered = cuts + gains.max(axis=0).clip(min=0.0).sum(axis=1)
        yield self.opened(state, int(np.where(state[:, 0] != IN_FULL, gathered, -np.inf).argmax()))

    def _gains(self, state: _State) -> Sizes:
        """For each hop, base and version what it gains to store it so; negative infinity where that may not be.

        There must be no ring, and nothing that is behind the version may take too long.
        """
        cost, height, below = self._shape(state)
        after = cost[None, :, None] + self._costs[:, None, None]
        possible = (after + height <= self._most) & ~below[None]
        saved = self._sizes_of(state) - self._sizes + self._price * (cost - after) * below.sum(axis=0)
        gains: Sizes = np.where(possible, saved, -np.inf)
        return gains

    def _with(self, state: _State, version: int, base: int, hop: int) -> _State:
        state = state.copy()
        if self.is_free[version]:
            state[version] = base, hop
        return state

    def _sizes_of(self, state: _State) -> Sizes:
        base, hop = state[:, 0], state[:, 1]
        sizes: Sizes = np.where(base == IN_FULL, self._full, self._sizes[hop, base, np.arange(self._n)])
        return sizes

    def _shape(self, state: _State) -> tuple[Sizes, Sizes, Any]:
        """Say what decoding each version takes, what it takes more to decode those behind it, and which those are."""
        base, hop = state[:, 0], state[:, 1]
        cost, height = self._root_cost.copy(), np.zeros(self._n)
        below = np.eye(self._n, dtype=bool)
        """For each version (column) whether a row's is behind it."""
        path = np.zeros(self._n)
        at, left = base.copy(), np.flatnonzero(base != IN_FULL)
        step = np.arange(self._n)
        for _ in range(MAX_DEPTH):
            if len(left) == 0:
                break
            path[left] += self._costs[hop[step[left]]]
            step[left] = at[left]
            np.maximum.at(height, step[left], path[left])
            below[left, step[left]] = True
            at[left] = base[step[left]]
            left = left[at[left] != IN_FULL]
        deltas = base != IN_FULL
        cost[deltas] = self._root_cost[step[deltas]] + path[deltas]
        return cost, height, below
