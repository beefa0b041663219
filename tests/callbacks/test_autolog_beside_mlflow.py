"""`autolog` beside MLflow's own autologging and the frameworks' own MLflow loggers, in whichever order."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch
import mlflow
import pytest
import xgboost

from tensorcas_mlflow.callbacks import autolog
from tensorcas_mlflow.integration.models import load_model
from tests.callbacks.loops import (
    PARAMETERS,
    data,
    make_module,
    make_trainer,
    only_run,
    same,
    steps_of,
)
from tests.callbacks.tokens import make_trainer as make_transformers_trainer

pytestmark = pytest.mark.long


@contextmanager
def autologging(flavor: Any, **options: Any) -> Iterator[None]:
    """MLflow's own autologging of a framework, for a while."""
    flavor.autolog(silent=True, **options)
    try:
        yield
    finally:
        flavor.autolog(disable=True)


def test_a_trained_transformers_model_is_logged_to_the_run_of_mlflows_callback(tmp_path: Path) -> None:
    autolog(every_n_steps=8)
    trainer = make_transformers_trainer(tmp_path, report_to=["mlflow"])
    trainer.train()
    (model,) = mlflow.search_logged_models(output_format="list")
    loaded = load_model(f"models:/{model.model_id}")
    run = only_run()

    assert steps_of(run.info.run_id) == [8]
    assert model.source_run_id == run.info.run_id
    assert run.info.status == "FINISHED"
    assert same(dict(loaded.state_dict()), dict(trainer.model.state_dict()))


@pytest.mark.parametrize("ours_first", [True, False])
def test_autolog_works_beside_mlflows_xgboost_autologging(ours_first: bool) -> None:
    if ours_first:
        autolog()
    with autologging(mlflow.xgboost, log_models=False):
        autolog()
        xgboost.train(PARAMETERS, data(), 5, evals=[(data(), "train")], verbose_eval=False)
        mlflow.xgboost.autolog(silent=True, log_models=False)
        xgboost.train(PARAMETERS, data(), 5, evals=[(data(), "train")], verbose_eval=False)
    runs = mlflow.search_runs(output_format="list")

    assert [steps_of(run.info.run_id) for run in runs] == [[5], [5]]
    assert all("train-rmse" in run.data.metrics and run.data.params["max_depth"] == "2" for run in runs)


def test_autolog_continues_after_mlflows_autologging_is_turned_off() -> None:
    with autologging(mlflow.xgboost):
        autolog(log_models=False)
    xgboost.train(PARAMETERS, data(), 5)
    run = only_run()

    assert steps_of(run.info.run_id) == [5]
    assert run.data.params == {}


def test_autolog_works_beside_mlflows_lightning_autologging(tmp_path: Path) -> None:
    with autologging(mlflow.pytorch, log_models=False, checkpoint=False):
        autolog()
        trainer = make_trainer(lightning.pytorch, tmp_path, max_epochs=1, enable_checkpointing=False)
        trainer.fit(make_module(lightning.pytorch))
    run = only_run()

    assert steps_of(run.info.run_id) == [4]
    assert run.data.params["epochs"] == "1"
    assert run.info.status == "FINISHED"


def test_autolog_works_beside_mlflows_transformers_autologging(tmp_path: Path) -> None:
    with autologging(mlflow.transformers):
        autolog(every_n_steps=4)
        make_transformers_trainer(tmp_path).train()
    run = only_run()

    assert steps_of(run.info.run_id) == [4, 8]
    assert "loss" in run.data.metrics


def test_the_run_of_a_lightning_logger_is_used(tmp_path: Path) -> None:
    autolog()
    logger = lightning.pytorch.loggers.MLFlowLogger("theirs", tracking_uri=mlflow.get_tracking_uri())
    trainer = make_trainer(
        lightning.pytorch, tmp_path, max_epochs=1, logger=logger, log_every_n_steps=1, enable_checkpointing=False
    )
    trainer.fit(make_module(lightning.pytorch))

    assert steps_of(logger.run_id) == [4]
    assert mlflow.search_runs(output_format="list") == []


SCRIPT = """
import sys
import mlflow
from tensorcas_mlflow.callbacks import autolog

{setup}
heavy = {{"torch", "lightning", "pytorch_lightning", "transformers", "xgboost", "sklearn"}} & sys.modules.keys()
assert not heavy, heavy
import xgboost
import numpy as np

data = xgboost.DMatrix(np.eye(4), np.arange(4))
xgboost.train({{"nthread": 1}}, data, 4, evals=[(data, "train")], verbose_eval=False)
(run,) = mlflow.search_runs(output_format="list")
from tensorcas_mlflow.integration.checkpoints import list_checkpoints
print([record.step for record in list_checkpoints(run.info.run_id)], sorted(run.data.metrics)[-1])
"""


@pytest.mark.parametrize(
    "setup",
    [
        # XGBoost imports scikit-learn, and to patch that takes MLflow longer than all else here.
        "autolog(every_n_steps=2, log_models=False); mlflow.autolog(log_models=False, exclude_flavors=['sklearn'])",
        "mlflow.autolog(log_models=False, exclude_flavors=['sklearn']); autolog(every_n_steps=2, log_models=False)",
    ],
    ids=["ours first", "MLflow first"],
)
def test_autolog_imports_no_framework_and_patches_later_imports(tmp_path: Path, tracking_uri: str, setup: str) -> None:
    environment = {"MLFLOW_TRACKING_URI": tracking_uri, "PATH": "", "HOME": str(tmp_path)}
    script = SCRIPT.format(setup=setup)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[2, 4] train-rmse"
