"""Collections keep what forms take, and delete forms that make nothing needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tensorcas_mlflow.backends import LocalBackend, MemoryBackend
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import _gc, plan_gc, verify
from tensorcas_mlflow.store import Derived, Store, commit_form
from tensorcas_mlflow.store.protocol import read_pack_table
from tests.derived.made import check_loads, save
from tests.forms.made import (
    Family,
    collect,
    derived_forms,
    digests_of,
    drop,
    form_in,
    forms_of,
    held,
    no_search,
    optimize,
)
from tests.maintenance.repair.damaging import overwrite

CHUNK = 64 << 10


@pytest.fixture(params=["memory", "objects", "files"])
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Family:
    if request.param == "files":
        return Family(LocalBackend(tmp_path)).optimized()
    return Family(MemoryBackend(is_remote=request.param == "objects")).optimized()


def test_inputs_of_a_form_outlive_the_checkpoint_that_they_were_saved_with(family: Family) -> None:
    drop(family.store, family.of_model)

    collect(family.store)
    collect(family.store)

    check_loads(family.store, family.of_copy, family.copy)


def test_form_and_its_inputs_go_with_the_last_checkpoint_that_needs_it(family: Family) -> None:
    drop(family.store, family.of_model)
    drop(family.store, family.of_copy)

    report = plan_gc(Store.open_backend(family.store.backend), grace_s=0).execute()

    assert report.n_manifests == 3
    assert forms_of(family.store) == []
    assert held(family.store.backend) == set()


@pytest.mark.long
def test_form_goes_and_its_inputs_stay_where_a_checkpoint_needs_them(family: Family) -> None:
    drop(family.store, family.of_copy)

    collect(family.store)

    assert forms_of(family.store) == []
    check_loads(family.store, family.of_model, family.model)


@pytest.mark.long
def test_plan_without_a_ref_counts_the_inputs_that_it_alone_keeps(family: Family) -> None:
    drop(family.store, family.of_model)
    store = Store.open_backend(family.store.backend)

    plan = plan_gc(store, without=[family.of_copy.key])

    assert plan.freed_bytes > 0.5 * sum(array.nbytes for array in family.model.values())
    assert plan_gc(store).is_empty or plan_gc(store).freed_bytes < plan.freed_bytes
    check_loads(store, family.of_copy, family.copy)


@pytest.mark.long
def test_collection_is_at_rest_after_an_optimization(family: Family) -> None:
    assert plan_gc(Store.open_backend(family.store.backend), grace_s=0).is_empty


@pytest.mark.long
def test_save_under_way_keeps_its_pack_though_a_form_makes_its_chunks(family: Family) -> None:
    with no_search():
        save(family.store, family.copy, run_id="again")
        store = Store.open_backend(family.store.backend)
        with store.write_checkpoint(family.copy) as pending:
            plan_gc(Store.open_backend(family.store.backend), max_waste=0).execute()
            assert digests_of(family.store, family.of_copy) <= held(family.store.backend)
            ref = pending.commit(RefTarget(run_id="third", step=0))

    check_loads(family.store, ref, family.copy)


def test_optimization_replaces_a_form_whose_inputs_nothing_else_needs(family: Family) -> None:
    """A bfloat16 copy would keep the model of twice its size."""
    drop(family.store, family.of_model)

    optimize(family.store)

    assert derived_forms(family.store) == []
    assert held(family.store.backend) == digests_of(family.store, family.of_copy)
    check_loads(family.store, family.of_copy, family.copy)


@pytest.mark.long
def test_only_the_inputs_of_needed_rows_are_kept(family: Family) -> None:
    """Another checkpoint needs one tensor of those that the form makes."""
    name = "layers.0.q.weight"
    with no_search():
        one = save(family.store, {name: family.copy[name]}, run_id="one")
    optimize(family.store)
    drop(family.store, family.of_model)
    drop(family.store, family.of_copy)

    collect(family.store)

    inputs = {
        digest(family.model[name].tobytes()[at : at + CHUNK]) for at in range(0, family.model[name].nbytes, CHUNK)
    }
    assert held(family.store.backend) == inputs
    check_loads(family.store, one, {name: family.copy[name]})


@pytest.mark.long
def test_damaged_form_costs_nothing(family: Family) -> None:
    key = form_in(family.store).key
    good = family.store.backend.get(key)
    overwrite(family.store.backend, key, good[:-9])
    before = held(family.store.backend)

    collect(family.store)

    assert held(family.store.backend) == before
    overwrite(family.store.backend, key, good)
    check_loads(family.store, family.of_copy, family.copy)


@pytest.mark.long
def test_form_that_lacks_an_input_stands_for_no_chunk(family: Family) -> None:
    """A save has written what it derives again, and its inputs are lost."""
    with no_search():
        again = save(family.store, family.copy, run_id="again")
    needed = digests_of(family.store, family.of_model) - digests_of(family.store, again)
    drop(family.store, family.of_model)
    packs = family.store.backend
    for info in list(packs.list("packs")):
        name = info.key.removeprefix("packs/").removesuffix(".pack")
        if needed & {entry["digest"].tobytes() for entry in read_pack_table(packs, name)}:
            packs.delete(info.key)

    plan_gc(Store.open_backend(packs), grace_s=0, max_waste=0).execute()

    assert digests_of(family.store, again) <= held(packs)
    check_loads(family.store, again, family.copy)
    check_loads(family.store, family.of_copy, family.copy)
    assert verify(Store.open_backend(packs), full=True).problems == ()


def forged(family: Family) -> Family:
    """Write a form that takes the inputs of two tensors in the other order."""
    store = Store.open_backend(family.store.backend)
    manifest, model = store.manifest(family.of_copy), store.manifest(family.of_model)
    one, other = [name for name, array in family.copy.items() if array.shape == (256, 256)][:2]
    swapped = {one: other, other: one}
    derived = {
        int(manifest.numbers([name])[0]): Derived(
            function="cast",
            params={},
            inputs=[model.row(swapped.get(name, name))],
            row=manifest.row(name),
            made=lambda: memoryview(b""),
        )
        for name in family.copy
    }
    assert commit_form(store, manifest, derived, [family.of_copy.manifest])
    return family


@pytest.mark.parametrize("kind", ["memory", "objects"])
def test_form_that_lies_costs_no_copy(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    family = forged(Family(MemoryBackend(is_remote=kind == "objects")))

    collect(family.store)

    assert digests_of(family.store, family.of_copy) <= held(family.store.backend)
    assert "does not make what it says" in caplog.text
    check_loads(family.store, family.of_copy, family.copy)


def test_form_of_another_content_costs_no_copy() -> None:
    family = Family(MemoryBackend())
    store = family.store
    form = RefTarget(of=family.of_copy.manifest)
    with store.adopt(store.manifest(family.of_model)) as pending:
        pending.commit(form)

    collect(store)

    assert digests_of(store, family.of_copy) <= held(store.backend)
    check_loads(store, family.of_copy, family.copy)


def test_form_that_appears_after_the_plan_stands_for_no_chunk() -> None:
    """The collection has not evaluated it. A save has come to rely on packs of the plan."""
    family = Family(MemoryBackend())
    store = family.store
    drop(store, family.of_copy)
    plan = plan_gc(Store.open_backend(store.backend), grace_s=0)
    assert plan.packs
    with no_search():
        family.of_copy = save(Store.open_backend(store.backend), family.copy, run_id="again")
    forged(family)

    plan.execute()

    assert digests_of(store, family.of_copy) <= held(store.backend)
    check_loads(store, family.of_copy, family.copy)


def test_form_stays_until_its_manifest_is_on_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save may still come to rely on the manifest, and another collection on the form."""
    family = Family(MemoryBackend()).optimized()
    store = family.store
    with no_search():
        drop(store, save(store, {"x": family.model["embed.weight"] * 2}, run_id="old"))
    plan = plan_gc(Store.open_backend(store.backend), grace_s=0)
    condemn = _gc._condemn

    def and_delete(*args: Any) -> str:
        key = condemn(*args)
        drop(store, family.of_copy)
        return key

    with monkeypatch.context() as patch:
        patch.setattr(_gc, "_condemn", and_delete)
        plan.execute()
    assert len(derived_forms(store)) == 1

    collect(store)

    assert forms_of(store) == []
