"""`autolog`: one line, and trainings that know nothing of it."""

from __future__ import annotations

import importlib
import inspect
import logging
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch
import mlflow
import numpy as np
import pytest
import transformers
import xgboost

from tensorcas_mlflow.callbacks import autolog
from tensorcas_mlflow.callbacks.lightning import TensorCasCheckpoint
from tensorcas_mlflow.callbacks.xgboost import TensorCasCallback
from tensorcas_mlflow.integration.checkpoints import Keep, load_checkpoint
from tensorcas_mlflow.integration.models import load_model
from tests.callbacks.loops import (
    FEATURES,
    LABELS,
    PARAMETERS,
    data,
    make_module,
    make_trainer,
    names_of,
    only_run,
    same,
    steps_of,
)
from tests.callbacks.tokens import make_trainer as make_transformers_trainer

pytestmark = pytest.mark.long


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    # MLflow's loggers do not hand on what they show, so the fixture would not see it.
    monkeypatch.setattr(logging.getLogger("mlflow"), "propagate", True)
    caplog.set_level(logging.WARNING)
    return caplog


def break_the_store(tmp_path: Path) -> None:
    """Make the active experiment one whose artifacts cannot be written."""
    (tmp_path / "file").write_text("not a folder")
    experiment_id = mlflow.create_experiment("broken", artifact_location=f"tensorcas://{tmp_path}/file/artifacts")
    mlflow.set_experiment(experiment_id=experiment_id)


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_lightning_training_is_logged_to_a_run_of_its_own(package: str, tmp_path: Path) -> None:
    lightning = importlib.import_module(package)
    autolog()
    trainer = make_trainer(lightning, tmp_path, max_epochs=2, enable_checkpointing=False)
    trainer.fit(make_module(lightning))
    run = only_run()

    assert steps_of(run.info.run_id) == [4, 8]
    assert run.info.status == "FINISHED"
    assert run.data.tags["mlflow.autologging"] == "tensorcas"
    assert mlflow.active_run() is None
    assert same(load_checkpoint(run.info.run_id)["state_dict"], dict(trainer.lightning_module.state_dict()))
    assert not any(type(callback).__name__ == "TensorCasCheckpoint" for callback in trainer.callbacks)


def test_a_transformers_training_is_logged_to_a_run_of_its_own(tmp_path: Path) -> None:
    autolog(every_n_steps=3)
    trainer = make_transformers_trainer(tmp_path)
    trainer.train()
    run = only_run()

    assert steps_of(run.info.run_id) == [3, 6, 8]
    assert run.info.status == "FINISHED"
    assert mlflow.active_run() is None


def test_an_xgboost_training_is_logged_to_a_run_of_its_own() -> None:
    autolog()
    booster = xgboost.train(PARAMETERS, data(), 25)
    run = only_run()

    assert steps_of(run.info.run_id) == [10, 20, 25]
    assert load_checkpoint(run.info.run_id).save_raw() == booster.save_raw()
    assert run.info.status == "FINISHED"


def test_a_fit_of_xgboosts_scikit_learn_classes_is_logged() -> None:
    autolog(every_n_steps=3)
    model = xgboost.XGBClassifier(n_estimators=6, n_jobs=1).fit(FEATURES, LABELS)
    run = only_run()

    assert steps_of(run.info.run_id) == [3, 6]
    assert load_checkpoint(run.info.run_id).save_raw() == model.get_booster().save_raw()
    assert model.callbacks is None


def test_autolog_logs_the_trained_model() -> None:
    autolog()
    booster = xgboost.train(PARAMETERS, data(), 5)
    (model,) = mlflow.search_logged_models(output_format="list")
    loaded = load_model(f"models:/{model.model_id}")

    assert model.source_run_id == only_run().info.run_id
    assert loaded.save_raw() == booster.save_raw()


def test_autolog_logs_the_trained_lightning_module(tmp_path: Path) -> None:
    autolog()
    trainer = make_trainer(lightning.pytorch, tmp_path, max_epochs=1, enable_checkpointing=False)
    trainer.fit(make_module(lightning.pytorch))
    (model,) = mlflow.search_logged_models(output_format="list")
    loaded = load_model(f"models:/{model.model_id}")

    assert same(dict(loaded.state_dict()), dict(trainer.lightning_module.state_dict()))


def test_log_models_false_logs_checkpoints_only() -> None:
    autolog(log_models=False)
    xgboost.train(PARAMETERS, data(), 5)

    assert mlflow.search_logged_models(output_format="list") == []
    assert steps_of(only_run().info.run_id) == [5]


def test_the_active_run_is_used_and_stays_open() -> None:
    autolog()
    with mlflow.start_run() as run:
        xgboost.train(PARAMETERS, data(), 5)

        assert mlflow.active_run() is not None
    assert steps_of(run.info.run_id) == [5]


def test_exclusive_leaves_the_runs_of_the_program_alone() -> None:
    autolog(exclusive=True)
    with mlflow.start_run() as run:
        xgboost.train(PARAMETERS, data(), 5)

    assert steps_of(run.info.run_id) == []


def test_disable_turns_autolog_off() -> None:
    autolog()
    autolog(disable=True)
    xgboost.train(PARAMETERS, data(), 5)

    assert mlflow.search_runs(output_format="list") == []


def test_second_call_of_autolog_changes_the_settings() -> None:
    autolog()
    autolog(every_n_steps=1, keep=Keep(last=2), name="boosters")
    xgboost.train(PARAMETERS, data(), 5)

    assert steps_of(only_run().info.run_id, "boosters") == [4, 5]


def test_a_wrong_interval_is_refused_and_changes_nothing() -> None:
    with pytest.raises(ValueError, match="every_n_steps must be at least 1"):
        autolog(every_n_steps=0)
    xgboost.train(PARAMETERS, data(), 5)

    assert mlflow.search_runs(output_format="list") == []


def test_a_second_training_in_a_run_goes_under_another_name() -> None:
    autolog()
    with mlflow.start_run() as run:
        for _ in range(3):
            xgboost.train(PARAMETERS, data(), 5)

    assert names_of(run.info.run_id) == {"checkpoint", "checkpoint-2", "checkpoint-3"}


def test_a_training_that_goes_on_keeps_the_name() -> None:
    autolog()
    with mlflow.start_run() as run:
        booster = xgboost.train(PARAMETERS, data(), 5)
        xgboost.train(PARAMETERS, data(), 5, xgb_model=booster)

    assert steps_of(run.info.run_id) == [5, 10]
    assert names_of(run.info.run_id) == {"checkpoint"}


def test_a_training_with_a_callback_of_ours_is_left_alone(tmp_path: Path) -> None:
    autolog()
    with mlflow.start_run() as run:
        xgboost.train(PARAMETERS, data(), 3, callbacks=[TensorCasCallback(name="own")])
        trainer = make_trainer(lightning.pytorch, tmp_path, max_epochs=1, callbacks=[TensorCasCheckpoint(name="mine")])
        trainer.fit(make_module(lightning.pytorch))

    assert names_of(run.info.run_id) == {"own", "mine"}


def test_autolog_calls_the_callbacks_of_the_program() -> None:
    seen: list[int] = []

    class Counting(xgboost.callback.TrainingCallback):
        def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
            seen.append(epoch)
            return False

    autolog()
    callbacks = [Counting()]
    xgboost.train(PARAMETERS, data(), 3, callbacks=callbacks)

    assert seen == [0, 1, 2]
    assert len(callbacks) == 1


def test_a_store_that_cannot_be_written_is_a_warning(tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    break_the_store(tmp_path)
    autolog(every_n_steps=1)
    booster = xgboost.train(PARAMETERS, data(), 10)

    assert booster.num_boosted_rounds() == 10
    assert 1 <= len(warnings.records) <= 3
    assert "Autologging of a xgboost training failed" in warnings.text
    assert only_run().info.status == "FINISHED"


def test_a_tracking_server_that_is_gone_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri("http://127.0.0.1:9")
    autolog(every_n_steps=1)
    booster = xgboost.train(PARAMETERS, data(), 10)
    mlflow.set_tracking_uri(before)

    assert booster.num_boosted_rounds() == 10
    assert len(warnings.records) == 1


def test_silent_autolog_prints_nothing(tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    break_the_store(tmp_path)
    autolog(silent=True)
    xgboost.train(PARAMETERS, data(), 10)

    assert warnings.records == []


def test_errors_of_the_training_itself_are_raised_as_ever(warnings: pytest.LogCaptureFixture) -> None:
    autolog()

    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        xgboost.train(PARAMETERS, data(), 10, nonsense=True)
    with pytest.raises(ValueError, match="Invalid Input: 'nonsense'"):
        xgboost.train({"tree_method": "nonsense"}, data(), 10)
    assert {run.info.status for run in mlflow.search_runs(output_format="list")} == {"FAILED"}
    assert warnings.records == []


def test_an_interrupted_training_ends_its_run_and_keeps_what_was_logged() -> None:
    class Interrupting(xgboost.callback.TrainingCallback):
        def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
            if epoch == 6:
                raise KeyboardInterrupt
            return False

    autolog(every_n_steps=2)
    with pytest.raises(KeyboardInterrupt):
        xgboost.train(PARAMETERS, data(), 10, callbacks=[Interrupting()])
    run = only_run()

    assert steps_of(run.info.run_id) == [2, 4, 6]
    assert run.info.status == "FAILED"
    assert mlflow.active_run() is None


def test_autolog_does_not_change_a_training(tmp_path: Path) -> None:
    plain = make_transformers_trainer(tmp_path)
    plain.train()
    autolog(every_n_steps=1)
    logged = make_transformers_trainer(tmp_path)
    logged.train()

    assert same(dict(plain.model.state_dict()), dict(logged.model.state_dict()))
    assert np.array_equal(plain.state.log_history[0]["loss"], logged.state.log_history[0]["loss"])


def test_an_interrupted_lightning_training_ends_its_run_and_keeps_what_was_logged(
    tmp_path: Path,
) -> None:
    class Interrupting(lightning.pytorch.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 6:
                raise KeyboardInterrupt

    # Lightning ignores further interrupts for good.
    handler = signal.getsignal(signal.SIGINT)
    autolog(every_n_steps=2)
    trainer = make_trainer(
        lightning.pytorch, tmp_path, max_epochs=2, enable_checkpointing=False, callbacks=[Interrupting()]
    )
    with pytest.raises(SystemExit):
        trainer.fit(make_module(lightning.pytorch))
    signal.signal(signal.SIGINT, handler)
    run = only_run()

    assert steps_of(run.info.run_id) == [2, 4]
    assert run.info.status == "FAILED"
    assert mlflow.active_run() is None


def test_the_wrapped_functions_look_as_they_did() -> None:
    autolog()

    assert xgboost.train.__name__ == "train"
    assert "num_boost_round" in str(inspect.signature(xgboost.train))
    assert transformers.Trainer.train.__doc__ is not None
