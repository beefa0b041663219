"""XGBoost's own files, made by the real library."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from tensorcas_mlflow.file_formats import PlainBytes, Skeleton, Tensor
from tests.file_formats.parts import damaged, joined, take_apart, tensors


@pytest.fixture(scope="module")
def table() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    X = draw.normal(size=(3000, 5)).astype(np.float32)
    return X, (X[:, 0] * X[:, 1] + draw.normal(size=len(X)) > 0).astype(np.float32)


@pytest.fixture(scope="module")
def linear() -> xgb.Booster:
    X = np.random.default_rng(0).normal(size=(20, 5000)).astype(np.float32)
    return xgb.train({"booster": "gblinear"}, xgb.DMatrix(X, X[:, 0]), 2)


def saved(booster: xgb.Booster) -> bytes:
    return bytes(booster.save_raw("ubj"))


def kinds(data: bytes) -> set[type]:
    return {type(part) for part, _ in take_apart(data)}


@pytest.mark.parametrize("booster", ["gbtree", "dart"])
def test_a_model_of_small_trees_is_all_skeleton(table: tuple[np.ndarray, np.ndarray], booster: str) -> None:
    data = saved(xgb.train({"booster": booster, "max_depth": 5}, xgb.DMatrix(*table), 20))

    assert len(data) > 40_000
    assert kinds(data) == {Skeleton}
    assert joined(take_apart(data)) == data


def test_a_saved_classifier_is_all_skeleton(table: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    model = xgb.XGBClassifier(n_estimators=3, max_depth=3).fit(*table)
    model.save_model(tmp_path / "model.ubj")
    model.save_model(tmp_path / "model.json")

    assert kinds((tmp_path / "model.ubj").read_bytes()) == {Skeleton}
    assert kinds((tmp_path / "model.json").read_bytes()) == {Skeleton}


def test_pickled_booster_is_recognised(linear: xgb.Booster) -> None:
    data = bytes(linear.__getstate__()["handle"])

    assert b"Config" in data[:20]
    assert list(tensors(data)) == ["weights"]
    assert joined(take_apart(data)) == data


def test_the_weights_of_a_linear_model_are_a_tensor(linear: xgb.Booster) -> None:
    data = saved(linear)
    weights = linear.get_score(importance_type="weight")

    part, taken = tensors(data)["weights"]

    assert (part.dtype, part.shape) == (">float32", (5001,))
    np.testing.assert_array_equal(np.frombuffer(taken, ">f4")[:-1], list(weights.values()))


@pytest.mark.long
def test_the_nodes_of_a_deep_tree_are_tensors(table: tuple[np.ndarray, np.ndarray]) -> None:
    X = np.random.default_rng(0).normal(size=(20_000, 5)).astype(np.float32)
    booster = xgb.train({"max_depth": 16, "min_child_weight": 0}, xgb.DMatrix(X, X.sum(axis=1)), 1)
    tree = booster.trees_to_dataframe()

    found = tensors(saved(booster))

    part, taken = found["split_conditions"]
    assert (part.dtype, part.shape) == (">float32", (len(tree),))
    splits = np.frombuffer(taken, ">f4")
    is_inner = np.frombuffer(found["left_children"][1], ">i4") >= 0
    np.testing.assert_allclose(np.sort(splits[is_inner]), np.sort(tree.Split.dropna()), rtol=1e-6)


def test_long_lists_of_categories_are_tensors() -> None:
    names = [f"category {i}" for i in range(3000)]
    frame = pd.DataFrame({"a": pd.Categorical(names * 2, categories=names)})
    model = xgb.XGBRegressor(n_estimators=2, enable_categorical=True).fit(frame, np.arange(6000.0))

    data = saved(model.get_booster())

    assert tensors(data)["offsets"][0].dtype == ">int32"
    assert "".join(names[:2]).encode() in tensors(data)["values"][1]
    assert joined(take_apart(data)) == data


def test_an_array_is_found_wherever_it_lies(linear: xgb.Booster) -> None:
    weights = tensors(saved(linear))["weights"][1]
    data = saved(linear)
    beginning = b"{L\0\0\0\0\0\0\0\x07learner{"

    # Around the end of the first stretch that is looked at.
    for n_before in range((1 << 20) - 100, 1 << 20, 3):
        longer = beginning + b"Z" * n_before + data[1:]

        assert tensors(longer)["weights"][1] == weights


def test_an_array_that_claims_too_much_costs_nothing(linear: xgb.Booster) -> None:
    data = saved(linear)
    at = data.index(b"weights[$d#L") + len(b"weights[$d#L")

    for n_elements in (1 << 39, 1 << 63):
        boasting = data[:at] + n_elements.to_bytes(8, "big") + data[at + 8 :]

        assert joined(take_apart(boasting)) == boasting


def test_damaged_files_come_back(linear: xgb.Booster) -> None:
    data = saved(linear)

    for broken in damaged(data):
        assert joined(take_apart(broken)) == broken


@pytest.mark.parametrize("data", [b"{}", b"{L\0\0\0\0\0\0\0\x07", b"{i\x07learner{}", b"{L" + b"\xff" * 1000])
def test_other_files_are_not_taken_for_a_model(data: bytes) -> None:
    assert not any(isinstance(part, Tensor) for part, _ in take_apart(data))
    assert kinds(data) <= {PlainBytes, Skeleton}
