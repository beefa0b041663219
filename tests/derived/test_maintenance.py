"""Collections, copies, verification and repair keep the inputs of derived tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import LocalBackend, MemoryBackend
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.errors import ChunkNotFoundError, CorruptChunkError, DerivedTensorError, FormatError
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.layout.manifests import Derivation, Manifest
from tensorcas_mlflow.maintenance import plan_gc, plan_optimize, plan_repair, store_stats, verify
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store._save import PendingSave
from tensorcas_mlflow.store._sources import NoSource
from tensorcas_mlflow.store.protocol import list_packs, read_pack_table
from tests.derived.checkpoints import Made, save_derived
from tests.derived.test_reading import BF16, CHUNK_BYTES, CONV, MADE, TENSORS, V, W, same
from tests.maintenance.copy.copying import copy
from tests.maintenance.repair.damaging import overwrite

KEY = RefTarget(run_id="r", step=2)


@pytest.fixture(params=["memory", "remote", "files"])
def store(request: pytest.FixtureRequest, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("TENSORCAS_CACHE", "off")  # a cached chunk is read though its pack is damaged
    backend = LocalBackend(tmp_path) if request.param == "files" else MemoryBackend(is_remote=request.param == "remote")
    return Store.init_backend(backend, chunk_bytes=CHUNK_BYTES)


@pytest.fixture
def ref(store: Store) -> Ref:
    """A checkpoint derived of tensors that another one was saved with."""
    with store.write_checkpoint({"a": W, "b": V, "c": CONV}) as save:
        save.commit(RefTarget(run_id="r", step=1))
    return save_derived(store, KEY, TENSORS, MADE, is_bytes=["q8"])


def drop(store: Store, step: int) -> None:
    ref = store.ref(RefTarget(run_id="r", step=step).key)
    assert ref is not None
    store.drop(ref)


def collect(store: Store) -> Store:
    """Collect all that nothing needs, as another process does, and open the store anew."""
    plan_gc(Store.open_backend(store.backend), grace_s=0, max_waste=0).execute()
    return Store.open_backend(store.backend)


def check_loads(store: Store) -> None:
    fresh = Store.open_backend(store.backend)
    ref = fresh.ref(KEY.key)
    assert ref is not None
    found = fresh.read_tensors(fresh.manifest(ref))
    assert list(found) == list(TENSORS)
    for name, wanted in TENSORS.items():
        assert same(found[name], wanted), name


def flip_chunk(store: Store, data: bytes) -> None:
    """Damage the stored bytes of a chunk in each pack that has it."""
    for name, _ in list_packs(store.backend):
        for entry in read_pack_table(store.backend, name):
            if entry["digest"].tobytes() == digest(data):
                blob = bytearray(store.backend.get(f"packs/{name}.pack"))
                blob[int(entry["offset"]) + int(entry["stored_bytes"]) // 2] ^= 0xFF
                overwrite(store.backend, f"packs/{name}.pack", bytes(blob))


def test_inputs_outlive_the_checkpoint_that_they_were_saved_with(store: Store, ref: Ref) -> None:
    drop(store, 1)
    again = collect(store)
    again = collect(again)

    check_loads(again)
    assert verify(again, full=True).problems == ()


def test_inputs_go_with_the_last_checkpoint_derived_of_them(store: Store, ref: Ref) -> None:
    drop(store, 1)
    drop(store, 2)
    again = collect(store)

    assert list(list_packs(again.backend)) == []


def test_a_collection_deletes_the_stored_chunks_of_a_derived_tensor(store: Store, ref: Ref) -> None:
    with store.write_checkpoint({"x": BF16}) as save:
        save.commit(RefTarget(run_id="r", step=3))
    check_loads(store)
    chunks = store.manifest(ref).row("bf16").digests
    drop(store, 3)
    again = collect(store)

    assert not again.catalog.find(chunks).found.any()
    check_loads(again)


def test_a_census_remembers_the_inputs(store: Store, ref: Ref) -> None:
    again = collect(store)
    drop(again, 1)

    check_loads(collect(again))


def test_an_intent_protects_the_inputs_of_a_save_under_way(store: Store) -> None:
    with store.write_checkpoint({"a": W}) as save:
        save.commit(RefTarget(run_id="r", step=1))
        row = save.manifest.rows[0]
    with store.write_checkpoint({"x": BF16}) as given_up:
        content = given_up.manifest.rows[0]
    nameless = dataclasses.replace(row, spec=dataclasses.replace(row.spec, name=""))
    manifest = Manifest(
        kind="checkpoint",
        chunk_bytes=CHUNK_BYTES,
        store_id=store.id,
        flavor=None,
        rows=[content],
        inputs=[nameless],
        derived=(Derivation(0, "cast", {}, (1,)),),
    )
    with PendingSave(store.backend, store.catalog, manifest, NoSource([nameless], CHUNK_BYTES)) as pending:
        drop(store, 1)
        plan_gc(Store.open_backend(store.backend), max_waste=0).execute()
        ref = pending.commit(KEY)

    again = Store.open_backend(store.backend)
    assert same(again.read_tensors(again.manifest(ref))["x"], BF16)


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_copy_has_the_same_manifest_and_only_stored_chunks(store: Store, ref: Ref, is_remote: bool) -> None:
    there = Store.init_backend(MemoryBackend(is_remote=is_remote), chunk_bytes=CHUNK_BYTES, store_id=store.id)
    drop(store, 1)
    report = copy(store, there)
    copied = there.ref(KEY.key)

    assert report.failed == ()
    assert copied is not None
    assert there.manifest(copied).digest == store.manifest(ref).digest
    assert not there.catalog.find(there.manifest(copied).row("bf16").digests).found.any()
    check_loads(there)
    assert verify(there, full=True).problems == ()


def test_a_copy_into_a_store_of_another_id_keeps_the_derived_rows(store: Store, ref: Ref) -> None:
    there = Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)
    copy(store, there)
    copied = there.ref(KEY.key)

    assert copied is not None
    assert there.manifest(copied).derived == store.manifest(ref).derived
    check_loads(there)


def test_verification_names_the_tensors_derived_of_a_damaged_input(store: Store, ref: Ref) -> None:
    flip_chunk(store, V.tobytes()[:CHUNK_BYTES])
    [problem] = [each for each in verify(store, full=True).problems if each.checkpoint == ref.label]

    assert set(problem.tensors) == {"joined", "mean"}


@pytest.mark.parametrize("checks", [True, False])
def test_a_read_names_the_tensor_derived_of_a_damaged_input(store: Store, ref: Ref, checks: bool) -> None:
    flip_chunk(store, V.tobytes()[:CHUNK_BYTES])
    again = Store.open_backend(store.backend)
    manifest = again.manifest(ref)
    with pytest.raises(CorruptChunkError, match="'mean'") as caught:
        again.read_tensors(manifest, ["mean"], verify=checks)

    assert not isinstance(caught.value, DerivedTensorError)
    with pytest.raises(CorruptChunkError, match="'joined'"):
        again.chunks.check(manifest, manifest.numbers(["w", "joined"]))
    assert same(again.read_tensors(manifest, ["bf16"])["bf16"], BF16)


def test_a_read_of_everything_names_each_tensor_derived_of_a_damaged_input(store: Store, ref: Ref) -> None:
    flip_chunk(store, V.tobytes()[:CHUNK_BYTES])
    again = Store.open_backend(store.backend)
    with pytest.raises(CorruptChunkError) as caught:
        again.read_tensors(again.manifest(ref))

    assert set(caught.value.tensors) == {"joined", "mean"}


def test_a_read_names_the_damaged_tensor_and_those_derived_of_it(store: Store) -> None:
    tensors = {"full": W, "short": BF16}
    ref = save_derived(store, KEY, tensors, {"short": Made("cast", ["full"])})
    flip_chunk(store, W.tobytes()[:CHUNK_BYTES])
    again = Store.open_backend(store.backend)
    with pytest.raises(CorruptChunkError) as caught:
        again.read_tensors(again.manifest(ref))

    assert caught.value.tensors == ("full", "short")


def test_a_damaged_input_of_the_content_names_itself_and_what_is_derived_of_it(store: Store, ref: Ref) -> None:
    flip_chunk(store, W.tobytes()[:CHUNK_BYTES])
    found = [each for each in verify(store, full=True).problems if each.checkpoint == ref.label]

    assert set().union(*(each.tensors for each in found)) == {"w", *MADE} - {"hwio", "none"}


def test_a_missing_input_is_told_by_its_digest_and_by_the_derived_tensor(store: Store, ref: Ref) -> None:
    drop(store, 1)
    collect(store)
    for name, _ in list(list_packs(store.backend)):
        if digest(V.tobytes()[:CHUNK_BYTES]) in {
            row.tobytes() for row in read_pack_table(store.backend, name)["digest"]
        }:
            store.backend.delete(f"packs/{name}.pack")
    again = Store.open_backend(store.backend)

    with pytest.raises(ChunkNotFoundError, match="'mean'"):
        again.read_tensors(again.manifest(ref), ["mean"])


def test_a_repair_heals_an_input_from_a_backup(store: Store, ref: Ref) -> None:
    backup = Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES, store_id=store.id)
    copy(store, backup)
    flip_chunk(store, V.tobytes()[:CHUNK_BYTES])
    plan_repair(Store.open_backend(store.backend), sources=[backup]).execute()

    check_loads(store)
    assert verify(Store.open_backend(store.backend), full=True).problems == ()


def test_a_repair_without_a_backup_tells_the_tensors_that_are_lost(store: Store, ref: Ref) -> None:
    flip_chunk(store, V.tobytes()[:CHUNK_BYTES])
    plan = plan_repair(Store.open_backend(store.backend))

    [loss] = [each for each in plan.losses if each.key == ref.key]
    assert set(loss.tensors) == {"joined", "mean"}


def test_a_repair_restores_a_manifest_with_derived_rows(store: Store, ref: Ref) -> None:
    backup = Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES, store_id=store.id)
    copy(store, backup)
    store.backend.delete(f"manifests/{ref.manifest}")
    plan_repair(Store.open_backend(store.backend), sources=[backup]).execute()

    check_loads(store)


def test_a_forged_function_is_refused_and_named(store: Store) -> None:
    """The digests of the row are not those of the function's result."""
    wrong = dict(MADE)
    wrong["mean"] = wrong["mean"]._replace(inputs=["w", "w"])
    ref = save_derived(store, KEY, TENSORS, wrong, is_bytes=["q8"])
    manifest = store.manifest(ref)

    for checks in (True, False):
        with pytest.raises(DerivedTensorError, match=r"'mean'.*function mean"):
            store.read_tensors(manifest, ["mean"], verify=checks)
    with pytest.raises(DerivedTensorError):
        store.chunks.check(manifest, manifest.numbers(["mean"]))
    [problem] = verify(store, full=True).problems
    assert problem.tensors == ("mean",)
    assert verify(store).problems == ()
    assert same(store.read_tensors(manifest, ["bf16"])["bf16"], BF16)


def test_an_optimized_store_keeps_derived_tensors(store: Store, ref: Ref) -> None:
    drop(store, 1)
    plan_optimize(Store.open_backend(store.backend)).execute()
    again = collect(store)

    check_loads(again)
    assert verify(again, full=True).problems == ()


def test_statistics_count_derived_tensors_as_content_and_not_as_stored_chunks(store: Store) -> None:
    before = store_stats(store)
    ref = save_derived(store, KEY, TENSORS, MADE, is_bytes=["q8"])
    manifest = store.manifest(ref)
    after = store_stats(store)

    assert after.total_bytes - before.total_bytes == sum(array.nbytes for array in TENSORS.values())
    assert after.unique_chunks == len({row.tobytes() for row in manifest.stored_digests})


def test_a_manifest_with_derived_rows_is_adopted(store: Store, ref: Ref) -> None:
    manifest = Manifest.from_bytes(store.manifest(ref).to_bytes())
    again = Store.open_backend(store.backend)
    with again.adopt(manifest) as pending:
        adopted = pending.commit(RefTarget(path="models/m/checkpoint.arrow"))
    drop(store, 1)
    drop(store, 2)
    fresh = collect(store)

    for name, array in fresh.read_tensors(fresh.manifest(adopted)).items():
        assert same(array, TENSORS[name]), name


def test_a_manifest_whose_input_is_gone_is_not_adopted(store: Store, ref: Ref) -> None:
    manifest = Manifest.from_bytes(store.manifest(ref).to_bytes())
    drop(store, 1)
    drop(store, 2)
    with store.write_checkpoint({"w": W, "c": CONV, "other": TENSORS["other"]}) as save:
        save.commit(RefTarget(run_id="r", step=3))
    fresh = collect(store)

    with pytest.raises(ChunkNotFoundError):
        fresh.adopt(manifest)


def test_an_unknown_function_stops_a_collection(store: Store, ref: Ref) -> None:
    """A collector that cannot tell what a manifest needs deletes nothing."""
    key = f"manifests/{ref.manifest}"
    stream = Manifest.stream_in(store.backend.get(key))
    assert stream.count(b'"q8_0"') == 1
    forged = stream.replace(b'"q8_0"', b'"q9_9"')
    name = f"{digest(forged).hex()}.00000000"
    store.backend.put_new(f"manifests/{name}", [forged])
    with pytest.raises(FormatError):
        Manifest.from_blob(forged, name)
    with store.write_checkpoint({"y": V}) as save:
        other = save.commit(RefTarget(run_id="r", step=4))
    record = store.backend.get(other.key).replace(other.manifest.encode(), name.encode())
    before = record.split(b', "check": "')[0]
    overwrite(store.backend, other.key, before + b', "check": "' + digest(before).hex()[:32].encode() + b'"}')

    with pytest.raises(FormatError):
        plan_gc(Store.open_backend(store.backend), grace_s=0)


def test_tensors_under_new_names_are_saved_beside_a_checkpoint_with_derived_ones() -> None:
    store = Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)
    draw = np.random.default_rng(0)
    wide = {f"wide.{at}": draw.normal(0, 0.02, 20_000).astype(np.float32) for at in range(4)}
    narrow = {f"narrow.{at}": array.astype(np.float16) for at, array in enumerate(wide.values())}
    made = {f"narrow.{at}": Made("cast", [f"wide.{at}"]) for at in range(4)}
    save_derived(store, RefTarget(run_id="r", step=1), wide | narrow, made)
    renamed = {f"model.{at}": array * np.float32(1.0001) for at, array in enumerate(wide.values())}
    with store.write_checkpoint(renamed) as save:
        ref = save.commit(RefTarget(run_id="other", step=1))
    found = store.read_tensors(store.manifest(ref))

    assert all(np.array_equal(found[name], array) for name, array in renamed.items())
    assert save.n_stored_bytes < 0.6 * sum(array.nbytes for array in renamed.values())
