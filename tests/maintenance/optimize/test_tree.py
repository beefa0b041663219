"""Choice of bases: bounds that hold whatever the sizes are."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.layout import MAX_DEPTH
from tensorcas_mlflow.maintenance._optimize_tree import IN_FULL, Hop, StoredVersion, choose_tree

FULL_COST, MOST_COST = 0.3, 3.1
NAN = float("nan")


def random_hops(seed: int, n: int) -> tuple[Any, list[Hop]]:
    rng = np.random.default_rng(seed)
    full, places = rng.uniform(0.6, 1.0, n), rng.uniform(0, 1, (n, 2))
    far = np.linalg.norm(places[:, None] - places[None], axis=2)
    slow = far + rng.uniform(0, 0.3, (n, n))
    return full, [Hop(sizes=slow * 1.2, cost=0.7), Hop(sizes=slow, cost=2.0)]


def total(full: Any, hops: list[Hop], tree: list[StoredVersion], *, free: Any = None) -> float:
    sizes = [
        full[v] if each.base == IN_FULL else hops[each.hop].sizes[each.base, v]
        for v, each in enumerate(tree)
        if free is None or free[v]
    ]
    return float(sum(sizes))


def cost(hops: list[Hop], tree: list[StoredVersion], version: int, roots: Any = None) -> float:
    taken, n_hops = 0.0, 0
    while tree[version].base != IN_FULL:
        taken += hops[tree[version].hop].cost
        version, n_hops = tree[version].base, n_hops + 1
        assert n_hops <= len(tree), "it is a ring"
    return taken + (FULL_COST if roots is None else roots[version])


def choose(full: Any, hops: list[Hop], **options: Any) -> list[StoredVersion]:
    return choose_tree(full, hops, full_cost=FULL_COST, most_cost=MOST_COST, **options)


@pytest.mark.parametrize("n", range(1, 34, 4))
def test_no_tree_is_worse_than_all_in_full_nor_deeper_than_allowed(n: int) -> None:
    full, hops = random_hops(n, n)

    tree = choose(full, hops)

    assert total(full, hops, tree) <= full.sum() * (1 + 1e-12)
    assert max(cost(hops, tree, version) for version in range(len(tree))) <= MOST_COST + 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_best_delta_tree_of_a_few_versions_is_found_or_nearly_found(seed: int) -> None:
    n = 4
    full, hops = random_hops(seed, n)
    ways = [StoredVersion(IN_FULL), *(StoredVersion(base, hop) for base, hop in product(range(n), range(len(hops))))]
    best = min(
        total(full, hops, list(tree))
        for tree in product(*([way for way in ways if way.base != version] for version in range(n)))
        if not has_ring(list(tree)) and all(cost(hops, list(tree), v) <= MOST_COST + 1e-9 for v in range(n))
    )

    assert total(full, hops, choose(full, hops)) <= 1.02 * best


def has_ring(tree: list[StoredVersion]) -> bool:
    for version in range(len(tree)):
        at, n_hops = version, 0
        while tree[at].base != IN_FULL:
            at, n_hops = tree[at].base, n_hops + 1
            if n_hops > len(tree):
                return True
    return False


def test_the_version_in_the_middle_becomes_the_base_of_those_before_and_behind() -> None:
    steps = np.arange(5)
    sizes = 0.2 * np.abs(steps[:, None] - steps[None]).astype(float)

    tree = choose(np.ones(5), [Hop(sizes=sizes, cost=2.0)])

    assert [each.base for each in tree] == [2, 2, IN_FULL, 2, 2]


@pytest.mark.parametrize("n", [MAX_DEPTH + 2, 24, 48])
def test_no_chain_of_cheap_deltas_is_longer_than_the_format_allows(n: int) -> None:
    """A pack with a deeper delta would be read as damaged."""
    apart = np.abs(np.arange(n)[:, None] - np.arange(n)).astype(float)
    tree = choose(np.full(n, 100.0), [Hop(sizes=2 * apart, cost=0.05)])

    assert max(cost([Hop(sizes=apart, cost=1)], tree, version, np.zeros(n)) for version in range(n)) <= MAX_DEPTH


def test_version_that_is_stored_already_stays_and_is_a_base_at_no_cost() -> None:
    sizes = np.full((3, 3), 0.5)

    tree = choose(np.ones(3), [Hop(sizes=sizes, cost=0.7)], fixed=np.array([0.3, NAN, NAN]))

    assert tree == [StoredVersion(IN_FULL), StoredVersion(0), StoredVersion(0)]


def test_version_that_takes_long_to_read_is_no_base() -> None:
    sizes = np.full((2, 2), 0.5)

    tree = choose(np.ones(2), [Hop(sizes=sizes, cost=0.7)], fixed=np.array([2.9, NAN]))

    assert tree == [StoredVersion(IN_FULL), StoredVersion(IN_FULL)]


def test_a_hop_is_taken_for_what_it_spares_and_not_for_less_than_its_price() -> None:
    hops = [Hop(sizes=np.full((2, 2), 0.6), cost=0.7), Hop(sizes=np.full((2, 2), 0.55), cost=2.0)]
    fixed = np.array([0.3, NAN])

    assert choose(np.ones(2), hops, fixed=fixed)[1] == StoredVersion(0, 1)
    assert choose(np.ones(2), hops, fixed=fixed, price=0.1)[1] == StoredVersion(0, 0)
    assert choose(np.ones(2), hops, fixed=fixed, price=1.0)[1] == StoredVersion(IN_FULL)


def test_without_a_way_to_make_deltas_all_are_stored_in_full() -> None:
    assert choose(np.ones(3), []) == [StoredVersion(IN_FULL)] * 3


def test_version_with_a_bound_of_its_own_is_read_within_it_and_is_the_base_of_others() -> None:
    steps = np.arange(9)
    sizes = 0.11 * np.abs(steps[:, None] - steps[None]).astype(float)
    bound = np.where(steps == 8, 1.1, MOST_COST)
    hops = [Hop(sizes=sizes, cost=0.7)]

    tree = choose_tree(np.ones(9), hops, full_cost=0.3, most_cost=bound)

    assert cost(hops, tree, 8) <= 1.1
    assert any(cost(hops, tree, version) > 1.1 for version in range(8))
    assert all(cost(hops, tree, version) <= MOST_COST + 1e-9 for version in range(9))


def test_version_whose_decoding_has_a_high_price_is_stored_in_full() -> None:
    steps = np.arange(5)
    sizes = 0.2 * np.abs(steps[:, None] - steps[None]).astype(float)
    price = np.where(steps == 4, 2.0, 0.0)

    tree = choose(np.ones(5), [Hop(sizes=sizes, cost=2.0)], price=price)

    assert tree[4] == StoredVersion(IN_FULL)
    assert sum(each.base == IN_FULL for each in tree) <= 2
