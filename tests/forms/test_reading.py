"""Readers find by forms what packs do not hold."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import LocalBackend, MemoryBackend
from tensorcas_mlflow.errors import ChunkNotFoundError, CorruptChunkError, CorruptError, DerivedTensorError
from tensorcas_mlflow.layout import FORMS, RefTarget, ref_bytes
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.maintenance._copy_chunks import CopyReader
from tensorcas_mlflow.reader import open_ref
from tensorcas_mlflow.store import Store
from tests.derived.made import as_bfloat16, check_loads, gguf_file, model, save, save_file
from tests.derived.test_maintenance import flip_chunk
from tests.forms.made import Family, collect, digests_of, drop, form_in, held, no_search, optimize
from tests.maintenance.repair.damaging import overwrite

NAME = "embed.weight"


@pytest.fixture(params=["memory", "objects", "files"])
def family(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Family:
    monkeypatch.setenv("TENSORCAS_CACHE", "off")  # a cached chunk is read though its pack is damaged
    backend = (
        LocalBackend(tmp_path) if request.param == "files" else MemoryBackend(is_remote=request.param == "objects")
    )
    return Family(backend).optimized()


def fresh(family: Family) -> tuple[Store, Manifest]:
    store = Store.open_backend(family.store.backend)
    return store, store.manifest(family.of_copy)


@pytest.mark.long
@pytest.mark.parametrize("copy", [None, False])
@pytest.mark.parametrize("checks", [True, False])
def test_tensors_are_read_whole(family: Family, copy: bool | None, checks: bool) -> None:
    store, manifest = fresh(family)

    found = store.read_tensors(manifest, [NAME, "layers.0.q.weight"], verify=checks, copy=copy)

    for name, array in found.items():
        assert array.tobytes() == family.copy[name].tobytes(), name


@pytest.mark.long
def test_tensors_are_read_into_arrays(family: Family) -> None:
    store, manifest = fresh(family)
    out = {NAME: np.empty_like(family.copy[NAME])}

    store.read_tensors(manifest, [NAME], out=out)

    assert out[NAME].tobytes() == family.copy[NAME].tobytes()


@pytest.mark.long
def test_checkpoint_is_checked_without_its_chunks(family: Family) -> None:
    store, manifest = fresh(family)

    store.chunks.check(manifest, manifest.numbers(manifest.names()))


@pytest.mark.long
def test_damage_of_an_input_is_found_by_a_check(family: Family) -> None:
    flip_chunk(family.store, family.model[NAME].tobytes()[: 64 << 10])
    store, manifest = fresh(family)

    with pytest.raises(CorruptChunkError, match=f"run copy step 0.*'{NAME}'"):
        store.chunks.check(manifest, manifest.numbers([NAME]))
    store.chunks.check(manifest, manifest.numbers(["layers.0.q.weight"]))


@pytest.mark.long
@pytest.mark.parametrize("checks", [True, False])
def test_read_names_the_tensor_that_a_damaged_input_makes(family: Family, checks: bool) -> None:
    flip_chunk(family.store, family.model[NAME].tobytes()[: 64 << 10])
    store, manifest = fresh(family)

    with pytest.raises(CorruptChunkError, match=f"run copy step 0.*'{NAME}'"):
        store.read_tensors(manifest, [NAME], verify=checks)


@pytest.mark.long
def test_read_names_the_tensor_whose_input_is_gone(family: Family) -> None:
    for info in list(family.store.backend.list("packs")):
        family.store.backend.delete(info.key)
    store, manifest = fresh(family)

    with pytest.raises(ChunkNotFoundError, match=f"'{NAME}'"):
        store.read_tensors(manifest, [NAME])


@pytest.mark.long
def test_read_without_its_form_names_the_tensor(family: Family) -> None:
    family.store.backend.delete(form_in(family.store).key)
    store, manifest = fresh(family)

    with pytest.raises(ChunkNotFoundError, match=f"'{NAME}'"):
        store.read_tensors(manifest, [NAME])


@pytest.mark.long
def test_form_that_makes_other_bytes_is_refused(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    store, manifest = fresh(family)

    def wrong(*_: Any, out: Any, **__: Any) -> Any:
        out[...] = 0
        return out

    monkeypatch.setattr("tensorcas_mlflow.chunk_io._derive.evaluate", wrong)
    for checks in (True, False):
        with pytest.raises(DerivedTensorError, match=f"'{NAME}'"):
            store.read_tensors(manifest, [NAME], verify=checks)


@pytest.mark.long
def test_open_reader_finds_the_form_after_a_collection(tmp_path: Path) -> None:
    """It knows the packs that the optimization then deletes."""
    family = Family(LocalBackend(tmp_path))
    store, manifest = fresh(family)
    store.read_tensors(manifest, [NAME])

    optimize(family.store)

    found = store.read_tensors(manifest)
    for name, array in found.items():
        assert array.tobytes() == family.copy[name].tobytes(), name


@pytest.mark.long
def test_parts_of_tensors_are_read(tmp_path: Path) -> None:
    family = Family(LocalBackend(tmp_path)).optimized()
    with open_ref(Store.open_backend(family.store.backend), family.of_copy) as reader:
        rows = reader[NAME][1000:1010]
        steps = reader[NAME][::500, ::100]

    assert np.asarray(rows).tobytes() == family.copy[NAME][1000:1010].tobytes()
    assert np.asarray(steps).tobytes() == np.ascontiguousarray(family.copy[NAME][::500, ::100]).tobytes()


def test_file_with_parts_that_forms_make_is_read_piece_by_piece() -> None:
    tensors = model(11, n_layers=1)
    data = gguf_file(tensors)
    store = Store.init_backend(MemoryBackend())
    with no_search():
        ref = save_file(store, data, "model.gguf")
        save(store, tensors)
    optimize(store)
    assert not digests_of(store, ref) <= held(store.backend)

    again = Store.open_backend(store.backend)

    assert b"".join(map(bytes, again.iter_file(ref))) == data


def test_plan_of_a_read_names_the_packs_of_the_inputs() -> None:
    family = Family(MemoryBackend()).optimized()
    store, manifest = fresh(family)

    plan = store.explain(manifest, [NAME])

    assert plan.n_bytes == family.copy[NAME].nbytes
    assert sum(read.n_chunks for read in plan.packs) == len(store.manifest(family.of_model).row(NAME).digests)


@pytest.mark.long
def test_copy_of_a_state_reads_what_a_form_makes_since() -> None:
    """An asynchronous save holds only what has changed, and takes the rest from the store."""
    family = Family(MemoryBackend())
    store = Store.open_backend(family.store.backend)
    before = store.copy(family.copy)
    with no_search(), store.begin_checkpoint(before) as pending:
        pending.commit(RefTarget(run_id="copy", step=1))
    optimize(family.store)
    changed = {**family.copy, "layers.0.q.weight": family.copy["layers.0.k.weight"]}
    copied = store.copy(changed, before=before)

    with no_search(), store.begin_checkpoint(copied) as pending:
        ref = pending.commit(RefTarget(run_id="copy", step=2))

    check_loads(store, ref, changed)


@pytest.mark.long
def test_manifest_of_what_forms_make_is_adopted() -> None:
    family = Family(MemoryBackend()).optimized()
    store, manifest = fresh(family)

    with store.adopt(manifest) as pending:
        ref = pending.commit(RefTarget(path="models/m/checkpoint.arrow"))

    assert digests_of(store, ref) <= held(store.backend)
    optimize(store)
    assert not digests_of(store, ref) <= held(store.backend)
    check_loads(store, ref, family.copy)


@pytest.mark.long
def test_tensors_are_read_whose_inputs_are_there(family: Family) -> None:
    """Another tensor of the same form has lost an input."""
    flip_chunk(family.store, family.model[NAME].tobytes()[: 64 << 10])
    other = "layers.0.q.weight"
    store, manifest = fresh(family)

    assert store.read_tensors(manifest, [other])[other].tobytes() == family.copy[other].tobytes()
    wanted = manifest.row(other).digests
    assert {each.digest for each in CopyReader(store).payloads(wanted)} == {each.tobytes() for each in wanted}


def test_open_reader_finds_what_a_form_made_in_packs_again() -> None:
    """It knows the form and its inputs, which are gone since."""
    family = Family(MemoryBackend()).optimized()
    store, manifest = fresh(family)
    store.read_tensors(manifest)
    optimize(family.store, for_restore=True)
    drop(family.store, family.of_model)
    collect(family.store)

    for _ in range(2):
        found = store.read_tensors(manifest, [NAME])
        assert found[NAME].tobytes() == family.copy[NAME].tobytes()


@pytest.mark.long
def test_reader_of_a_checkpoint_reads_its_form_and_no_others() -> None:
    family = Family(MemoryBackend())
    with no_search():
        for seed in range(3):
            other = model(30 + seed, n_layers=1)
            save(family.store, other, run_id=f"model-{seed}")
            save(family.store, as_bfloat16(other), run_id=f"copy-{seed}")
    assert optimize(family.store).n_forms == 4
    store, manifest = fresh(family)
    [info] = family.store.backend.list(f"{FORMS}/{manifest.digest}")
    for other_info in list(family.store.backend.list(FORMS)):
        if other_info.key != info.key:
            family.store.backend.delete(other_info.key)

    found = store.read_tensors(manifest)

    assert found[NAME].tobytes() == family.copy[NAME].tobytes()


def test_form_of_another_content_is_not_believed(family: Family) -> None:
    """It is forged: its rows have other chunks."""
    store, manifest = fresh(family)
    with no_search():
        other = save(store, {name: array * 2 for name, array in family.copy.items()}, run_id="other")
    form = form_in(store)
    forged = dataclasses.replace(form, manifest=other.manifest)
    overwrite(store.backend, form.key, ref_bytes(forged))

    with pytest.raises(ChunkNotFoundError, match=f"'{NAME}'"):
        store.read_tensors(manifest, [NAME])


@pytest.mark.long
def test_damaged_form_is_named(family: Family) -> None:
    store, manifest = fresh(family)
    key = form_in(store).key
    overwrite(store.backend, key, store.backend.get(key)[:-9])

    with pytest.raises(CorruptError, match="refs/forms/"):
        store.read_tensors(manifest, [NAME])


@pytest.mark.long
def test_copy_of_a_manifest_elsewhere_is_read_by_the_form(family: Family) -> None:
    """MLflow keeps such copies, which nobody rewrites."""
    store, manifest = fresh(family)
    elsewhere = Manifest.from_bytes(manifest.to_bytes())

    found = store.read_tensors(elsewhere, [NAME])

    assert found[NAME].tobytes() == family.copy[NAME].tobytes()
