"""Pickles of real objects, and hostile ones."""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import cloudpickle
import ml_dtypes
import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.ensemble import GradientBoostingRegressor, RandomForestRegressor
from sklearn.linear_model import Ridge
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from xgboost import XGBClassifier

from tensorcas_mlflow.base.content_cuts import content_cuts
from tensorcas_mlflow.base.dtypes import dtype_name
from tensorcas_mlflow.file_formats import PlainBytes, Skeleton, Tensor, _pickle
from tensorcas_mlflow.file_formats._pickle_machine import PickleLimits
from tests.file_formats.parts import damaged, joined, kinds, take_apart, tensors

RANDOM = np.random.default_rng(7)
WIDE = RANDOM.normal(size=(40, 700))
X = RANDOM.normal(size=(1200, 5))
Y = X @ np.arange(5) + RANDOM.normal(size=1200)

ARRAYS: dict[str, np.ndarray] = {
    "float32": np.arange(2000, dtype="<f4").reshape(4, 25, 20),
    "bool": np.arange(5000) % 3 == 0,
    "complex128": np.arange(600) * 1j,
    "int16, big-endian": np.arange(3000, dtype=">i2"),
    "text": np.array(["a", "Ünïcode", "three"] * 200),
    "bytes": np.array([b"four"] * 1600),
    "times": np.arange(900).astype("M8[25s]"),
    "bfloat16": np.arange(3000).astype(ml_dtypes.bfloat16),
    "records": np.zeros(300, [("left", "<i8"), ("value", "<f8", (2,)), ("go", "?")]),
    "nothing but bytes": np.arange(5000, dtype=np.uint8),
}
PIPELINE: Pipeline = make_pipeline(StandardScaler(), Ridge()).fit(WIDE, np.arange(40))


class RunsACommand:
    """Unpickling it would make a file."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._marker}",)


# --- arrays


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_an_array_is_a_tensor_with_its_dtype_and_shape(array: np.ndarray, protocol: int) -> None:
    data = pickle.dumps({"an array": array, "next": [1, 2.5]}, protocol)
    parts = take_apart(data)

    assert joined(parts) == data
    assert kinds(data) == [Skeleton, Tensor, Skeleton]
    tensor, content = parts[1]
    assert isinstance(tensor, Tensor)
    assert (tensor.name, tensor.dtype, tensor.shape) == ("an array", dtype_name(array.dtype), array.shape)
    assert content == array.tobytes()


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_an_array_in_fortran_order_has_the_shape_in_which_its_bytes_are_in_c_order(protocol: int) -> None:
    array = np.asfortranarray(np.arange(1200.0).reshape(3, 20, 20))
    tensor, content = tensors(pickle.dumps({"a": array}, protocol))["a"]

    assert (tensor.dtype, tensor.shape) == ("float64", (20, 20, 3))
    assert content == array.T.tobytes()


def test_axes_in_another_order_are_in_the_order_of_the_bytes() -> None:
    stored = np.arange(1200.0).reshape(3, 20, 20)
    tensor, content = tensors(pickle.dumps({"a": stored.transpose(1, 0, 2)}, 5))["a"]

    assert (tensor.dtype, tensor.shape) == ("float64", (3, 20, 20))
    assert content == stored.tobytes()


@pytest.mark.parametrize("protocol", [4, 5])
def test_records_with_gaps_have_no_name_and_are_a_tensor_of_bytes(protocol: int) -> None:
    array = np.zeros((50, 10), np.dtype([("left", "<i8"), ("go", "?")], align=True))
    tensor, content = tensors(pickle.dumps({"nodes": array}, protocol))["nodes"]

    assert (tensor.dtype, tensor.shape) == ("uint8", (500, 16))
    assert content == array.tobytes()


class LeavesOutSets(pickle.Pickler):
    """Writes persistent ids, which mean something only to whoever wrote them."""

    def persistent_id(self, obj: Any) -> Any:
        return ("a set", len(obj)) if isinstance(obj, set) else None


def test_arrays_among_persistent_ids_are_found() -> None:
    array = np.arange(900.0)
    out = io.BytesIO()
    LeavesOutSets(out, 4).dump([{1}, {"a": array}, {2, 3}])
    data = out.getvalue()

    assert joined(take_apart(data)) == data
    assert {name: content for name, (_, content) in tensors(data).items()} == {"1.a": array.tobytes()}


@pytest.mark.parametrize("protocol", [4, 5])
def test_a_small_array_stays_in_the_skeleton(protocol: int) -> None:
    assert kinds(pickle.dumps([np.zeros(500)] * 3, protocol)) == [Skeleton]


def test_bytes_that_protocol_2_writes_as_text_stay_in_the_skeleton() -> None:
    assert kinds(pickle.dumps(np.zeros(5000), 2)) == [Skeleton]


def test_an_array_too_large_to_look_past_has_no_dtype_in_protocol_5() -> None:
    array = np.zeros(_pickle._LOOK_AHEAD_BYTES // 8 + 1)
    in_4 = tensors(pickle.dumps({"a": array}, 4))["a"]
    in_5 = tensors(pickle.dumps({"a": array}, 5))["a"]

    assert (in_4[0].dtype, in_4[0].shape) == ("float64", array.shape)
    assert (in_5[0].dtype, in_5[0].shape) == (None, None)
    assert in_4[1] == in_5[1] == array.tobytes()


@pytest.mark.parametrize("protocol", [4, 5])
def test_arrays_are_found_wherever_a_window_ends(protocol: int) -> None:
    window = 256 << 10
    arrays = [np.full(n_bytes, nth, np.uint8) for nth, n_bytes in enumerate(range(window - 400, window + 400, 37))]
    data = pickle.dumps({f"number {nth}": array for nth, array in enumerate(arrays)}, protocol)
    found = tensors(data)

    assert joined(take_apart(data)) == data
    assert list(found) == [f"number {nth}" for nth in range(len(arrays))]
    assert [content for _, content in found.values()] == [array.tobytes() for array in arrays]
    assert {tensor.dtype for tensor, _ in found.values()} == {"uint8"}


def test_long_texts_and_numbers_are_passed() -> None:
    array = np.arange(700.0)
    data = pickle.dumps({"text": "x" * 600_000, "number": 1 << 90_000, "bytes": b"y" * 9000, "array": array})

    assert joined(take_apart(data)) == data
    assert {name: content for name, (_, content) in tensors(data).items()} == {"array": array.tobytes()}


# --- models


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
def test_an_estimators_arrays_have_the_names_of_its_attributes(dumps: Any, protocol: int) -> None:
    data = dumps(PIPELINE, protocol=protocol)
    scaler, ridge = PIPELINE[0], PIPELINE[1]

    assert joined(take_apart(data)) == data
    assert {name: content for name, (_, content) in tensors(data).items()} == {
        "steps.standardscaler.mean_": scaler.mean_.tobytes(),
        "steps.standardscaler.var_": scaler.var_.tobytes(),
        "steps.standardscaler.scale_": scaler.scale_.tobytes(),
        "steps.ridge.coef_": ridge.coef_.tobytes(),
    }


@pytest.mark.parametrize("protocol", [4, 5])
def test_a_forests_trees_are_tensors(protocol: int) -> None:
    forest = RandomForestRegressor(3, random_state=0).fit(X, Y)
    found = tensors(pickle.dumps(forest, protocol))

    for nth, tree in enumerate(forest.estimators_):
        assert found[f"estimators_.{nth}.tree_.nodes"][1] == tree.tree_.__getstate__()["nodes"].tobytes()
        assert found[f"estimators_.{nth}.tree_.values"][1] == tree.tree_.value.tobytes()


def test_a_frames_columns_are_tensors() -> None:
    frame = pd.DataFrame({"a": np.arange(900.0), "b": np.arange(900), "t": pd.date_range("2020", periods=900)})
    data = pickle.dumps(frame)
    found = [(part, content) for part, content in take_apart(data) if isinstance(part, Tensor)]

    assert [content for _, content in found] == [frame[column].to_numpy().tobytes() for column in frame]
    assert [(part.dtype, part.shape) for part, _ in found[:2]] == [("float64", (1, 900)), ("int64", (1, 900))]


@pytest.mark.parametrize("protocol", [4, 5])
def test_a_torch_module_in_a_pickle_has_its_weights_as_tensors(protocol: int) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Linear(50, 60)).to(torch.bfloat16)
    data = pickle.dumps({"module": module, "epoch": 3}, protocol)
    found = tensors(data)

    assert joined(take_apart(data)) == data
    for name in ("0.weight", "1.weight"):
        tensor, content = found[f"module.{name}"]
        assert tensor.dtype == "bfloat16"
        assert content == module.state_dict()[name].view(torch.uint8).numpy().tobytes()


def chunks(data: bytes) -> Iterator[bytes]:
    """Cut a file as a store does: skeletons by content, each with its neighbours, tensors at fixed distances."""
    skeleton = b""
    for part, content in [*take_apart(data), (PlainBytes(n_bytes=1), b"")]:
        if isinstance(part, Skeleton):
            skeleton += content
            continue
        cuts = [0, *content_cuts(np.frombuffer(skeleton, np.uint8))]
        yield from (skeleton[start:stop] for start, stop in pairwise(cuts))
        skeleton = b""
        yield from (content[start : start + 262144] for start in range(0, len(content), 262144))


def forests() -> Iterator[Any]:
    forest = RandomForestRegressor(warm_start=True, random_state=0)
    for n_trees in range(10, 61, 10):
        yield forest.set_params(n_estimators=n_trees).fit(X, Y)


def boosters() -> Iterator[Any]:
    model = GradientBoostingRegressor(warm_start=True, random_state=0, max_depth=4)
    for n_trees in range(40, 241, 40):
        yield model.set_params(n_estimators=n_trees).fit(X, Y)


def xgboost_classifiers() -> Iterator[Any]:
    for n_trees in range(40, 241, 40):
        yield XGBClassifier(n_estimators=n_trees, n_jobs=1).fit(X, Y > 0)


@pytest.mark.long
@pytest.mark.parametrize("models", [forests, boosters, xgboost_classifiers])
def test_pickles_of_a_growing_model_share_what_they_have_in_common(models: Any) -> None:
    files = [pickle.dumps(model) for model in models()]
    stored = {chunk for data in files for chunk in chunks(data)}

    assert sum(map(len, stored)) < 0.5 * sum(map(len, files))


# --- files of several pickles


def test_pickles_in_a_row_are_walked_and_what_follows_them_is_plain() -> None:
    arrays = [np.arange(700.0), np.arange(3000).reshape(30, 100)]
    data = b"".join(pickle.dumps(array, protocol) for array in arrays for protocol in (3, 4, 5))
    parts = take_apart(data + b"and a tail")

    assert joined(parts) == data + b"and a tail"
    assert [part.shape for part, _ in parts if isinstance(part, Tensor)] == [arrays[0].shape] * 3 + [
        arrays[1].shape
    ] * 3
    assert (type(parts[-1][0]), parts[-1][1]) == (PlainBytes, b"and a tail")


def test_rest_of_a_pickle_too_long_to_be_walked_is_skeleton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pickle, "_LIMITS", PickleLimits(max_ops=5000, max_items=64, max_memo=100))
    data = pickle.dumps([np.zeros(700), *(str(number) for number in range(200_000)), np.ones(700)])

    assert kinds(data) == [Skeleton, Tensor, Skeleton]
    assert joined(take_apart(data)) == data


def test_other_files_are_not_taken_for_pickles() -> None:
    assert kinds(b"\x80\x09\x00\x01" * 100) == [PlainBytes]
    assert kinds(pickle.dumps({"protocol": 0}, 0)) == [Skeleton]  # as a text
    assert kinds(b"\x80\x04\x00\x01" * 100) == [PlainBytes]


# --- hostile files


def test_callables_named_by_a_pickle_are_never_called(tmp_path: Path) -> None:
    marker = tmp_path / "was-run"
    found: list[str] = []
    listening = [True]
    sys.addaudithook(lambda event, facts: found.append(event) if listening and event == "pickle.find_class" else None)
    data = pickle.dumps({"a": np.zeros(5000), "command": RunsACommand(marker), "b": np.ones(5000)})
    names = list(tensors(data))
    listening.clear()

    assert names == ["a", "b"]
    assert not marker.exists()
    assert found == []


def test_nothing_that_a_pickle_names_is_imported() -> None:
    data = b"\x80\x02cantigravity\nfly\n)R."

    assert joined(take_apart(data)) == data
    assert "antigravity" not in sys.modules


N_OPS = 100_000
HOSTILE = {
    "nested lists": b"]" * N_OPS,
    "lists in the memo": b"]\x94" * N_OPS,
    "lists in a list": b"]" + (b"(" + b"]" * 1000 + b"e") * (N_OPS // 1000),
    "nested tuples": b")" + b"\x85" * N_OPS,
    "tuples that double": b")" + b"2\x86" * N_OPS,
    "tuples that double, as keys": b"}" + b")" + b"2\x86" * 5000 + b"Ns.",
    "marks": b"(" * N_OPS,
    "memo numbers": (b"Nr" + b"\xff" * 4) * 1000 + b"j\xff\xff\xff\xff.",
    "memo numbers as text": b"Np99999999999999999999\n" * 1000,
    "no stack": b"0.",
    "no mark": b"Nt.",
    "no arguments": b"R.",
    "bytes that never come": b"\x8e" + struct.pack("<Q", 1 << 63),
    "half of the bytes": b"\x8e" + struct.pack("<Q", 1 << 55) + b"x" * 100_000,
    "text that never comes": b"\x8d" + struct.pack("<Q", (1 << 63) - 1) + b"x" * 100_000,
    "a frame without end": b"\x95" + b"\xff" * 8 + b"N.",
    "a number without end": b"\x8b\xff\xff\xff\xff" + b"x" * 10_000,
    "a line without end": b"c" + b"x" * 100_000,
    "an opcode that is none": b"N" * 100 + b"\x00",
    "an array of the wrong size": pickle.dumps(np.zeros(5000), 4)[2:].replace(b"M\x88\x13\x85", b"M\xff\xff\x85"),
    "an array of negative size": pickle.dumps(np.zeros(5000), 4)[2:].replace(
        b"M\x88\x13\x85", b"J\xff\xff\xff\xff\x85"
    ),
    "a dtype that is none": pickle.dumps(np.zeros(5000), 4)[2:].replace(b"\x8c\x02f8", b"\x8c\x02zz"),
    "a dtype without end": b"cnumpy\ndtype\n(X\x08\0\0\0V9999999t\x85R.",
    "pickles without end": b"N.\x80\x04" * 20_000,
}


@pytest.mark.long
@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_pickle_comes_back_bit_for_bit_at_little_cost(body: bytes) -> None:
    data = b"\x80\x04" + body
    tracemalloc.start()
    try:
        parts = take_apart(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert joined(parts) == data
    assert peak < 120 * len(data) + (8 << 20)


@pytest.mark.long
@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_a_damaged_pickle_comes_back_bit_for_bit(protocol: int) -> None:
    whole = pickle.dumps({"model": PIPELINE, "tensor": torch.arange(3000)}, protocol)

    for data in damaged(whole):
        assert joined(take_apart(data)) == data


def test_any_opcodes_in_any_order_come_back_bit_for_bit() -> None:
    alphabet = np.frombuffer(bytes(range(40, 130)) * 3 + bytes(range(0x80, 0x99)) * 20, np.uint8)
    random = np.random.default_rng(1)

    for _ in range(500):
        data = b"\x80\x04" + b"(]})N" * 5 + random.choice(alphabet, 300).tobytes()
        assert joined(take_apart(data)) == data
