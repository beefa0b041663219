"""`autolog` keeps the checkpoints of several trainings in one run apart, and those of one that goes on together."""

from __future__ import annotations

import importlib
from pathlib import Path

import mlflow
import pytest
import xgboost

from tensorcas_mlflow.callbacks import autolog
from tensorcas_mlflow.callbacks.transformers import write_trainer_checkpoint
from tensorcas_mlflow.integration.checkpoints import list_checkpoints, load_checkpoint, log_checkpoint
from tests.callbacks.loops import FEATURES, PARAMETERS, TARGETS, data, make_module, make_trainer
from tests.callbacks.tokens import make_trainer as make_transformers_trainer

pytestmark = pytest.mark.long

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]


@pytest.fixture(autouse=True)
def _checkpoints_only() -> None:
    autolog(log_models=False)


def series_of(run_id: str) -> dict[str, list[int]]:
    series: dict[str, list[int]] = {}
    for record in list_checkpoints(run_id):
        series.setdefault(record.name, []).append(record.step)
    return series


def test_a_longer_xgboost_training_from_scratch_is_not_mixed_with_a_shorter_one() -> None:
    with mlflow.start_run() as run:
        xgboost.train({"max_depth": 1, "nthread": 1}, data(), 9)
        other = xgboost.train({"max_depth": 6, "nthread": 1}, xgboost.DMatrix(FEATURES, -TARGETS), 21)

    assert series_of(run.info.run_id) == {"checkpoint": [9], "checkpoint-2": [10, 20, 21]}
    assert load_checkpoint(run.info.run_id, name="checkpoint-2").save_raw() == other.save_raw()


def test_an_xgboost_training_goes_on_under_the_name_of_the_one_it_goes_on_from() -> None:
    with mlflow.start_run() as run:
        xgboost.train(PARAMETERS, data(), 9)
        booster = xgboost.train(PARAMETERS, data(), 12)
        xgboost.train(PARAMETERS, data(), 9, xgb_model=booster)

    assert series_of(run.info.run_id) == {"checkpoint": [9], "checkpoint-2": [10, 12, 20, 21]}


def test_continued_fit_of_xgboosts_scikit_learn_classes_keeps_its_series() -> None:
    with mlflow.start_run() as run:
        first = xgboost.XGBRegressor(n_estimators=4, n_jobs=1).fit(FEATURES, TARGETS)
        xgboost.XGBRegressor(n_estimators=3, n_jobs=1).fit(FEATURES, TARGETS, xgb_model=first)
        xgboost.XGBRegressor(n_estimators=8, n_jobs=1).fit(FEATURES, TARGETS)

    assert series_of(run.info.run_id) == {"checkpoint": [4, 7], "checkpoint-2": [8]}


def test_a_training_that_goes_on_from_another_step_than_the_last_goes_under_another_name() -> None:
    booster = xgboost.train(PARAMETERS, data(), 12)
    with mlflow.start_run() as run:
        xgboost.train(PARAMETERS, data(), 9)
        xgboost.train(PARAMETERS, data(), 9, xgb_model=booster)
        xgboost.train(PARAMETERS, data(), 9, xgb_model=booster[:5])

    assert series_of(run.info.run_id) == {"checkpoint": [9], "checkpoint-2": [20, 21], "checkpoint-3": [10, 14]}


def test_training_that_may_continue_two_series_starts_a_new_name() -> None:
    with mlflow.start_run() as run:
        for _ in range(2):
            booster = xgboost.train(PARAMETERS, data(), 5)
        xgboost.train(PARAMETERS, data(), 2, xgb_model=booster)

    assert series_of(run.info.run_id) == {"checkpoint": [5], "checkpoint-2": [5], "checkpoint-3": [7]}


def test_a_training_that_builds_no_new_rounds_goes_under_another_name() -> None:
    refresh = {**PARAMETERS, "process_type": "update", "updater": "refresh", "refresh_leaf": True}
    with mlflow.start_run() as run:
        booster = xgboost.train(PARAMETERS, data(), 5)
        xgboost.train(refresh, data(), 5, xgb_model=booster)

    assert series_of(run.info.run_id) == {"checkpoint": [5], "checkpoint-2": [5]}


def test_autolog_leaves_checkpoints_of_the_program_alone() -> None:
    with mlflow.start_run() as run:
        log_checkpoint({"weights": FEATURES}, step=0)
        xgboost.train(PARAMETERS, data(), 5)

    assert series_of(run.info.run_id) == {"checkpoint": [0], "checkpoint-2": [5]}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_longer_lightning_training_from_scratch_is_not_mixed_with_a_shorter_one(package: str, tmp_path: Path) -> None:
    framework = importlib.import_module(package)
    with mlflow.start_run() as run:
        for max_epochs in (1, 2):
            trainer = make_trainer(framework, tmp_path, max_epochs=max_epochs, enable_checkpointing=False)
            trainer.fit(make_module(framework))

    assert series_of(run.info.run_id) == {"checkpoint": [4], "checkpoint-2": [4, 8]}


@pytest.mark.parametrize("package", PACKAGES)
def test_lightning_trainings_from_scratch_that_log_at_other_steps_are_not_mixed(package: str, tmp_path: Path) -> None:
    framework = importlib.import_module(package)
    with mlflow.start_run() as run:
        for max_epochs, every_n_steps in ((1, 4), (2, 5)):
            autolog(every_n_steps=every_n_steps, log_models=False)
            trainer = make_trainer(framework, tmp_path, max_epochs=max_epochs, enable_checkpointing=False)
            trainer.fit(make_module(framework))

    assert series_of(run.info.run_id) == {"checkpoint": [4], "checkpoint-2": [5, 8]}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_lightning_training_goes_on_under_the_name_of_the_one_it_goes_on_from(package: str, tmp_path: Path) -> None:
    framework = importlib.import_module(package)
    file = tmp_path / "resume.ckpt"
    with mlflow.start_run() as run:
        first = make_trainer(framework, tmp_path, max_epochs=1, enable_checkpointing=False)
        first.fit(make_module(framework))
        first.save_checkpoint(file)
        second = make_trainer(framework, tmp_path, max_epochs=3, enable_checkpointing=False)
        second.fit(make_module(framework), ckpt_path=file)

    assert series_of(run.info.run_id) == {"checkpoint": [4, 8, 12]}


def test_transformers_trainings_from_scratch_are_not_mixed(tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        for max_steps, every_n_steps in ((2, 2), (5, 3)):
            autolog(every_n_steps=every_n_steps, log_models=False)
            make_transformers_trainer(tmp_path, max_steps=max_steps).train()

    assert series_of(run.info.run_id) == {"checkpoint": [2], "checkpoint-2": [3, 5]}


def test_a_transformers_training_goes_on_under_the_name_of_the_one_it_goes_on_from(tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        make_transformers_trainer(tmp_path, max_steps=2).train()
        folder = write_trainer_checkpoint(run.info.run_id, tmp_path / "resume")
        make_transformers_trainer(tmp_path, max_steps=5).train(resume_from_checkpoint=folder)

    assert series_of(run.info.run_id) == {"checkpoint": [2, 5]}
