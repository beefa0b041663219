"""Copies of everything, bit for bit, and of nothing twice."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.backends import Backend, FolderBackend, LocalBackend, MemoryBackend
from tensorcas_mlflow.base.progress import Progress
from tensorcas_mlflow.errors import WrongStoreError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import _copy_refs, copy_refs, plan_copy, plan_gc, read_source, verify
from tensorcas_mlflow.store import Store, protocol
from tests.faulty import FaultyBackend
from tests.maintenance.copy.copying import (
    assert_steps_load,
    blobs,
    copy,
    new_store,
    payloads,
    save,
    save_file,
    save_steps,
    state,
)

PAIRS = ["memory to memory", "files to memory", "memory to files", "files to database", "database to files"]
KINDS: dict[str, Callable[[Path], Backend]] = {
    "memory": lambda _: MemoryBackend(),
    "files": LocalBackend,
    "database": FolderBackend,
}


@pytest.fixture(params=PAIRS)
def backends(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Backend, Backend]:
    made = [KINDS[kind](tmp_path / str(n)) for n, kind in enumerate(str(request.param).split(" to "))]
    return made[0], made[1]


def test_a_copy_holds_everything_bit_for_bit(backends: tuple[Backend, Backend], tmp_path: Path) -> None:
    source = new_store(backends[0])
    destination = new_store(backends[1], like=source)
    assert all(each.has_database == isinstance(each, FolderBackend) for each in backends)
    save_steps(source, 1, 2, 3)
    data = np.random.default_rng(0).bytes(100_000)
    file = save_file(source, data, "notes/a.bin", tmp_path)
    report = copy(source, destination)

    assert (report.n_copied, report.n_there, report.kept, report.failed) == (4, 0, (), ())
    copied = destination.artifact("notes/a.bin")
    assert copied is not None
    out = io.BytesIO()
    out.writelines(destination.iter_file(copied))
    assert out.getvalue() == data
    destination.drop(file)
    assert_steps_load(destination, 1, 2, 3)
    assert verify(destination, full=True).problems == ()


def test_chunks_are_moved_as_they_are_stored() -> None:
    source = new_store()
    destination = new_store(like=source)
    save_steps(source, 1, 2)
    copy(source, destination)

    assert payloads(destination) == payloads(source)


def test_a_ref_of_a_copy_says_what_it_said_but_for_the_manifests_random_digits() -> None:
    source = new_store()
    destination = new_store(like=source)
    save(source, state(1), step=1, name="ema", parent_step=0, metrics={"loss": 0.5}, uri="file:///mlruns/x")
    save(source, state(2), model_id="m-1", copy_path="models/m-1/artifacts/data/checkpoint.arrow")
    copy(source, destination)

    for before, after in zip(source.checkpoints(), destination.checkpoints(), strict=True):
        assert before.manifest[:64] == after.manifest[:64]
        assert replace(after, manifest=before.manifest) == before


def test_manifests_of_a_copy_of_the_same_id_are_byte_for_byte_the_same() -> None:
    source = new_store()
    destination = new_store(like=source)
    [ref] = save_steps(source, 1)
    copy(source, destination)

    copied = destination.ref(ref.key)
    assert copied is not None
    assert destination.manifest(copied).to_bytes() == source.manifest(ref).to_bytes()


def test_the_chunks_of_one_raw_tensor_lie_side_by_side_again() -> None:
    source = new_store()
    destination = new_store(like=source)
    save(source, {"a": np.frombuffer(np.random.default_rng(1).bytes(40_000), np.uint8)}, step=1)
    copy(source, destination)

    [(name, _)] = protocol.list_packs(destination.backend)
    entries = protocol.read_pack_table(destination.backend, name)
    assert len(entries) == 10
    assert int(entries["offset"][0]) % 64 == 0
    assert (entries["offset"][1:] == entries["offset"][:-1] + entries["stored_bytes"][:-1]).all()


def test_a_second_copy_reads_each_ref_once_and_moves_nothing() -> None:
    inner = new_store()
    save_steps(inner, 1, 2, 3)
    source = Store.open_backend(FaultyBackend(inner.backend))
    target = new_store(like=source)
    destination = Store.open_backend(FaultyBackend(target.backend))
    copy(source, destination)
    before = blobs(target)
    for store in (source, destination):
        store.backend.calls.clear()  # type: ignore[attr-defined]
    report = copy(source, destination)

    assert (report.n_copied, report.n_there, report.read_bytes, report.written_bytes) == (0, 3, 0, 0)
    assert Counter(source.backend.calls) == {"list": 1, "get": 3}  # type: ignore[attr-defined]
    assert Counter(destination.backend.calls) == {"list": 1, "get": 3}  # type: ignore[attr-defined]
    assert blobs(target) == before


def test_only_chunks_that_are_missing_are_read_and_written() -> None:
    source = new_store()
    destination = new_store(like=source)
    save_steps(source, 1)
    copy(source, destination)
    [new] = save_steps(source, 2)
    n_new = sum(len(data) for digest, (_, _, data) in payloads(source).items() if digest not in payloads(destination))
    report = copy(source, destination)

    assert report.n_copied == 1
    assert n_new <= report.read_bytes < n_new + 1_000
    assert n_new < report.written_bytes < n_new + 4_000
    assert new.key in {ref.key for ref in destination.checkpoints()}


def test_copy_moves_no_chunk_that_the_destination_has_from_elsewhere() -> None:
    source = new_store()
    destination = new_store()
    save_steps(source, 1)
    save(destination, state(1), run_id="another", step=7)
    report = copy(source, destination)

    assert (report.n_copied, report.read_bytes) == (1, 0)


def test_many_small_checkpoints_share_a_pack() -> None:
    source = new_store()
    destination = new_store(like=source)
    for step in range(40):
        save(source, {"w": np.full(100, step)}, step=step)
    report = copy(source, destination)

    assert report.n_copied == 40
    assert len(list(protocol.list_packs(source.backend))) == 40
    assert len(list(protocol.list_packs(destination.backend))) == 1


def test_copy_commits_new_steps_before_it_has_moved_all(monkeypatch: pytest.MonkeyPatch) -> None:
    source = new_store()
    destination = new_store(like=source)
    save_steps(source, *range(6))
    monkeypatch.setattr(_copy_refs, "MAX_BATCH_BYTES", 30_000)
    seen: list[tuple[int, int]] = []
    report = copy(source, destination, watch=lambda progress: seen.append((progress.n_done, progress.done_bytes)))

    assert report.n_copied == 6
    assert seen == sorted(seen)
    assert seen[-1] == (6, report.read_bytes)
    assert any(0 < n_done < 6 and read < report.read_bytes for n_done, read in seen)


def test_refs_of_one_manifest_share_a_manifest_in_the_copy() -> None:
    source = new_store()
    destination = new_store(like=source)
    for step in (1, 2, 3):
        save(source, state(0), step=step)
    report = copy(source, destination)

    assert report.n_copied == 3
    assert len(list(destination.backend.list("manifests"))) == 1


def test_progress_is_told_up_to_the_last() -> None:
    source = new_store()
    save_steps(source, 1, 2)
    seen: list[Progress] = []
    report = copy(source, new_store(like=source), watch=seen.append)

    assert (seen[-1].n_done, seen[-1].n, seen[-1].done_bytes) == (2, 2, report.read_bytes)


def test_an_empty_store_is_copied_in_no_time() -> None:
    source = new_store()

    assert copy(source, new_store(like=source)).n_copied == 0


def test_step_dropped_and_collected_is_copied_again_under_another_manifest_name() -> None:
    source = new_store()
    destination = new_store(like=source)
    [ref] = save_steps(source, 1)
    copy(source, destination)
    first = destination.ref(ref.key)
    assert first is not None
    destination.drop(first)
    plan_gc(destination, grace_s=0).execute()
    copy(source, destination)

    second = destination.ref(ref.key)
    assert second is not None
    assert first.manifest[:64] == second.manifest[:64]
    assert first.manifest != second.manifest
    assert_steps_load(destination, 1)


def test_a_manifest_that_this_process_has_copied_is_shared_by_later_refs() -> None:
    source = new_store()
    destination = new_store(like=source)
    save(source, state(0), step=1)
    copy(source, destination)
    save(source, state(0), step=2)
    copy(source, destination)

    assert len(destination.checkpoints()) == 2
    assert len(list(destination.backend.list("manifests"))) == 1


def test_a_checkpoint_without_chunks_is_copied() -> None:
    source = new_store()
    destination = new_store(like=source)
    save(source, {"empty": np.empty(0)}, step=1)
    copy(source, destination)

    [ref] = destination.checkpoints()
    assert destination.read_tensors(destination.manifest(ref))["empty"].shape == (0,)


# --- what is planned


def test_a_plan_says_what_a_copy_then_moves() -> None:
    source = new_store()
    destination = new_store(like=source)
    save_steps(source, 1)
    copy(source, destination)
    save_steps(source, 2, 3)
    before = blobs(destination)
    refs, _ = read_source(source)
    plan = plan_copy(source, destination, refs)

    assert blobs(destination) == before
    assert (plan.n_new, plan.n_there, plan.kept, plan.failed) == (2, 1, (), ())
    there = payloads(destination)
    new = [data for digest, (_, _, data) in payloads(source).items() if digest not in there]
    assert (plan.n_chunks, plan.chunk_bytes) == (len(new), sum(map(len, new)))
    assert plan.execute().n_copied == plan.n_new
    assert len(payloads(destination)) == len(there) + plan.n_chunks


# --- what the destination has otherwise


def test_another_checkpoint_of_the_same_step_is_kept_and_told() -> None:
    source, destination = new_store(), new_store()
    save_steps(source, 1, 2)
    save(destination, {"other": np.ones(3)}, step=1)
    report = copy(source, destination)

    assert (report.n_copied, report.kept) == (1, ("run run step 1",))
    [kept] = [ref for ref in destination.checkpoints() if ref.step == 1]
    assert destination.manifest(kept).names() == ["other"]


def test_another_checkpoint_of_the_same_step_is_replaced_where_that_is_said() -> None:
    source, destination = new_store(), new_store()
    save_steps(source, 1, 2)
    save(destination, {"other": np.ones(3)}, step=1)
    report = copy(source, destination, replace=True)

    assert (report.n_copied, report.kept) == (2, ())
    assert_steps_load(destination, 1, 2)


def test_an_equal_checkpoint_that_was_saved_by_itself_is_there_already() -> None:
    source, destination = new_store(), new_store()
    save_steps(source, 1)
    [own] = save_steps(destination, 1)
    report = copy(source, destination, replace=True)

    assert (report.n_copied, report.n_there) == (0, 1)
    assert destination.ref(own.key) == own


def test_a_ref_that_cannot_be_read_counts_as_another_one() -> None:
    source = new_store()
    destination = new_store(like=source)
    [ref] = save_steps(source, 1)
    destination.backend.put_new(ref.key, [b"damaged"])

    assert copy(source, destination).kept == ("run run step 1",)
    assert copy(source, destination, replace=True).n_copied == 1
    assert_steps_load(destination, 1)


def test_a_checkpoint_that_somebody_saves_meanwhile_is_kept() -> None:
    source, destination = new_store(), new_store()
    save_steps(source, 1)
    refs, _ = read_source(source)
    saved: list[int] = []

    def save_too(progress: Progress) -> None:
        if not saved:
            saved.append(1)
            save(destination, {"other": np.ones(3)}, step=1)

    report = copy_refs(source, destination, refs, watch=save_too)

    assert (report.n_copied, report.kept) == (0, ("run run step 1",))
    [kept] = destination.checkpoints()
    assert destination.manifest(kept).names() == ["other"]
    assert list(destination.backend.list("intents")) == []


# --- stores of another id


def test_into_a_store_of_another_id_manifests_become_its_own() -> None:
    source, destination = new_store(), new_store()
    [ref] = save_steps(source, 1)
    copy(source, destination)

    copied = destination.ref(ref.key)
    assert copied is not None
    assert destination.manifest(copied).store_id == destination.id != source.id
    assert_steps_load(destination, 1)
    with pytest.raises(WrongStoreError):
        destination.read_tensors(source.manifest(ref))
    assert copy(source, destination).n_there == 1


def test_into_a_store_of_another_id_a_copy_elsewhere_does_not_decide_about_a_ref() -> None:
    source, destination = new_store(), new_store()
    elsewhere = save(
        source, state(1), model_id="m-1", uri="file:///mlruns/1/models/m-1/artifacts/data/checkpoint.arrow"
    )
    shown = save(source, state(1), path="models/m-2/artifacts/data/checkpoint.arrow", uri="tensorcas:///x")
    copy(source, destination)

    ref = destination.ref(elsewhere.key)
    assert ref is not None
    assert (ref.uri, ref.model_id, ref.run_id) == (None, "m-1", "run")
    kept = destination.ref(shown.key)
    assert kept is not None
    assert kept.uri == "tensorcas:///x"


def test_chunk_sizes_may_differ() -> None:
    source = new_store()
    destination = Store.init_backend(MemoryBackend(), chunk_bytes=65536)
    save_steps(source, 1, 2)
    copy(source, destination)

    assert_steps_load(destination, 1, 2)


def test_a_file_that_streamed_in_is_copied_into_a_store_of_another_id(tmp_path: Path) -> None:
    source, destination = new_store(), new_store()
    data = np.random.default_rng(0).bytes(50_000)
    save_file(source, data, "a/b.bin", tmp_path)
    copy(source, destination)

    ref = destination.artifact("a/b.bin")
    assert ref is not None
    assert b"".join(destination.iter_file(ref)) == data
    assert ref.n_bytes == 50_000


def test_saving_goes_on_in_a_copy() -> None:
    source = new_store()
    destination = new_store(like=source)
    save_steps(source, 1)
    copy(source, destination)
    with destination.write_checkpoint(state(1)) as pending:
        pending.commit(RefTarget(run_id="run", step=2))

        assert pending.n_new_bytes == 0
