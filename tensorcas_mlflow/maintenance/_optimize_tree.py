"""Choice of which versions of a tensor are stored in full, and which as deltas against which.

Samples of the versions are encoded in full and against each other. A search then weighs sizes against the costs of
decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.codecs import DECAYED_BYTES, DELTA, PLANES, Transform, estimate_share, is_sparse
from tensorcas_mlflow.layout import MAX_DEPTH

Sizes = np.ndarray[Any, np.dtype[np.float64]]

IN_FULL = -1
_LEAST_GAIN = 1e-9
_N_STARS = 3
_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """Way to make deltas."""

    sizes: Sizes
    """Shape ``(n, n)``: the size of each version (column) as a delta against each other one (row); may be infinite."""
    cost: float
    """Cost of decoding such a delta, without its base."""


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """Storage of one version."""

    base: int
    """Version that is its base, or `IN_FULL`."""
    hop: int = 0
    """Position of a delta's hop."""


def choose_tree(
    full: Sizes,
    hops: Sequence[Hop],
    *,
    full_cost: float,
    most_cost: float | Sizes,
    price: float | Sizes = 0.0,
    fixed: Sizes | None = None,
) -> list[StoredVersion]:
    """Choose a base for each version, so that all of them take little room and none takes long to decode.

    A base may be older or newer. Finding the best trees of bounded depth is hard, so this is a local search from some
    starts. As long as the sum gets smaller, it gives one version another base, or stores one in full and makes it the
    base of all versions that gain by it (a move of Kuehn and Hamburger, "A heuristic program for locating warehouses",
    1963). The result is never worse than storing all in full.

    Args:
        full: For each of n versions its size in full.
        hops: Ways to make deltas.
        full_cost: Cost of decoding a version that is stored in full.
        most_cost: Largest cost of decoding a version, with its bases: one for all versions, or one for each.
        price: Bytes that one unit of decoding cost is worth: one for all versions, or one for each.
        fixed: Cost of decoding each version that is stored already and stays; NaN for the others. Without it, all
            versions are to be stored.

    Returns:
        Storage of each version; `IN_FULL` for fixed ones, whatever theirs is. A version needs at most `MAX_DEPTH`
        others, down to a fixed one or one in full.
    """
    if not hops:
        return [StoredVersion(IN_FULL) for _ in full]
    forest = _Forest(full, hops, full_cost, most_cost, price, np.full(len(full), np.nan) if fixed is None else fixed)
    best = forest.search()
    if forest.depth(best) > MAX_DEPTH:
        # A search with this bound finds worse trees: few moves lead from one state that keeps it to another.
        forest.max_depth = MAX_DEPTH
        best = forest.search()
    return [StoredVersion(base, hop) for base, hop in best.tolist()]


_State = Any
"""For each version its base and its hop, shape ``(n, 2)``."""


class _Shape(NamedTuple):
    """Properties of each version in one state."""

    cost: Sizes
    """Cost of decoding it."""
    bound: Sizes
    """Largest cost that its dependents allow."""
    below: Any
    """For each version (column) whether that of the row depends on it."""
    depth: Any
    """Number of its bases."""
    height: Any
    """Largest number of hops from a dependent to it."""


class _Forest:
    """Sizes and costs that the search weighs."""

    def __init__(
        self,
        full: Sizes,
        hops: Sequence[Hop],
        full_cost: float,
        most_cost: float | Sizes,
        price: float | Sizes,
        fixed: Sizes,
    ) -> None:
        self._n = len(full)
        self.max_depth = self._n
        """Maximum number of bases of a version."""
        self.is_free = np.isnan(fixed)
        self._full = np.where(self.is_free, full, 0.0)
        self._root_cost = np.where(self.is_free, full_cost, fixed)
        self._costs = np.array([hop.cost for hop in hops])
        self._most = np.broadcast_to(most_cost, self._n) + _LEAST_GAIN
        self._price = np.broadcast_to(price, self._n)
        self._sizes = np.array([hop.sizes for hop in hops], dtype=np.float64)
        self._sizes[:, np.arange(self._n), np.arange(self._n)] = np.inf
        self._sizes[:, :, ~self.is_free] = np.inf

    def search(self) -> _State:
        """Search from some starts, and return the best state."""
        best = self.descend(self.all_in_full())
        for star in self.stars():
            best = min(best, self.descend(star), key=self.total)
        for _ in range(_ROUNDS):
            before = self.total(best)
            for version in np.flatnonzero(self.is_free).tolist():
                best = min(best, self.descend(self.opened(best, version)), key=self.total)
            if self.total(best) >= before * (1 - _LEAST_GAIN):
                break
        return best

    def depth(self, state: _State) -> int:
        """Return the largest number of bases of a version."""
        return int(self._shape(state).depth.max(initial=0))

    def all_in_full(self) -> _State:
        return np.stack([np.full(self._n, IN_FULL), np.zeros(self._n, dtype=np.int64)], axis=1)

    def stars(self) -> list[_State]:
        """Return forests in which one version is the base of all that gain by it, the best ones first."""
        made = [self.opened(self.all_in_full(), version) for version in range(self._n)]
        return sorted(made, key=self.total)[:_N_STARS]

    def total(self, state: _State) -> float:
        """Return the sum to minimize: the sizes, and the price of decoding."""
        return float(self._sizes_of(state).sum() + self._price @ self._shape(state).cost)

    def descend(self, state: _State) -> _State:
        """Make the move that gains most until none gains."""
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
        """Yield the state itself, and of each kind of move the one that seems to gain most."""
        yield state
        gains = self._gains(state)
        hop, base, version = np.unravel_index(int(gains.argmax()), gains.shape)
        if gains[hop, base, version] > 0:
            yield self._with(state, int(version), int(base), int(hop))
        shape = self._shape(state)
        cuts = self._sizes_of(state) - self._full + (shape.cost - self._root_cost) * (self._price @ shape.below)
        yield self._with(state, int(cuts.argmax()), IN_FULL, 0)
        gathered = cuts + gains.max(axis=0).clip(min=0.0).sum(axis=1)
        yield self.opened(state, int(np.where(state[:, 0] != IN_FULL, gathered, -np.inf).argmax()))

    def _gains(self, state: _State) -> Sizes:
        """Return for each hop, base and version the gain; negative infinity where it is not allowed.

        No ring is allowed, and no dependent of the version may take too long to decode, or need too many others.
        """
        shape = self._shape(state)
        after = shape.cost[None, :, None] + self._costs[:, None, None]
        is_short = shape.depth[:, None] + 1 + shape.height <= self.max_depth
        possible = (after <= shape.bound) & (is_short & ~shape.below)[None]
        saved = self._sizes_of(state) - self._sizes + (shape.cost - after) * (self._price @ shape.below)
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

    def _shape(self, state: _State) -> _Shape:
        base, hop = state[:, 0], state[:, 1]
        cost, bound = self._root_cost.copy(), self._most.copy()
        below = np.eye(self._n, dtype=bool)
        depth, height = np.zeros((2, self._n), dtype=np.int64)
        path = np.zeros(self._n)
        at, left = base.copy(), np.flatnonzero(base != IN_FULL)
        step = np.arange(self._n)
        for n_hops in range(1, self._n):
            if len(left) == 0:
                break
            path[left] += self._costs[hop[step[left]]]
            step[left] = at[left]
            np.minimum.at(bound, step[left], self._most[left] - path[left])
            below[left, step[left]] = True
            depth[left], height[step[left]] = n_hops, n_hops
            at[left] = base[step[left]]
            left = left[at[left] != IN_FULL]
        deltas = base != IN_FULL
        cost[deltas] = self._root_cost[step[deltas]] + path[deltas]
        return _Shape(cost, bound, below, depth, height)


PLAIN_COST = 0.35
"""Nanoseconds a byte to decode `planes`, in one thread of a busy machine; see ``docs/design/codecs.md``."""
_COSTS = {
    Transform.PLAIN: 0.8,
    Transform.GROUPED: 1.6,
    Transform.DECAYED: 0.85,
    Transform.SPARSE: 0.25,
    Transform.NUDGED: 0.25,
}
"""The same for a delta, without its base."""
_FEW_WORDS = 4
"""Deltas of few words have their cost if at most one word in so many changes."""
MOST_COST = 2.8
"""Largest cost of decoding. It leaves room for a grouped delta against a plain one, or for three plain ones."""
PRICE = 0.008
"""Share of its size that a version may grow for each nanosecond a byte saved in decoding."""
_LOWER_PRICES = (1 / 4, 0.0)
"""Shares of the price to try if a tree takes more room than the versions take so far."""
_SHALLOW_COST = PLAIN_COST + _COSTS[Transform.DECAYED]
"""The largest cost, for a version that is to be restored fast: one hop, and not a grouped one."""
_SHALLOW_PRICE = 50 * PRICE
"""The price, for such a version. A delta must save a third of the size: to decode it, a reader also reads its base."""
SAMPLE_BYTES = 64 << 10
_LEAST_GROUPED_BYTES = 32 << 10
"""Least bytes that pay for the headers and codes of groups."""
_CLEARLY_SMALLER = 0.97
_MOST_TRIED = 6
"""Bases tried for each version: those that look best by the entropy of the differences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Storage of the versions of a group."""

    stored: Sequence[StoredVersion]
    transforms: Sequence[Transform]
    """Transform of each hop; see `StoredVersion.hop`."""
    depths: Sequence[int]
    """For each version the number of its bases."""
    shares: Sequence[float]
    """For each version the share of its size that it is likely to take."""


def plant(
    samples: Sequence[Sequence[Buffer | None]],
    itemsize: int,
    *,
    is_float: bool,
    fixed_depth: Any,
    is_shallow: Any,
    saved_shares: Any = None,
) -> Tree:
    """Choose the storage of the versions of a group.

    Short chains have a price in bytes. It is lower where the versions would take more room than as they were saved.

    Args:
        samples: For each version the same stretches, up to `SAMPLE_BYTES` long; None for one that could not be read.
        itemsize: Size of an element, 1, 2, 4 or 8.
        is_float: Whether the elements are floating point numbers.
        fixed_depth: For each version its depth if it is stored already and stays, else -1.
        is_shallow: For each version whether it is to be read with one base at most.
        saved_shares: For each version the share of its size that it takes so far; NaN if that is unknown.
    """
    n = len(samples)
    is_whole = np.array([all(part is not None for part in parts) for parts in samples])
    n_bytes = sum(memoryview(part).nbytes for part in samples[int(is_whole.argmax())] if part is not None)
    if not is_whole.any() or n_bytes == 0:
        return Tree(
            stored=[StoredVersion(IN_FULL)] * n,
            transforms=(),
            depths=np.maximum(fixed_depth, 0).tolist(),
            shares=[1.0] * n,
        )
    known = [version for version in range(n) if is_whole[version]]
    transforms = _transforms(n_bytes // len(samples[0]), itemsize, is_float=is_float)
    full = np.full(n, float(n_bytes))
    sizes = np.full((len(transforms), n, n), np.inf)

    def try_full(version: int) -> int:
        return sum(min(len(PLANES.encode_as(raw, itemsize, None)), len(raw)) for raw in _known_parts(samples[version]))

    def try_delta(pair: tuple[int, int, int]) -> float:
        hop, base, version = pair
        both = list(zip(_known_parts(samples[version]), _known_parts(samples[base]), strict=True))
        is_of_few = transforms[hop] in (Transform.SPARSE, Transform.NUDGED)
        if is_of_few and not all(is_sparse(raw, itemsize, of, _FEW_WORDS) for raw, of in both):
            return np.inf
        return sum(len(DELTA.encode_as(raw, itemsize, of, transforms[hop])) for raw, of in both)

    free = [version for version in known if fixed_depth[version] < 0]
    full[free] = list(threads.ordered_map(try_full, free))
    pairs = list(_promising(samples, itemsize, transforms, known, free, full))
    for (hop, base, version), size in zip(pairs, threads.ordered_map(try_delta, pairs), strict=True):
        if size < _CLEARLY_SMALLER * full[version]:
            sizes[hop, base, version] = size
    # The transforms of stored deltas are unknown, so the most expensive one is assumed.
    depth = np.asarray(fixed_depth, dtype=np.float64)
    costs = [_COSTS[transform] for transform in transforms]
    fixed = np.where(depth < 0, np.nan, PLAIN_COST + depth * max(costs))
    hops = [Hop(sizes=sizes[hop], cost=cost) for hop, cost in enumerate(costs)]
    is_judged = np.zeros(n, dtype=bool) if saved_shares is None else (depth < 0) & ~is_shallow & ~np.isnan(saved_shares)
    saved = 0.0 if saved_shares is None else float(saved_shares[is_judged].sum()) * n_bytes
    stored: Sequence[StoredVersion] = ()
    taken: Any = full
    for share in (1.0, *_LOWER_PRICES):
        stored = choose_tree(
            full,
            hops,
            full_cost=PLAIN_COST,
            most_cost=np.where(is_shallow, _SHALLOW_COST, MOST_COST),
            price=np.where(is_shallow, _SHALLOW_PRICE, share * PRICE) * n_bytes,
            fixed=fixed,
        )
        at = [(each.base, each.hop) for each in stored]
        taken = np.array([full[v] if base == IN_FULL else sizes[hop, base, v] for v, (base, hop) in enumerate(at)])
        if float(taken[is_judged].sum()) <= saved or not is_judged.any():
            break
    return Tree(
        stored=stored,
        transforms=transforms,
        depths=_depths(stored, fixed_depth),
        shares=[float(size) / n_bytes for size in taken],
    )


def _depths(stored: Sequence[StoredVersion], fixed_depth: Any) -> list[int]:
    depths = []
    for version in range(len(stored)):
        n, at = 0, version
        while stored[at].base != IN_FULL:
            n, at = n + 1, stored[at].base
        depths.append(n + max(0, int(fixed_depth[at])))
    return depths


def _transforms(sample_bytes: int, itemsize: int, *, is_float: bool) -> list[Transform]:
    if not is_float or sample_bytes < _LEAST_GROUPED_BYTES:
        return [Transform.PLAIN]
    # For elements of other sizes `DECAYED` is the same as `PLAIN`.
    decays = [Transform.DECAYED] if itemsize == DECAYED_BYTES else []
    return [Transform.PLAIN, Transform.GROUPED, *decays, Transform.SPARSE, Transform.NUDGED]


def _promising(
    samples: Sequence[Sequence[Buffer | None]],
    itemsize: int,
    transforms: Sequence[Transform],
    known: Sequence[int],
    free: Sequence[int],
    full: Any,
) -> Iterator[tuple[int, int, int]]:
    """Yield the hops, bases and versions that are worth trying."""
    plain = sum(memoryview(raw).nbytes for raw in _known_parts(samples[known[0]]))
    for version in free:
        estimates = {
            base: sum(
                memoryview(raw).nbytes * estimate_share(raw, itemsize, base=of)
                for raw, of in zip(_known_parts(samples[version]), _known_parts(samples[base]), strict=True)
            )
            for base in known
            if base != version
        }
        best = sorted(estimates, key=estimates.__getitem__)[:_MOST_TRIED]
        near = [base for base in best if estimates[base] < min(full[version], plain)]
        for base, hop in product(near, range(len(transforms))):
            yield hop, base, version


def _known_parts(sample: Sequence[Buffer | None]) -> list[Buffer]:
    return [part for part in sample if part is not None]
