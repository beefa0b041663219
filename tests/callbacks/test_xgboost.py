"""The XGBoost callback, with `xgboost.train` and the scikit-learn classes."""

from __future__ import annotations

import pickle
from typing import Any

import mlflow
import pytest
import xgboost
from sklearn.base import clone

from tensorcas_mlflow.callbacks.xgboost import TensorCasCallback
from tensorcas_mlflow.integration.checkpoints import Keep, load_checkpoint
from tests.callbacks.loops import FEATURES, LABELS, PARAMETERS, TARGETS, data, only_run, steps_of

pytestmark = pytest.mark.long


def raw(booster: xgboost.Booster) -> bytes:
    return bytes(booster.save_raw("ubj"))


def train(callback: TensorCasCallback, n_rounds: int = 10, **options: Any) -> xgboost.Booster:
    return xgboost.train(PARAMETERS, data(), n_rounds, callbacks=[callback], **options)


def test_every_few_rounds_and_the_last_are_logged() -> None:
    with mlflow.start_run() as run:
        booster = train(TensorCasCallback(every_n_rounds=4))

    assert steps_of(run.info.run_id) == [4, 8, 10]
    assert raw(load_checkpoint(run.info.run_id)) == raw(booster)


def test_xgboost_callback_without_an_interval_logs_only_the_end() -> None:
    with mlflow.start_run() as run:
        train(TensorCasCallback(every_n_rounds=None))

    assert steps_of(run.info.run_id) == [10]


def test_a_step_is_the_booster_of_that_many_rounds() -> None:
    with mlflow.start_run() as run:
        train(TensorCasCallback(every_n_rounds=5))

    assert raw(load_checkpoint(run.info.run_id, step=5)) == raw(xgboost.train(PARAMETERS, data(), 5))


def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped() -> None:
    with mlflow.start_run() as run:
        train(TensorCasCallback(every_n_rounds=3), 6)
        train(TensorCasCallback(every_n_rounds=3), 6, xgb_model=load_checkpoint(run.info.run_id))

    assert steps_of(run.info.run_id) == [3, 6, 9, 12]
    assert raw(load_checkpoint(run.info.run_id)) == raw(xgboost.train(PARAMETERS, data(), 12))


def test_a_training_of_no_rounds_logs_nothing() -> None:
    with mlflow.start_run() as run:
        booster = train(TensorCasCallback())
        train(TensorCasCallback(), 0, xgb_model=booster)

    assert steps_of(run.info.run_id) == [10]


def test_a_run_is_started_and_ended_if_there_is_none() -> None:
    train(TensorCasCallback())
    run = only_run()

    assert mlflow.active_run() is None
    assert run.info.status == "FINISHED"
    assert steps_of(run.info.run_id) == [10]


def test_two_trainings_with_one_callback_and_no_run_go_to_two_runs() -> None:
    callback = TensorCasCallback()
    train(callback)
    first = callback.recorder.run_id
    train(callback)

    assert first != callback.recorder.run_id
    assert steps_of(first) == steps_of(callback.recorder.run_id) == [10]


def test_the_given_run_comes_before_the_active_one() -> None:
    with mlflow.start_run() as given:
        pass
    with mlflow.start_run() as active:
        train(TensorCasCallback(run_id=given.info.run_id))

    assert steps_of(given.info.run_id) == [10]
    assert steps_of(active.info.run_id) == []


def test_early_stopping_state_goes_along() -> None:
    with mlflow.start_run() as run:
        booster = train(
            TensorCasCallback(every_n_rounds=1),
            60,
            evals=[(xgboost.DMatrix(FEATURES, -TARGETS), "other")],
            early_stopping_rounds=2,
            verbose_eval=False,
        )
    loaded = load_checkpoint(run.info.run_id)

    assert booster.num_boosted_rounds() < 60
    assert loaded.attributes() == booster.attributes() != {}


def test_rounds_that_early_stopping_cuts_off_are_logged() -> None:
    with mlflow.start_run() as run:
        xgboost.train(
            PARAMETERS,
            data(),
            60,
            evals=[(xgboost.DMatrix(FEATURES, -TARGETS), "other")],
            verbose_eval=False,
            callbacks=[xgboost.callback.EarlyStopping(rounds=2, save_best=True), TensorCasCallback(every_n_rounds=2)],
        )

    assert steps_of(run.info.run_id)[0] < steps_of(run.info.run_id)[-1]


@pytest.mark.parametrize("booster", ["dart", "gblinear"])
def test_dart_and_linear_boosters_count_rounds(booster: str) -> None:
    with mlflow.start_run() as run:
        xgboost.train({"booster": booster, "nthread": 1}, data(), 4, callbacks=[TensorCasCallback(every_n_rounds=2)])

    assert steps_of(run.info.run_id) == [2, 4]


def test_scikit_learn_classes_take_the_xgboost_callback() -> None:
    model = xgboost.XGBClassifier(n_estimators=6, n_jobs=1, callbacks=[TensorCasCallback(every_n_rounds=3)])
    with mlflow.start_run() as run:
        model.fit(FEATURES, LABELS)

    assert steps_of(run.info.run_id) == [3, 6]
    assert raw(load_checkpoint(run.info.run_id)) == raw(model.get_booster())


def test_estimator_with_the_callback_can_be_cloned_and_pickled() -> None:
    model = xgboost.XGBRegressor(n_estimators=2, n_jobs=1, callbacks=[TensorCasCallback(blocking=False)])
    with mlflow.start_run():
        model.fit(FEATURES, TARGETS)
    with mlflow.start_run() as run:
        pickle.loads(pickle.dumps(clone(model))).fit(FEATURES, TARGETS)

    assert steps_of(run.info.run_id) == [2]


def test_keep_deletes_while_training_goes_on() -> None:
    with mlflow.start_run() as run:
        train(TensorCasCallback(every_n_rounds=1, keep=Keep(last=2)))

    assert steps_of(run.info.run_id) == [9, 10]


def test_keep_goes_by_an_evaluation() -> None:
    with mlflow.start_run() as run:
        train(
            TensorCasCallback(every_n_rounds=1, keep=Keep(best="other-rmse")),
            evals=[(xgboost.DMatrix(FEATURES, -TARGETS), "other")],
            verbose_eval=False,
        )

    assert steps_of(run.info.run_id) == [1, 10]


@pytest.mark.parametrize("blocking", [True, False])
def test_the_best_step_is_the_last_one_if_every_round_is_better(blocking: bool) -> None:
    with mlflow.start_run() as run:
        train(
            TensorCasCallback(every_n_rounds=4, keep=Keep(best="train-rmse"), blocking=blocking),
            evals=[(data(), "train")],
            verbose_eval=False,
        )
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "train-rmse")

    assert steps_of(run.info.run_id) == [10]
    assert sorted(point.step for point in history) == [4, 8, 10]


def test_a_training_that_goes_on_keeps_the_best_step_of_the_one_before() -> None:
    options: dict[str, Any] = {"evals": [(data(), "train")], "verbose_eval": False}
    with mlflow.start_run() as run:
        booster = train(TensorCasCallback(every_n_rounds=5, keep=Keep(best="train-rmse")), **options)
        xgboost.train(
            PARAMETERS,
            xgboost.DMatrix(FEATURES, -TARGETS),
            7,
            xgb_model=booster,
            callbacks=[TensorCasCallback(every_n_rounds=5, keep=Keep(best="train-rmse"))],
            **options,
        )

    assert steps_of(run.info.run_id) == [10, 17]


def test_a_booster_that_is_cut_to_its_best_round_is_rated_by_that_round() -> None:
    evaluations: dict[str, Any] = {}
    with mlflow.start_run() as run:
        booster = xgboost.train(
            PARAMETERS,
            data(),
            60,
            evals=[(xgboost.DMatrix(FEATURES, -TARGETS), "other")],
            evals_result=evaluations,
            verbose_eval=False,
            callbacks=[
                xgboost.callback.EarlyStopping(rounds=3, save_best=True),
                TensorCasCallback(every_n_rounds=None, keep=Keep(best="other-rmse")),
            ],
        )
    (point,) = mlflow.MlflowClient().get_metric_history(run.info.run_id, "other-rmse")

    assert steps_of(run.info.run_id) == [booster.num_boosted_rounds()] == [point.step]
    assert point.value == min(evaluations["other"]["rmse"])


def test_a_step_that_is_refused_leaves_the_metric_of_the_one_that_is_there() -> None:
    options: dict[str, Any] = {"evals": [(data(), "train")], "verbose_eval": False}
    with mlflow.start_run() as run:
        train(TensorCasCallback(keep=Keep(best="train-rmse")), **options)
        with pytest.raises(Exception, match="checkpoint"):
            xgboost.train(
                PARAMETERS,
                xgboost.DMatrix(FEATURES, -TARGETS),
                10,
                callbacks=[TensorCasCallback(keep=Keep(best="train-rmse"))],
                **options,
            )

    assert len(mlflow.MlflowClient().get_metric_history(run.info.run_id, "train-rmse")) == 1


def test_a_metric_that_cannot_be_logged_stops_the_training_after_the_checkpoint() -> None:
    name = "x" * 300
    evals = [(data(), name)]
    with mlflow.start_run() as run, pytest.raises(mlflow.exceptions.MlflowException, match="exceeds"):
        train(TensorCasCallback(every_n_rounds=4, keep=Keep(best=f"{name}-rmse")), evals=evals, verbose_eval=False)

    assert steps_of(run.info.run_id) == [4]


def test_the_run_that_the_first_checkpoint_starts_gets_its_metric() -> None:
    train(TensorCasCallback(keep=Keep(best="train-rmse")), evals=[(data(), "train")], verbose_eval=False)

    assert "train-rmse" in only_run().data.metrics


def test_saves_in_the_background_are_done_when_training_ends() -> None:
    with mlflow.start_run() as run:
        booster = train(TensorCasCallback(every_n_rounds=1, blocking=False))

    assert steps_of(run.info.run_id) == list(range(1, 11))
    assert raw(load_checkpoint(run.info.run_id)) == raw(booster)


def test_a_step_that_is_there_already_stops_the_training() -> None:
    with mlflow.start_run():
        train(TensorCasCallback())

        with pytest.raises(Exception, match="checkpoint"):
            train(TensorCasCallback())


def test_cross_validation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"xgboost\.cv trains a booster for each fold"):
        xgboost.cv(PARAMETERS, data(), 2, callbacks=[TensorCasCallback()])


def test_an_interrupted_training_keeps_what_was_logged() -> None:
    class Interrupting(xgboost.callback.TrainingCallback):
        def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
            if epoch == 6:
                raise KeyboardInterrupt
            return False

    callbacks = [Interrupting(), TensorCasCallback(every_n_rounds=2, blocking=False)]
    with mlflow.start_run() as run, pytest.raises(KeyboardInterrupt):
        xgboost.train(PARAMETERS, data(), 10, callbacks=callbacks)

    assert raw(load_checkpoint(run.info.run_id, step=6)) == raw(xgboost.train(PARAMETERS, data(), 6))


def test_an_interval_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="every_n_rounds must be at least 1"):
        TensorCasCallback(every_n_rounds=0)
