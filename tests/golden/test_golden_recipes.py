"""Recipes that an earlier release wrote make the same chunks in every later one."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest

from tensorcas_mlflow.layout import list_recipes, read_recipe
from tensorcas_mlflow.maintenance import plan_gc, plan_optimize, plan_repair, verify
from tensorcas_mlflow.store import Store
from tests.golden.stores import copied
from tests.recipes.made import digests_of, held

EXPECTED = json.loads((Path(__file__).parent / "v1_recipes/expected.json").read_text())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return copied("v1_recipes", "root", tmp_path)


def check_holds(store: Store) -> None:
    """Check that both checkpoints load bit for bit, and that all is sound."""
    assert {ref.key for ref in store.checkpoints()} == EXPECTED.keys()
    for key, expected in EXPECTED.items():
        ref = store.ref(key)
        assert ref is not None
        found = store.read_tensors(store.manifest(ref))
        assert {name: sha256(array.tobytes()).hexdigest() for name, array in found.items()} == expected
    assert verify(store, full=True).problems == ()


def test_what_golden_recipes_make_is_read_bit_for_bit(store: Store) -> None:
    for ref in store.checkpoints():
        assert digests_of(store, ref).isdisjoint(held(store.backend))
    check_holds(store)


def test_golden_recipes_are_of_two_functions(store: Store) -> None:
    recipes = [read_recipe(store.backend, name) for name in list_recipes(store.backend)]

    assert {each.function for recipe in recipes for each in recipe.derived} == {"cast", "permute"}
    assert {each.kind for each in recipes} == {"recipe"}


def test_golden_store_of_recipes_is_optimized_and_collected(store: Store) -> None:
    """The recipe goes whose inputs nothing else needs, and which take more room than what it makes."""
    recipes = list_recipes(store.backend)
    plan_gc(Store.open_backend(store.backend), grace_s=0, max_waste=0).execute()
    assert list_recipes(store.backend) == recipes
    check_holds(Store.open_backend(store.backend))

    plan_optimize(Store.open_backend(store.backend)).execute()

    assert len(list_recipes(store.backend)) == 1
    check_holds(Store.open_backend(store.backend))


def test_repair_of_the_golden_store_of_recipes_finds_nothing_to_do(store: Store) -> None:
    assert plan_repair(store).is_empty
