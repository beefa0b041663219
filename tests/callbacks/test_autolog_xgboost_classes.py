"""`autolog` and the scikit-learn classes of XGBoost: the fitted estimator is logged, unless it is part of another."""

from __future__ import annotations

from typing import Any

import mlflow
import numpy as np
import pytest
import xgboost
from sklearn.base import BaseEstimator
from sklearn.ensemble import VotingClassifier
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tensorcas_mlflow.callbacks import autolog
from tensorcas_mlflow.callbacks.xgboost import TensorCasCallback
from tensorcas_mlflow.integration.checkpoints import load_checkpoint
from tensorcas_mlflow.integration.models import load_model
from tests.callbacks.loops import FEATURES, LABELS, PARAMETERS, TARGETS, data, names_of, only_run, steps_of

pytestmark = pytest.mark.long

SMALL = {"n_estimators": 2, "max_depth": 2, "n_jobs": 1}


class Scaling(xgboost.XGBRegressor):  # type: ignore[misc]
    def fit(self, X: Any, y: Any, **options: Any) -> Scaling:
        super().fit(X, y * 2, **options)
        return self


def logged_models() -> list[Any]:
    return list(mlflow.search_logged_models(output_format="list"))


@pytest.mark.parametrize(
    "estimator_class", [xgboost.XGBClassifier, xgboost.XGBRegressor, xgboost.XGBRFClassifier, xgboost.XGBRFRegressor]
)
def test_the_fitted_estimator_is_logged_once(estimator_class: Any) -> None:
    autolog()
    estimator = estimator_class(**SMALL)
    estimator.fit(FEATURES, LABELS)
    (model,) = logged_models()
    loaded = load_model(f"models:/{model.model_id}")
    run = only_run()

    assert type(loaded) is type(estimator)
    assert np.array_equal(loaded.predict(FEATURES), estimator.predict(FEATURES))
    assert model.name == "model"
    assert model.source_run_id == run.info.run_id
    assert run.info.status == "FINISHED"
    assert mlflow.active_run() is None
    assert load_checkpoint(run.info.run_id).save_raw() == estimator.get_booster().save_raw()


def test_a_ranker_is_logged() -> None:
    autolog()
    xgboost.XGBRanker(**SMALL).fit(FEATURES, LABELS, qid=np.repeat([0, 1], 32))
    (model,) = logged_models()

    assert type(load_model(f"models:/{model.model_id}")) is xgboost.XGBRanker


def test_an_estimator_of_the_users_own_class_is_logged() -> None:
    autolog()
    Scaling(**SMALL).fit(FEATURES, TARGETS)
    (model,) = logged_models()

    assert steps_of(only_run().info.run_id) == [2]
    assert type(load_model(f"models:/{model.model_id}")) is Scaling


def test_the_active_run_is_used_and_stays_open() -> None:
    autolog()
    with mlflow.start_run() as run:
        xgboost.XGBRegressor(**SMALL).fit(FEATURES, TARGETS)

        assert mlflow.active_run() is not None
    assert steps_of(run.info.run_id) == [2]
    assert [model.source_run_id for model in logged_models()] == [run.info.run_id]


def test_log_models_false_logs_checkpoints_only() -> None:
    autolog(log_models=False)
    xgboost.XGBRegressor(**SMALL).fit(FEATURES, TARGETS)

    assert steps_of(only_run().info.run_id) == [2]
    assert logged_models() == []


def test_exclusive_leaves_the_runs_of_the_program_alone_and_starts_others() -> None:
    autolog(exclusive=True)
    with mlflow.start_run() as run:
        xgboost.XGBRegressor(**SMALL).fit(FEATURES, TARGETS)
    xgboost.XGBRegressor(**SMALL).fit(FEATURES, TARGETS)
    (model,) = logged_models()

    assert steps_of(run.info.run_id) == []
    assert steps_of(model.source_run_id) == [2]


def test_an_estimator_with_a_callback_of_ours_is_left_alone() -> None:
    autolog()
    with mlflow.start_run() as run:
        xgboost.XGBRegressor(**SMALL, callbacks=[TensorCasCallback(name="own")]).fit(FEATURES, TARGETS)

    assert names_of(run.info.run_id) == {"own"}
    assert logged_models() == []


def test_a_fit_that_fails_logs_no_model_and_ends_its_run() -> None:
    autolog()
    with pytest.raises(ValueError, match="nonsense"):
        xgboost.XGBRegressor(tree_method="nonsense").fit(FEATURES, TARGETS)
    xgboost.train(PARAMETERS, data(), 3)

    assert {run.info.status for run in mlflow.search_runs(output_format="list")} == {"FAILED", "FINISHED"}
    assert len(logged_models()) == 1


@pytest.mark.parametrize(
    "outer",
    [
        make_pipeline(StandardScaler(), xgboost.XGBClassifier(**SMALL)),
        VotingClassifier([("one", xgboost.XGBClassifier(**SMALL))]),
        GridSearchCV(xgboost.XGBClassifier(**SMALL), {"max_depth": [1]}, cv=2),
    ],
    ids=lambda outer: type(outer).__name__,
)
def test_parts_of_another_estimator_are_not_logged(outer: BaseEstimator) -> None:
    autolog()
    with mlflow.start_run() as run:
        outer.fit(FEATURES, LABELS)

    assert logged_models() == []
    assert steps_of(run.info.run_id) == [2]


def test_parts_that_are_fitted_in_threads_are_not_logged() -> None:
    import joblib

    autolog()
    with mlflow.start_run(), joblib.parallel_backend("threading", n_jobs=2):
        VotingClassifier([(name, xgboost.XGBClassifier(**SMALL)) for name in "ab"], n_jobs=2).fit(FEATURES, LABELS)

    assert logged_models() == []


def test_estimators_of_a_cross_validation_are_not_logged() -> None:
    autolog()
    with mlflow.start_run():
        cross_val_score(xgboost.XGBClassifier(**SMALL), FEATURES, LABELS, cv=2)

    assert logged_models() == []


@pytest.mark.parametrize("ours_first", [True, False])
def test_autolog_of_xgboost_classes_works_beside_mlflows_autologging(ours_first: bool) -> None:
    if ours_first:
        autolog()
    mlflow.xgboost.autolog(silent=True, log_models=False)
    try:
        autolog()
        xgboost.XGBRegressor(**SMALL).fit(FEATURES, TARGETS)
    finally:
        mlflow.xgboost.autolog(disable=True)
    run = only_run()

    assert steps_of(run.info.run_id) == [2]
    assert run.data.params["max_depth"] == "2"
    assert [model.source_run_id for model in logged_models()] == [run.info.run_id]
