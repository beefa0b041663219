"""Everything in a store but packs: manifests, refs, its settings, the index, lists and intents."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.errors import CorruptError, PendingSavesError, StoreNotFoundError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout.packs import make_table, pack_key, segment_bytes
from tensorcas_mlflow.maintenance import open_damaged, open_damaged_backend, plan_gc, plan_repair, verify
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import condemned_bytes, intent_bytes, list_packs, read_pack_table
from tensorcas_mlflow.tensorcas_store import TensorCasStore
from tests.maintenance.repair.damaging import (
    CHUNK_BYTES,
    afresh,
    flip,
    flip_chunk,
    keys,
    loads,
    new_store,
    overwrite,
    pack_of,
    repair,
    save,
    target,
    tensors,
)


def manifest_key(store: Store, step: int) -> str:
    ref = store.ref(target(step).key)
    assert ref is not None
    return f"manifests/{ref.manifest}"


# --- manifests


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_manifest_is_restored_from_another_store_under_its_own_name(
    store: Store, backup: Store, is_gone: bool
) -> None:
    key = manifest_key(store, 0)
    if is_gone:
        store.backend.delete(key)
    else:
        flip(store.backend, key, 30)
    report = repair(store, backup)

    assert report.restored == (key,)
    assert report.is_whole
    assert loads(store, "ab", 0)
    assert len(keys(store.backend, "quarantine")) == (0 if is_gone else 1)
    assert keys(store.backend, "intents") == []


def test_a_manifest_is_restored_from_its_twin_in_the_same_store(store: Store) -> None:
    key = manifest_key(store, 0)
    store.backend.put_new(key[:-8] + "0" * 8, [store.backend.get(key)])
    flip(store.backend, key, 30)

    assert repair(store).is_whole
    assert loads(store, "ab", 0)


def test_a_manifest_that_is_damaged_in_the_other_store_too_is_not_taken(store: Store, backup: Store) -> None:
    flip(store.backend, manifest_key(store, 0), 30)
    flip(backup.backend, manifest_key(backup, 0), 40)
    report = repair(store, backup)

    assert report.restored == ()
    assert [(loss.checkpoint, loss.tensors) for loss in report.losses] == [("run run step 0", ())]


def test_a_manifest_that_is_another_one_in_the_other_store_is_not_taken(store: Store, backup: Store) -> None:
    key = manifest_key(store, 0)
    store.backend.delete(key)
    overwrite(backup.backend, manifest_key(backup, 0), backup.backend.get(manifest_key(backup, 1)))
    report = repair(store, backup)

    assert store.backend.stat(key) is None
    assert [loss.checkpoint for loss in report.losses] == ["run run step 0"]


def test_a_store_of_another_id_restores_a_manifest_that_is_the_same_but_for_the_id(store: Store) -> None:
    other = Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES, store_id="7" * 32)
    save(other, "ab", 0)
    store.backend.delete(manifest_key(store, 0))
    flip_chunk(store.backend, "a")

    assert repair(store, other).is_whole
    assert loads(store, "ab", 0)


def test_repair_leaves_a_manifest_that_a_collector_is_about_to_delete(store: Store, backup: Store) -> None:
    key = manifest_key(store, 0)
    store.backend.delete(key)
    plan = plan_repair(afresh(store), sources=[backup])
    doomed = frozenset([key.removeprefix("manifests/")])
    store.backend.put_new("condemned/" + "a" * 32, [condemned_bytes(frozenset(), doomed)])
    report = plan.execute()

    assert report.left[key] == "a collector is about to delete it"
    assert store.backend.stat(key) is None


# --- refs


def test_a_damaged_ref_is_taken_from_another_store_and_the_plan_says_which(store: Store, backup: Store) -> None:
    key = target(0).key
    overwrite(store.backend, key, b"{")
    plan = plan_repair(afresh(store), sources=[backup])
    report = plan.execute()

    assert f"replaced by that of {backup.uri}: run run step 0" in str(plan)
    assert report.restored == (key,)
    assert report.is_whole
    assert loads(store, "ab", 0)
    assert [store.backend.get(kept).partition(b"\n")[2] for kept in keys(store.backend, "quarantine")] == [b"{"]


def test_a_damaged_ref_that_no_other_store_has_stays_and_is_reported(store: Store, backup: Store) -> None:
    save(store, "e", 9)
    key = target(9).key
    overwrite(store.backend, key, b"{")
    plan = plan_repair(afresh(store), sources=[backup])

    assert f"tensorcas gc --abandon {key}" in str(plan)
    assert [loss.key for loss in plan.execute().losses] == [key]
    assert store.backend.get(key) == b"{"


def test_a_step_that_is_saved_anew_while_its_ref_is_repaired_stays_the_new_one(store: Store, backup: Store) -> None:
    overwrite(store.backend, target(0).key, b"{")
    plan = plan_repair(afresh(store), sources=[backup])
    save(afresh(store), "e", 0)
    plan.execute()

    assert loads(store, "e", 0)


def test_a_ref_whose_chunks_the_other_store_lacks_is_left(store: Store, backup: Store) -> None:
    overwrite(store.backend, target(2).key, b"{")
    store.backend.delete(pack_key(pack_of(store.backend, "d")))
    backup.backend.delete(pack_key(pack_of(backup.backend, "d")))
    report = repair(store, backup)

    assert "lacks chunk" in report.left[target(2).key]
    assert store.backend.get(target(2).key) == b"{"


# --- the settings


@pytest.mark.parametrize("damaged", [b"", b'{"chunk_bytes": 40', None])
def test_a_damaged_format_is_made_anew_from_manifests(store: Store, damaged: bytes | None) -> None:
    if damaged is None:
        store.backend.delete("format")
    else:
        overwrite(store.backend, "format", damaged)
    report = repair(store)
    fresh = afresh(store)

    assert report.restored == ("format",)
    assert report.is_whole
    assert (fresh.id, fresh.chunk_bytes) == (store.id, CHUNK_BYTES)
    assert loads(store, "ab", 0)


def test_no_other_store_is_made_where_one_has_lost_its_format(tmp_path: Path) -> None:
    store = Store.init(tmp_path / "root", chunk_bytes=CHUNK_BYTES)
    save(store, "ab", 0)
    store.backend.delete("format")

    with pytest.raises(CorruptError, match="run `tensorcas repair` to restore it"):
        Store.open(tmp_path / "root", create=True)
    with pytest.raises(CorruptError, match="run `tensorcas repair` to restore it"):
        TensorCasStore(tmp_path / "root", run_id="run")
    opened, format_fix = open_damaged(tmp_path / "root")
    plan_repair(opened, format_fix=format_fix).execute()
    assert loads(Store.open(tmp_path / "root", create=True), "ab", 0)


def test_a_store_that_clients_of_a_server_made_stays_one(store: Store) -> None:
    overwrite(store.backend, "format", b'{"carried": true, "chunk_bytes": 4096, "digest"')
    repair(store)

    assert json.loads(store.backend.get("format"))["carried"] is True


def test_damaged_format_of_a_store_without_manifests_is_not_guessed() -> None:
    store = new_store()
    overwrite(store.backend, "format", b"?")

    with pytest.raises(CorruptError, match="no manifest to tell what it was"):
        open_damaged_backend(store.backend)


def test_repair_of_a_place_without_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError):
        open_damaged(tmp_path / "here")


def test_a_local_store_without_its_format_is_found_from_below(tmp_path: Path) -> None:
    store = Store.init(tmp_path / "root", chunk_bytes=CHUNK_BYTES)
    save(store, "ab", 0)
    store.backend.delete("format")
    opened, format_fix = open_damaged(tmp_path / "root" / "0" / "artifacts")
    plan_repair(opened, format_fix=format_fix).execute()

    assert Store.open(tmp_path / "root").id == store.id


# --- the index


def test_an_index_that_is_gone_is_made_anew_from_packs(store: Store) -> None:
    for key in keys(store.backend, "index"):
        store.backend.delete(key)
    assert loads(store, "ab", 0)
    assert "it does not name 3 packs" in str(plan_repair(afresh(store)))
    report = repair(store)
    fresh = afresh(store)
    fresh.catalog.refresh()

    assert report.is_whole
    assert plan_repair(afresh(store)).is_empty
    ref = fresh.ref(target(0).key)
    assert ref is not None
    assert fresh.catalog.find(fresh.manifest(ref).digests).found.all()


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_segment_that_says_other_than_the_packs_is_replaced(is_remote: bool) -> None:
    store = new_store(MemoryBackend(is_remote=is_remote))
    save(store, "ab", 0)
    name = pack_of(store.backend, "a")
    wrong = read_pack_table(store.backend, name).copy()
    wrong["offset"][0] += 1
    bad = "index/" + "f" * 32 + ".segment"
    for key in keys(store.backend, "index"):
        store.backend.delete(key)
    store.backend.put_new(bad, [segment_bytes(make_table({name: wrong}))])
    report = repair(store)

    assert report.is_whole
    assert bad not in keys(store.backend, "index")
    assert len(keys(store.backend, "index")) == 1
    assert loads(store, "ab", 0)


# --- what savers and collectors leave for each other


def test_a_damaged_list_stops_saves_until_its_collector_is_said_to_be_dead(store: Store) -> None:
    key = "condemned/" + "e" * 32
    store.backend.put_new(key, [b'{"format": 1, "packs": ["'])
    with pytest.raises(CorruptError, match=f"repair --abandon {key}"):
        save(afresh(store), "e", 3)
    with pytest.raises(CorruptError, match=f"repair --abandon {key}"):
        plan_gc(afresh(store))
    assert "its collector may be alive" in repair(store).left[key]
    assert store.backend.stat(key) is not None
    report = repair(store, abandon=(key,))

    assert report.abandoned == (key,)
    assert report.is_whole
    save(afresh(store), "e", 3)
    assert loads(store, "e", 3)


def test_repair_counts_no_copy_that_a_damaged_condemned_list_may_name(store: Store) -> None:
    everything = frozenset(name for name, _ in list_packs(store.backend))
    store.backend.put_new("condemned/" + "a" * 32, [condemned_bytes(everything, frozenset())])
    save(afresh(store), "a", 3)
    store.backend.delete("condemned/" + "a" * 32)
    [copy] = {name for name, _ in list_packs(store.backend)} - everything
    flip_chunk(store.backend, "b", min(everything, key=lambda name: name != pack_of(store.backend, "b")))
    store.backend.put_new("condemned/" + "e" * 32, [b"?"])
    repair(store)
    store.backend.delete(pack_key(copy))  # as the collector does whose list it was

    assert loads(store, "ab", 0, "a")


def test_only_damaged_refs_can_be_abandoned(store: Store) -> None:
    key = "condemned/" + "e" * 32
    store.backend.put_new(key, [condemned_bytes(frozenset(), frozenset())])

    with pytest.raises(ValueError, match="cannot be abandoned"):
        plan_repair(afresh(store), abandon=[key])


def test_a_list_of_which_nothing_is_left_is_taken_away(store: Store) -> None:
    [pack] = [name for name, _ in list_packs(store.backend) if name == pack_of(store.backend, "d")]
    store.backend.put_new("condemned/" + "a" * 32, [condemned_bytes(frozenset(["f" * 32]), frozenset())])
    store.backend.put_new("condemned/" + "b" * 32, [condemned_bytes(frozenset([pack]), frozenset())])
    repair(store)

    assert keys(store.backend, "condemned") == ["condemned/" + "b" * 32]


def test_a_damaged_intent_is_told_and_left_to_collections(store: Store) -> None:
    key = "intents/" + "1" * 32
    store.backend.put_new(key, [b"half an int"])
    plan = plan_repair(afresh(store))

    assert [(finding.key, finding.is_harmless) for finding in plan.findings] == [(key, True)]
    assert plan.execute().is_whole
    assert store.backend.stat(key) is not None


def test_while_a_save_through_a_server_is_under_way_nothing_is_repaired(store: Store) -> None:
    ref = store.ref(target(0).key)
    assert ref is not None
    manifest = store.manifest(ref)
    intent = intent_bytes(ref.manifest, manifest.digests, through_carrier=True)
    store.backend.put_new("intents/" + "1" * 32, [intent])

    with pytest.raises(PendingSavesError):
        plan_repair(afresh(store))


def test_a_cut_pack_beside_a_cut_intent_may_still_be_on_its_way_through_a_server(store: Store) -> None:
    settings = json.loads(store.backend.get("format")) | {"carried": True}
    overwrite(store.backend, "format", json.dumps(settings).encode())
    store.backend.put_new("intents/" + "1" * 32, [b"half an int"])
    key = "packs/" + "9" * 32 + ".pack"
    store.backend.put_new(key, [b"\x89TCPK\r\n\x01 as far as it came"])
    report = repair(store)

    assert "may still be writing it" in report.left[key]
    assert store.backend.stat(key) is not None


def test_files_and_artifacts_are_named_by_their_path(store: Store, tmp_path: Path) -> None:
    np.save(tmp_path / "file.npy", tensors("g")["g"])
    with store.write_file(tmp_path / "file.npy") as pending:
        pending.commit(RefTarget(path="data/file"))
    flip_chunk(store.backend, "g")
    report = repair(store)

    assert [loss.checkpoint for loss in report.losses] == ["data/file"]


def test_a_repaired_store_verifies_but_for_what_is_lost(store: Store, backup: Store) -> None:
    flip_chunk(store.backend, "b")
    flip_chunk(store.backend, "d")
    flip_chunk(backup.backend, "d")
    overwrite(store.backend, target(1).key, b"")
    repair(store, backup)
    problems = verify(afresh(store), full=True).problems

    assert {(problem.checkpoint, problem.tensors) for problem in problems} == {("run run step 2", ("d",))}


def test_a_pack_is_left_alone_that_a_save_through_a_server_began_to_send_after_the_first_look(store: Store) -> None:
    other = new_store()
    ref = save(other, "e", 3)
    cut = other.backend.get(pack_key(pack_of(other.backend, "e")))[:3000]
    key = "packs/" + "9" * 32 + ".pack"
    store.backend.put_new(key, [cut])
    plan = plan_repair(afresh(store))
    intent = intent_bytes(ref.manifest, other.manifest(ref).digests, through_carrier=True)
    store.backend.put_new("intents/" + "1" * 32, [intent])

    with pytest.raises(PendingSavesError):
        plan.execute()
    assert store.backend.get(key) == cut
