"""Collection on stores in memory and in files, one collector at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import BlobInfo, LocalBackend, MemoryBackend
from tensorcas_mlflow.base.files import pid_space
from tensorcas_mlflow.errors import CorruptError
from tensorcas_mlflow.layout.packs import segment_bytes
from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import list_packs, parse_intent, read_pack_table
from tests.maintenance.gc.collecting import (
    CHUNK_BYTES,
    everything,
    keys,
    loads,
    overwrite,
    plan_now,
    save,
    save_apart,
    target,
    tensors,
)

# --- the plan


def test_a_plan_says_in_words_what_would_be_done(store: Store) -> None:
    save(store, "ab", 0)
    store.drop(save(store, "cd", 1))

    assert str(plan_now(store)) == (
        "2 chunks kept by 1 checkpoint or file, 1 pack to delete (8.5 KB of deleted checkpoints), "
        "1 manifest to delete, frees about 9.0 KB of 18.5 KB on disk"
    )


def test_a_plan_is_a_value(store: Store) -> None:
    store.drop(save(store, "ab", 0))

    assert plan_now(store) == plan_now(store)


def test_planning_changes_nothing(store: Store) -> None:
    save(store, "ab", 0)
    store.drop(save(store, "bc", 1))
    before = everything(store)
    plan_now(store, max_waste=0)

    assert everything(store) == before


def test_the_plan_of_a_store_with_nothing_to_collect_is_empty(store: Store) -> None:
    save(store, "ab", 0)

    assert plan_now(store).is_empty


def test_an_empty_store_can_be_collected(store: Store) -> None:
    report = plan_now(store).execute()

    assert (report.n_packs, report.n_manifests, report.n_withdrawn, report.freed_bytes) == (0, 0, 0, 0)


@pytest.mark.parametrize("options", [{"grace_s": -1}, {"max_waste": 1.1}, {"max_waste": -0.1}])
def test_impossible_settings_are_refused(store: Store, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="grace_s"):
        plan_gc(store, **options)


# --- execution


def test_collection_deletes_blobs_that_no_ref_needs(store: Store) -> None:
    save(store, "ab", 0)
    store.drop(save(store, "cd", 1))
    report = plan_now(store).execute()

    assert (report.n_packs, report.n_manifests) == (1, 1)
    assert len(keys(store, "packs")) == len(keys(store, "manifests")) == 1
    assert keys(store, "condemned") == []
    assert loads(store, "ab", 0)


def test_the_bytes_freed_are_the_bytes_that_are_gone(store: Store) -> None:
    save(store, "ab", 0)
    store.drop(save(store, "acdefg", 1))

    def n_bytes() -> int:
        return sum(info.size for prefix in ("packs", "manifests") for info in store.backend.list(prefix))

    before = n_bytes()
    report = plan_now(store, max_waste=0).execute()

    assert report.freed_bytes == before - n_bytes() > 0


def test_a_plan_that_was_executed_can_be_executed_again(store: Store) -> None:
    store.drop(save(store, "ab", 0))
    plan = plan_now(store)
    plan.execute()

    assert plan.execute().n_packs == 0


def test_collection_spares_chunks_a_save_relied_on_since_the_plan(store: Store) -> None:
    store.drop(save(store, "ab", 0))
    plan = plan_now(store)
    save(store, "ab", 1)
    report = plan.execute()

    assert (report.n_packs, report.n_spared) == (0, 1)
    assert loads(store, "ab", 1)


def test_collection_spares_chunks_a_pending_save_relies_on(store: Store) -> None:
    store.drop(save(store, "ab", 0))
    plan = plan_gc(store)
    with store.write_checkpoint(tensors("ac")) as pending:
        plan.execute()
        pending.commit(target(1))

    assert loads(store, "ac", 1)


def test_nothing_outside_of_the_plan_is_deleted(store: Store) -> None:
    ref = save(store, "ab", 0)
    plan = plan_now(store)
    store.drop(ref)
    plan.execute()

    assert len(keys(store, "packs")) == 1


def test_a_save_that_was_given_up_by_mistake_starts_again_and_commits(store: Store) -> None:
    with store.write_checkpoint(tensors("ab")) as pending:
        report = plan_now(store).execute()
        pending.commit(target(0))

    assert report.n_withdrawn == 1
    assert loads(store, "ab", 0)


def test_an_abandoned_save_is_garbage_at_once(store: Store) -> None:
    with store.write_checkpoint(tensors("ab")):
        pass
    plan_gc(store).execute()

    assert everything(store) == {}


# --- rewriting


def test_a_pack_is_rewritten_when_it_wastes_more_than_is_allowed(store: Store) -> None:
    store.drop(save(store, "abcd", 0))
    save(store, "abc", 1)

    assert plan_now(store, max_waste=0.3).is_empty is False
    assert plan_now(store, max_waste=0.3).rewrites == {}
    assert list(plan_now(store, max_waste=0.2).rewrites.values()) == [
        (3 * CHUNK_BYTES, next(list_packs(store.backend))[1])
    ]


def test_a_rewritten_pack_holds_what_is_needed_and_nothing_else(store: Store) -> None:
    store.drop(save(store, "abcd", 0))
    save(store, "ad", 1)
    plan_now(store, max_waste=0).execute()
    ((name, _),) = list_packs(store.backend)

    assert len(read_pack_table(store.backend, name)) == 2
    assert loads(store, "ad", 1)
    assert plan_now(store, max_waste=0).is_empty


def test_copies_of_a_chunk_in_several_packs_are_reduced_to_one(store: Store) -> None:
    save(store, "ab", 0)
    save_apart(store, "abc", 1)
    save_apart(store, "a", 2)
    plan_now(store, max_waste=0).execute()
    tables = [read_pack_table(store.backend, name) for name, _ in list_packs(store.backend)]

    assert sum(map(len, tables)) == 3
    assert loads(store, "ab", 0)
    assert loads(store, "abc", 1)
    assert loads(store, "a", 2)


def test_an_open_store_reads_on_while_its_packs_are_rewritten(store: Store) -> None:
    reader = Store.open_backend(store.backend)
    store.drop(save(store, "ab", 0))
    ref = save(store, "a", 1)
    reader.catalog.refresh()
    plan_now(store, max_waste=0).execute()

    assert np.array_equal(reader.read_tensors(reader.manifest(ref))["a"], tensors("a")["a"])


def test_a_pack_with_a_damaged_chunk_is_spared_and_others_are_rewritten(store: Store) -> None:
    store.drop(save(store, "ab", 0))
    save(store, "a", 1)
    store.drop(save(store, "cd", 2))
    save(store, "c", 3)
    for name, _ in list_packs(store.backend):
        entries = read_pack_table(store.backend, name)
        if store.manifest(store.checkpoints()[0]).digests[0].tobytes() in {row["digest"].tobytes() for row in entries}:
            damaged = name
    data = bytearray(store.backend.get(f"packs/{damaged}.pack"))
    for row in read_pack_table(store.backend, damaged):
        data[int(row["offset"])] ^= 1
    overwrite(store.backend, f"packs/{damaged}.pack", bytes(data))
    report = plan_now(store, max_waste=0).execute()

    assert (report.n_packs, report.n_spared) == (1, 1)
    assert store.backend.get(f"packs/{damaged}.pack") == data
    assert keys(store, "condemned") == []
    assert loads(store, "c", 3)


# --- the index


def test_the_index_forgets_packs_that_are_gone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorcas_mlflow.chunk_io._catalog._FOLD_AT", 2)
    refs = [save(store, letter, step) for step, letter in enumerate("abcd")]
    assert any(key.endswith(".segment") for key in keys(store, "index"))
    for ref in refs[1:]:
        store.drop(ref)
    plan_now(store).execute()

    reader = Store.open_backend(store.backend)
    reader.catalog.refresh()
    places = reader.catalog.find(np.concatenate([reader.manifest(ref).digests for ref in store.checkpoints()]))
    assert places.found.all()
    assert {name for table in reader.catalog._tables for name in table.packs} == {
        n for n, _ in list_packs(store.backend)
    }


def test_a_segment_that_cannot_be_read_is_removed_and_its_packs_are_found_again(store: Store) -> None:
    save(store, "ab", 0)
    for key in keys(store, "index"):
        store.backend.delete(key)
    store.backend.put_new("index/" + "e" * 32 + ".segment", [b"no segment"])
    plan_now(store).execute()

    assert keys(store, "index") == [f"index/{name}.loose" for name, _ in list_packs(store.backend)]


def test_a_segment_that_names_only_living_packs_is_left_alone(store: Store) -> None:
    save(store, "ab", 0)
    store.catalog.refresh()
    key = "index/" + "e" * 32 + ".segment"
    store.backend.put_new(key, [segment_bytes(store.catalog._tables[0])])
    store.drop(save(store, "cd", 1))
    plan_now(store).execute()

    assert key in keys(store, "index")


# --- processes

SAVER = """
import sys
import numpy as np
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
store = Store.open(sys.argv[1])
rng = np.random.default_rng(1)
pending = store.write_checkpoint({"x": rng.integers(0, 256, 20_000, dtype=np.uint8)})
print("stored", flush=True)
sys.stdin.readline()
pending.commit(RefTarget(run_id="run", step=7))
print("committed", flush=True)
"""


def start_saver(store: Store) -> subprocess.Popen[str]:
    """Start a process that saves and waits for a line before it commits."""
    saver = subprocess.Popen(
        [sys.executable, "-c", SAVER, store.uri],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert saver.stdout is not None
    assert saver.stdout.readline() == "stored\n"
    return saver


@pytest.mark.long
def test_a_living_process_is_waited_for(local_store: Store) -> None:
    saver = start_saver(local_store)
    report = plan_gc(local_store).execute()
    out, _ = saver.communicate("\n", timeout=30)

    assert report.n_withdrawn == 0
    assert out == "committed\n"
    assert [ref.step for ref in local_store.checkpoints()] == [7]


@pytest.mark.long
def test_a_killed_process_is_not_waited_for(local_store: Store) -> None:
    saver = start_saver(local_store)
    saver.kill()
    saver.communicate()
    report = plan_gc(local_store).execute()

    assert report.n_withdrawn == 1
    assert everything(local_store) == {}


def test_temporary_files_of_dead_processes_are_removed_and_those_of_the_living_are_not(local_store: Store) -> None:
    assert isinstance(local_store.backend, LocalBackend)
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True
    ).stdout
    folder = local_store.backend.root / "packs"
    folder.mkdir(exist_ok=True)
    host = "".join(c for c in os.uname().nodename if c.isalnum())[:40] + pid_space()
    elsewhere = folder / f"+staging-{dead.strip()}-{host}0-{'2' * 32}"
    elsewhere.write_bytes(b"1234567")
    left_behind = folder / f"+staging-{dead.strip()}-{host}-{'0' * 32}"
    under_way = folder / f"+staging-{os.getpid()}-{host}-{'1' * 32}"
    left_behind.write_bytes(b"123")
    under_way.write_bytes(b"12345")
    report = plan_now(local_store).execute()

    assert report.freed_bytes == 3
    assert not left_behind.exists()
    assert under_way.exists()
    assert elsewhere.exists()


@pytest.mark.parametrize("way", [[], ["unshare", "--map-root-user", "--pid", "--fork"]])
def test_a_save_of_another_container_is_not_taken_for_dead_by_its_process_id(way: list[str]) -> None:
    code = "import sys, numpy as np; from tensorcas_mlflow.store.protocol import intent_bytes; "
    code += "sys.stdout.buffer.write(intent_bytes('0' * 64, np.empty((0, 32), np.uint8)))"
    made = subprocess.run([*way, sys.executable, "-c", code], capture_output=True)
    if way and made.returncode:
        pytest.skip(f"no process ids apart here: {made.stderr!r}")
    info = BlobInfo(key="intents/1", size=len(made.stdout), modified_s=0.0, token="1")

    assert parse_intent(info, made.stdout).writer_is_dead == (not way)


def test_a_plan_for_another_root_cannot_be_mixed_up(store: Store) -> None:
    """A plan carries its store: executed on a copy of the store it deletes nothing of the original."""
    store.drop(save(store, "ab", 0))
    copy = MemoryBackend()
    for key, data in {**everything(store), "format": store.backend.get("format")}.items():
        copy.put_new(key, [data])
    plan = replace(plan_now(store), store=Store.open_backend(copy))
    plan.execute()

    assert len(keys(store, "packs")) == 1
    assert list(copy.list("packs")) == []


@pytest.mark.usefixtures("store_of_files")
def test_a_manifest_that_does_not_hash_to_its_name_stops_the_collection(local_store: Store) -> None:
    # Long enough to be kept as it is, where one flipped bit of a digest leaves a manifest that reads well.
    with local_store.write_checkpoint({"w": np.arange(2500 * CHUNK_BYTES // 8)}) as pending:
        ref = pending.commit(target(1))
    assert isinstance(local_store.backend, LocalBackend)
    blob = local_store.backend.root / "manifests" / ref.manifest
    data = bytearray(blob.read_bytes())
    data[data.index(local_store.manifest(ref).digests[7].tobytes())] ^= 1
    blob.write_bytes(data)

    with pytest.raises(CorruptError, match="it hashes to"):
        plan_gc(local_store, grace_s=0)
