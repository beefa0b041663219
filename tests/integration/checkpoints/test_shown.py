"""Checkpoints in MLflow: listing, metrics, deletion and collection."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from tensorcas_mlflow.backends import FolderBackend
from tensorcas_mlflow.integration.checkpoints import Keep
from tensorcas_mlflow.integration.forgotten import drop_orphans, orphaned_refs
from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.store import Store
from tests.integration.checkpoints.states import assert_same, load, log, make_state, shown, steps, store_below

# --- what MLflow shows


def test_mlflow_lists_and_downloads_checkpoints(experiment: str) -> None:
    with mlflow.start_run() as run:
        info = log(make_state(), 12)

    listed = mlflow.artifacts.list_artifacts(run_id=run.info.run_id, artifact_path="checkpoints/checkpoint")
    [size] = [file.file_size for file in listed if file.path.endswith("step-00000012.arrow")]
    assert shown(run.info.run_id) == ["step-00000012.arrow"]
    assert Path(mlflow.artifacts.download_artifacts(info.uri)).stat().st_size == size


def test_figures_are_logged_as_metrics_of_the_step(experiment: str) -> None:
    with mlflow.start_run() as run:
        state = make_state()
        first = log(state, 1)
        second = log(state, 2)
    mlflow.tensorcas.wait()

    def history(key: str) -> list[tuple[int, float]]:
        return [(m.step, m.value) for m in mlflow.MlflowClient().get_metric_history(run.info.run_id, key)]

    assert history("tensorcas/total_bytes") == [(1, first.total_bytes), (2, second.total_bytes)]
    assert history("tensorcas/new_bytes") == [(1, first.new_bytes), (2, 0)]
    assert history("tensorcas/stored_bytes") == [(1, first.stored_bytes), (2, second.stored_bytes)]
    assert history("tensorcas/saved_ratio") == [(1, 1 - first.new_bytes / first.total_bytes), (2, 1.0)]


def test_calls_for_figures_take_a_small_share_of_the_time(experiment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n_metrics: list[int] = []
    took_s: list[float] = []

    def slow(self: MlflowClient, run_id: str, metrics: Any) -> None:
        began = time.monotonic()
        time.sleep(0.05)
        n_metrics.append(len(metrics))
        took_s.append(time.monotonic() - began)

    monkeypatch.setattr(MlflowClient, "log_batch", slow)
    with mlflow.start_run():
        began = time.monotonic()
        for step in range(40):
            log(make_state(), step)
        total_s, in_calls_s = time.monotonic() - began, sum(took_s)
    mlflow.tensorcas.wait()

    assert sum(n_metrics) == 4 * 40
    assert in_calls_s <= total_s / 5 + 2 * max(took_s)


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_figures_of_checkpoints_can_be_switched_off(experiment: str, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    options: dict[str, Any] = {"log_metrics": False} if by == "argument" else {}
    if by == "environment":
        monkeypatch.setenv("TENSORCAS_LOG_METRICS", "false")
    with mlflow.start_run() as run:
        log(make_state(), 1, **options)
    mlflow.tensorcas.wait()

    assert mlflow.MlflowClient().get_run(run.info.run_id).data.metrics == {}


def test_a_tracking_store_that_fails_costs_figures_and_no_checkpoint(
    experiment: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mlflow.start_run():
        state = make_state()
        (tmp_path / "mlflow.db").rename(tmp_path / "gone.db")
        (tmp_path / "mlflow.db").mkdir()
        try:
            log(state, 1)
            mlflow.tensorcas.wait()
        finally:
            (tmp_path / "mlflow.db").rmdir()
            (tmp_path / "gone.db").rename(tmp_path / "mlflow.db")

    assert_same(load(), state)


# --- deleting and collecting


def test_a_deleted_checkpoint_is_gone_and_the_others_are_not(experiment: str, tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        for step in range(3):
            log(make_state(step), step)
        mlflow.tensorcas.delete_checkpoint(step=1)
    store = store_below(tmp_path)
    report = plan_gc(store, grace_s=0).execute()

    assert report.freed_bytes > make_state()["weights"].nbytes // 2
    assert steps() == [0, 2]
    assert_same(load(step=0), make_state(0))
    assert_same(load(step=2), make_state(2))
    assert shown(run.info.run_id) == ["step-00000000.arrow", "step-00000002.arrow"]


def test_deletion_tells_whether_there_was_a_checkpoint(experiment: str) -> None:
    with mlflow.start_run():
        log(make_state(), 1)

        assert not mlflow.tensorcas.delete_checkpoint(step=2)
        assert mlflow.tensorcas.delete_checkpoint(step=1)
        assert not mlflow.tensorcas.delete_checkpoint(step=1)


def test_a_collection_keeps_every_checkpoint(experiment: str, tmp_path: Path) -> None:
    with mlflow.start_run():
        for step in range(3):
            log(make_state(step), step)
    plan_gc(store_below(tmp_path), grace_s=0).execute()

    assert all(load(step=step)["epoch"] == step for step in range(3))


def test_checkpoints_of_a_run_that_mlflow_has_deleted_are_orphans(plain_experiment: str, tmp_path: Path) -> None:
    with mlflow.start_run() as gone:
        log(make_state(1), 1)
    with mlflow.start_run() as kept:
        log(make_state(2), 2)
    store = store_below(tmp_path)
    before = orphaned_refs(store, grace_s=0)
    shutil.rmtree(tmp_path / "artifacts" / gone.info.run_id)

    assert before == []
    orphans = orphaned_refs(store, grace_s=0)
    assert [ref.run_id for ref in orphans] == [gone.info.run_id]
    assert drop_orphans(store, orphans) == 1
    plan_gc(store, grace_s=0).execute()
    assert_same(load(kept.info.run_id), make_state(2))


def test_a_checkpoint_whose_shown_copy_is_lost_is_no_orphan(plain_experiment: str, tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        log(make_state(1), 1)
    (file,) = (tmp_path / "artifacts" / run.info.run_id).rglob("*.arrow")
    file.unlink()

    assert orphaned_refs(store_below(tmp_path), grace_s=0) == []
    assert_same(load(), make_state(1))


def test_nothing_is_an_orphan_where_only_the_store_was_copied(plain_experiment: str, tmp_path: Path) -> None:
    with mlflow.start_run():
        log(make_state(1), 1)
    shutil.copytree(tmp_path / "artifacts/.tensorcas", tmp_path / "copy/.tensorcas")

    assert orphaned_refs(Store.open(tmp_path / "copy"), grace_s=0) == []


# --- what looks like a checkpoint and is none, and the other way round


def test_a_file_under_a_checkpoints_name_is_none_and_is_not_dropped(cas_experiment: str, tmp_path: Path) -> None:
    file = tmp_path / "step-00000009.arrow"
    file.write_bytes(b"\0" * 100_000)
    with mlflow.start_run() as run:
        log(make_state(1), 1)
        mlflow.log_artifact(str(file), "checkpoints/checkpoint")
        log(make_state(2), 2, keep=Keep(last=1))

    assert load()["epoch"] == 2
    assert steps() == [2]
    assert shown(run.info.run_id) == ["step-00000002.arrow", "step-00000009.arrow"]


def test_checkpoints_in_a_copy_of_the_store_are_no_orphans(
    plain_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mlflow.start_run():
        log(make_state(1), 1)
    shutil.copytree(tmp_path / "artifacts", tmp_path / "copy")
    monkeypatch.setenv("TENSORCAS_STORE", str(tmp_path / "copy"))
    with mlflow.start_run():
        log(make_state(2), 2)

    assert orphaned_refs(Store.open(tmp_path / "copy"), grace_s=0) == []


def test_a_store_beside_other_folders_than_mlflows_has_no_orphans(plain_experiment: str, tmp_path: Path) -> None:
    with mlflow.start_run():
        log(make_state(1), 1)
    (tmp_path / "backup/photos").mkdir(parents=True)
    shutil.copytree(tmp_path / "artifacts/.tensorcas", tmp_path / "backup/.tensorcas")

    assert orphaned_refs(Store.open(tmp_path / "backup"), grace_s=0) == []


@pytest.mark.long
def test_a_step_logged_while_its_orphan_is_dropped_stays(
    plain_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mlflow.start_run() as run:
        log(make_state(1), 1)
    with mlflow.start_run():
        log(make_state(0), 0)
    store = store_below(tmp_path)
    shutil.rmtree(tmp_path / "artifacts" / run.info.run_id)
    orphans = orphaned_refs(store, grace_s=0)
    withdraw = type(store.backend).withdraw

    def log_again(self: Any, key: str, token: str) -> bool:
        is_withdrawn = withdraw(self, key, token)
        monkeypatch.undo()
        log(make_state(2), 1, run_id=run.info.run_id)
        return is_withdrawn

    monkeypatch.setattr(type(store.backend), "withdraw", log_again)
    drop_orphans(store, orphans)

    assert len(orphans) == 1
    assert_same(load(run.info.run_id), make_state(2))


# --- durability of what tells a deleted run from a live one


def test_the_runs_folder_is_durable_before_the_first_checkpoint(
    plain_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, promote = os.fsync, FolderBackend.promote

    def note_fsync(descriptor: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def note_commit(self: FolderBackend, *arguments: Any, **options: Any) -> None:
        events.append("commit")
        promote(self, *arguments, **options)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(FolderBackend, "promote", note_commit)
    with mlflow.start_run() as run:
        log(make_state(1), 1)

    before = events[: events.index("commit")]
    root = str(tmp_path / "artifacts")
    assert {root, f"{root}/{run.info.run_id}", f"{root}/{run.info.run_id}/artifacts"} <= set(before)
    assert str(tmp_path) in before or root in before


def test_a_folder_that_cannot_be_made_is_an_mlflow_error(plain_experiment: str, tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        (tmp_path / "artifacts").mkdir()
        (tmp_path / "artifacts" / run.info.run_id).write_text("in the way")
        with pytest.raises(MlflowException, match="could not make"):
            log(make_state(1), 1)

    assert list(store_below(tmp_path).backend.list("intents")) == []


def test_a_setting_that_makes_no_sense_leaves_no_intent(
    experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORCAS_LOG_METRICS", "maybe")
    with mlflow.start_run(), pytest.raises(MlflowException, match="TENSORCAS_LOG_METRICS must be true or false"):
        log(make_state(1), 1)

    assert list(store_below(tmp_path).backend.list("intents")) == []


def test_a_series_of_another_name_has_metrics_of_its_own(experiment: str) -> None:
    with mlflow.start_run() as run:
        log(make_state(1), 1)
        log(make_state(2), 1, name="ema é@1")
    mlflow.tensorcas.wait()

    assert set(mlflow.MlflowClient().get_run(run.info.run_id).data.metrics) == {
        f"{prefix}/{figure}"
        for prefix in ("tensorcas", "tensorcas/ema __1")
        for figure in ("total_bytes", "new_bytes", "stored_bytes", "saved_ratio")
    }


def test_copies_go_through_our_repository_where_tensors_are_in_a_store_elsewhere(
    experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORCAS_STORE", str(Store.init(tmp_path / "elsewhere").uri))
    monkeypatch.chdir(tmp_path)
    with mlflow.start_run() as run:
        log(make_state(), 1)
        mlflow.tensorcas.wait()

        assert shown(run.info.run_id) == ["step-00000001.arrow"]
        assert_same(load(), make_state())
        mlflow.tensorcas.delete_checkpoint(step=1)
        mlflow.tensorcas.wait()
        assert shown(run.info.run_id) == []
    assert not list(tmp_path.glob("tensorcas*"))
