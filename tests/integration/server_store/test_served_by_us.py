"""This package at both ends: the client sends files, and the server's store is the only one."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import requests
import torch
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from tensorcas_mlflow.errors import ConflictError, StoreNotFoundError
from tensorcas_mlflow.integration.checkpoints import Keep
from tensorcas_mlflow.integration.server_store import SERVED_BY, find_carrier, is_served_by_us
from tensorcas_mlflow.store import Store
from tests.integration.server_store.conftest import Experiment
from tests.stored_bytes import pack_bytes

pytestmark = pytest.mark.long


def state_of(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {"frozen": rng.normal(size=60_000), "trained": rng.normal(size=30_000) + step, "step": step}


def log(step: int, **options: Any) -> Any:
    return mlflow.tensorcas.log_checkpoint(state_of(step), step=step, log_metrics=False, **options)


def stores_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob(".tensorcas") if path.is_dir()]


def test_server_with_the_package_identifies_itself(served: Experiment, carried: Experiment) -> None:
    assert not is_served_by_us(carried.uri)
    url = f"{served.server.uri}/api/2.0/mlflow-artifacts/artifacts"
    listed = requests.get(url, params={"path": f"{served.id}/.tensorcas"}, timeout=20).json()

    assert listed == {"files": [{"path": SERVED_BY, "is_dir": False}]}
    assert requests.get(url, params={"path": served.id}, timeout=20).json() == {}


def test_a_logged_model_is_sent_whole_and_the_server_stores_what_is_new(served: Experiment) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 600), torch.nn.ReLU(), torch.nn.Linear(600, 300))
    first = mlflow.tensorcas.log_model(model, name="model", pip_requirements=[])
    before = pack_bytes(served.server.folder / "files")
    second = mlflow.tensorcas.log_model(model, name="model", pip_requirements=[])

    assert pack_bytes(served.server.folder / "files") - before < 0.05 * 1_440_000
    assert mlflow.models.Model.load(second.model_uri).flavors["tensorcas"]["store"] is None
    for info in (first, second):
        loaded = mlflow.tensorcas.load_model(info.model_uri)
        assert torch.equal(loaded[2].weight, model[2].weight)
    assert stores_below(served.server.folder) == [served.server.folder / "files/.tensorcas"]


def test_each_step_of_a_series_is_a_file(served: Experiment) -> None:
    with mlflow.start_run() as run:
        infos = [log(step) for step in range(3)]
        before = pack_bytes(served.server.folder / "files")
        again = log(3, name="ä b")
        shown = mlflow.MlflowClient().list_artifacts(run.info.run_id, "checkpoints/checkpoint")

        for step in range(3):
            assert mlflow.tensorcas.load_checkpoint(step=step)["step"] == step
        loaded = mlflow.tensorcas.load_checkpoint(again.uri)
    assert loaded["trained"].tobytes() == state_of(3)["trained"].tobytes()
    assert {f"checkpoints/checkpoint/step-0000000{step}.tensors" for step in range(3)} <= {info.path for info in shown}
    assert pack_bytes(served.server.folder / "files") - before < 300_000
    assert (infos[0].new_bytes, infos[0].stored_bytes) == (None, None)
    assert infos[0].uri == f"runs:/{run.info.run_id}/checkpoints/checkpoint/step-00000000.tensors"
    names = [(record.name, record.step) for record in mlflow.tensorcas.list_checkpoints(run.info.run_id)]
    assert names == [("checkpoint", 0), ("checkpoint", 1), ("checkpoint", 2), ("ä b", 3)]
    assert stores_below(served.server.folder) == [served.server.folder / "files/.tensorcas"]


def test_a_tensor_that_a_model_and_a_checkpoint_share_is_stored_once(served: Experiment) -> None:
    torch.manual_seed(7)
    model = torch.nn.Linear(500, 500)
    with mlflow.start_run():
        mlflow.tensorcas.log_model(model, name="model", pip_requirements=[])
        before = pack_bytes(served.server.folder / "files")
        mlflow.tensorcas.log_checkpoint({"model": model}, step=1, log_metrics=False)

    assert pack_bytes(served.server.folder / "files") - before < 0.05 * 1_000_000


def test_served_step_is_replaced_only_with_overwrite(served: Experiment) -> None:
    with mlflow.start_run():
        log(1)
        with pytest.raises(MlflowException, match="already a checkpoint"):
            log(1)
        mlflow.tensorcas.log_checkpoint(state_of(2), step=1, overwrite=True, log_metrics=False)

        assert mlflow.tensorcas.load_checkpoint(step=1)["step"] == 2


def test_a_rule_and_a_deletion_drop_steps(served: Experiment) -> None:
    with mlflow.start_run():
        for step in range(4):
            log(step, keep=Keep(last=2))
        mlflow.tensorcas.delete_checkpoint(step=2)

        assert [record.step for record in mlflow.tensorcas.list_checkpoints()] == [3]
        with pytest.raises(MlflowException, match="no checkpoint"):
            mlflow.tensorcas.load_checkpoint(step=2)
        assert not mlflow.tensorcas.delete_checkpoint(step=2)


def test_files_of_the_user_are_no_steps(served: Experiment) -> None:
    with mlflow.start_run():
        log(1)
        for name in ("5.tensors", "step-9.tensors", "step-00000007.tensors", "step-00000008.arrow"):
            mlflow.log_text("mine", f"checkpoints/checkpoint/{name}")
        log(5)

        assert [record.step for record in mlflow.tensorcas.list_checkpoints()] == [1, 5]
        assert mlflow.tensorcas.load_checkpoint(step=5)["step"] == 5


def test_a_file_of_the_user_in_the_place_of_a_step_stays(served: Experiment) -> None:
    mine = "mine " * 100
    path = "checkpoints/checkpoint/step-00000007.tensors"
    with mlflow.start_run() as run:
        log(1)
        mlflow.log_text(mine, path)
        with pytest.raises(MlflowException, match="no checkpoint"):
            mlflow.tensorcas.load_checkpoint(step=7)
        assert not mlflow.tensorcas.delete_checkpoint(step=7)
        with pytest.raises(MlflowException, match="already a checkpoint"):
            log(7)
        with pytest.raises(MlflowException, match="is no checkpoint and stays"):
            log(7, overwrite=True)
        assert mlflow.tensorcas.load_checkpoint()["step"] == 1
        log(8, keep=Keep(last=1))

        assert mlflow.tensorcas.load_checkpoint()["step"] == 8
    assert mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/{path}") == mine


def test_a_save_in_the_background_may_be_trained_on(served: Experiment) -> None:
    with mlflow.start_run():
        state = state_of(1)
        info = mlflow.tensorcas.log_checkpoint(state, step=1, blocking=False, log_metrics=False)
        state["trained"][:] = 0
        info.wait()

        loaded = mlflow.tensorcas.load_checkpoint(step=1)
        assert loaded["trained"].tobytes() == state_of(1)["trained"].tobytes()


def test_no_figure_is_logged_where_the_server_does_not_tell_what_is_new(served: Experiment) -> None:
    with mlflow.start_run() as run:
        mlflow.tensorcas.log_checkpoint(state_of(1), step=1)
        mlflow.tensorcas.wait()

    assert mlflow.get_run(run.info.run_id).data.metrics == {}


def test_no_store_is_carried_in_a_server_that_has_one(served: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConflictError, match="store within a store"):
        find_carrier(served.uri, create=True)
    with pytest.raises(StoreNotFoundError):
        find_carrier(served.uri)
    monkeypatch.setenv("TENSORCAS_STORE", served.uri)
    with mlflow.start_run(), pytest.raises(MlflowException, match="store within a store"):
        log(1)
    with pytest.raises((MlflowException, requests.HTTPError)):
        get_artifact_repository(served.uri).log_artifact(__file__, ".tensorcas")
    assert stores_below(served.server.folder) == [served.server.folder / "files/.tensorcas"]


def test_a_store_that_is_named_is_taken_wherever_the_artifacts_are(
    served: Experiment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TENSORCAS_STORE", str(tmp_path / "named"))
    with mlflow.start_run():
        log(1)
        assert mlflow.tensorcas.load_checkpoint(step=1)["step"] == 1
        mlflow.tensorcas.wait()

    assert len(Store.open(tmp_path / "named").checkpoints()) == 1


def test_parts_of_a_step_are_read_from_the_file_that_is_fetched(served: Experiment) -> None:
    with mlflow.start_run() as run:
        log(1)
        log(2)

    with mlflow.tensorcas.open_checkpoint(run.info.run_id, step=1) as reader:
        assert reader.rows("trained", slice(5, 9)).tobytes() == state_of(1)["trained"][5:9].tobytes()
        found = mlflow.tensorcas.diff(reader, (run.info.run_id, 2))

    assert found.changed == ("trained",)


def test_fetched_file_is_deleted_with_its_reader(
    served: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    np.savez(tmp_path / "good.npz", w=np.arange(1000.0))
    (tmp_path / "bad.npz").write_bytes((tmp_path / "good.npz").read_bytes()[:-30])
    with mlflow.start_run() as run:
        mlflow.log_artifact(str(tmp_path / "good.npz"))
        mlflow.log_artifact(str(tmp_path / "bad.npz"))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

    with pytest.raises(MlflowException) as held:
        mlflow.tensorcas.open_checkpoint(f"runs:/{run.info.run_id}/bad.npz")
    assert held.value.__cause__ is not None
    assert list(scratch.iterdir()) == []
    with pytest.raises(MlflowException, match="no framework"):
        mlflow.tensorcas.open_checkpoint(f"runs:/{run.info.run_id}/good.npz", framework="jax")
    assert list(scratch.iterdir()) == []
    reader = mlflow.tensorcas.open_checkpoint(f"runs:/{run.info.run_id}/good.npz")
    assert reader.rows("w", slice(3, 5)).tolist() == [3, 4]
    assert len(list(scratch.iterdir())) == 1
    reader.close()
    assert list(scratch.iterdir()) == []
