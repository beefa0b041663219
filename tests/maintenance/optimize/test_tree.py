"""Choice of bases: bounds that hold whatever the sizes are."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.layout.packs import MAX_DEPTH
from tensorcas_mlflow.maintenance._optimize_tree import IN_FULL, choose_bases
from tensorcas_mlflow.store import MAX_PASSES


def random_sizes(seed: int, n: int) -> tuple[Any, Any, Any]:
    """Return sizes in full, sizes as deltas, and costs of decoding these."""
    rng = np.random.default_rng(seed)
    full, places = rng.uniform(0.6, 1.0, n), rng.uniform(0, 1, (n, 2))
    far = np.linalg.norm(places[:, None] - places[None], axis=2)
    return full, far + rng.uniform(0, 0.1, (n, n)), np.minimum(1.0, 3 * far)


def line(n: int, each: float) -> Any:
    """Return the sizes of deltas between the steps of a training that move by equal amounts."""
    return each * np.abs(np.arange(n)[:, None] - np.arange(n)).astype(float)


def total(full: Any, sizes: Any, tree: Any) -> float:
    return float(sum(full[at] if base == IN_FULL else sizes[base, at] for at, base in enumerate(tree)))


def cost(passes: Any, tree: Any, at: int) -> float:
    taken, n_hops = 0.0, 0
    while tree[at] != IN_FULL:
        taken, at, n_hops = taken + passes[tree[at], at], tree[at], n_hops + 1
        assert n_hops <= len(tree), "it is a ring"
    return taken


@pytest.mark.parametrize("n", range(1, 34, 4))
def test_no_tree_is_worse_than_all_in_full_nor_slower_than_allowed(n: int) -> None:
    full, sizes, passes = random_sizes(n, n)

    tree = choose_bases(full, sizes, passes)

    assert total(full, sizes, tree) <= full.sum() * (1 + 1e-12)
    assert max(cost(passes, tree, at) for at in range(n)) <= MAX_PASSES


@pytest.mark.parametrize("seed", range(4))
def test_best_tree_of_a_few_versions_is_found_or_nearly_found(seed: int) -> None:
    assert share_of_best(seed) <= 1.02


def test_trees_take_little_more_than_the_best_ones_on_the_whole() -> None:
    """A single one may take a tenth more: the next base is the one that gains most now."""
    assert np.mean([share_of_best(seed) for seed in range(40)]) <= 1.015


def share_of_best(seed: int, n: int = 4) -> float:
    """Return the size of a tree, as a multiple of that of the best one."""
    full, sizes, passes = random_sizes(seed, n)
    best = min(
        total(full, sizes, tree)
        for tree in product(range(IN_FULL, n), repeat=n)
        if not has_ring(tree) and all(cost(passes, tree, at) <= MAX_PASSES for at in range(n))
    )
    return total(full, sizes, choose_bases(full, sizes, passes)) / best


def has_ring(tree: Any) -> bool:
    for start in range(len(tree)):
        at, n_hops = start, 0
        while tree[at] != IN_FULL:
            at, n_hops = tree[at], n_hops + 1
            if n_hops > len(tree):
                return True
    return False


def test_the_version_in_the_middle_becomes_the_base_of_those_before_and_behind() -> None:
    tree = choose_bases(np.ones(5), line(5, 0.2), np.full((5, 5), 2.0))

    assert tree == [2, 2, IN_FULL, 2, 2]


@pytest.mark.parametrize("n", [MAX_DEPTH + 2, 80, 140])
def test_no_chain_of_cheap_deltas_is_longer_than_the_format_allows(n: int) -> None:
    """A pack with a deeper delta would be read as damaged."""
    tree = choose_bases(np.full(n, 1000.0), line(n, 2.0), np.full((n, n), 1e-3))

    assert max(cost(np.ones((n, n)), tree, at) for at in range(n)) <= MAX_DEPTH


def test_version_that_is_stored_already_stays_and_is_a_base_at_no_cost() -> None:
    tree = choose_bases(np.ones(3), np.full((3, 3), 0.5), np.ones((3, 3)), fixed=np.array([0, -1, -1]))

    assert tree == [IN_FULL, 0, 0]


def test_version_that_takes_long_to_read_is_no_base() -> None:
    tree = choose_bases(np.ones(2), np.full((2, 2), 0.5), np.ones((2, 2)), fixed=np.array([2, -1]))

    assert tree == [IN_FULL, IN_FULL]


def test_nearer_base_is_taken_for_what_it_saves_and_not_for_less_than_its_price() -> None:
    sizes = np.full((3, 3), np.inf)
    sizes[0, 1], sizes[0, 2], sizes[1, 2] = 0.5, 0.6, 0.55
    fixed = np.array([0, -1, -1])

    assert choose_bases(np.ones(3), sizes, np.ones((3, 3)), fixed=fixed, price=0.0) == [IN_FULL, 0, 1]
    assert choose_bases(np.ones(3), sizes, np.ones((3, 3)), fixed=fixed, price=0.1) == [IN_FULL, 0, 0]
    assert choose_bases(np.ones(3), sizes, np.ones((3, 3)), fixed=fixed, price=1.0) == [IN_FULL] * 3


def test_version_to_be_restored_fast_has_one_base_at_most_and_others_have_more() -> None:
    is_shallow = np.arange(9) == 8
    passes = np.full((9, 9), 0.5)

    tree = choose_bases(np.ones(9), line(9, 0.11), passes, is_shallow=is_shallow)

    assert cost(np.ones((9, 9)), tree, 8) <= 1
    assert any(cost(np.ones((9, 9)), tree, at) > 1 for at in range(8))


def test_version_to_be_restored_fast_is_stored_in_full_unless_a_delta_saves_a_third() -> None:
    is_shallow = np.array([False, True])
    passes = np.ones((2, 2))

    assert choose_bases(np.array([0.5, 1.0]), line(2, 0.7), passes, is_shallow=is_shallow)[1] == IN_FULL
    assert choose_bases(np.array([0.5, 1.0]), line(2, 0.6), passes, is_shallow=is_shallow)[1] == 0
