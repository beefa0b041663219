"""Models saved while they are trained: the bytes that each step adds to a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgboost
from sklearn.datasets import make_regression
from xgboost import Booster, DMatrix

from tensorcas_flavors.xgboost import XGBoostAdapter
from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.store import Store
from tests.flavors.xgboost.models import FRAME, load, save
from tests.stored_bytes import bytes_below

pytestmark = pytest.mark.long

ADAPTER = XGBoostAdapter()
X, Y = make_regression(2000, 12, random_state=0)
CLASSES = np.digitize(Y, np.quantile(Y, [0.25, 0.5, 0.75]))
MULTI = {"objective": "multi:softprob", "num_class": 4}
TARGETS = np.stack((Y, X[:, 0] * Y, Y**2), axis=1)

N_STEPS = 8
RECORD_BYTES = 34
"""A node of a tree, in the table and in a document."""


def boosted(params: dict[str, Any], data: DMatrix, n_rounds: int = 5) -> Iterator[Booster]:
    booster = None
    for _ in range(N_STEPS):
        booster = xgboost.train({"max_depth": 4, "nthread": 1, **params}, data, n_rounds, xgb_model=booster)
        yield booster


def wrapped() -> Iterator[xgboost.XGBClassifier]:
    model = None
    for _ in range(N_STEPS):
        fresh = xgboost.XGBClassifier(n_estimators=5, max_depth=4, n_jobs=1)
        model = fresh.fit(X, CLASSES, xgb_model=model)
        yield model


def frame() -> DMatrix:
    return DMatrix(FRAME, Y[: len(FRAME)], enable_categorical=True)


HISTORIES: dict[str, Callable[[], Iterator[Any]]] = {
    "trees": lambda: boosted({}, DMatrix(X, Y)),
    "classes": lambda: boosted(MULTI, DMatrix(X, CLASSES)),
    "forests": lambda: boosted({"num_parallel_tree": 3, "subsample": 0.5}, DMatrix(X, Y)),
    "dart": lambda: boosted({"booster": "dart", "rate_drop": 0.3, "one_drop": 1}, DMatrix(X, Y)),
    "dart of classes": lambda: boosted({**MULTI, "booster": "dart", "rate_drop": 0.3}, DMatrix(X, CLASSES)),
    "categories": lambda: boosted({"max_cat_to_onehot": 1, "max_depth": 6}, frame()),
    "vector leaves": lambda: boosted({"multi_strategy": "multi_output_tree"}, DMatrix(X, TARGETS)),
    "wrapper": wrapped,
}


def raw(model: Any) -> bytes:
    return bytes((model if isinstance(model, Booster) else model.get_booster()).save_raw("ubj"))


def chunks(tensors: dict[str, Array]) -> dict[str, list[bytes]]:
    """Cut tensors as a store does."""
    cuts = ADAPTER.cuts(tensors)
    ends = {name: cuts.get(name, [len(array)]) for name, array in tensors.items()}
    return {
        name: [array[start:end].tobytes() for start, end in zip([0, *ends[name]], ends[name], strict=False)]
        for name, array in tensors.items()
    }


@pytest.mark.parametrize("kind", HISTORIES)
def test_a_step_writes_its_new_trees_and_one_unfinished_group(kind: str) -> None:
    known: set[bytes] = set()
    n_nodes = 0
    for step, model in enumerate(HISTORIES[kind]()):
        tensors = ADAPTER.extract(model)
        parts = chunks(tensors)
        new = {name: sum(len(part) for part in set(of_one) - known) for name, of_one in parts.items()}
        known.update(part for of_one in parts.values() for part in of_one)
        n_added, n_nodes = len(tensors["trees"]) - n_nodes, len(tensors["trees"])
        unfinished = 4096 + max(0.0, 160 * tensors["trees"].nbytes) ** 0.5
        largest_tree = tensors["tree_table"][:, 0].max() * tensors["trees"].itemsize

        assert new["trees"] <= n_added * tensors["trees"].itemsize + unfinished + largest_tree
        assert step == 0 or new["__skeleton__"] == 0


def test_a_finished_group_of_trees_is_never_written_again() -> None:
    for history in HISTORIES.values():
        before: list[bytes] = []
        for model in history():
            groups = chunks(ADAPTER.extract(model))["trees"]
            finished = before[:-1]

            assert groups[: len(finished)] == finished
            before = groups


def test_the_weights_of_a_dart_are_apart_from_its_trees() -> None:
    first, second = list(HISTORIES["dart"]())[:2]
    before, after = ADAPTER.extract(first), ADAPTER.extract(second)
    n_trees = len(before["weight_drop"])

    assert not np.array_equal(before["weight_drop"], after["weight_drop"][:n_trees])
    assert np.array_equal(before["trees"], after["trees"][: len(before["trees"])])


def test_a_step_of_a_linear_model_writes_only_its_weights() -> None:
    known: set[bytes] = set()
    booster = None
    for step in range(5):
        booster = xgboost.train({"booster": "gblinear", "nthread": 1}, DMatrix(X, Y), 1, xgb_model=booster)
        tensors = ADAPTER.extract(booster)
        new = {name for name, array in tensors.items() if array.tobytes() not in known}
        known.update(array.tobytes() for array in tensors.values())

        assert step == 0 or new <= {"weights", "__skeleton__"}
        assert tensors["weights"].nbytes == 4 * 13


def test_twenty_steps_take_less_than_a_fourteenth_of_their_files(tmp_path: Path) -> None:
    store = Store.open(tmp_path, create=True)
    files = []
    booster = None
    for step in range(20):
        booster = xgboost.train({"max_depth": 4, "nthread": 1}, DMatrix(X, Y), 5, xgb_model=booster)
        save(store, booster, step)
        files.append(raw(booster))
    stored = bytes_below(tmp_path)

    assert stored <= 0.07 * sum(map(len, files))
    assert all(raw(load(store, step)) == file for step, file in enumerate(files))
