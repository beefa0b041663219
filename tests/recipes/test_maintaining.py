"""Verification, repair, copies and figures of stores with recipes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tensorcas_mlflow.backends import LocalBackend, MemoryBackend
from tensorcas_mlflow.errors import BackendError, FormatError
from tensorcas_mlflow.layout import Manifest, list_recipes, read_recipe, recipe_key
from tensorcas_mlflow.maintenance import disk_usage, find_shares, plan_gc, plan_repair, store_stats, verify
from tensorcas_mlflow.store import Store
from tests.derived.made import check_loads, save
from tests.derived.test_maintenance import flip_chunk
from tests.layout.test_recipe import named, with_head
from tests.maintenance.copy.copying import copy
from tests.maintenance.repair.damaging import overwrite
from tests.recipes.made import Family, collect, digests_of, drop, held, no_search, optimize, recipes_of

NAME = "embed.weight"


@pytest.fixture(params=["memory", "objects", "files"])
def family(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Family:
    monkeypatch.setenv("TENSORCAS_CACHE", "off")  # a cached chunk is read though its pack is damaged
    if request.param == "files":
        return Family(LocalBackend(tmp_path)).optimized()
    return Family(MemoryBackend(is_remote=request.param == "objects")).optimized()


def fresh(family: Family) -> Store:
    return Store.open_backend(family.store.backend)


def damage_recipe(family: Family) -> str:
    """Change a byte of the recipe, and return its key."""
    [name] = recipes_of(family.store)
    key = recipe_key(name)
    blob = bytearray(family.store.backend.get(key))
    blob[len(blob) // 2] ^= 1
    overwrite(family.store.backend, key, bytes(blob))
    return key


def backup_of(family: Family) -> Store:
    backup = Store.init_backend(MemoryBackend(), chunk_bytes=family.store.chunk_bytes, store_id=family.store.id)
    assert copy(fresh(family), backup).failed == ()
    return backup


@pytest.mark.parametrize("full", [False, True])
def test_sound_store_has_no_problem(family: Family, full: bool) -> None:
    assert verify(fresh(family), full=full).problems == ()


def test_verification_names_the_tensors_that_a_damaged_input_makes(family: Family) -> None:
    flip_chunk(family.store, family.model[NAME].tobytes()[: 64 << 10])

    problems = verify(fresh(family), full=True).problems

    [of_copy] = [each for each in problems if each.checkpoint == "run copy step 0"]
    [of_model] = [each for each in problems if each.checkpoint == "run model step 0"]
    assert of_model.tensors == (NAME,)
    assert NAME in of_copy.tensors
    assert of_copy.key is not None
    assert of_copy.key.startswith("recipes/")


def test_verification_names_a_damaged_recipe_and_the_checkpoint_that_needs_it(family: Family) -> None:
    key = damage_recipe(family)

    problems = verify(fresh(family)).problems

    assert key in {each.key for each in problems}
    [suffers] = [each for each in problems if each.checkpoint == "run copy step 0"]
    assert NAME in suffers.tensors


def test_full_verification_finds_a_recipe_that_makes_other_bytes(family: Family) -> None:
    """Another release's, or a forged one: the digests in it are right, and the function is not."""
    lie(family)

    assert verify(fresh(family)).problems == ()
    [problem] = [each for each in verify(fresh(family), full=True).problems if each.checkpoint is not None]
    assert len(problem.tensors) == 2


def lie(family: Family) -> str:
    """Put a recipe in the place of the sound one that says the same of its inputs in another order; return its key."""
    [name] = recipes_of(family.store)
    recipe = read_recipe(family.store.backend, name)
    one, other = [each for each in recipe.derived if recipe.columns.shape(each.row) == (256, 256)][:2]
    swapped = {one.row: other.inputs, other.row: one.inputs}
    derived = tuple(dataclasses.replace(each, inputs=swapped.get(each.row, each.inputs)) for each in recipe.derived)
    forged = dataclasses.replace(recipe, derived=derived)
    key = recipe_key(f"{forged.digest}.{'0' * 8}")
    family.store.backend.delete(recipe_key(name))
    family.store.backend.put_new(key, [forged.to_blob()])
    return key


def test_repair_puts_a_recipe_that_makes_other_bytes_into_quarantine(family: Family) -> None:
    backup = backup_of(family)
    key = lie(family)

    plan = plan_repair(fresh(family), sources=[backup])
    report = plan.execute()

    assert report.recipes_gone == (key,)
    assert report.is_whole
    check_loads(family.store, family.of_copy, family.copy)


def test_repair_takes_no_wrong_recipe_from_a_backup_that_has_the_same_one(family: Family) -> None:
    backup = backup_of(family)
    key = lie(family)
    backup.backend.put_new(key, [family.store.backend.get(key)])

    report = plan_repair(fresh(family), sources=[backup]).execute()

    assert report.restored == ()
    assert report.recipes_gone == (key,)
    assert report.is_whole
    check_loads(family.store, family.of_copy, family.copy)


def test_repair_leaves_a_damaged_recipe_that_the_storage_does_not_give(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup = backup_of(family)
    key = damage_recipe(family)
    plan = plan_repair(fresh(family), sources=[backup])
    get = type(family.store.backend).get

    def starved(backend: Any, asked: str, **how: Any) -> bytes:
        if asked == key:
            raise BackendError("read", asked, "the storage does not answer")
        return get(backend, asked, **how)

    with monkeypatch.context() as patch:
        patch.setattr(type(family.store.backend), "get", starved)
        report = plan.execute()

    assert report.left[key] == "the storage does not answer"
    assert family.store.backend.stat(key) is not None
    assert list(family.store.backend.list("quarantine")) == []
    assert plan_repair(fresh(family), sources=[backup]).execute().is_whole
    check_loads(family.store, family.of_copy, family.copy)


def test_repair_takes_chunks_from_a_backup_with_a_recipe_of_a_later_release(family: Family) -> None:
    backup = backup_of(family)
    blob = with_head(read_recipe(family.store.backend, recipes_of(family.store)[0]), format=99)
    backup.backend.put_new(recipe_key(named(blob)), [blob])
    flip_chunk(family.store, family.model[NAME].tobytes()[: 64 << 10])
    with no_search():
        lost = save(family.store, {"lost": family.model[NAME] * 3}, run_id="lost")
    flip_chunk(family.store, (family.model[NAME] * 3).tobytes()[: 64 << 10])

    plan = plan_repair(fresh(family), sources=[backup])
    report = plan.execute()

    assert [loss.key for loss in report.losses] == [lost.key]
    drop(family.store, lost)
    check_loads(family.store, family.of_copy, family.copy)


def test_repair_heals_an_input_from_a_backup(family: Family) -> None:
    backup = backup_of(family)
    flip_chunk(family.store, family.model[NAME].tobytes()[: 64 << 10])

    report = plan_repair(fresh(family), sources=[backup]).execute()

    assert report.is_whole
    check_loads(family.store, family.of_copy, family.copy)
    check_loads(family.store, family.of_model, family.model)


def test_repair_without_a_backup_names_the_tensors_that_a_lost_input_makes(family: Family) -> None:
    flip_chunk(family.store, family.model[NAME].tobytes()[: 64 << 10])

    plan = plan_repair(fresh(family))

    assert {loss.checkpoint for loss in plan.losses} == {"run copy step 0", "run model step 0"}
    assert all(NAME in loss.tensors for loss in plan.losses)


def test_repair_of_other_damage_leaves_what_recipes_make(family: Family) -> None:
    with no_search():
        save(family.store, {"x": family.model[NAME] * 2}, run_id="other")
    backup = backup_of(family)
    flip_chunk(family.store, (family.model[NAME] * 2).tobytes()[: 64 << 10])

    report = plan_repair(fresh(family), sources=[backup]).execute()

    assert report.is_whole
    assert report.n_healed == 1
    assert not digests_of(family.store, family.of_copy) <= held(family.store.backend)
    check_loads(family.store, family.of_copy, family.copy)


def test_repair_takes_a_damaged_recipe_from_a_store_that_has_it(family: Family, tmp_path: Path) -> None:
    [name] = recipes_of(family.store)
    other = Store.init_backend(MemoryBackend(), chunk_bytes=family.store.chunk_bytes, store_id=family.store.id)
    other.backend.put_new(recipe_key(name), [family.store.backend.get(recipe_key(name))])
    key = damage_recipe(family)

    plan = plan_repair(fresh(family), sources=[other])
    report = plan.execute()

    assert key in report.restored
    assert report.is_whole
    assert family.store.backend.stat(key) is None
    check_loads(family.store, family.of_copy, family.copy)
    assert plan_gc(fresh(family), grace_s=0).recipes == ()


def test_repair_takes_what_a_damaged_recipe_made_from_a_backup(family: Family) -> None:
    backup = backup_of(family)
    key = damage_recipe(family)

    plan = plan_repair(fresh(family), sources=[backup])
    report = plan.execute()

    assert [loss.checkpoint for loss in plan.losses] == ["run copy step 0"]
    assert report.recipes_gone == (key,)
    assert report.is_whole
    check_loads(family.store, family.of_copy, family.copy)


def test_repair_without_a_backup_puts_a_damaged_recipe_into_quarantine_and_names_the_loss(family: Family) -> None:
    key = damage_recipe(family)
    bytes_before = family.store.backend.get(key)

    report = plan_repair(fresh(family)).execute()

    assert report.recipes_gone == (key,)
    assert [loss.checkpoint for loss in report.losses] == ["run copy step 0"]
    [piece] = family.store.backend.list("quarantine")
    assert family.store.backend.get(piece.key).endswith(bytes_before)
    drop(family.store, family.of_copy)
    collect(family.store)
    check_loads(family.store, family.of_model, family.model)


def test_repair_of_a_sound_store_finds_nothing(family: Family) -> None:
    plan = plan_repair(fresh(family))

    assert plan.is_empty
    assert str(plan) == "nothing is damaged"


@pytest.mark.parametrize("is_remote", [False, True])
def test_copy_holds_what_recipes_make(family: Family, is_remote: bool) -> None:
    """It is another store, with inputs of its own or none, and finds recipes by its own optimizations."""
    there = Store.init_backend(MemoryBackend(is_remote=is_remote), chunk_bytes=family.store.chunk_bytes)
    drop(family.store, family.of_model)

    report = copy(fresh(family), there)

    assert report.failed == ()
    [ref] = there.checkpoints()
    assert digests_of(there, ref) <= held(there.backend)
    check_loads(there, ref, family.copy)


def test_copy_reports_what_cannot_be_made(family: Family) -> None:
    flip_chunk(family.store, family.model[NAME].tobytes()[: 64 << 10])
    there = Store.init_backend(MemoryBackend(), chunk_bytes=family.store.chunk_bytes)

    report = copy(fresh(family), there)

    assert sorted(failure.what for failure in report.failed) == ["run copy step 0", "run model step 0"]


def test_copied_store_is_optimized_again(family: Family) -> None:
    there = Store.init_backend(MemoryBackend(), chunk_bytes=family.store.chunk_bytes)
    copy(fresh(family), there)

    assert optimize(there).n_recipes == 1

    [ref] = [ref for ref in there.checkpoints() if ref.run_id == "copy"]
    check_loads(there, ref, family.copy)


def test_figures_count_inputs_for_the_checkpoints_that_are_made_of_them(family: Family) -> None:
    store = fresh(family)
    both = find_shares(store, "run")
    alone = {share.run_id: share.exclusive_bytes for share in both.shares}
    drop(family.store, family.of_model)
    of_copy = find_shares(fresh(family), "run")

    assert alone["copy"] < 20_000
    assert alone["model"] < 20_000
    assert both.shared_bytes > 0.5 * sum(array.nbytes for array in family.model.values())
    assert of_copy.needed_bytes > both.shared_bytes


def test_statistics_count_the_bytes_of_recipes(family: Family) -> None:
    recipes = sum(list_recipes(family.store.backend).values())
    manifests = sum(info.size for info in family.store.backend.list("manifests"))

    assert disk_usage(family.store.backend).manifests == manifests + recipes
    assert store_stats(fresh(family)).checkpoints == 2


def test_recipe_is_refused_as_a_manifest(family: Family) -> None:
    [name] = recipes_of(family.store)
    blob = family.store.backend.get(recipe_key(name))

    with pytest.raises(FormatError, match="it is a recipe"):
        Manifest.from_blob(blob, name)
