"""Models of other libraries inside of estimators are filled or refused, never left unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import lightgbm
import numpy as np
import pytest
import torch
import xgboost
import zstandard
from sklearn.base import BaseEstimator
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import make_regression
from sklearn.ensemble import StackingClassifier, VotingClassifier
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression, SGDClassifier
from sklearn.model_selection import GridSearchCV
from sklearn.multioutput import MultiOutputClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.errors import AdapterError
from tests.flavors.sklearn.cases import ADAPTER, CANCER, IRIS, read_back, round_trip
from tests.flavors.sklearn.models import differences

X, Y = CANCER


def xgb(n: int = 3) -> Any:
    return xgboost.XGBClassifier(n_estimators=n, max_depth=2, n_jobs=1)


def lgbm(n: int = 3) -> Any:
    return lightgbm.LGBMClassifier(n_estimators=n, num_leaves=4, n_jobs=1, verbose=-1)


def cat(n: int = 3) -> Any:
    import catboost  # `make venv-all` installs it, for long tests

    return catboost.CatBoostClassifier(iterations=n, depth=2, thread_count=1, verbose=0, allow_writing_files=False)


class Holder(BaseEstimator):  # type: ignore[misc]
    """A user's estimator that holds a native model."""

    def __init__(self, train: Callable[[Array, Array], Any]) -> None:
        self.train = train

    def fit(self, x: Array, y: Array) -> Holder:
        self.model_ = self.train(x, y)
        return self

    def predict(self, x: Array) -> Array:
        data = xgboost.DMatrix(x) if isinstance(self.model_, xgboost.Booster) else x
        return np.asarray(self.model_.predict(data))


def train_xgb(x: Array, y: Array) -> Any:
    return xgboost.train({"max_depth": 2, "nthread": 1}, xgboost.DMatrix(x, y), 3)


def train_lgbm(x: Array, y: Array) -> Any:
    return lightgbm.train({"num_leaves": 4, "num_threads": 1, "verbose": -1}, lightgbm.Dataset(x, y), 3)


def train_cat(x: Array, y: Array) -> Any:
    return cat().fit(x, y)


AROUND: dict[str, Callable[[Any], Any]] = {
    "pipeline": lambda model: make_pipeline(StandardScaler(), model),
    "search": lambda model: GridSearchCV(model, {"learning_rate": [0.1, 0.3]}, cv=2),
    "vote": lambda model: VotingClassifier([("one", model), ("other", LogisticRegression(max_iter=9))], voting="soft"),
    "stack": lambda model: StackingClassifier([("one", model)], cv=2),
    "several outputs": MultiOutputClassifier,
    "calibrated": lambda model: CalibratedClassifierCV(model, cv=2, method="sigmoid"),
}


def fitted(name: str, model: Any, *, is_other: bool = False) -> Any:
    y = Y[::-1] if is_other else Y
    return AROUND[name](model).fit(X, np.stack([y, 1 - y], axis=1) if name == "several outputs" else y)


def filled(stored: Any, original: Any) -> Any:
    return ADAPTER.reconstruct(read_back(ADAPTER.extract(stored)), original)


def answers(model: Any) -> bytes:
    return np.asarray((getattr(model, "predict_proba", None) or model.predict)(X)).tobytes()


pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", AROUND)
def test_a_booster_of_xgboost_inside_comes_back_and_is_filled_in(name: str) -> None:
    stored, original = fitted(name, xgb()), fitted(name, xgb(5), is_other=True)
    before = answers(original)

    assert answers(round_trip(stored)) == answers(stored) != before
    assert answers(filled(stored, original)) == answers(stored)


def test_a_booster_of_xgboost_inside_is_rows_under_its_path() -> None:
    tensors = ADAPTER.extract(fitted("pipeline", xgb()))

    assert {"steps/xgbclassifier/_Booster/trees", "steps/xgbclassifier/_Booster/tree_table"} <= tensors.keys()
    assert "steps/xgbclassifier/_Booster/trees" in ADAPTER.cuts(tensors)
    assert any(package.startswith("xgboost") for package in ADAPTER.requirements(tensors))


def test_a_booster_of_xgboost_inside_that_grows_leaves_its_first_chunks_alone() -> None:
    pieces = []
    for n in (200, 210):
        rows = ADAPTER.extract(fitted("pipeline", xgb(n)))
        name = "steps/xgbclassifier/_Booster/trees"
        ends = ADAPTER.cuts(rows)[name]
        pieces.append([rows[name][start:end].tobytes() for start, end in pairwise([0, *ends])])

    assert len(pieces[0]) > 2
    assert pieces[1][: len(pieces[0]) - 1] == pieces[0][:-1]


def test_a_booster_of_xgboost_held_by_two_comes_back_as_one() -> None:
    model = make_pipeline(Holder(train_xgb)).fit(X, Y)
    model[0].again_ = model[0].model_
    restored = round_trip(model)

    assert restored[0].again_ is restored[0].model_
    assert answers(restored) == answers(model)


def test_a_booster_of_xgboost_held_by_two_is_filled_in_for_both() -> None:
    stored, original = (make_pipeline(Holder(train_xgb)).fit(X, y) for y in (Y, Y[::-1]))
    for model in (stored, original):
        model[0].again_ = model[0].model_
    filled(stored, original)

    assert original[0].again_ is original[0].model_
    assert answers(original) == answers(stored)


def test_a_booster_of_xgboost_that_was_not_trained_is_refused_as_xgboost_refuses_to_pickle_it() -> None:
    model = LogisticRegression().fit(*IRIS)
    model.booster_ = xgboost.Booster()

    with pytest.raises(AdapterError, match="is the booster trained"):
        ADAPTER.extract(model)


def test_a_damaged_booster_is_refused_and_the_original_is_unchanged() -> None:
    stored, original = fitted("pipeline", xgb()), fitted("pipeline", xgb(), is_other=True)
    before = answers(original)
    tensors = read_back(ADAPTER.extract(stored))
    trees = tensors["steps/xgbclassifier/_Booster/trees"]
    trees["left_children"][:] = 77

    with pytest.raises(AdapterError):
        ADAPTER.reconstruct(tensors, original)
    assert answers(original) == before


@pytest.mark.parametrize("make", [lgbm, pytest.param(cat, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["pipeline", "vote", "stack", "several outputs"])
def test_a_model_of_another_library_inside_is_restored_or_refused(make: Any, name: str) -> None:
    stored, original = fitted(name, make()), fitted(name, make(), is_other=True)
    before = answers(original)

    assert answers(round_trip(stored)) == answers(stored)
    with pytest.raises(AdapterError, match="can only be unpickled: load a new one"):
        filled(stored, original)
    assert answers(original) == before


@pytest.mark.parametrize("train", [train_lgbm, pytest.param(train_cat, marks=pytest.mark.long)])
def test_a_native_model_in_a_users_estimator_is_restored_or_refused(train: Any) -> None:
    stored, original = (Holder(train).fit(X, y) for y in (Y, Y[::-1]))

    with pytest.raises(AdapterError, match=r"'model_.* can only be unpickled"):
        filled(stored, original)


def test_an_equal_model_of_another_library_allows_a_fill() -> None:
    stored, original = fitted("vote", lgbm()), fitted("vote", lgbm())
    original.estimators_[1].coef_[:] = 0

    assert answers(filled(stored, original)) == answers(stored)


def test_a_stored_model_without_facts_fills_nothing() -> None:
    stored = LogisticRegression().fit(*IRIS)
    tensors = read_back(ADAPTER.extract(stored))
    tensors[SKELETON] = tensors[SKELETON][:-15]

    with pytest.raises(AdapterError, match="does not say what an original must be like: load a new one"):
        ADAPTER.reconstruct(tensors, copy.deepcopy(stored))


def test_a_missing_object_of_another_library_is_named() -> None:
    stored, original = (LogisticRegression().fit(IRIS[0], y) for y in (IRIS[1], IRIS[1][::-1]))
    stored.note_ = torch.nn.Linear(3, 1)

    with pytest.raises(AdapterError, match="'note_' is absent in it"):
        filled(stored, original)


def test_other_class_labels_in_an_array_of_strings_are_refused() -> None:
    names, others = np.array(["a", "b", "c"]), np.array(["x", "y", "z"])
    stored, original = (LogisticRegression().fit(IRIS[0], of[IRIS[1]]) for of in (names, others))
    before = copy.deepcopy(original)

    with pytest.raises(AdapterError, match="'classes_' is array"):
        filled(stored, original)
    assert differences(before, original) == []


def test_other_class_labels_in_an_array_of_objects_come_back() -> None:
    names = np.array(["a", "b", "c"], dtype=object)
    stored, original = (LogisticRegression().fit(IRIS[0], of[IRIS[1]]) for of in (names, names[::-1]))
    filled(stored, original)

    assert original.predict(IRIS[0]).tolist() == stored.predict(IRIS[0]).tolist()


def test_filled_vectorizer_has_the_stored_vocabulary() -> None:
    stored, original = (CountVectorizer().fit([text]) for text in ("one two", "two three"))
    filled(stored, original)

    assert original.transform(["one two three"]).toarray().tolist() == [[1, 1]]
    assert original.get_feature_names_out().tolist() == ["one", "two"]


def test_an_equal_vocabulary_in_another_order_allows_a_fill() -> None:
    stored, original = (CountVectorizer().fit([text]) for text in ("one two", "two one"))

    assert filled(stored, original) is original


def test_iteration_counts_of_a_fit_are_filled_in() -> None:
    stored, original = (SGDClassifier(tol=tol, random_state=0).fit(*CANCER) for tol in (1e-3, 1e9))

    assert stored.n_iter_ != original.n_iter_
    assert filled(stored, original).n_iter_ == stored.n_iter_


def test_another_network_of_torch_inside_is_refused() -> None:
    stored, original = (Holder(lambda x, y: torch.nn.Linear(3, 1)).fit(X, Y) for _ in range(2))

    with pytest.raises(AdapterError, match=r"'model_.* can only be unpickled"):
        filled(stored, original)


class Shift:
    """A step that is no estimator of scikit-learn's, and says itself what is pickled of it."""

    def fit(self, x: Array, y: Array) -> Shift:
        self.by, self.all_by = float(x.mean()), x.mean(axis=0)
        return self

    def transform(self, x: Array) -> Array:
        return x - self.by - self.all_by

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))


def test_a_step_of_a_users_own_is_filled_in() -> None:
    stored, original = (make_pipeline(Shift(), LogisticRegression()).fit(x, IRIS[1]) for x in (IRIS[0], IRIS[0] * 2))

    assert filled(stored, original).predict_proba(IRIS[0]).tobytes() == stored.predict_proba(IRIS[0]).tobytes()


def test_settings_that_are_no_hyperparameters_come_back() -> None:
    stored, original = (StandardScaler().fit(X) for _ in range(2))
    stored.set_output(transform="pandas")

    assert type(filled(stored, original).transform(X)).__name__ == "DataFrame"
    assert type(filled(StandardScaler().fit(X), original).transform(X)).__name__ == "ndarray"


@pytest.mark.long
def test_a_step_of_a_growing_lightgbm_model_writes_a_fraction_of_its_text() -> None:
    model = None
    seen: set[bytes] = set()
    n_new = n_texts = 0
    x, y = make_regression(2000, 12, random_state=0)
    for _ in range(20):
        model = lightgbm.LGBMRegressor(n_estimators=5, n_jobs=1, verbose=-1).fit(x, y, init_model=model)
        tensors = ADAPTER.extract(model)
        row = tensors["__strings__"]
        pieces = {row[start:end].tobytes() for start, end in pairwise([0, *ADAPTER.cuts(tensors)["__strings__"]])}
        n_new += sum(len(zstandard.compress(piece, 3)) for piece in pieces - seen)
        n_texts += len(row)
        seen |= pieces

    assert n_new < 0.1 * n_texts
