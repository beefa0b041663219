"""How much room versions take in full and against each other, found by encoding samples of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from tensorcas_mlflow import threads
from tensorcas_mlflow.codecs import DECAYED_BYTES, DELTA, PLANES, Buffer, Transform, estimate_share
from tensorcas_mlflow.optimize._tree import IN_FULL, Hop, Stored, choose_tree

PLAIN_COST = 0.35
"""Nanoseconds a byte of one thread, on a busy machine, to decode `planes`; see ``docs/design/codecs.md``."""
_COSTS = {Transform.PLAIN: 0.8, Transform.GROUPED: 1.6, Transform.DECAYED: 0.85}
"""The same for a delta, besides what its base takes."""
MOST_COST = 2.8
"""What decoding may take. It leaves room for a delta in groups against one without, or for three without."""
PRICE = 0.008
"""How much of its size a version may take more for each nanosecond a byte that it is decoded faster."""
SAMPLE_BYTES = 64 << 10
_LEAST_GROUPED_BYTES = 32 << 10
"""Groups have headers and codes of their own, for which fewer bytes do not pay."""
_CLEARLY_SMALLER = 0.97
_MOST_TRIED = 6
"""So many bases are tried for each version: those that look best by the entropies of what differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """How the versions of a group are stored."""

    stored: Sequence[Stored]
    transforms: Sequence[Transform]
    """What `Stored.hop` counts in."""
    depths: Sequence[int]
    """For each version how many others it takes to decode it."""
    shares: Sequence[float]
    """For each version what share of its size it is likely to take."""


def plant(samples: Sequence[Sequence[Buffer | None]], itemsize: int, *, is_float: bool, fixed_depth: Any) -> Tree:
    """Choose how versions are stored.

    Args:
        samples: For each version some stretches, the same ones of each, up to `SAMPLE_BYTES` long; None for what could
            not be read.
        itemsize: Size of an element, 1, 2, 4 or 8.
        is_float: Whether the elements are floating point numbers.
        fixed_depth: For each version its depth if it is stored already and stays so, else -1.
    """
    n = len(samples)
    is_whole = np.array([all(part is not None for part in parts) for parts in samples])
    n_bytes = sum(memoryview(part).nbytes for part in samples[int(is_whole.argmax())] if part is not None)
    if not is_whole.any() or n_bytes == 0:
        return Tree(
            stored=[Stored(IN_FULL)] * n, transforms=(), depths=np.maximum(fixed_depth, 0).tolist(), shares=[1.0] * n
        )
    known = [version for version in range(n) if is_whole[version]]
    transforms = _transforms(n_bytes // len(samples[0]), itemsize, is_float=is_float)
    full = np.full(n, float(n_bytes))
    sizes = np.full((len(transforms), n, n), np.inf)

    def try_full(version: int) -> int:
        return sum(min(len(PLANES.encode_as(raw, itemsize, None)), len(raw)) for raw in _parts(samples[version]))

    def try_delta(pair: tuple[int, int, int]) -> int:
        hop, base, version = pair
        both = zip(_parts(samples[version]), _parts(samples[base]), strict=True)
        return sum(len(DELTA.encode_as(raw, itemsize, of, transforms[hop])) for raw, of in both)

    free = [version for version in known if fixed_depth[version] < 0]
    full[free] = list(threads.ordered_map(try_full, free))
    pairs = list(_promising(samples, itemsize, transforms, known, free, full))
    for (hop, base, version), size in zip(pairs, threads.ordered_map(try_delta, pairs), strict=True):
        if size < _CLEARLY_SMALLER * full[version]:
            sizes[hop, base, version] = size
    # Nobody knows how what is stored already was made; it is taken for what takes longest to decode.
    depth = np.asarray(fixed_depth, dtype=np.float64)
    costs = [_COSTS[transform] for transform in transforms]
    fixed = np.where(depth < 0, np.nan, PLAIN_COST + depth * max(costs))
    hops = [Hop(sizes=sizes[hop], cost=cost) for hop, cost in enumerate(costs)]
    stored = choose_tree(full, hops, full_cost=PLAIN_COST, most_cost=MOST_COST, price=PRICE * n_bytes, fixed=fixed)
    taken = [full[v] if each.base == IN_FULL else sizes[each.hop, each.base, v] for v, each in enumerate(stored)]
    return Tree(
        stored=stored,
        transforms=transforms,
        depths=_depths(stored, fixed_depth),
        shares=[float(size) / n_bytes for size in taken],
    )


def _depths(stored: Sequence[Stored], fixed_depth: Any) -> list[int]:
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
    # For what has not decayed, `DECAYED` would be tried as `PLAIN` once more.
    decays = [Transform.DECAYED] if itemsize == DECAYED_BYTES else []
    return [Transform.PLAIN, Transform.GROUPED, *decays]


def _promising(
    samples: Sequence[Sequence[Buffer | None]],
    itemsize: int,
    transforms: Sequence[Transform],
    known: Sequence[int],
    free: Sequence[int],
    full: Any,
) -> Iterator[tuple[int, int, int]]:
    """Give the hops, bases and versions that are worth trying."""
    plain = sum(memoryview(raw).nbytes for raw in _parts(samples[known[0]]))
    for version in free:
        estimates = {
            base: sum(
                memoryview(raw).nbytes * estimate_share(raw, itemsize, base=of)
                for raw, of in zip(_parts(samples[version]), _parts(samples[base]), strict=True)
            )
            for base in known
            if base != version
        }
        best = sorted(estimates, key=estimates.__getitem__)[:_MOST_TRIED]
        near = [base for base in best if estimates[base] < min(full[version], plain)]
        for base, hop in product(near, range(len(transforms))):
            yield hop, base, version


def _parts(sample: Sequence[Buffer | None]) -> list[Buffer]:
    return [part for part in sample if part is not None]
