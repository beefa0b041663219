"""A step of a growing ensemble costs its new trees."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import zstandard
from sklearn.ensemble import (
    AdaBoostClassifier,
    AdaBoostRegressor,
    BaggingClassifier,
    BaggingRegressor,
    ExtraTreesClassifier,
    ExtraTreesRegressor,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    IsolationForest,
    RandomForestClassifier,
    RandomForestRegressor,
    RandomTreesEmbedding,
)

from tensorcas_mlflow.adapter import SKELETON, Array
from tests.flavors.sklearn.cases import (
    ADAPTER,
    CANCER,
    DIABETES,
    DIGITS,
    IRIS,
    fit,
    round_trip,
)
from tests.flavors.sklearn.models import differences

pytestmark = pytest.mark.long


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
        assert differences(model, restored) == []


def test_a_restored_model_trains_on_as_the_live_one_does() -> None:
    model = GradientBoostingClassifier(n_estimators=3, subsample=0.5, warm_start=True, random_state=0).fit(*CANCER)
    restored = round_trip(model)
    model.set_params(n_estimators=6).fit(*CANCER)
    restored.set_params(n_estimators=6).fit(*CANCER)

    assert differences(model, restored) == []


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
def test_the_skeleton_of_a_boosted_model_stays_small(data: tuple[Array, Array], n_estimators: int) -> None:
    tensors = ADAPTER.extract(GradientBoostingClassifier(n_estimators=n_estimators, random_state=0).fit(*data))

    assert len(zstandard.compress(tensors[SKELETON].tobytes(), 3)) < 1250


def test_all_trees_are_one_packed_table() -> None:
    tensors = ADAPTER.extract(fit("gradient boosting"))

    assert [name for name in tensors if "tree" in name] == ["trees"]
    assert tensors["trees"].dtype.itemsize == sum(tensors["trees"].dtype[i].itemsize for i in range(8))


def test_a_tree_pruned_by_hand_comes_back() -> None:
    model = RandomForestClassifier(n_estimators=3, random_state=0).fit(*CANCER)
    tree = model.estimators_[1].tree_
    tree.children_left[1] = tree.children_right[1] = -1
    restored = round_trip(model)

    assert differences(model, restored) == []
    assert restored.predict_proba(CANCER[0]).tobytes() == model.predict_proba(CANCER[0]).tobytes()


def test_sample_weights_come_back() -> None:
    weight = np.linspace(0.1, 2.3, len(CANCER[1]))
    model = GradientBoostingClassifier(n_estimators=3).fit(*CANCER, sample_weight=weight)

    assert differences(model, round_trip(model)) == []


def stored_pieces(tensors: Mapping[str, Array]) -> set[bytes]:
    """Return the chunks of all tensors, the skeleton's too; those of this size are not cut further."""
    cuts = ADAPTER.cuts(tensors)
    pieces = set()
    for name, array in tensors.items():
        rows = np.atleast_1d(np.ascontiguousarray(array))
        pieces |= {rows[start:end].tobytes() for start, end in pairwise([0, *cuts.get(name, [len(rows)])])}
    return pieces


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (GradientBoostingClassifier(warm_start=True, random_state=0), DIGITS),
        (GradientBoostingRegressor(warm_start=True, random_state=0), DIABETES),
        (GradientBoostingRegressor(warm_start=True, subsample=0.5, random_state=0), DIABETES),
        (RandomForestClassifier(warm_start=True, random_state=0), CANCER),
        (RandomForestRegressor(warm_start=True, random_state=0), DIABETES),
        (ExtraTreesClassifier(warm_start=True, random_state=0), CANCER),
        (ExtraTreesRegressor(warm_start=True, random_state=0), DIABETES),
        (BaggingClassifier(warm_start=True, random_state=0), CANCER),
        (BaggingRegressor(warm_start=True, max_features=0.5, random_state=0), DIABETES),
        (RandomTreesEmbedding(warm_start=True, random_state=0), CANCER),
        (IsolationForest(warm_start=True, random_state=0), CANCER),
        # They have no warm start, but the same stages if they are fitted anew.
        (AdaBoostClassifier(random_state=0), CANCER),
        (AdaBoostRegressor(random_state=0), DIABETES),
        (HistGradientBoostingClassifier(warm_start=True, max_leaf_nodes=8, random_state=0), DIGITS),
        (HistGradientBoostingRegressor(warm_start=True, random_state=0), DIABETES),
        (HistGradientBoostingRegressor(warm_start=True, early_stopping=True, n_iter_no_change=99), DIABETES),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "fit") else "",
)
def test_a_step_writes_little_more_than_its_new_trees(model: Any, data: tuple[Array, Array]) -> None:
    n_stages = "max_iter" if hasattr(model, "max_iter") else "n_estimators"
    before = ADAPTER.extract(model.set_params(**{n_stages: 30}).fit(*data))
    after = ADAPTER.extract(model.set_params(**{n_stages: 35}).fit(*data))
    n_grown = sum(after[name].nbytes - before[name].nbytes for name in after)
    n_new = sum(map(len, stored_pieces(after) - stored_pieces(before)))

    assert n_grown > 0
    # Of each growing tensor the last, ragged group of rows is written anew.
    assert n_new < 1.05 * n_grown + 10_000


@pytest.mark.parametrize(
    "model",
    [
        RandomForestClassifier(warm_start=True, random_state=0),
        GradientBoostingClassifier(warm_start=True, random_state=0),
        HistGradientBoostingClassifier(warm_start=True, random_state=0, min_samples_leaf=3),
    ],
)
def test_a_new_tree_adds_a_few_bytes_to_the_skeleton(model: Any) -> None:
    n_stages = "max_iter" if hasattr(model, "max_iter") else "n_estimators"
    n_bytes = []
    for n in (20, 60):
        model.set_params(**{n_stages: n}).fit(*IRIS)
        n_bytes.append(len(ADAPTER.extract(model)[SKELETON]))
    n_trees = 40 if isinstance(model, RandomForestClassifier) else 3 * 40

    assert n_bytes[1] - n_bytes[0] < 8 * n_trees


def test_trees_of_different_shapes_come_back() -> None:
    model = RandomForestClassifier(9, random_state=0).fit(*CANCER)
    trees = model.estimators_
    trees[1].max_depth = 7
    trees[2].min_impurity_decrease = -0.0
    trees[3].note_ = "mine"
    trees[4].classes_ = trees[5].classes_
    trees[6].tree_ = trees[7].tree_
    del trees[8].classes_
    restored = round_trip(model)

    assert differences(model, restored) == []
    assert str(restored.estimators_[2].min_impurity_decrease) == "-0.0"
    assert restored.estimators_[4].classes_ is restored.estimators_[5].classes_
    assert restored.estimators_[6].tree_ is restored.estimators_[7].tree_


def test_a_tree_that_two_ensembles_share_comes_back_as_one() -> None:
    model = RandomForestClassifier(9, random_state=0).fit(*CANCER)
    model.best_ = [model.estimators_[4], model.estimators_[0]]
    restored = round_trip(model)

    assert restored.best_[0] is restored.estimators_[4]
    assert restored.best_[1] is restored.estimators_[0]
    assert differences(model, restored) == []


def test_random_numbers_of_each_stage_are_cut_finely() -> None:
    model = GradientBoostingRegressor(n_estimators=200).fit(*DIABETES)
    ends = ADAPTER.cuts(ADAPTER.extract(model))["train_score_"]

    assert ends[0] == 32
    assert ends[-1] == 200
