"""Checkpoints of training loops through a server that knows nothing of this package."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlflow
import numpy as np
import pytest
from mlflow.exceptions import MlflowException
from mlflow.store.artifact import http_artifact_repo

from tensorcas_mlflow.integration.checkpoints import Keep
from tests.integration.server_store.conftest import Experiment


def state_of(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {"frozen": rng.normal(size=60_000), "trained": rng.normal(size=30_000) + step, "step": step}


def log(step: int, **options: Any) -> Any:
    return mlflow.tensorcas.log_checkpoint(state_of(step), step=step, log_metrics=False, **options)


def load(step: int | None = None, **options: Any) -> Any:
    return mlflow.tensorcas.load_checkpoint(step=step, **options)


def assert_is(state: dict[str, Any], step: int) -> None:
    expected = state_of(step)
    assert state["step"] == step
    assert state["frozen"].tobytes() == expected["frozen"].tobytes()
    assert state["trained"].tobytes() == expected["trained"].tobytes()


@contextmanager
def requests_counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count what the artifact API asks of the server."""
    counted: Counter[str] = Counter()
    real = http_artifact_repo.http_request

    def counting(host: Any, endpoint: str, method: str, *args: Any, **kwargs: Any) -> Any:
        counted["LIST" if method == "GET" and "params" in kwargs else method] += 1
        return real(host, endpoint, method, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(http_artifact_repo, "http_request", counting)
        yield counted
        mlflow.tensorcas.wait()


@pytest.mark.long
def test_steps_come_back_and_share_what_is_equal(carried: Experiment) -> None:
    with mlflow.start_run():
        infos = [log(step) for step in range(3)]

        for step in range(3):
            assert_is(load(step), step)
        assert_is(load(), 2)
    assert infos[0].new_bytes > 480_000
    assert all(info.new_bytes < 250_000 for info in infos[1:])
    assert [record.step for record in mlflow.tensorcas.list_checkpoints()] == [0, 1, 2]
    assert all(record.created and record.flavor for record in mlflow.tensorcas.list_checkpoints())


@pytest.mark.long
def test_mlflow_shows_a_copy_of_each_manifest_and_the_page_of_the_series(carried: Experiment) -> None:
    with mlflow.start_run() as run:
        log(0)
        log(1)
        mlflow.tensorcas.wait()

    shown = mlflow.MlflowClient().list_artifacts(run.info.run_id, "checkpoints/checkpoint")
    assert [info.path for info in shown] == [
        "checkpoints/checkpoint/history.html",
        "checkpoints/checkpoint/step-00000000.arrow",
        "checkpoints/checkpoint/step-00000001.arrow",
    ]


@pytest.mark.long
def test_a_series_may_have_any_printable_name(carried: Experiment) -> None:
    with mlflow.start_run():
        for name in ("mit Maß & Ziel", "a+b@c", "x" * 100):
            log(1, name=name)

        assert [record.name for record in mlflow.tensorcas.list_checkpoints()] == ["a+b@c", "mit Maß & Ziel", "x" * 100]
        assert_is(load(1, name="mit Maß & Ziel"), 1)
        with pytest.raises(MlflowException, match="no '/', '%'"):
            log(1, name="100%")


@pytest.mark.long
def test_carried_step_is_replaced_only_with_overwrite(carried: Experiment) -> None:
    with mlflow.start_run():
        log(1)
        with pytest.raises(MlflowException, match="already a checkpoint"):
            log(1)
        mlflow.tensorcas.log_checkpoint(state_of(2), step=1, overwrite=True, log_metrics=False)

        assert load(1)["step"] == 2
    assert len(carried.store().checkpoints()) == 1


@pytest.mark.long
def test_a_rule_and_a_deletion_drop_steps(carried: Experiment) -> None:
    with mlflow.start_run():
        for step in range(4):
            log(step, keep=Keep(last=2))
        mlflow.tensorcas.delete_checkpoint(step=2)

        assert [record.step for record in mlflow.tensorcas.list_checkpoints()] == [3]
        with pytest.raises(MlflowException, match="no checkpoint"):
            load(2)


@pytest.mark.long
def test_a_save_in_the_background_is_saved(carried: Experiment) -> None:
    with mlflow.start_run():
        state = state_of(1)
        info = mlflow.tensorcas.log_checkpoint(state, step=1, blocking=False, log_metrics=False)
        state["trained"][:] = 0

        assert info.wait().stored_bytes > 0
        assert_is(load(1), 1)


@pytest.mark.long
def test_the_requests_of_a_save_and_a_load_are_few(carried: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    # The page of a series takes requests of its own, twice a minute at most; this test's waits would write each.
    monkeypatch.setenv("TENSORCAS_PAGES", "false")
    with mlflow.start_run():
        log(0)
        mlflow.tensorcas.wait()
        with requests_counted(monkeypatch) as unchanged:
            mlflow.tensorcas.log_checkpoint(state_of(0), step=1, log_metrics=False)
        with requests_counted(monkeypatch) as changed:
            log(2)
        with requests_counted(monkeypatch) as loaded:
            load(2)

    print(f"unchanged {unchanged.total()}: {unchanged}; changed {changed.total()}: {changed}; load {loaded}")
    assert unchanged.total() <= 14
    assert changed.total() <= 17
    assert loaded.total() <= 6


@pytest.mark.long
def test_page_of_a_series_is_put_beside_its_steps(carried: Experiment) -> None:
    with mlflow.start_run() as run:
        for step in range(3):
            log(step)
        mlflow.tensorcas.wait()
    page = carried.folder / run.info.run_id / "artifacts/checkpoints/checkpoint/history.html"

    assert page.read_bytes().startswith(b"<!doctype html>")
    assert mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/checkpoints/checkpoint/history.html").endswith(
        "</html>\n"
    )


@pytest.mark.long
def test_a_new_process_does_not_fetch_packs_to_know_what_is_in_them(
    carried: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorcas_mlflow.integration.server_store import _open

    with mlflow.start_run():
        for step in range(3):
            log(step)
        monkeypatch.setattr(_open, "_roots", {})
        fetched: list[str] = []
        real = http_artifact_repo.HttpArtifactRepository._download_file
        monkeypatch.setattr(
            http_artifact_repo.HttpArtifactRepository,
            "_download_file",
            lambda self, path, out: (fetched.append(path), real(self, path, out)),
        )
        info = log(3)

    assert info.new_bytes < 250_000
    assert fetched
    assert not [path for path in fetched if "/packs/" in path]


@pytest.mark.long
def test_many_small_tables_are_folded_into_one(carried: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorcas_mlflow.chunk_io._catalog._FOLD_AT", 4)
    with mlflow.start_run():
        for step in range(7):
            log(step)

        assert len(list((carried.folder / ".tensorcas/index").iterdir())) < 5
        for step in range(7):
            assert_is(load(step), step)


@pytest.mark.long
def test_a_collection_by_direct_access_keeps_what_is_needed(carried: Experiment) -> None:
    from tensorcas_mlflow.maintenance import plan_gc

    with mlflow.start_run():
        for step in range(3):
            log(step)
        mlflow.tensorcas.delete_checkpoint(step=0)
        report = plan_gc(carried.store(), grace_s=0, max_waste=0).execute()

        assert report.freed_bytes > 0
        for step in (1, 2):
            assert_is(load(step), step)
        assert log(4).new_bytes < 250_000


@pytest.mark.long
def test_a_run_that_mlflow_has_deleted_gets_its_folder_again_before_the_next_checkpoint(
    carried: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mlflow.start_run() as run:
        log(0)
        mlflow.tensorcas.wait()
        shutil.rmtree(carried.folder / run.info.run_id)
        with monkeypatch.context() as patch:
            patch.setattr(
                "tensorcas_mlflow.integration.checkpoints._store_series.show", lambda *_: None
            )  # what comes after the commit
            log(1)

        assert (carried.folder / run.info.run_id / "artifacts/checkpoints/checkpoint/step-00000001.arrow").is_file()


def test_a_store_named_with_its_server_knows_what_lies_below_it(
    carried: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "TENSORCAS_STORE", carried.uri.replace(":/", f"://{carried.server.uri.removeprefix('http://')}/")
    )
    with mlflow.start_run() as run:
        log(0)

    [ref] = carried.store().checkpoints()
    assert ref.copy_path == f"{run.info.run_id}/artifacts/checkpoints/checkpoint/step-00000000.arrow"


def test_a_run_that_shows_nothing_yet_gets_its_folder_before_its_first_checkpoint(carried: Experiment) -> None:
    """It is by the folder that `gc --orphans` knows that a run is not gone."""
    with mlflow.start_run() as run:
        begun = time.time()
        log(0)

    [ref] = carried.store().checkpoints()
    shown = carried.folder / (ref.copy_path or "")
    assert ref.run_id == run.info.run_id
    assert shown.stat().st_mtime >= begun - 5


@pytest.mark.long
def test_parts_of_a_step_are_read_through_a_server(carried: Experiment) -> None:
    log(1)
    log(2)

    with mlflow.tensorcas.open_checkpoint(mlflow.last_active_run().info.run_id, step=2) as reader:
        for name in reader:
            array = reader.tensor(name)
            assert reader.rows(name, slice(3, 5)).tobytes() == array[3:5].tobytes()
        found = mlflow.tensorcas.diff((mlflow.last_active_run().info.run_id, 1), reader)

    assert found.changed == ("trained",)
