"""Runs whose store was moved or deleted: no call shows the loss as a run without checkpoints."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import mlflow.tensorcas
import numpy as np
import pytest

from tensorcas_mlflow.errors import StoreLostError, StoreNotFoundError
from tensorcas_mlflow.integration.checkpoints._load import list_before_logging

CALLS: dict[str, Callable[[str], Any]] = {
    "list": mlflow.tensorcas.list_checkpoints,
    "list of a series": lambda run: mlflow.tensorcas.list_checkpoints(run, name="checkpoint"),
    "list of a callback": lambda run: list_before_logging(run),
    "load": mlflow.tensorcas.load_checkpoint,
    "delete": lambda run: mlflow.tensorcas.delete_checkpoint(run, step=1),
    "open": lambda run: mlflow.tensorcas.open_checkpoint(run),
}


def log(**options: Any) -> str:
    with mlflow.start_run() as run:
        mlflow.tensorcas.log_checkpoint({"w": np.arange(100.0)}, step=1, **options)
    mlflow.tensorcas.wait()
    return str(run.info.run_id)


@pytest.mark.long
@pytest.mark.parametrize("call", CALLS)
def test_every_call_says_that_the_store_of_a_run_is_gone(experiment: str, tmp_path: Path, call: str) -> None:
    run_id = log()
    shutil.move(tmp_path / "artifacts", tmp_path / "elsewhere")

    with pytest.raises(StoreLostError, match=f"run '{run_id}' has logged checkpoints or models, and there is no store"):
        CALLS[call](run_id)


def test_copies_of_manifests_tell_of_a_store_without_metrics(plain_experiment: str, tmp_path: Path) -> None:
    run_id = log(log_metrics=False)
    shutil.rmtree(tmp_path / "artifacts" / ".tensorcas")

    with pytest.raises(StoreLostError):
        mlflow.tensorcas.list_checkpoints(run_id)


def test_a_store_named_elsewhere_does_not_hide_the_loss(
    cas_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = log()
    shutil.move(tmp_path / "artifacts", tmp_path / "elsewhere")
    monkeypatch.setenv("TENSORCAS_STORE", str(tmp_path / "elsewhere"))

    with pytest.raises(StoreLostError):
        mlflow.tensorcas.list_checkpoints(run_id)


def test_a_run_that_has_logged_nothing_has_no_checkpoints(experiment: str) -> None:
    with mlflow.start_run() as run:
        mlflow.log_metric("loss", 1.0)

    assert mlflow.tensorcas.list_checkpoints(run.info.run_id) == []


def test_a_link_in_the_old_place_brings_the_checkpoints_back(cas_experiment: str, tmp_path: Path) -> None:
    run_id = log()
    shutil.move(tmp_path / "artifacts", tmp_path / "elsewhere")
    (tmp_path / "artifacts").symlink_to(tmp_path / "elsewhere")

    assert [each.step for each in mlflow.tensorcas.list_checkpoints(run_id)] == [1]
    assert (mlflow.tensorcas.load_checkpoint(run_id)["w"] == np.arange(100.0)).all()


def test_the_error_survives_pickling_and_is_a_store_that_is_not_found() -> None:
    error: StoreLostError = pickle.loads(pickle.dumps(StoreLostError("tensorcas:///gone", "run")))

    assert issubclass(type(error), StoreNotFoundError)
    assert (error.uri, error.run_id, str(error)) == ("tensorcas:///gone", "run", str(StoreLostError(*error.args)))
