"""Errors of the functions that go through MLflow: of the package's own classes, and of MLflow's."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import mlflow
import numpy as np
import pytest
from mlflow.exceptions import MlflowException

import tensorcas_mlflow as tensorcas
from tensorcas_mlflow import errors

STATE = {"w": np.arange(10.0)}

CALLS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "step that is there": (
        lambda: tensorcas.log_checkpoint(STATE, step=1),
        errors.CheckpointExistsError,
        "RESOURCE_ALREADY_EXISTS",
    ),
    "step that is not there": (
        lambda: tensorcas.load_checkpoint(step=2),
        errors.CheckpointNotFoundError,
        "RESOURCE_DOES_NOT_EXIST",
    ),
    "run that is not there": (
        lambda: tensorcas.open_checkpoint("0" * 32),
        errors.NotFoundError,
        "RESOURCE_DOES_NOT_EXIST",
    ),
    "model that is not there": (
        partial(tensorcas.load_model, "/nowhere"),
        errors.NotFoundError,
        "RESOURCE_DOES_NOT_EXIST",
    ),
    "file that is not there": (
        partial(tensorcas.open_checkpoint, "/nowhere/model.npz"),
        errors.NotFoundError,
        "RESOURCE_DOES_NOT_EXIST",
    ),
    "wrong call": (
        lambda: tensorcas.load_checkpoint(into=STATE, weights_only=True),
        ValueError,
        "INVALID_PARAMETER_VALUE",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_error_is_of_our_tree_and_of_mlflow(plain_experiment: str, case: str) -> None:
    call, kind, code = CALLS[case]
    with mlflow.start_run():
        tensorcas.log_checkpoint(STATE, step=1, log_metrics=False)
        with pytest.raises(kind) as caught:
            call()

    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert isinstance(error, kind)
        assert isinstance(error, MlflowException)
        assert error.error_code == code
        assert str(error) == error.message == str(caught.value)


def test_facts_of_an_error_stay_when_mlflow_gets_it(plain_experiment: str) -> None:
    with mlflow.start_run():
        tensorcas.log_checkpoint(STATE, step=1, name="ema", log_metrics=False)
        with pytest.raises(errors.CheckpointExistsError) as caught:
            tensorcas.log_checkpoint(STATE, step=1, name="ema")

    assert caught.value.name.startswith("'ema' of run ")
    assert isinstance(caught.value.__cause__, errors.CheckpointExistsError)


def test_folder_that_is_not_empty_is_a_conflict(plain_experiment: str, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    with mlflow.start_run():
        info = tensorcas.log_model({"w": np.arange(10.0)}, name="model")

    with pytest.raises(errors.ConflictError) as caught:
        tensorcas.export_model(info.model_uri, tmp_path)

    assert isinstance(caught.value, MlflowException)
    assert caught.value.error_code == "RESOURCE_ALREADY_EXISTS"
