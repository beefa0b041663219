"""Damaged tensors are refused before compiled code follows them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from sklearn.cluster import HDBSCAN
from sklearn.ensemble import GradientBoostingClassifier, HistGradientBoostingClassifier
from sklearn.linear_model import Ridge
from sklearn.neighbors import KernelDensity, KNeighborsClassifier
from sklearn.preprocessing import OneHotEncoder
from sklearn.svm import SVC

from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.errors import AdapterError
from tests.flavors.sklearn.cases import ADAPTER, CANCER, IRIS, fit, read_back, round_trip, without_pickle
from tests.flavors.sklearn.models import describe, differences, differing


@pytest.mark.parametrize(
    ("field", "row", "value"),
    [
        ("left_child", 0, 10**9),
        ("left_child", 0, 0),
        ("left_child", 0, -2),
        ("right_child", 0, -1),
        ("right_child", 0, 1),
        ("left_child", -1, 1),
        ("feature", 0, 30),
        ("feature", 0, -1),
    ],
)
def test_nodes_that_point_anywhere_else_are_refused(field: str, row: int, value: int) -> None:
    tensors = read_back(ADAPTER.extract(GradientBoostingClassifier(n_estimators=3).fit(*CANCER)))
    tensors["trees"][field][row] = value

    with pytest.raises(AdapterError):
        ADAPTER.reconstruct(tensors)


@pytest.mark.parametrize("side", ["left", "right"])
def test_histogram_nodes_that_point_out_of_their_tree_are_refused(side: str) -> None:
    tensors = read_back(ADAPTER.extract(fit("histogram boosting")))
    tensors["_predictors/0/0/nodes"][side][0] = 10**6

    with pytest.raises(AdapterError, match="do not form trees"):
        ADAPTER.reconstruct(tensors)


@pytest.mark.parametrize("keep", [slice(0, -1), slice(0, 0), slice(0, 15)])
def test_a_table_cut_short_is_refused(keep: slice) -> None:
    tensors = read_back(ADAPTER.extract(GradientBoostingClassifier(n_estimators=3).fit(*CANCER)))
    tensors["trees"] = tensors["trees"][keep]

    with pytest.raises(AdapterError):
        ADAPTER.reconstruct(tensors)


def test_trees_left_over_are_refused() -> None:
    tensors = read_back(ADAPTER.extract(GradientBoostingClassifier(n_estimators=3).fit(*CANCER)))
    tensors["trees"] = np.concatenate([tensors["trees"]] * 2)

    with pytest.raises(AdapterError, match="more parts"):
        ADAPTER.reconstruct(tensors)


def test_nodes_with_other_fields_than_this_scikit_learn_has_are_refused_by_name() -> None:
    tensors = read_back(ADAPTER.extract(fit("gradient boosting")))
    names = [name for name in tensors["trees"].dtype.names or () if name != "impurity"]
    tensors["trees"] = np.array(tensors["trees"][names].tolist(), dtype=[(n, tensors["trees"].dtype[n]) for n in names])

    with pytest.raises(AdapterError, match="impurity"):
        ADAPTER.reconstruct(tensors)


def test_row_counts_that_do_not_add_up_are_refused() -> None:
    tensors = read_back(ADAPTER.extract(fit("isolation forest")))
    tensors["_decision_path_lengths/*#rows"][0] += 1

    with pytest.raises(AdapterError, match="add up"):
        ADAPTER.reconstruct(tensors)


@pytest.mark.parametrize("name", ["classes_", "trees", "__strings__", "random_states", SKELETON])
def test_a_missing_tensor_is_refused_by_name(name: str) -> None:
    tensors = read_back(ADAPTER.extract(fit("random forest")))
    del tensors[name]

    with pytest.raises(AdapterError, match=name):
        ADAPTER.reconstruct(tensors)


@pytest.mark.parametrize("n_kept", [0, 3, 6, 7, 40, 100])
def test_a_garbage_skeleton_is_refused(n_kept: int) -> None:
    tensors = read_back(ADAPTER.extract(fit("ridge")))
    tensors[SKELETON] = np.concatenate([tensors[SKELETON][:n_kept], np.arange(50, dtype=np.uint8)])

    with pytest.raises(AdapterError):
        ADAPTER.reconstruct(tensors)


def test_an_object_that_cannot_be_pickled_is_refused() -> None:
    model = Ridge()
    model.rows_ = (row for row in IRIS[0])

    with pytest.raises(AdapterError, match="cannot be pickled"):
        ADAPTER.extract(model)


Change = Callable[[Array], None]


def put(where: Any, value: Any) -> Change:
    """Return what writes a value somewhere into an array."""

    def change(array: Array) -> None:
        array[where] = value

    return change


def at(field: str, where: Any, value: Any) -> Change:
    """Return what writes a value somewhere into a field of an array."""

    def change(array: Array) -> None:
        array[field][where] = value

    return change


def negative_count(counts: Array) -> None:
    """Leave the sum of counts as it is."""
    counts[0], counts[1] = -1000, counts[1] + counts[0] + 1000


def reverse(array: Array) -> None:
    array[...] = array[::-1].copy()


def by_category() -> Any:
    x = np.column_stack([np.arange(len(IRIS[0])) * 7 % 5, IRIS[0]])
    # The first split is on the categories: nothing else tells of these classes.
    return HistGradientBoostingClassifier(max_iter=1, categorical_features=[0]).fit(x, x[:, 0] < 2)


histogram = partial(fit, "histogram boosting")
space = partial(fit, "kd-tree neighbours")
vectors = partial(fit, "svc")
POINTS = sparse.csr_matrix(IRIS[0] * (IRIS[0] > 1))


def balls() -> Any:
    return KNeighborsClassifier(algorithm="ball_tree", leaf_size=9).fit(*IRIS)


def density() -> Any:
    return KernelDensity().fit(IRIS[0])


def sparse_points() -> Any:
    return KNeighborsClassifier(algorithm="brute").fit(POINTS, IRIS[1])


def sparse_vectors() -> Any:
    return SVC().fit(POINTS, IRIS[1])


def hierarchy() -> Any:
    return HDBSCAN(copy=True).fit(IRIS[0])


def codes() -> Any:
    return OneHotEncoder().fit(IRIS[0])


HOSTILE: dict[str, tuple[Callable[[], Any], str, Change]] = {
    "a feature past the last": (histogram, "_predictors/0/0/nodes", at("feature_idx", 0, 10**6)),
    "a feature before the first": (histogram, "_predictors/0/0/nodes", at("feature_idx", 0, -1)),
    "a child before its parent": (histogram, "_predictors/0/0/nodes", at("left", 0, 0)),
    "a child past the last node": (histogram, "_predictors/0/0/nodes", at("right", 0, 10**6)),
    "no leaf": (histogram, "_predictors/0/0/nodes", at("is_leaf", slice(None), 0)),
    "categories of a number": (histogram, "_predictors/0/0/nodes", at("is_categorical", slice(None), 1)),
    "a set of categories too many": (by_category, "_predictors/0/0/nodes", at("bitset_idx", slice(None), 99)),
    "no feature of categories": (by_category, "_bin_mapper/is_categorical_", put(slice(None), 0)),
    "a category above all": (by_category, "_bin_mapper/known_categories/0", put(0, 1e9)),
    "a category that is no number": (by_category, "_bin_mapper/known_categories/0", put(0, np.nan)),
    "more bins than there are": (histogram, "_bin_mapper/n_bins_non_missing_", put(0, 1000)),
    "a point past the last": (space, "_tree/idx_array", put(0, 10**9)),
    "a point before the first": (space, "_tree/idx_array", put(0, -1)),
    "a last node with children": (space, "_tree/node_data", at("is_leaf", -1, 0)),
    "a node that starts too early": (space, "_tree/node_data", at("idx_start", 1, -5)),
    "a node that ends too late": (space, "_tree/node_data", at("idx_end", -1, 10**6)),
    "nodes that share points": (space, "_tree/node_data", at("idx_start", 2, 0)),
    "a root of too many points": (space, "_tree/node_data", at("idx_end", 0, 10**6)),
    "a ball of other points": (balls, "_tree/idx_array", put(3, 10**9)),
    "a density of other points": (density, "tree_/idx_array", put(3, 10**9)),
    "a class past the last": (space, "_y", put(0, 99)),
    "a class before the first": (space, "_y", put(0, -1)),
    "a column past the last": (sparse_points, "_fit_X/indices", put(-1, 10**6)),
    "a column before the first": (sparse_points, "_fit_X/indices", put(0, -1)),
    "a row past the end": (sparse_points, "_fit_X/indptr", put(-1, 10**6)),
    "rows that go back": (sparse_points, "_fit_X/indptr", put(3, 100)),
    "a first row elsewhere": (sparse_points, "_fit_X/indptr", put(0, -4)),
    "a negative count of vectors": (vectors, "_n_support", negative_count),
    "counts of more vectors": (vectors, "_n_support", put(0, 10**6)),
    "a vector of another point": (vectors, "support_", put(0, 10**9)),
    "a sparse vector of another column": (sparse_vectors, "support_vectors_/indices", put(0, 10**6)),
    "a negative count of sparse vectors": (sparse_vectors, "_n_support", negative_count),
    "a merge of a cluster to come": (hierarchy, "_single_linkage_tree_", at("left_node", 0, 10**9)),
    "a merge of no cluster": (hierarchy, "_single_linkage_tree_", at("right_node", 0, -7)),
    "categories out of order": (codes, "categories_/0", reverse),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_array_that_leads_compiled_code_out_of_bounds_is_refused(name: str) -> None:
    make, tensor, damage = HOSTILE[name]
    tensors = read_back(ADAPTER.extract(make()))
    damage(tensors[tensor])

    with pytest.raises(AdapterError):
        ADAPTER.reconstruct(tensors)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_fill_with_a_dangerous_array_is_refused_and_changes_nothing(name: str) -> None:
    make, tensor, damage = HOSTILE[name]
    model = make()
    original = copy.deepcopy(model)
    before = describe(original)
    tensors = without_pickle(ADAPTER.extract(model))
    damage(tensors[tensor])

    with pytest.raises(AdapterError, match="damaged"):
        ADAPTER.reconstruct(tensors, original)
    assert differing(before, describe(original)) == []


def test_attributes_of_user_classes_with_checked_names_are_not_checked() -> None:
    model = Ridge().fit(*IRIS)
    model._y = np.array([10**9, -1])
    model.classes_ = np.array([0, 1])
    model._n_support = model.support_ = np.array([-4])
    model.categories_ = [np.array([3.0, 1.0])]
    model._single_linkage_tree_ = np.zeros(3)

    assert differences(model, round_trip(model)) == []
