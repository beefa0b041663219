"""Collections keep what recipes take, and delete recipes that make nothing needed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tensorcas_mlflow.backends import LocalBackend, MemoryBackend
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.errors import CorruptError
from tensorcas_mlflow.layout import RefTarget, read_recipe, recipe_key
from tensorcas_mlflow.maintenance import _gc, plan_gc, verify
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import condemned_bytes, list_packs, read_pack_table
from tests.crash.world import CHUNK_BYTES, chunk, derive
from tests.derived.made import check_loads, save
from tests.maintenance.repair.damaging import overwrite
from tests.recipes.made import Family, collect, digests_of, drop, held, no_search, optimize, recipes_of

CHUNK = 64 << 10


@pytest.fixture(params=["memory", "objects", "files"])
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Family:
    if request.param == "files":
        return Family(LocalBackend(tmp_path)).optimized()
    return Family(MemoryBackend(is_remote=request.param == "objects")).optimized()


def test_inputs_of_a_recipe_outlive_the_checkpoint_that_they_were_saved_with(family: Family) -> None:
    drop(family.store, family.of_model)

    collect(family.store)
    collect(family.store)

    check_loads(family.store, family.of_copy, family.copy)


def test_recipe_and_its_inputs_go_with_the_last_checkpoint_that_needs_it(family: Family) -> None:
    drop(family.store, family.of_model)
    drop(family.store, family.of_copy)

    plan = plan_gc(Store.open_backend(family.store.backend), grace_s=0)
    report = plan.execute()

    assert "1 recipe to delete" in str(plan)
    assert report.n_recipes == 1
    assert "1 recipe" in str(report)
    assert recipes_of(family.store) == []
    assert held(family.store.backend) == set()


def test_recipe_goes_and_its_inputs_stay_where_a_checkpoint_needs_them(family: Family) -> None:
    drop(family.store, family.of_copy)

    collect(family.store)

    assert recipes_of(family.store) == []
    check_loads(family.store, family.of_model, family.model)


def test_plan_without_a_ref_counts_the_inputs_that_it_alone_keeps(family: Family) -> None:
    drop(family.store, family.of_model)
    store = Store.open_backend(family.store.backend)

    plan = plan_gc(store, without=[family.of_copy.key])

    assert plan.freed_bytes > 0.5 * sum(array.nbytes for array in family.model.values())
    assert plan_gc(store).is_empty or plan_gc(store).freed_bytes < plan.freed_bytes
    check_loads(store, family.of_copy, family.copy)


def test_collection_is_at_rest_after_an_optimization(family: Family) -> None:
    assert plan_gc(Store.open_backend(family.store.backend), grace_s=0).is_empty


def test_damaged_recipe_stops_a_collection(family: Family) -> None:
    [name] = recipes_of(family.store)
    blob = bytearray(family.store.backend.get(recipe_key(name)))
    blob[len(blob) // 2] ^= 1
    overwrite(family.store.backend, recipe_key(name), bytes(blob))
    before = held(family.store.backend)

    with pytest.raises(CorruptError, match=r"recipes/.*tensorcas repair"):
        plan_gc(Store.open_backend(family.store.backend), grace_s=0)

    assert held(family.store.backend) == before


def test_condemned_recipe_stands_for_nothing(family: Family) -> None:
    [name] = recipes_of(family.store)
    with no_search():
        again = save(family.store, family.copy, run_id="again")
    key = f"condemned/{'a' * 32}"
    family.store.backend.put_new(key, [condemned_bytes(frozenset(), frozenset(), frozenset({name}))])

    plan_gc(Store.open_backend(family.store.backend), max_waste=0).execute()

    assert digests_of(family.store, again) <= held(family.store.backend)
    check_loads(family.store, again, family.copy)


def test_finished_list_of_a_needed_recipe_leaves_its_chunks_in_packs(family: Family) -> None:
    """Its collector died between its second survey, which spared the recipe, and the deletion of its list."""
    [name] = recipes_of(family.store)
    key = f"condemned/{'a' * 32}"
    family.store.backend.put_new(key, [condemned_bytes(frozenset(), frozenset(), frozenset({name}))])

    collect(family.store)

    assert family.store.backend.stat(key) is None
    assert recipes_of(family.store) == []
    assert digests_of(family.store, family.of_copy) <= held(family.store.backend)
    check_loads(family.store, family.of_copy, family.copy)


def test_list_of_a_recipe_that_cannot_be_evaluated_stays(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    [name] = recipes_of(family.store)
    key = f"condemned/{'a' * 32}"
    family.store.backend.put_new(key, [condemned_bytes(frozenset(), frozenset(), frozenset({name}))])
    with monkeypatch.context() as patch:
        patch.setattr("tensorcas_mlflow.maintenance._gc_copy.made_payloads", lambda *_: iter(()))
        collect(family.store)

    assert recipes_of(family.store) == [name]
    assert family.store.backend.stat(key) is not None
    check_loads(family.store, family.of_copy, family.copy)


def test_save_under_way_keeps_its_pack_though_a_recipe_makes_its_chunks(family: Family) -> None:
    with no_search():
        save(family.store, family.copy, run_id="again")
        store = Store.open_backend(family.store.backend)
        with store.write_checkpoint(family.copy) as pending:
            plan_gc(Store.open_backend(family.store.backend), max_waste=0).execute()
            assert digests_of(family.store, family.of_copy) <= held(family.store.backend)
            ref = pending.commit(RefTarget(run_id="third", step=0))

    check_loads(family.store, ref, family.copy)


def test_chunks_stay_where_a_recipe_lacks_an_input(family: Family) -> None:
    with no_search():
        again = save(family.store, family.copy, run_id="again")
    needed = {digest.tobytes() for digest in Store.open_backend(family.store.backend).manifest(family.of_model).digests}
    drop(family.store, family.of_model)
    packs = family.store.backend
    for info in list(packs.list("packs")):
        name = info.key.removeprefix("packs/").removesuffix(".pack")
        if needed & {entry["digest"].tobytes() for entry in read_pack_table(packs, name)}:
            packs.delete(info.key)

    plan_gc(Store.open_backend(packs), grace_s=0, max_waste=0).execute()

    assert digests_of(family.store, again) <= held(packs)
    assert recipes_of(family.store) == []
    check_loads(family.store, again, family.copy)
    assert verify(Store.open_backend(packs), full=True).problems == ()


def test_plan_says_which_bytes_stay_for_recipes(family: Family) -> None:
    drop(family.store, family.of_model)

    plan = plan_gc(Store.open_backend(family.store.backend), grace_s=0)

    assert plan.recipe_bytes > 0.5 * sum(array.nbytes for array in family.model.values())
    assert "stay for recipes" in str(plan)


def test_optimization_replaces_a_recipe_whose_inputs_nothing_else_needs(family: Family) -> None:
    """A bfloat16 copy would keep the model of twice its size."""
    drop(family.store, family.of_model)

    optimize(family.store)

    assert recipes_of(family.store) == []
    assert held(family.store.backend) == digests_of(family.store, family.of_copy)
    check_loads(family.store, family.of_copy, family.copy)


def test_only_the_inputs_of_needed_rows_are_kept(family: Family) -> None:
    """Another checkpoint needs one tensor of those that the recipe makes."""
    name = "layers.0.q.weight"
    with no_search():
        one = save(family.store, {name: family.copy[name]}, run_id="one")
    collect(family.store)
    drop(family.store, family.of_model)
    drop(family.store, family.of_copy)

    collect(family.store)

    inputs = {
        digest(family.model[name].tobytes()[at : at + CHUNK]) for at in range(0, family.model[name].nbytes, CHUNK)
    }
    assert held(family.store.backend) == inputs
    check_loads(family.store, one, {name: family.copy[name]})


def test_one_of_two_equal_recipes_goes(family: Family) -> None:
    """Two optimizations have found the same function."""
    [name] = recipes_of(family.store)
    again = dataclasses.replace(read_recipe(family.store.backend, name), metadata={"nonce": "another"})
    family.store.backend.put_new(recipe_key(f"{again.digest}.{'0' * 8}"), [again.to_blob()])

    collect(family.store)

    assert len(recipes_of(family.store)) == 1
    check_loads(family.store, family.of_copy, family.copy)


def test_collection_ends_where_inputs_and_products_share_a_pack(family: Family) -> None:
    """A rewriting copies the inputs, and nothing that the recipe makes of them."""
    with no_search():
        both = {**{f"in.{name}": array for name, array in family.model.items()}, **family.copy}
        of_both = save(family.store, {**both, "garbage": family.model["embed.weight"] * 2}, run_id="both")
        again = save(family.store, both, run_id="again")
    for ref in (of_both, family.of_model, family.of_copy):
        drop(family.store, ref)

    collect(family.store)
    collect(family.store)

    assert plan_gc(Store.open_backend(family.store.backend), grace_s=0, max_waste=0).is_empty
    assert digests_of(family.store, again) - held(family.store.backend)
    check_loads(family.store, again, both)


@pytest.mark.parametrize("is_remote", [False, True])
def test_pack_that_holds_inputs_and_products_is_rewritten_without_the_products(is_remote: bool) -> None:
    store = Store.init_backend(MemoryBackend(is_remote=is_remote), chunk_bytes=CHUNK_BYTES)
    tensors = {letter: chunk(letter) for letter in "abAB"}
    ref = save(store, tensors)
    derive(Store.open_backend(store.backend), "AB")

    collect(store)

    assert held(store.backend) == {digest(chunk(letter).tobytes()) for letter in "ab"}
    assert plan_gc(Store.open_backend(store.backend), grace_s=0, max_waste=0).is_empty
    check_loads(store, ref, tensors)


def test_recipe_that_appears_after_the_list_stands_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another collector, which has not seen the recipe, may be about to delete its input."""
    store = Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)
    product = {"A": chunk("A")}
    save(store, {"a": chunk("a")})
    dropped = save(store, product, 1)
    drop(store, dropped)
    plan = plan_gc(Store.open_backend(store.backend), grace_s=0)
    assert len(plan.packs) == 1
    ref = save(Store.open_backend(store.backend), product, 2)  # relies on the pack that the plan names
    condemn = _gc._condemn

    def and_write_a_recipe(*args: Any) -> str:
        key = condemn(*args)
        derive(Store.open_backend(store.backend), "A")
        return key

    monkeypatch.setattr(_gc, "_condemn", and_write_a_recipe)
    report = plan.execute()

    assert len(recipes_of(store)) == 1
    assert report.n_spared == 1
    assert digest(product["A"].tobytes()) in held(store.backend)
    check_loads(store, ref, product)


def test_recipe_stands_for_nothing_when_another_collector_has_condemned_its_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)
    save(store, {"a": chunk("a")})
    [(of_input, _)] = list_packs(store.backend)
    product = {"A": chunk("A")}
    ref = save(store, product, 1)
    derive(Store.open_backend(store.backend), "A")
    plan = plan_gc(Store.open_backend(store.backend), grace_s=0)
    assert len(plan.packs) == 1
    condemn = _gc._condemn

    def beside_another(*args: Any) -> str:
        store.backend.put_new(f"condemned/{'a' * 32}", [condemned_bytes(frozenset({of_input}), frozenset())])
        return condemn(*args)

    monkeypatch.setattr(_gc, "_condemn", beside_another)
    report = plan.execute()

    assert report.n_spared == 1
    assert digest(product["A"].tobytes()) in held(store.backend)
    check_loads(store, ref, product)
