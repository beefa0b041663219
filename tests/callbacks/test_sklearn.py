"""Fitting scikit-learn estimators in stages."""

from __future__ import annotations

from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
from sklearn.cluster import MiniBatchKMeans
from sklearn.ensemble import GradientBoostingRegressor, RandomForestClassifier
from sklearn.linear_model import SGDClassifier
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from tensorcas_mlflow.callbacks.sklearn import fit_with_checkpoints
from tensorcas_mlflow.integration.checkpoints import Keep, load_checkpoint
from tests.callbacks.loops import FEATURES, LABELS, TARGETS, steps_of


def test_every_stage_of_a_warm_start_is_logged() -> None:
    model = GradientBoostingRegressor(random_state=0)
    with mlflow.start_run() as run:
        fit_with_checkpoints(model, FEATURES, TARGETS, steps=range(2, 7, 2))

    assert steps_of(run.info.run_id) == [2, 4, 6]
    assert np.array_equal(load_checkpoint(run.info.run_id).predict(FEATURES), model.predict(FEATURES))


def test_a_stage_is_what_a_fit_of_that_size_gives() -> None:
    with mlflow.start_run() as run:
        fit_with_checkpoints(GradientBoostingRegressor(random_state=0), FEATURES, TARGETS, steps=range(2, 7, 2))
    alone = GradientBoostingRegressor(n_estimators=4, random_state=0).fit(FEATURES, TARGETS)

    assert np.array_equal(load_checkpoint(run.info.run_id, step=4).predict(FEATURES), alone.predict(FEATURES))


def test_a_loaded_stage_is_fitted_further() -> None:
    whole = fit_with_checkpoints(
        RandomForestClassifier(random_state=0), FEATURES, LABELS, steps=[2, 4, 6], name="whole"
    )
    with mlflow.start_run(nested=True) as run:
        fit_with_checkpoints(RandomForestClassifier(random_state=0), FEATURES, LABELS, steps=[2, 4])
        fit_with_checkpoints(load_checkpoint(run.info.run_id), FEATURES, LABELS, steps=[6])

    assert steps_of(run.info.run_id) == [2, 4, 6]
    assert np.array_equal(load_checkpoint(run.info.run_id).predict_proba(FEATURES), whole.predict_proba(FEATURES))


def test_warm_start_is_set_back_and_the_estimator_returned() -> None:
    model = RandomForestClassifier(random_state=0)
    with mlflow.start_run() as run:
        returned = fit_with_checkpoints(model, FEATURES, LABELS, steps=2)

    assert returned is model
    assert model.warm_start is False
    assert load_checkpoint(run.info.run_id).warm_start is True


def test_a_pipeline_grows_by_the_parameter_of_its_last_step() -> None:
    model = make_pipeline(StandardScaler(), GradientBoostingRegressor(random_state=0))
    with mlflow.start_run() as run:
        fit_with_checkpoints(
            model, FEATURES, TARGETS, steps=[3, 6], parameter="gradientboostingregressor__n_estimators"
        )

    assert steps_of(run.info.run_id) == [3, 6]
    assert np.array_equal(load_checkpoint(run.info.run_id).predict(FEATURES), model.predict(FEATURES))


@pytest.mark.parametrize("frame", [np.asarray, pd.DataFrame], ids=["array", "frame"])
def test_partial_fit_passes_are_logged(frame: Any) -> None:
    model = SGDClassifier(random_state=0)
    with mlflow.start_run() as run:
        fit_with_checkpoints(model, frame(FEATURES), LABELS, steps=[1, 3], parameter=None, batch_size=10)

    assert steps_of(run.info.run_id) == [1, 3]
    assert np.array_equal(load_checkpoint(run.info.run_id).coef_, model.coef_)


def test_batches_need_not_hold_every_class() -> None:
    order = np.argsort(LABELS)
    with mlflow.start_run():
        model = fit_with_checkpoints(
            GaussianNB(), FEATURES[order], LABELS[order], steps=1, parameter=None, batch_size=8
        )

    assert np.allclose(model.theta_, GaussianNB().fit(FEATURES, LABELS).theta_)


def test_an_estimator_without_targets_is_fitted_by_passes() -> None:
    with mlflow.start_run() as run:
        fit_with_checkpoints(
            MiniBatchKMeans(n_clusters=2, random_state=0), FEATURES, steps=2, parameter=None, batch_size=32
        )

    assert steps_of(run.info.run_id) == [1, 2]


def test_fit_params_reach_every_fit() -> None:
    weights = np.where(LABELS == 1, 1.0, 0.0)
    with mlflow.start_run() as run:
        fit_with_checkpoints(
            RandomForestClassifier(random_state=0), FEATURES, LABELS, steps=2, fit_params={"sample_weight": weights}
        )

    assert load_checkpoint(run.info.run_id, step=1).predict(FEATURES).all()


def test_keep_deletes_while_fitting_goes_on() -> None:
    with mlflow.start_run() as run:
        fit_with_checkpoints(RandomForestClassifier(), FEATURES, LABELS, steps=5, keep=Keep(last=2), blocking=False)

    assert steps_of(run.info.run_id) == [4, 5]


def test_a_failing_fit_leaves_the_stages_before_it() -> None:
    class Failing(GradientBoostingRegressor):
        def fit(self, X: Any, y: Any, **options: Any) -> Any:
            if self.n_estimators == 3:
                raise KeyboardInterrupt
            return super().fit(X, y, **options)

    model = Failing(random_state=0)
    with mlflow.start_run() as run, pytest.raises(KeyboardInterrupt):
        fit_with_checkpoints(model, FEATURES, TARGETS, steps=4)

    assert steps_of(run.info.run_id) == [1, 2]
    assert model.warm_start is False


def test_an_estimator_that_cannot_be_fitted_in_stages_is_refused() -> None:
    with pytest.raises(ValueError, match="SVC has no parameter 'n_estimators'"):
        fit_with_checkpoints(SVC(), FEATURES, LABELS, steps=2)
    with pytest.raises(ValueError, match="SVC has no partial_fit"):
        fit_with_checkpoints(SVC(), FEATURES, LABELS, steps=2, parameter=None)


@pytest.mark.parametrize("steps", [0, [], [2, 2], [3, 1], [0, 1]])
def test_steps_that_do_not_ascend_are_refused(steps: Any) -> None:
    with pytest.raises(ValueError, match="steps must be ascending numbers"):
        fit_with_checkpoints(RandomForestClassifier(), FEATURES, LABELS, steps=steps)


@pytest.mark.parametrize("steps", [np.int64(2), np.array([1, 2]), (np.int8(1), 2)])
def test_steps_are_any_whole_numbers(steps: Any) -> None:
    with mlflow.start_run() as run:
        fit_with_checkpoints(RandomForestClassifier(), FEATURES, LABELS, steps=steps)

    assert steps_of(run.info.run_id) == [1, 2]


@pytest.mark.parametrize("steps", [2.0, [1, 2.5], "12", None])
def test_steps_that_are_no_whole_numbers_are_refused(steps: Any) -> None:
    with pytest.raises(ValueError, match="steps must be a whole number or several ascending ones"):
        fit_with_checkpoints(RandomForestClassifier(), FEATURES, LABELS, steps=steps)


def test_batches_are_for_partial_fit_only() -> None:
    with pytest.raises(ValueError, match="batch_size is for partial_fit"):
        fit_with_checkpoints(RandomForestClassifier(), FEATURES, LABELS, steps=2, batch_size=8)
