"""Verification, repair, copies and figures of stores with forms."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tensorcas_mlflow.backends import LocalBackend, MemoryBackend
from tensorcas_mlflow.layout import ref_bytes
from tensorcas_mlflow.layout.manifests import read_form
from tensorcas_mlflow.maintenance import find_shares, plan_gc, plan_repair, store_stats, verify
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import list_packs, read_pack_table
from tests.derived.made import check_loads, save
from tests.derived.test_maintenance import flip_chunk
from tests.forms.made import Family, collect, digests_of, drop, form_in, held, no_search, optimize
from tests.maintenance.copy.copying import copy
from tests.maintenance.repair.damaging import overwrite

NAME = "embed.weight"


@pytest.fixture(params=["memory", "objects", "files"])
def family(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Family:
    monkeypatch.setenv("TENSORCAS_CACHE", "off")  # a cached chunk is read though its pack is damaged
    if request.param == "files":
        return Family(LocalBackend(tmp_path)).optimized()
    return Family(MemoryBackend(is_remote=request.param == "objects")).optimized()


def fresh(family: Family) -> Store:
    return Store.open_backend(family.store.backend)


def backup_of(family: Family) -> Store:
    backup = Store.init_backend(MemoryBackend(), chunk_bytes=family.store.chunk_bytes, store_id=family.store.id)
    assert copy(fresh(family), backup).failed == ()
    return backup


@pytest.mark.long
@pytest.mark.parametrize("full", [False, True])
def test_sound_store_has_no_problem(family: Family, full: bool) -> None:
    assert verify(fresh(family), full=full).problems == ()


@pytest.mark.long
def test_verification_names_the_tensors_that_a_damaged_input_makes(family: Family) -> None:
    flip_chunk(family.store, family.model[NAME].tobytes()[: 64 << 10])

    problems = verify(fresh(family), full=True).problems

    [of_copy] = [each for each in problems if each.checkpoint == "run copy step 0"]
    [of_model] = [each for each in problems if each.checkpoint == "run model step 0"]
    assert of_model.tensors == (NAME,)
    assert NAME in of_copy.tensors
    assert of_copy.key is not None


@pytest.mark.long
def test_repair_heals_an_input_from_a_backup(family: Family) -> None:
    backup = backup_of(family)
    flip_chunk(family.store, family.model[NAME].tobytes()[: 64 << 10])

    report = plan_repair(fresh(family), sources=[backup]).execute()

    assert report.is_whole
    check_loads(family.store, family.of_copy, family.copy)
    check_loads(family.store, family.of_model, family.model)


@pytest.mark.long
def test_repair_without_a_backup_names_the_tensors_that_a_lost_input_makes(family: Family) -> None:
    flip_chunk(family.store, family.model[NAME].tobytes()[: 64 << 10])

    plan = plan_repair(fresh(family))

    assert {loss.checkpoint for loss in plan.losses} == {"run copy step 0", "run model step 0"}
    assert all(NAME in loss.tensors for loss in plan.losses)


@pytest.mark.long
def test_repair_of_other_damage_leaves_what_forms_make(family: Family) -> None:
    with no_search():
        save(family.store, {"x": family.model[NAME] * 2}, run_id="other")
    backup = backup_of(family)
    flip_chunk(family.store, (family.model[NAME] * 2).tobytes()[: 64 << 10])

    report = plan_repair(fresh(family), sources=[backup]).execute()

    assert report.is_whole
    assert report.n_healed == 1
    assert not digests_of(family.store, family.of_copy) <= held(family.store.backend)
    check_loads(family.store, family.of_copy, family.copy)


def test_repair_of_a_sound_store_finds_nothing(family: Family) -> None:
    plan = plan_repair(fresh(family))

    assert plan.is_empty
    assert str(plan) == "nothing is damaged"


@pytest.mark.long
@pytest.mark.parametrize("is_remote", [False, True])
def test_copy_holds_what_forms_make(family: Family, is_remote: bool) -> None:
    """It is another store, with inputs of its own or none, and finds forms by its own optimizations."""
    there = Store.init_backend(MemoryBackend(is_remote=is_remote), chunk_bytes=family.store.chunk_bytes)
    drop(family.store, family.of_model)

    report = copy(fresh(family), there)

    assert report.failed == ()
    [ref] = there.checkpoints()
    assert digests_of(there, ref) <= held(there.backend)
    check_loads(there, ref, family.copy)


@pytest.mark.long
def test_copy_reports_what_cannot_be_made(family: Family) -> None:
    flip_chunk(family.store, family.model[NAME].tobytes()[: 64 << 10])
    there = Store.init_backend(MemoryBackend(), chunk_bytes=family.store.chunk_bytes)

    report = copy(fresh(family), there)

    assert sorted(failure.what for failure in report.failed) == ["run copy step 0", "run model step 0"]


@pytest.mark.long
def test_copied_store_is_optimized_again(family: Family) -> None:
    there = Store.init_backend(MemoryBackend(), chunk_bytes=family.store.chunk_bytes)
    copy(fresh(family), there)

    assert optimize(there).n_forms == 1

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


def under_two_names(family: Family) -> None:
    """Save the copy again as a process does that does not know its manifest."""
    name = family.of_copy.manifest.partition(".")[0] + ".00000000"
    blob = family.store.backend.get(f"manifests/{family.of_copy.manifest}")
    family.store.backend.put_new(f"manifests/{name}", [blob])
    ref = dataclasses.replace(family.of_copy, key_="refs/runs/other/@0", run_id="other", manifest=name)
    family.store.backend.put_new(ref.key, [ref_bytes(ref)])


@pytest.mark.long
@pytest.mark.parametrize("how", ["derived", "in full", "two names"])
def test_figures_count_what_a_collection_keeps(how: str) -> None:
    family = Family(MemoryBackend())
    if how == "two names":
        under_two_names(family)
    optimize(family.store)
    if how == "in full":
        optimize(family.store, for_restore=True)
    collect(family.store)
    backend = family.store.backend
    kept = sum(info.size for info in backend.list("manifests"))
    kept += sum(int(read_pack_table(backend, name)["stored_bytes"].sum()) for name, _ in list_packs(backend))

    found = find_shares(fresh(family), "run")

    assert found.needed_bytes == sum(share.exclusive_bytes for share in found.shares) + found.shared_bytes == kept
    assert sum(share.marginal_bytes for share in found.shares) == kept


def damage(family: Family, key: str) -> str:
    """Change a byte of a blob, and return its key."""
    blob = bytearray(family.store.backend.get(key))
    blob[len(blob) // 2] ^= 1
    overwrite(family.store.backend, key, bytes(blob))
    return key


@pytest.mark.long
@pytest.mark.parametrize("what", ["ref", "manifest"])
def test_verification_names_a_damaged_form_and_the_checkpoint_that_needs_it(family: Family, what: str) -> None:
    form = form_in(family.store)
    key = damage(family, form.key if what == "ref" else f"manifests/{form.manifest}")

    problems = verify(fresh(family)).problems

    assert key in {each.key for each in problems}
    [suffers] = [each for each in problems if each.checkpoint == "run copy step 0" and each.tensors]
    assert NAME in suffers.tensors


@pytest.mark.long
def test_full_verification_finds_a_form_that_makes_other_bytes(family: Family) -> None:
    """Another release's, or a forged one: the digests in it are right, and the function is not."""
    form = form_in(family.store)
    manifest = read_form(family.store.backend, form.manifest)
    assert manifest is not None
    one, other = [each for each in manifest.derived if manifest.columns.shape(each.row) == (256, 256)][:2]
    swapped = {one.row: other.inputs, other.row: one.inputs}
    derived = tuple(dataclasses.replace(each, inputs=swapped.get(each.row, each.inputs)) for each in manifest.derived)
    lie = dataclasses.replace(manifest, derived=derived)
    name = f"{lie.digest}.{'0' * 8}"
    family.store.backend.put_new(f"manifests/{name}", [lie.to_blob()])
    overwrite(family.store.backend, form.key, ref_bytes(dataclasses.replace(form, manifest=name)))

    assert verify(fresh(family)).problems == ()
    problems = verify(fresh(family), full=True).problems

    assert [each.checkpoint for each in problems] == ["run copy step 0"] * 2
    assert all(len(each.tensors) == 1 for each in problems)


@pytest.mark.long
@pytest.mark.parametrize("what", ["ref", "manifest"])
def test_repair_names_the_tensors_that_a_damaged_form_loses(family: Family, what: str) -> None:
    form = form_in(family.store)
    damage(family, form.key if what == "ref" else f"manifests/{form.manifest}")

    report = plan_repair(fresh(family)).execute()

    [loss] = [each for each in report.losses if each.checkpoint == "run copy step 0"]
    assert NAME in loss.tensors
    store = fresh(family)
    found = store.read_tensors(store.manifest(family.of_model))
    assert all(found[name].tobytes() == array.tobytes() for name, array in family.model.items())


@pytest.mark.long
@pytest.mark.parametrize("what", ["ref", "manifest"])
def test_repair_takes_a_damaged_form_or_what_it_derives_from_a_backup(family: Family, what: str) -> None:
    """The backup has the manifest, and no form."""
    backup = backup_of(family)
    form = form_in(family.store)
    damage(family, form.key if what == "ref" else f"manifests/{form.manifest}")

    plan_repair(fresh(family), sources=[backup]).execute()

    check_loads(family.store, family.of_copy, family.copy)
    check_loads(family.store, family.of_model, family.model)


@pytest.mark.long
def test_repair_restores_the_manifest_of_a_form_from_a_store_that_has_it(family: Family) -> None:
    form = form_in(family.store)
    other = Store.init_backend(MemoryBackend(), chunk_bytes=family.store.chunk_bytes, store_id=family.store.id)
    for info in family.store.backend.list("manifests"):
        other.backend.put_new(info.key, [family.store.backend.get(info.key)])
    key = damage(family, f"manifests/{form.manifest}")

    report = plan_repair(fresh(family), sources=[other]).execute()

    assert key in report.restored
    assert report.is_whole
    check_loads(family.store, family.of_copy, family.copy)


@pytest.mark.long
def test_figures_do_not_count_forms_as_checkpoints(family: Family) -> None:
    store = fresh(family)

    assert store_stats(store).checkpoints == 2
    assert verify(store).n_refs == 2
    assert plan_gc(store).n_refs == 2
    assert {ref.run_id for ref in store.checkpoints()} == {"model", "copy"}
