"""Estimators come back bit for bit from their tensors alone, trees cost what they add, and bad tensors are refused."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import zstandard
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.cluster import KMeans
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris
from sklearn.decomposition import PCA
from sklearn.ensemble import (
    BaggingClassifier,
    ExtraTreesRegressor,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    IsolationForest,
    RandomForestClassifier,
)
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.svm import SVC
from sklearn.tree import DecisionTreeClassifier

from tensorcas_flavors.sklearn import SklearnAdapter
from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.errors import AdapterError

ADAPTER = SklearnAdapter()
IRIS = load_iris(return_X_y=True)
CANCER = load_breast_cancer(return_X_y=True)
DIGITS = load_digits(return_X_y=True)
DIABETES = load_diabetes(return_X_y=True)

ESTIMATORS: dict[str, tuple[Any, tuple[Array, Array]]] = {
    "gradient boosting": (GradientBoostingClassifier(n_estimators=4, random_state=0), IRIS),
    "stochastic boosting": (GradientBoostingRegressor(n_estimators=9, subsample=0.5, random_state=0), DIABETES),
    "random forest": (RandomForestClassifier(n_estimators=12, random_state=0), CANCER),
    "extra trees, two outputs": (ExtraTreesRegressor(n_estimators=9), (DIABETES[0], DIABETES[0][:, :2])),
    "forest, two outputs": (RandomForestClassifier(n_estimators=3), (IRIS[0], np.stack([IRIS[1], IRIS[1] > 1], 1))),
    "isolation forest": (IsolationForest(n_estimators=10, random_state=0), CANCER),
    "one tree": (DecisionTreeClassifier(random_state=0), CANCER),
    "best-first tree": (DecisionTreeClassifier(max_leaf_nodes=9, random_state=0), CANCER),
    "pruned tree": (DecisionTreeClassifier(ccp_alpha=0.01, random_state=0), CANCER),
    "stump without a split": (DecisionTreeClassifier(min_samples_split=10_000), CANCER),
    "bagged trees": (BaggingClassifier(n_estimators=9, max_features=0.5, random_state=0), CANCER),
    "histogram boosting": (HistGradientBoostingClassifier(max_iter=5, random_state=0), CANCER),
    "histogram boosting, categories": (HistGradientBoostingClassifier(max_iter=5, categorical_features=[0]), IRIS),
    "logistic regression": (LogisticRegression(max_iter=500), IRIS),
    "ridge": (Ridge(), DIABETES),
    "svc": (SVC(probability=False), IRIS),
    "kd-tree neighbours": (KNeighborsClassifier(algorithm="kd_tree"), IRIS),
    "brute neighbours": (KNeighborsClassifier(algorithm="brute"), IRIS),
    "k-means": (KMeans(3, n_init=1, random_state=0), IRIS),
    "pca": (PCA(2), DIGITS),
    "pipeline": (Pipeline([("scale", StandardScaler()), ("clf", LogisticRegression())]), CANCER),
    "grid search": (GridSearchCV(Ridge(), {"alpha": [0.1, 1.0]}, cv=2), DIABETES),
    "mlp": (MLPClassifier((20, 20), max_iter=5, random_state=0), IRIS),
}


@cache
def fit(name: str) -> Any:
    """Return a fitted estimator, the same one each time: copy it before changing it."""
    estimator, (x, y) = ESTIMATORS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return copy.deepcopy(estimator).fit(x, y)


def read_back(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """What a store gives back: C-contiguous, writable and owned."""
    return {name: np.array(array, order="C", copy=True) for name, array in tensors.items()}


def round_trip(model: Any) -> Any:
    return ADAPTER.reconstruct(read_back(ADAPTER.extract(model)))


def answers(model: Any, x: Array) -> list[Array]:
    methods = ("predict", "predict_proba", "decision_function", "transform", "score_samples", "apply")
    found = [getattr(model, method)(x) for method in methods if hasattr(model, method)]
    return [part for answer in found for part in (answer if isinstance(answer, list) else [answer])]


def differences(one: Any, other: Any, path: str = "model", seen: dict[int, int] | None = None) -> Iterator[str]:
    """Yield where two object graphs differ: in types, scalars, or bits, order and aliasing of arrays."""
    seen = {} if seen is None else seen
    if type(one) is not type(other):
        yield f"{path}: {type(one)} and {type(other)}"
        return
    if isinstance(one, (dict, list, np.ndarray)) or hasattr(one, "__dict__"):
        if id(one) in seen:
            if seen[id(one)] != id(other):
                yield f"{path}: aliased in one only"
            return
        seen[id(one)] = id(other)
    if isinstance(one, np.random.RandomState):
        yield from differences(one.get_state(legacy=False), other.get_state(legacy=False), path, {})
    elif type(one).__name__ == "Tree":
        mine, theirs = one.__getstate__(), other.__getstate__()
        for field in mine["nodes"].dtype.names:
            yield from differences(mine["nodes"][field].copy(), theirs["nodes"][field].copy(), f"{path}.{field}", {})
        for key in ("values", "max_depth", "node_count"):
            yield from differences(mine[key], theirs[key], f"{path}.{key}", {})
    elif isinstance(one, np.ndarray) and one.dtype != object:
        same = one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        if not same or one.flags.fnc != other.flags.fnc:
            yield f"{path}: arrays differ"
    elif isinstance(one, np.ndarray):
        yield from differences((one.shape, *one.flat), (other.shape, *other.flat), path, seen)
    elif isinstance(one, (list, tuple)):
        if len(one) != len(other):
            yield f"{path}: lengths differ"
        for i, (a, b) in enumerate(zip(one, other, strict=False)):
            yield from differences(a, b, f"{path}[{i}]", seen)
    elif isinstance(one, dict):
        if list(one) != list(other):
            yield f"{path}: keys differ"
        for key in one:
            yield from differences(one[key], other.get(key), f"{path}[{key!r}]", seen)
    elif hasattr(one, "__dict__") and not isinstance(one, type) and not callable(one):
        yield from differences(vars(one), vars(other), path, seen)
    elif isinstance(one, (int, float, str, np.generic)) and not (one == other or one != one):
        yield f"{path}: {one!r} and {other!r}"


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_attribute_comes_back_bit_for_bit(name: str) -> None:
    model = fit(name)

    assert list(differences(model, round_trip(model))) == []


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_restored_model_answers_with_the_same_bits(name: str) -> None:
    model = fit(name)
    restored = round_trip(model)
    x = ESTIMATORS[name][1][0]

    assert [a.tobytes() for a in answers(restored, x)] == [a.tobytes() for a in answers(model, x)]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_same_model_gives_the_same_tensors_twice(name: str) -> None:
    model = fit(name)
    first, second = ADAPTER.extract(model), ADAPTER.extract(model)

    assert [(n, a.dtype, a.tobytes()) for n, a in first.items()] == [
        (n, a.dtype, a.tobytes()) for n, a in second.items()
    ]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_restored_model_gives_the_tensors_it_came_from(name: str) -> None:
    tensors = ADAPTER.extract(fit(name))
    again = ADAPTER.extract(ADAPTER.reconstruct(read_back(tensors)))
    pickled = (SKELETON, "__strings__")

    assert {n: a.tobytes() for n, a in again.items() if n not in pickled} == {
        n: a.tobytes() for n, a in tensors.items() if n not in pickled
    }


@pytest.mark.parametrize(
    ("model", "data", "n_per_step"),
    [
        (GradientBoostingClassifier(warm_start=True, random_state=0), CANCER, 5),
        (GradientBoostingClassifier(warm_start=True, random_state=0), IRIS, 1),
        (GradientBoostingRegressor(warm_start=True, random_state=0), DIABETES, 5),
    ],
)
def test_every_step_of_a_warm_start_comes_back(model: Any, data: tuple[Array, Array], n_per_step: int) -> None:
    for step in range(1, 21):
        model.set_params(n_estimators=step * n_per_step).fit(*data)
        restored = round_trip(model)

        assert restored.predict(data[0]).tobytes() == model.predict(data[0]).tobytes()
        assert list(differences(model, restored)) == []


def test_a_restored_model_trains_on_as_the_live_one_does() -> None:
    model = GradientBoostingClassifier(n_estimators=3, subsample=0.5, warm_start=True, random_state=0).fit(*CANCER)
    restored = round_trip(model)
    model.set_params(n_estimators=6).fit(*CANCER)
    restored.set_params(n_estimators=6).fit(*CANCER)

    assert list(differences(model, restored)) == []


def chunks(tensors: Mapping[str, Array], name: str) -> list[bytes]:
    ends = ADAPTER.cuts(tensors)[name]
    return [tensors[name][start:end].tobytes() for start, end in pairwise([0, *ends])]


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (GradientBoostingClassifier(warm_start=True, random_state=0), ["trees"]),
        (RandomForestClassifier(warm_start=True, random_state=0), ["trees", "random_states", "estimators_/*/classes_"]),
        (IsolationForest(warm_start=True, random_state=0), ["trees", "_decision_path_lengths/*"]),
    ],
)
def test_new_trees_leave_all_but_the_last_chunk_alone(model: Any, names: list[str]) -> None:
    before = ADAPTER.extract(model.set_params(n_estimators=20).fit(*CANCER))
    after = ADAPTER.extract(model.set_params(n_estimators=30).fit(*CANCER))

    for name in names:
        kept = chunks(before, name)[:-1]
        assert chunks(after, name)[: len(kept)] == kept


def test_cuts_end_at_whole_trees_and_at_the_last_row() -> None:
    model = RandomForestClassifier(n_estimators=8, random_state=0).fit(*CANCER)
    tensors = ADAPTER.extract(model)
    tree_ends = np.cumsum([tree.tree_.node_count for tree in model.estimators_])
    ends = ADAPTER.cuts(tensors)["trees"]

    assert set(ends) <= set(tree_ends)
    assert ends[-1] == len(tensors["trees"])


def shuffled(piece: Array) -> bytes:
    return piece.reshape(len(piece), -1).view(np.uint8).reshape(len(piece), -1).T.tobytes()


def test_a_warm_start_of_20_steps_costs_a_sixteenth_of_its_pickles() -> None:
    model = GradientBoostingClassifier(warm_start=True, random_state=0)
    seen: set[bytes] = set()
    n_bytes = n_pickle_bytes = 0
    for step in range(1, 21):
        model.set_params(n_estimators=step).fit(*DIGITS)
        tensors = ADAPTER.extract(model)
        n_pickle_bytes += len(pickle.dumps(model))
        cuts = ADAPTER.cuts(tensors)
        for name, array in tensors.items():
            for start, end in pairwise([0, *cuts.get(name, [len(array)])]):
                piece = np.ascontiguousarray(array[start:end])
                n_bytes += 32
                if piece.tobytes() not in seen:
                    seen.add(piece.tobytes())
                    n_bytes += 40 + len(zstandard.compress(shuffled(piece), 3))
        n_bytes += 100 * len(tensors)

    assert n_bytes < 0.06 * n_pickle_bytes


@pytest.mark.parametrize(("data", "n_estimators"), [(CANCER, 100), (DIGITS, 20)])
def test_the_skeleton_of_a_boosted_model_stays_under_a_kilobyte(data: tuple[Array, Array], n_estimators: int) -> None:
    tensors = ADAPTER.extract(GradientBoostingClassifier(n_estimators=n_estimators, random_state=0).fit(*data))

    assert len(zstandard.compress(tensors[SKELETON].tobytes(), 3)) < 1000


def test_arrays_are_named_by_the_attributes_that_lead_to_them() -> None:
    tensors = ADAPTER.extract(fit("pipeline"))

    assert {"steps/scale/mean_", "steps/scale/var_", "steps/clf/coef_", "steps/clf/intercept_"} <= set(tensors)


def test_all_trees_are_one_packed_table() -> None:
    tensors = ADAPTER.extract(fit("gradient boosting"))

    assert [name for name in tensors if "tree" in name] == ["trees"]
    assert tensors["trees"].dtype.itemsize == sum(tensors["trees"].dtype[i].itemsize for i in range(8))


def test_fortran_order_comes_back() -> None:
    model = Ridge()
    model.coef_ = np.asfortranarray(np.arange(6.0).reshape(2, 3))

    assert round_trip(model).coef_.flags.f_contiguous


def test_one_array_under_two_names_comes_back_as_one() -> None:
    model = Ridge()
    model.coef_ = model.also_coef_ = np.arange(3.0)
    restored = round_trip(model)

    assert restored.coef_ is restored.also_coef_


def test_members_of_a_family_keep_their_aliases_and_shapes() -> None:
    model = Ridge()
    shared = np.arange(5.0)
    model.parts_ = [*(np.arange(float(n)) for n in range(10)), shared, shared]
    restored = round_trip(model)

    assert list(differences(model, restored)) == []
    assert restored.parts_[-1] is restored.parts_[-2]


def test_given_arrays_are_used_without_a_copy() -> None:
    tensors = read_back(ADAPTER.extract(fit("logistic regression")))

    assert np.shares_memory(ADAPTER.reconstruct(tensors).intercept_, tensors["intercept_"])


def test_a_tree_pruned_by_hand_comes_back() -> None:
    model = RandomForestClassifier(n_estimators=3, random_state=0).fit(*CANCER)
    tree = model.estimators_[1].tree_
    tree.children_left[1] = tree.children_right[1] = -1
    restored = round_trip(model)

    assert list(differences(model, restored)) == []
    assert restored.predict_proba(CANCER[0]).tobytes() == model.predict_proba(CANCER[0]).tobytes()


def test_weights_of_samples_come_back() -> None:
    weight = np.linspace(0.1, 2.3, len(CANCER[1]))
    model = GradientBoostingClassifier(n_estimators=3).fit(*CANCER, sample_weight=weight)

    assert list(differences(model, round_trip(model))) == []


def test_strings_and_objects_of_a_column_transformer_come_back() -> None:
    frame = pd.DataFrame({"colour": ["red", "blüe", "green"] * 4, "size": np.arange(12.0)})
    model = ColumnTransformer([("cat", OneHotEncoder(), ["colour"]), ("num", StandardScaler(), ["size"])])
    expected = model.fit_transform(frame)
    restored = round_trip(model)

    assert "transformers_/num/mean_" in ADAPTER.extract(model)
    assert list(restored.transformers_[0][1].categories_[0]) == ["blüe", "green", "red"]
    assert restored.transform(frame).tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["__array__/0", "trees", "random_states", "a/b", "*", "", "line\nbreak"])
def test_any_attribute_name_is_safe(name: str) -> None:
    model = RandomForestClassifier(n_estimators=9, random_state=0).fit(*IRIS)
    vars(model)[name] = np.arange(100.0)
    tensors = ADAPTER.extract(model)

    assert all(key and "\n" not in key and "\0" not in key for key in tensors)
    assert list(differences(model, ADAPTER.reconstruct(read_back(tensors)))) == []


@pytest.mark.parametrize("name", ["logistic regression", "random forest", "isolation forest", "pipeline", "mlp", "svc"])
def test_a_live_model_is_filled_in_place_without_its_pickle(name: str) -> None:
    model = fit(name)
    tensors = read_back(ADAPTER.extract(model))
    del tensors[SKELETON]
    original = copy.deepcopy(model)
    for array in ADAPTER.extract(original).values():
        if array.dtype == float and array.flags.writeable and array.base is None:
            array[...] = 0
    filled = ADAPTER.reconstruct(tensors, original)

    assert filled is original
    assert list(differences(model, filled)) == []


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
        (RandomForestClassifier(9).fit(*CANCER), RandomForestClassifier(8).fit(*CANCER)),
        (RandomForestClassifier(9).fit(*CANCER), RandomForestClassifier(9).fit(*IRIS)),
        (DecisionTreeClassifier().fit(*CANCER), DecisionTreeClassifier().fit(CANCER[0][:, :1], CANCER[1])),
    ],
)
def test_an_original_that_does_not_fit_is_refused_and_left_alone(stored: Any, original: Any) -> None:
    tensors = read_back(ADAPTER.extract(stored))
    before = copy.deepcopy(original)

    with pytest.raises(AdapterError):
        ADAPTER.reconstruct(tensors, original)
    assert list(differences(before, original)) == []


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


def test_unpickles_is_told_from_the_skeleton() -> None:
    tensors = ADAPTER.extract(fit("ridge"))

    assert ADAPTER.unpickles(tensors)
    assert not ADAPTER.unpickles({})


class Foreign:
    """A look-alike with fit and predict that is not scikit-learn's."""

    def predict(self, x: Array) -> Array:
        return x


def test_estimators_are_accepted_and_xgboosts_and_look_alikes_are_not() -> None:
    from xgboost import XGBClassifier

    class Mine(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
        pass

    class MyBooster(XGBClassifier):
        pass

    assert all(ADAPTER.accepts(model) for model in (Ridge(), Pipeline([("a", Ridge())]), Mine()))
    assert not any(ADAPTER.accepts(model) for model in (XGBClassifier(), MyBooster(), Foreign(), 3, Ridge))


def test_predict_is_the_models_own() -> None:
    model = fit("random forest")

    assert ADAPTER.predict(model, CANCER[0]).tobytes() == model.predict(CANCER[0]).tobytes()


def test_a_model_without_predict_says_so() -> None:
    with pytest.raises(AdapterError, match="StandardScaler has no predict"):
        ADAPTER.predict(StandardScaler().fit(IRIS[0]), IRIS[0])


def test_requirements_are_those_of_mlflows_own_flavor() -> None:
    from mlflow.sklearn import get_default_pip_requirements

    assert ADAPTER.requirements() == get_default_pip_requirements(include_cloudpickle=True)  # type: ignore[no-untyped-call]


def test_what_cannot_be_pickled_is_refused() -> None:
    model = Ridge()
    model.rows_ = (row for row in IRIS[0])

    with pytest.raises(AdapterError, match="cannot be pickled"):
        ADAPTER.extract(model)


SAVE = """
import numpy as np
from sklearn.base import BaseEstimator
from sklearn.ensemble import RandomForestRegressor
from tensorcas_flavors.sklearn import SklearnAdapter

class Halved(BaseEstimator):
    def fit(self, x, y):
        self.forest_ = RandomForestRegressor(9, random_state=0).fit(x, y)
        return self
    def predict(self, x):
        return self.forest_.predict(x) / 2

x = np.random.default_rng(0).normal(size=(60, 4))
model = Halved().fit(x, x[:, 0])
np.savez("model.npz", **{n.replace("/", "|"): a for n, a in SklearnAdapter().extract(model).items()})
np.savez("answer.npz", x=x, y=model.predict(x))
"""

LOAD = """
import sys
import numpy as np
from tensorcas_flavors.sklearn import SklearnAdapter
assert not any(name.split(".")[0] in ("sklearn", "torch", "xgboost") for name in sys.modules)
with np.load("model.npz") as stored:
    model = SklearnAdapter().reconstruct({n.replace("|", "/"): stored[n] for n in stored.files})
with np.load("answer.npz") as answer:
    assert model.predict(answer["x"]).tobytes() == answer["y"].tobytes()
"""


def test_a_class_of_main_is_restored_in_a_fresh_process_that_had_not_imported_sklearn(tmp_path: Path) -> None:
    for script in (SAVE, LOAD):
        done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)

        assert done.returncode == 0, done.stderr
