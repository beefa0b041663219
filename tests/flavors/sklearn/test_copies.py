"""A live model may have come from a fit, a pickle, a load, a copy or a clone: the stored one fills it, and back."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import (
    AdaBoostClassifier,
    BaggingClassifier,
    StackingClassifier,
    StackingRegressor,
    VotingClassifier,
    VotingRegressor,
)
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.multiclass import OneVsOneClassifier, OneVsRestClassifier
from sklearn.multioutput import ClassifierChain, MultiOutputClassifier
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import FeatureUnion, make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler
from sklearn.tree import DecisionTreeClassifier
from sklearn.utils import Bunch

from tensorcas_mlflow.errors import AdapterError
from tests.flavors.sklearn.cases import ADAPTER, round_trip, without_pickle
from tests.pairs import pairs_of

pytestmark = pytest.mark.filterwarnings("ignore")


def two() -> list[tuple[str, Any]]:
    return [("line", LogisticRegression(max_iter=20)), ("bayes", GaussianNB())]


META: dict[str, Callable[[], Any]] = {
    "voting": lambda: VotingClassifier(two(), voting="soft"),
    "voting with a dropped member": lambda: VotingClassifier([*two(), ("none", "drop")]),
    "voting of regressors": lambda: VotingRegressor([("one", Ridge()), ("other", Ridge(2.0))]),
    "stacking": lambda: StackingClassifier(two(), final_estimator=LogisticRegression(), cv=2),
    "stacking of regressors": lambda: StackingRegressor([("one", Ridge()), ("other", Ridge(2.0))], cv=2),
    "voting of ensembles": lambda: VotingClassifier(
        [("v", VotingClassifier(two())), ("s", StackingClassifier(two(), cv=2))]
    ),
    "voting in a pipeline": lambda: make_pipeline(StandardScaler(), VotingClassifier(two())),
    "search over a vote": lambda: GridSearchCV(VotingClassifier(two()), {"line__C": [0.1, 1.0]}, cv=2),
    "union": lambda: make_pipeline(FeatureUnion([("a", StandardScaler()), ("b", MinMaxScaler())]), Ridge()),
    "columns": lambda: make_pipeline(
        ColumnTransformer([("a", StandardScaler(), [0, 1]), ("b", "drop", [2])], remainder=MinMaxScaler()), Ridge()
    ),
    "bagging": lambda: BaggingClassifier(GaussianNB(), n_estimators=3, random_state=0),
    "boosting": lambda: AdaBoostClassifier(DecisionTreeClassifier(max_depth=2), n_estimators=3, random_state=0),
    "calibrated": lambda: CalibratedClassifierCV(GaussianNB(), cv=2),
    "several outputs": lambda: MultiOutputClassifier(GaussianNB()),
    "chain": lambda: ClassifierChain(GaussianNB()),
    "one versus rest": lambda: OneVsRestClassifier(GaussianNB()),
    "one versus one": lambda: OneVsOneClassifier(GaussianNB()),
}


def fit(model: Any, name: str, seed: int) -> Any:
    random = np.random.default_rng(seed)
    x, y = random.normal(size=(60, 5)), np.arange(60) % 3
    x[:, 0] += y
    return model.fit(x, np.stack([y, y[::-1]], axis=1) if name in ("several outputs", "chain") else y)


@cache
def fitted(name: str, seed: int) -> Any:
    return fit(META[name](), name, seed)


COPIES: dict[str, Callable[[str, int], Any]] = {
    "fitted": lambda name, seed: fit(META[name](), name, seed),
    "pickled": lambda name, seed: pickle.loads(pickle.dumps(fitted(name, seed))),
    "loaded": lambda name, seed: round_trip(fitted(name, seed)),
    "loaded twice": lambda name, seed: round_trip(round_trip(fitted(name, seed))),
    "copied": lambda name, seed: copy.deepcopy(fitted(name, seed)),
    "cloned and fitted": lambda name, seed: fit(clone(fitted(name, 7)), name, seed),
    "filled": lambda name, seed: ADAPTER.reconstruct(ADAPTER.extract(fitted(name, seed)), COPIES["fitted"](name, 7)),
}


@pytest.mark.parametrize(("name", "saved", "live"), pairs_of(META, ["fitted", "pickled", "loaded"], COPIES))
def test_any_copy_of_a_model_is_filled_with_any_other(name: str, saved: str, live: str) -> None:
    original = COPIES[live](name, 1)
    data = np.random.default_rng(3).normal(size=(40, 5))

    ADAPTER.reconstruct(without_pickle(ADAPTER.extract(COPIES[saved](name, 0))), original)

    assert np.array_equal(original.predict(data), fitted(name, 0).predict(data))


def neighbours(seed: int) -> KNeighborsClassifier:
    return KNeighborsClassifier(algorithm="kd_tree").fit(
        np.random.default_rng(seed).normal(size=(60, 5)), np.arange(60) % 2
    )


def in_two_arrays(model: Any) -> Any:
    """Return a model whose data is no longer the very array in its tree, as after `joblib.load`."""
    model._fit_X = model._fit_X.copy()
    return model


@pytest.mark.parametrize("saved", [neighbours, lambda seed: in_two_arrays(neighbours(seed))], ids=["one", "two"])
@pytest.mark.parametrize("live", [neighbours, lambda seed: in_two_arrays(neighbours(seed))], ids=["one", "two"])
def test_one_array_in_two_places_fills_two_equal_ones_and_back(saved: Any, live: Any) -> None:
    original = live(1)
    data = np.random.default_rng(3).normal(size=(40, 5))

    ADAPTER.reconstruct(without_pickle(ADAPTER.extract(saved(0))), original)

    assert np.array_equal(original.kneighbors(data)[0], neighbours(0).kneighbors(data)[0])
    assert np.array_equal(original._fit_X, neighbours(0)._fit_X)


def test_two_different_arrays_do_not_fill_one() -> None:
    model, original = in_two_arrays(neighbours(0)), neighbours(1)
    model._fit_X += 1
    before = original._fit_X.copy()

    with pytest.raises(AdapterError, match="only one of the two has '_tree/data'"):
        ADAPTER.reconstruct(without_pickle(ADAPTER.extract(model)), original)

    assert np.array_equal(original._fit_X, before)


def test_items_of_a_bunch_come_back_and_its_attributes_are_those_of_the_live_one() -> None:
    model, live = fitted("voting", 0), COPIES["pickled"]("voting", 1)

    ADAPTER.reconstruct(without_pickle(ADAPTER.extract(model)), live)

    assert type(live.named_estimators_) is Bunch
    assert live.named_estimators_.line is live.estimators_[0]
