"""Forms that lack chunks, refer to each other, or store what their manifests derive."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.errors import ChunkNotFoundError
from tensorcas_mlflow.layout import Ref, RefTarget, form_key, ref_bytes
from tensorcas_mlflow.maintenance import plan_gc, plan_repair
from tensorcas_mlflow.maintenance._optimize_forms import StoredRefs, write_in_full
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import list_packs, read_pack_table
from tests.derived.made import Tensors, as_bfloat16, check_loads, model, save
from tests.derived.test_maintenance import flip_chunk
from tests.forms.made import Family, collect, digests_of, drop, form_in, held, no_search, optimize
from tests.maintenance.copy.copying import copy
from tests.maintenance.repair.damaging import overwrite

NAME = "embed.weight"


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORCAS_CACHE", "off")  # a cached chunk is read though its pack is gone


class Full(NamedTuple):
    """A bf16 copy of a deleted model. Its save derived it, and a form stores it in full."""

    store: Store
    of_copy: Ref
    copy: Tensors


def stored_in_full(*, is_remote: bool = False) -> Full:
    store = Store.init_backend(MemoryBackend(is_remote=is_remote), chunk_bytes=64 << 10)
    tensors = model(1, d=256, n_layers=1)
    copied = as_bfloat16(tensors)
    of_model = save(store, tensors, run_id="model")
    of_copy = save(store, copied, run_id="copy")
    with no_search():
        again = save(store, copied, run_id="again")
    store = Store.open_backend(store.backend)
    manifest = store.manifest(of_copy)
    assert manifest.derived
    with store.adopt(manifest.in_full(store_id=store.id)) as pending:
        pending.commit(RefTarget(of=of_copy.manifest))
    drop(store, of_model)
    drop(store, again)
    return Full(store, of_copy, copied)


@pytest.mark.parametrize("is_remote", [False, True])
def test_derived_checkpoint_is_read_by_a_form_that_derives_nothing(is_remote: bool) -> None:
    """Its own inputs are gone, and the form has no rows at their numbers."""
    full = stored_in_full(is_remote=is_remote)
    collect(full.store)

    check_loads(full.store, full.of_copy, full.copy)


def test_collection_keeps_inputs_while_what_a_form_stores_is_lost() -> None:
    full = stored_in_full()
    known = full.store.manifest(full.of_copy)
    lost = digests_of(full.store, full.of_copy) - {digest.tobytes() for digest in known.stored_digests}
    for name, _ in list(list_packs(full.store.backend)):
        if lost & {entry["digest"].tobytes() for entry in read_pack_table(full.store.backend, name)}:
            full.store.backend.delete(f"packs/{name}.pack")

    collect(full.store)

    check_loads(full.store, full.of_copy, full.copy)


def test_derived_checkpoint_is_copied_after_its_form_is_replaced() -> None:
    """The copy has its manifest, with the inputs, which the form does not derive."""
    store = Store.init_backend(MemoryBackend(), chunk_bytes=64 << 10)
    tensors = model(1, d=256, n_layers=1)
    copied = as_bfloat16(tensors)
    of_model, of_copy = save(store, tensors, run_id="model"), save(store, copied, run_id="copy")
    found = StoredRefs.read(store)
    assert store.manifest(of_copy).derived
    write_in_full(store, found, {of_copy.manifest})
    drop(store, of_model)
    collect(store)
    there = Store.init_backend(MemoryBackend(), chunk_bytes=store.chunk_bytes)

    assert copy(Store.open_backend(store.backend), there).failed == ()

    [ref] = there.checkpoints()
    check_loads(there, ref, copied)
    check_loads(store, of_copy, copied)


@pytest.mark.long
def test_partly_derived_checkpoint_is_stored_again_as_it_was_saved() -> None:
    """Its save derived one tensor, and an optimization all others."""
    store = Store.init_backend(MemoryBackend(), chunk_bytes=64 << 10)
    tensors = model(1, d=256, n_layers=1)
    copied = as_bfloat16(tensors)
    of_part = save(store, {NAME: tensors[NAME]}, run_id="part")
    of_copy = save(store, copied, run_id="copy")
    assert len(store.manifest(of_copy).derived) == 1
    with no_search():
        of_model = save(store, tensors, run_id="model")
    assert optimize(store).n_forms == 1
    drop(store, of_part)
    drop(store, of_model)

    optimize(store)
    collect(store)

    stored = {digest.tobytes() for digest in store.manifest(of_copy).stored_digests}
    assert held(store.backend) == stored
    check_loads(store, of_copy, copied)
    there = Store.init_backend(MemoryBackend(), chunk_bytes=store.chunk_bytes)
    assert copy(Store.open_backend(store.backend), there).failed == ()


def backup_without_inputs(family: Family) -> Store:
    """Delete the checkpoint of the inputs, and copy the other one."""
    drop(family.store, family.of_model)
    backup = Store.init_backend(MemoryBackend(), chunk_bytes=family.store.chunk_bytes, store_id=family.store.id)
    assert copy(Store.open_backend(family.store.backend), backup).failed == ()
    return backup


@pytest.mark.long
def test_repair_takes_what_a_form_derives_from_a_backup_without_its_inputs() -> None:
    family = Family(MemoryBackend()).optimized()
    backup = backup_without_inputs(family)
    flip_chunk(family.store, family.model[NAME].tobytes()[: 64 << 10])

    report = plan_repair(Store.open_backend(family.store.backend), sources=[backup]).execute()

    assert report.is_whole
    check_loads(family.store, family.of_copy, family.copy)


@pytest.mark.long
def test_form_without_inputs_is_replaced_after_a_repair() -> None:
    family = Family(MemoryBackend()).optimized()
    backup = backup_without_inputs(family)
    flip_chunk(family.store, family.model[NAME].tobytes()[: 64 << 10])
    plan_repair(Store.open_backend(family.store.backend), sources=[backup]).execute()

    collect(family.store)
    optimize(family.store)

    assert plan_gc(Store.open_backend(family.store.backend), grace_s=0).is_empty
    assert held(family.store.backend) == digests_of(family.store, family.of_copy)
    check_loads(family.store, family.of_copy, family.copy)


@pytest.mark.long
def test_repair_takes_what_a_form_of_a_backup_derives() -> None:
    family = Family(MemoryBackend()).optimized()
    other = Store.init_backend(MemoryBackend(), chunk_bytes=family.store.chunk_bytes, store_id=family.store.id)
    assert copy(Store.open_backend(family.store.backend), other).failed == ()
    flip_chunk(other, family.copy[NAME].tobytes()[: 64 << 10])

    report = plan_repair(
        Store.open_backend(other.backend), sources=[Store.open_backend(family.store.backend)]
    ).execute()

    assert report.is_whole
    [ref] = [ref for ref in other.checkpoints() if ref.run_id == "copy"]
    check_loads(other, ref, family.copy)


@pytest.mark.long
def test_repair_leaves_a_form_that_is_replaced_since_its_plan() -> None:
    """A collection may have freed what it derives since."""
    family = Family(MemoryBackend()).optimized()
    with no_search():
        save(family.store, family.copy, run_id="again")
    form = form_in(family.store)
    good = family.store.backend.get(form.key)
    overwrite(family.store.backend, form.key, good[:-9])
    plan = plan_repair(Store.open_backend(family.store.backend))
    overwrite(family.store.backend, form.key, good)

    plan.execute()

    assert form_in(family.store) == form


@pytest.mark.long
def test_chunks_in_packs_without_an_index_are_read_though_a_form_is_damaged() -> None:
    family = Family(MemoryBackend()).optimized()
    with no_search():
        save(family.store, family.copy, run_id="again")
    form = form_in(family.store)
    overwrite(family.store.backend, form.key, family.store.backend.get(form.key)[:-9])
    for info in list(family.store.backend.list("index")):
        family.store.backend.delete(info.key)
    store = Store.open_backend(family.store.backend)

    found = store.read_tensors(store.manifest(family.of_copy), [NAME])

    assert found[NAME].tobytes() == family.copy[NAME].tobytes()


def of_each_other() -> Family:
    """Forge a form of the form: the first manifest."""
    family = Family(MemoryBackend()).optimized()
    form = form_in(family.store)
    key = form_key(form.manifest)
    back = dataclasses.replace(form, key_=key, of=form.manifest, manifest=family.of_copy.manifest)
    family.store.backend.put_new(key, [ref_bytes(back)])
    return family


@pytest.mark.long
def test_read_ends_whose_manifests_are_forms_of_each_other() -> None:
    family = of_each_other()
    for name, _ in list(list_packs(family.store.backend)):
        family.store.backend.delete(f"packs/{name}.pack")
    store = Store.open_backend(family.store.backend)
    manifest = store.manifest(family.of_copy)

    with pytest.raises(ChunkNotFoundError, match=f"'{NAME}'"):
        store.read_tensors(manifest, [NAME])


@pytest.mark.long
def test_collection_keeps_what_manifests_that_are_forms_of_each_other_need() -> None:
    family = of_each_other()

    collect(family.store)
    collect(family.store)

    check_loads(family.store, family.of_copy, family.copy)


@pytest.mark.long
def test_collection_believes_no_form_that_only_another_form_makes_whole() -> None:
    family = of_each_other()
    backend, inputs = family.store.backend, digests_of(family.store, family.of_model)
    with no_search():
        again = save(Store.open_backend(backend), family.copy, run_id="again")  # packs hold its chunks, too
    drop(family.store, again)
    for name, _ in list(list_packs(backend)):
        if any(entry["digest"].tobytes() in inputs for entry in read_pack_table(backend, name)):
            backend.delete(f"packs/{name}.pack")

    assert not plan_gc(Store.open_backend(backend), grace_s=0, max_waste=0).packs
