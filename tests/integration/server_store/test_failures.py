"""Servers that die or fail under a save: nothing is lost, and a retry is safe."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import mlflow
import numpy as np
import pytest
from mlflow.exceptions import MlflowException

from tensorcas_mlflow.integration.server_store import CarrierBackend, find_carrier
from tensorcas_mlflow.maintenance import plan_gc, verify
from tests.deploy.servers import serve
from tests.integration.server_store.conftest import Experiment

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's clients repeat what fails for minutes."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0")


def log(step: int) -> None:
    state = {"w": np.arange(50_000.0) + step, "step": step}
    mlflow.tensorcas.log_checkpoint(state, step=step, log_metrics=False)


def test_an_upload_that_the_server_fails_leaves_what_was_there_and_can_be_repeated(carried: Experiment) -> None:
    packs = carried.folder / ".tensorcas/packs"
    with mlflow.start_run():
        log(1)
        mlflow.tensorcas.wait()
        packs.rename(packs.with_name("aside"))
        packs.write_text("no folder can be made here")
        with pytest.raises(MlflowException, match="safe to try again") as caught:
            log(2)
        packs.unlink()
        packs.with_name("aside").rename(packs)

        assert caught.value.error_code == "TEMPORARILY_UNAVAILABLE"
        assert [record.step for record in mlflow.tensorcas.list_checkpoints()] == [1]
        log(2)
        assert [mlflow.tensorcas.load_checkpoint(step=step)["step"] for step in (1, 2)] == [1, 2]
    assert verify(carried.store(), full=True).problems == ()
    assert plan_gc(carried.store(), grace_s=0).execute().n_packs == 0


def test_a_refused_upload_is_told_at_once(carried: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = find_carrier(carried.uri, create=True)
    assert isinstance(store.backend, CarrierBackend)
    monkeypatch.setattr(store.backend._shelf, "_folder", ".tensorcas/#")  # a path that servers do not take

    with mlflow.start_run(), pytest.raises(MlflowException, match="the server refuses it") as caught:
        log(1)
    assert caught.value.error_code == "BAD_REQUEST"  # clients of servers repeat what is TEMPORARILY_UNAVAILABLE


def test_checkpoint_saved_before_a_server_was_killed_survives_the_restart(
    empty_database: Path, tmp_path: Path, no_stray_settings: None
) -> None:
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    options = ("--workers", "1", "--artifacts-destination", str(tmp_path / "files"), "--serve-artifacts")
    before = mlflow.get_tracking_uri()
    try:
        with serve(tmp_path, options, plugin=False) as server:
            mlflow.set_tracking_uri(server.uri)
            client = mlflow.MlflowClient()
            run_id = client.create_run(client.create_experiment("short-lived")).info.run_id
            state = {"w": np.arange(50_000.0), "step": 1}
            mlflow.tensorcas.log_checkpoint(state, step=1, run_id=run_id, log_metrics=False)
            with (
                pytest.raises(MlflowException, match="safe to try again"),
                _killed_at_the_next_pack(server.process.pid),
            ):
                mlflow.tensorcas.log_checkpoint({"w": np.ones(50_000)}, step=2, run_id=run_id, log_metrics=False)
        with serve(tmp_path, options, plugin=False) as server:
            mlflow.set_tracking_uri(server.uri)
            loaded = mlflow.tensorcas.load_checkpoint(run_id, step=1)
            steps = [record.step for record in mlflow.tensorcas.list_checkpoints(run_id)]
            mlflow.tensorcas.log_checkpoint({"w": np.ones(50_000)}, step=2, run_id=run_id, log_metrics=False)
            again = mlflow.tensorcas.load_checkpoint(run_id, step=2)
    finally:
        mlflow.set_tracking_uri(before)

    assert steps == [1]
    assert (loaded["w"] == state["w"]).all()
    assert (again["w"] == 1).all()


class _killed_at_the_next_pack:  # noqa: N801
    """Kills a server, with its workers, when a client is about to send it a pack."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> None:
        from tensorcas_mlflow.integration.server_store._shelf import ArtifactShelf

        real = ArtifactShelf.put

        def put(shelf: ArtifactShelf, path: str, file: Path) -> None:
            if path.startswith("packs/"):
                os.killpg(self._pid, signal.SIGKILL)
            real(shelf, path, file)

        self._patch.setattr(ArtifactShelf, "put", put)

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
