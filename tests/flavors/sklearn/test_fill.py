"""A live estimator gets the arrays, trees and numbers of a stored one, and no pickle is read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingRegressor, IsolationForest, RandomForestClassifier
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.neighbors import KernelDensity, KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.svm import SVC, SVR
from sklearn.tree import DecisionTreeClassifier

from tensorcas_mlflow.errors import AdapterError
from tests.flavors.sklearn.cases import ADAPTER, CANCER, DIABETES, IRIS, fit, read_back, without_pickle
from tests.flavors.sklearn.models import differences


@pytest.mark.parametrize("name", ["logistic regression", "random forest", "isolation forest", "pipeline", "mlp", "svc"])
def test_a_live_model_is_filled_in_place_without_its_pickle(name: str) -> None:
    model = fit(name)
    tensors = without_pickle(ADAPTER.extract(model))
    original = copy.deepcopy(model)
    for array in ADAPTER.extract(original).values():
        if array.dtype == float and array.flags.writeable and array.base is None:
            array[...] = 0
    filled = ADAPTER.reconstruct(tensors, original)

    assert filled is original
    assert differences(model, filled) == []


def test_trees_of_another_size_replace_the_originals() -> None:
    model = RandomForestClassifier(n_estimators=9, random_state=0).fit(*CANCER)
    original = RandomForestClassifier(n_estimators=9, random_state=1).fit(*CANCER)
    ADAPTER.reconstruct(read_back(ADAPTER.extract(model)), original)

    assert original.predict_proba(CANCER[0]).tobytes() == model.predict_proba(CANCER[0]).tobytes()


@pytest.mark.parametrize(
    ("stored", "original"),
    [
        (Ridge().fit(*DIABETES), Ridge()),
        (Ridge().fit(*DIABETES), LogisticRegression().fit(*IRIS)),
        (Ridge().fit(*DIABETES), Ridge().fit(*CANCER)),
        (RandomForestClassifier(9).fit(*CANCER), RandomForestClassifier(9).fit(*IRIS)),
        (DecisionTreeClassifier().fit(*CANCER), DecisionTreeClassifier().fit(CANCER[0][:, :1], CANCER[1])),
    ],
)
def test_an_original_that_does_not_fit_is_refused_and_unchanged(stored: Any, original: Any) -> None:
    tensors = read_back(ADAPTER.extract(stored))
    before = copy.deepcopy(original)

    with pytest.raises(AdapterError):
        ADAPTER.reconstruct(tensors, original)
    assert differences(before, original) == []


def filled(stored: Any, original: Any) -> Any:
    return ADAPTER.reconstruct(without_pickle(ADAPTER.extract(stored)), original)


@pytest.mark.parametrize(
    "make",
    [
        lambda: HistGradientBoostingRegressor(max_iter=5, min_samples_leaf=30),
        lambda: IsolationForest(n_estimators=9),
        lambda: SVR(epsilon=40),
        lambda: SVC(gamma=0.5),
    ],
)
def test_arrays_whose_size_differs_from_fit_to_fit_are_replaced(make: Callable[[], Any]) -> None:
    x, y = DIABETES[0], DIABETES[1].round(-2)
    stored = make().fit(x, y)
    original = make().fit(x, y[::-1])
    sizes = [array.shape for array in ADAPTER.extract(original).values()]

    assert [array.shape for array in ADAPTER.extract(stored).values()] != sizes
    assert filled(stored, original).predict(x).tobytes() == stored.predict(x).tobytes()


def test_fitted_numbers_are_tensors_by_name() -> None:
    tensors = ADAPTER.extract(fit("ridge"))

    assert tensors["intercept_"] == fit("ridge").intercept_
    assert tensors["intercept_"].shape == ()
    assert "intercept_" in ADAPTER.weights(tensors)


def test_many_fitted_numbers_are_one_tensor() -> None:
    model = MLPClassifier((4,), max_iter=9, random_state=0).fit(*IRIS)

    assert ADAPTER.extract(model)["loss_curve_/*"].tolist() == model.loss_curve_


def test_fitted_numbers_are_filled_in_with_their_types() -> None:
    stored, original = Ridge().fit(*DIABETES), Ridge().fit(DIABETES[0], DIABETES[1] * 3)
    stored.note_, original.note_ = np.float32(0.1), np.float32(7)
    filled(stored, original)

    assert differences(stored, original) == []


def test_kernels_that_were_fitted_are_filled_in() -> None:
    stored = GaussianProcessRegressor(RBF(), alpha=1e-3).fit(IRIS[0], IRIS[1])
    original = GaussianProcessRegressor(RBF(), alpha=1e-3).fit(IRIS[0] * 2, IRIS[1] * 3)

    assert filled(stored, original).kernel_ == stored.kernel_
    assert original.predict(IRIS[0]).tobytes() == stored.predict(IRIS[0]).tobytes()


def test_hyperparameters_come_back() -> None:
    original = filled(Ridge(alpha=0.5).fit(*DIABETES), Ridge(alpha=0.25).fit(*DIABETES))

    assert original.alpha == 0.5


@pytest.mark.parametrize("algorithm", ["brute", "kd_tree", "ball_tree"])
def test_the_data_a_model_was_fitted_to_is_not_written_to(algorithm: str) -> None:
    x, y = IRIS[0].copy(), IRIS[1]
    original = KNeighborsClassifier(algorithm=algorithm).fit(x, y)
    stored = KNeighborsClassifier(algorithm=algorithm).fit(x[::-1] * 2, y)
    before = x.copy()
    filled(stored, original)

    assert x.tobytes() == before.tobytes()
    assert original.kneighbors(x)[0].tobytes() == stored.kneighbors(x)[0].tobytes()


def test_a_tree_of_weighted_points_weighs_as_the_stored_one() -> None:
    x = IRIS[0]
    stored = KernelDensity().fit(x, sample_weight=np.linspace(1, 9, len(x)))
    original = KernelDensity().fit(x, sample_weight=np.ones(len(x)))

    assert filled(stored, original).score_samples(x).tobytes() == stored.score_samples(x).tobytes()


def test_an_array_in_two_tuples_is_written_in_place() -> None:
    stored, original = Ridge().fit(*DIABETES), Ridge().fit(*DIABETES)
    for model, value in ((stored, 1.0), (original, 2.0)):
        model.pair_ = (np.full(3, value), np.full(4, value))
        model.same_ = model.pair_
    filled(stored, original)

    assert original.pair_ is original.same_
    assert differences(stored, original) == []


def test_members_of_a_family_get_memory_of_their_own() -> None:
    tensors = read_back(ADAPTER.extract(fit("isolation forest")))
    one = ADAPTER.reconstruct(tensors, copy.deepcopy(fit("isolation forest")))

    assert not any(np.shares_memory(a, b) for a, b in pairwise(one._decision_path_lengths))
