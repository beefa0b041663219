"""Estimators fitted with other parameters become the stored one, or are unchanged."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import xgboost
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.ensemble import (
    BaggingClassifier,
    BaggingRegressor,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    RandomForestClassifier,
    StackingClassifier,
    VotingClassifier,
)
from sklearn.linear_model import Lasso, LogisticRegression, Ridge, SGDClassifier
from sklearn.model_selection import GridSearchCV, RandomizedSearchCV
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, MinMaxScaler, OneHotEncoder, StandardScaler
from sklearn.svm import SVC
from sklearn.utils._param_validation import Interval, Options, StrOptions, make_constraint

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.errors import AdapterError
from tests.flavors.sklearn.cases import ADAPTER, without_pickle
from tests.flavors.sklearn.models import _OF_LABELS, _data, answers, describe, differing, fit, names

pytestmark = pytest.mark.filterwarnings("ignore")

FIRST = [name for name in names() if name.endswith("-0")]
"""One instance of each class."""


def others(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield parameters of an estimator, each with a value that it has not."""
    constraints = getattr(type(model), "_parameter_constraints", {})
    for name, value in model.get_params(deep=False).items():
        if name in ("n_jobs", "verbose", "random_state") or not isinstance(constraints.get(name), list):
            continue
        for constraint in map(make_constraint, constraints[name]):
            other = other_value(constraint, value)
            if other is not None and other != value:
                yield name, other
                break


def other_value(constraint: Any, value: Any) -> Any:
    if isinstance(constraint, StrOptions | Options):
        return next((each for each in sorted(constraint.options, key=str) if each != value), None)
    if isinstance(constraint, Interval) and isinstance(value, int | float) and not isinstance(value, bool):
        near = (value + 1, value / 2, value * 2, value - 1)
        return next((each for each in near if constraint.is_satisfied_by(each)), None)
    return not value if isinstance(value, bool) else None


def refit(model: Any, **parameters: Any) -> Any:
    """Return an estimator of other parameters, fitted to other data; None if it does not like them."""
    other = clone(model).set_params(**parameters)
    x, y = _data(model, 1)
    try:
        return other.fit(y) if type(model).__name__ in _OF_LABELS else other.fit(x, y)
    except (ValueError, TypeError, NotImplementedError, AttributeError, np.linalg.LinAlgError):
        return None


def parameters_of(model: Any) -> dict[str, str]:
    return describe({name: value for name, value in model.get_params().items() if not hasattr(value, "fit")})


def fill(rows: Mapping[str, Array], original: Any) -> str | None:
    """Fill a live model without a pickle; return why not."""
    try:
        assert ADAPTER.reconstruct(without_pickle(rows), original) is original
    except AdapterError as error:
        return str(error)
    return None


@pytest.mark.long
@pytest.mark.parametrize("name", FIRST)
def test_other_parameters_come_back_or_are_refused(name: str) -> None:
    model, x = fit(name)
    rows = ADAPTER.extract(model)
    wanted = answers(model, x)
    for parameter, value in others(model):
        other = refit(model, **{parameter: value})
        if other is None:
            continue
        before = answers(other, x)
        attributes = describe(other)
        reason = fill(rows, other)
        if reason is None:
            assert differing(parameters_of(model), parameters_of(other)) == [], parameter
            assert differing(wanted, answers(other, x)) == [], parameter
        else:
            assert "load a new one, without into=" in reason, parameter
            assert differing(attributes, describe(other)) == [], parameter
            assert differing(before, answers(other, x)) == [], parameter


@pytest.mark.long
@pytest.mark.parametrize("name", FIRST)
def test_every_attribute_comes_back_into_a_model_fitted_to_other_data(name: str) -> None:
    model, _ = fit(name)
    original, _ = fit(name, 1)

    assert fill(ADAPTER.extract(model), original) is None
    for each in (model, original):
        # The id of an object, to know it again.
        vars(each).pop("_stop_words_id", None)
    one, other = describe(model), describe(original)
    is_one = [text for text in {**one, **other}.values() if text.startswith("the same as")]
    assert [each for each in differing(one, other) if not {*each} & {*is_one}] == []


X = np.random.default_rng(0).random((60, 5))
Y = X @ np.arange(5.0)
CLASSES = (Y > 5).astype(int) + (Y > 4)


def changing_ways() -> dict[str, tuple[Any, Any]]:
    """Return pairs of models that differ in parameters, at the bottom of others; the first is stored."""

    def steps(k: int) -> Any:
        columns = ColumnTransformer([("a", MinMaxScaler(clip=k > 1), [0, 1, 2, 3, 4])])
        return make_pipeline(StandardScaler(with_mean=k > 1), columns, SVC(C=k))

    return {
        "pipeline": (steps(1), steps(2)),
        "search": (
            GridSearchCV(steps(1), {"svc__C": [0.1, 10.0], "svc__gamma": [0.1, 1.0]}),
            GridSearchCV(steps(2), {"svc__C": [0.1, 10.0], "svc__gamma": [0.1, 1.0]}),
        ),
        "random search": (
            RandomizedSearchCV(LogisticRegression(), {"C": [1.0, 2.0, 3.0]}, n_iter=2, random_state=0),
            RandomizedSearchCV(LogisticRegression(tol=9), {"C": [1.0, 2.0, 3.0]}, n_iter=2, random_state=0),
        ),
        "calibrated": (
            CalibratedClassifierCV(LogisticRegression(C=0.1), method="sigmoid", cv=2),
            CalibratedClassifierCV(LogisticRegression(C=9), method="sigmoid", cv=2, ensemble=True),
        ),
        "stacking": (
            StackingClassifier([("a", KNeighborsClassifier(1)), ("b", SVC(C=0.1))], LogisticRegression(C=0.1)),
            StackingClassifier([("a", KNeighborsClassifier(9)), ("b", SVC(C=9))], LogisticRegression(C=9)),
        ),
        "voting": (
            VotingClassifier([("a", SVC()), ("b", KNeighborsClassifier())], weights=[1, 9]),
            VotingClassifier([("a", SVC(C=5)), ("b", KNeighborsClassifier(2, weights="distance"))], weights=[9, 1]),
        ),
        "bagging": (
            BaggingClassifier(KNeighborsClassifier(1), n_estimators=3, random_state=0),
            BaggingClassifier(KNeighborsClassifier(9), n_estimators=5, random_state=1),
        ),
        "forest of a random state": (
            RandomForestClassifier(5, max_depth=2, random_state=np.random.RandomState(0)),
            RandomForestClassifier(9, max_depth=3, random_state=np.random.RandomState(1)),
        ),
        "boosting": (
            GradientBoostingClassifier(n_estimators=3, learning_rate=0.1),
            GradientBoostingClassifier(n_estimators=5, learning_rate=0.9),
        ),
        "histograms": (
            HistGradientBoostingClassifier(max_iter=3, max_features=0.5, random_state=3),
            HistGradientBoostingClassifier(max_iter=5, max_features=0.9),
        ),
        "xgboost": (
            make_pipeline(StandardScaler(), xgboost.XGBClassifier(n_estimators=3, max_depth=2, n_jobs=1)),
            make_pipeline(StandardScaler(), xgboost.XGBClassifier(n_estimators=5, learning_rate=0.9, n_jobs=1)),
        ),
        "network": (
            MLPClassifier((4,), max_iter=12, random_state=0),
            MLPClassifier((4,), max_iter=5, random_state=1, learning_rate_init=0.1),
        ),
        "descent": (SGDClassifier(alpha=0.1, random_state=0), SGDClassifier(alpha=1e-4, random_state=1, tol=9)),
    }


@pytest.mark.parametrize("name", changing_ways())
def test_parameters_of_nested_estimators_come_back(name: str) -> None:
    stored, original = changing_ways()[name]
    stored.fit(X, CLASSES)
    original.fit(X + 0.1, CLASSES)
    before = answers(original, X)

    assert fill(ADAPTER.extract(stored), original) is None
    assert differing(answers(stored, X), answers(original, X)) == []
    assert differing(parameters_of(stored), parameters_of(original)) == []
    assert differing(before, answers(original, X)) != []


OF_CODE: dict[str, tuple[Any, Any, str]] = {
    "function": (FunctionTransformer(np.log1p), FunctionTransformer(np.exp), "func"),
    "target": (
        TransformedTargetRegressor(Ridge(), func=np.log1p, inverse_func=np.expm1),
        TransformedTargetRegressor(Ridge(), func=np.sqrt, inverse_func=np.square),
        "func",
    ),
    "type": (OneHotEncoder(dtype=np.float32), OneHotEncoder(dtype=np.float64), "dtype"),
    "candidates": (
        GridSearchCV(Ridge(), {"alpha": [1.0, 2.0]}),
        GridSearchCV(Ridge(), {"alpha": [1.0, 3.0]}),
        "cv_results_/param_alpha",
    ),
    "class": (BaggingRegressor(Ridge()), BaggingRegressor(Lasso()), "estimators_/0"),
    "steps": (make_pipeline(MinMaxScaler(), Ridge()), make_pipeline(StandardScaler(), Ridge()), "steps/0/0"),
    "name of a step": (Pipeline([("a", Ridge())]), Pipeline([("b", Ridge())]), "steps/0/0"),
    "loss": (SGDClassifier(loss="hinge"), SGDClassifier(loss="log_loss"), "_loss_function_"),
}


@pytest.mark.parametrize("name", OF_CODE)
def test_a_difference_that_only_a_pickle_restores_is_refused(name: str) -> None:
    stored, original, path = OF_CODE[name]
    y = CLASSES if name == "loss" else Y
    stored.fit(X, y)
    original.fit(X, y)
    before, attributes = answers(original, X), describe(original)
    reason = fill(ADAPTER.extract(stored), original)

    assert reason is not None
    assert f"{path!r} " in reason
    assert "load a new one, without into=" in reason
    assert differing(before, answers(original, X)) == []
    assert differing(attributes, describe(original)) == []


def test_reading_a_report_does_not_change_its_facts() -> None:
    stored, original = (GridSearchCV(Ridge(), {"alpha": [0.1, 100.0]}).fit(X, Y) for _ in range(2))

    assert original.cv_results_["param_alpha"].fill_value is not None
    assert fill(ADAPTER.extract(stored), original) is None


def test_results_of_a_search_come_back() -> None:
    stored, original = (GridSearchCV(Ridge(), {"alpha": [0.1, 100.0]}) for _ in range(2))
    stored.fit(X, Y)
    original.fit(X, np.random.default_rng(1).random(60))

    assert stored.best_params_ != original.best_params_
    assert fill(ADAPTER.extract(stored), original) is None
    assert (original.best_params_, original.best_index_) == (stored.best_params_, stored.best_index_)
    assert original.best_estimator_.alpha == stored.best_estimator_.alpha


@pytest.mark.parametrize("seed", [0, None, np.random.RandomState(3)])
def test_random_states_continue_from_the_stored_state(seed: Any) -> None:
    stored, original, again = (
        GradientBoostingRegressor(n_estimators=3, subsample=0.5, warm_start=True, random_state=seed).fit(X, Y)
        for _ in range(3)
    )
    rows = ADAPTER.extract(stored)
    before = np.random.get_state()[1].tobytes()  # noqa: NPY002
    for live in (original, again):
        assert fill(rows, live) is None
        live.set_params(n_estimators=6).fit(X, Y)

    assert original._rng is not again._rng
    assert all(tree.random_state is original._rng for tree in original.estimators_.flat)
    assert original.predict(X).tobytes() == again.predict(X).tobytes()
    assert np.random.get_state()[1].tobytes() == before  # noqa: NPY002


def test_a_generator_continues_from_the_stored_state() -> None:
    stored, original = Ridge().fit(X, Y), Ridge().fit(X, Y)
    for n, model in enumerate((stored, original)):
        model.drawn_ = {"by": np.random.default_rng(n), "one": None}

    assert fill(ADAPTER.extract(stored), original) is None
    assert original.drawn_["by"].random() == stored.drawn_["by"].random()
    assert original.drawn_["by"].spawn(1)[0].random() == stored.drawn_["by"].spawn(1)[0].random()


def test_missing_attributes_come_back_and_surplus_ones_go() -> None:
    stored, original = Ridge().fit(X, Y), Ridge().fit(X, Y)
    stored.note_, original.other_ = {"a": [1, (2.5, None)]}, 5

    assert fill(ADAPTER.extract(stored), original) is None
    assert original.note_ == stored.note_
    assert not hasattr(original, "other_")


class Caching(Ridge):  # type: ignore[misc]
    """Holds what it does not pickle, and makes it when it needs it."""

    def fit(self, x: Array, y: Array) -> Any:
        self.lock_, self.cache_ = threading.Lock(), y.sum()
        return super().fit(x, y)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("lock_", "cache_")}


def test_attributes_that_are_not_pickled_are_dropped() -> None:
    stored, original = Caching(alpha=2).fit(X, Y), Caching().fit(X, Y * 2)

    assert fill(ADAPTER.extract(stored), original) is None
    assert original.alpha == 2
    assert vars(original).keys() == stored.__getstate__().keys()


def test_an_array_of_arrays_gets_whole_arrays() -> None:
    stored, original = Ridge().fit(X, Y), Ridge().fit(X, Y)
    for value, model in ((1.0, stored), (2.0, original)):
        model.parts_ = np.empty(2, dtype=object)
        model.parts_[:] = [np.full(3, value), [value]]

    assert fill(ADAPTER.extract(stored), original) is None
    assert original.parts_[0].tolist() == [1.0, 1.0, 1.0]
    assert original.parts_[1] == [1.0]


def test_a_damaged_array_leaves_parameters_unchanged() -> None:
    stored, original = (KNeighborsClassifier(n).fit(X, CLASSES) for n in (1, 5))
    rows = without_pickle(ADAPTER.extract(stored))
    rows["_y"][:] = 77
    before = describe(original)

    with pytest.raises(AdapterError, match="damaged"):
        ADAPTER.reconstruct(rows, original)
    assert differing(before, describe(original)) == []
