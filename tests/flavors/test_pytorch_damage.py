"""Whatever stands in a damaged or forged checkpoint, the answer is one clear error."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.errors import AdapterError
from tests.flavors.torch_models import ADAPTER, perceptron, stored


def forge(rows: dict[str, Array], change: Callable[[dict[str, Any]], object]) -> dict[str, Array]:
    """Change the layout that a state dict's skeleton is."""
    layout = json.loads(rows[SKELETON].tobytes())
    change(layout)
    return rows | {SKELETON: np.frombuffer(json.dumps(layout).encode(), dtype=np.uint8)}


class TestDamage:
    def test_a_missing_tensor_is_named(self) -> None:
        for model in (perceptron(), perceptron().state_dict()):
            rows = stored(model)
            del rows["4.bias"]

            with pytest.raises(AdapterError, match=r"'4.bias' is missing"):
                ADAPTER.reconstruct(rows)

    @pytest.mark.parametrize("bad", [np.ones(3, np.float32), np.ones(2, np.float64), np.ones((2, 1), np.float32)])
    def test_a_tensor_of_another_shape_or_dtype_is_named(self, bad: Array) -> None:
        for model in (perceptron(), perceptron().state_dict()):
            with pytest.raises(AdapterError, match=r"'4.bias' was stored as float32 \(2,\)"):
                ADAPTER.reconstruct(stored(model) | {"4.bias": bad})

    @pytest.mark.parametrize("bad", [np.array(["a"]), np.array([None]), np.ones(2, ">f4"), np.ones(2, "m8[s]")])
    def test_an_array_that_is_no_tensor_is_refused(self, bad: Array) -> None:
        with pytest.raises(AdapterError, match="'w' has the dtype"):
            ADAPTER.weights({"w": bad})

    def test_a_missing_skeleton_is_explained(self) -> None:
        rows = stored(perceptron())
        del rows[SKELETON]

        with pytest.raises(AdapterError, match="no skeleton"):
            ADAPTER.reconstruct(rows)

    @pytest.mark.parametrize(
        "text", [b"", b"TCPK1\n", b"\x80\x05.", b"{}", b"[]", b"null", b'{"layout":1}', b"[" * 10**5]
    )
    def test_garbage_for_a_skeleton_is_refused(self, text: bytes) -> None:
        with pytest.raises(AdapterError):
            ADAPTER.reconstruct({SKELETON: np.frombuffer(text, dtype=np.uint8)})

    def test_a_spoiled_pickle_is_refused(self) -> None:
        skeleton = stored(nn.Linear(2, 2))[SKELETON]
        for at in range(6, 200, 7):
            rows = stored(nn.Linear(2, 2)) | {SKELETON: skeleton.copy()}
            rows[SKELETON][at : at + 3] = 0xFF

            with pytest.raises(AdapterError):
                ADAPTER.reconstruct(rows)

    def test_every_truncation_is_refused(self) -> None:
        for model in (nn.Linear(2, 2), nn.Linear(2, 2).state_dict()):
            rows = stored(model)
            for n_bytes in range(rows[SKELETON].size):
                with pytest.raises(AdapterError):
                    ADAPTER.reconstruct(rows | {SKELETON: rows[SKELETON][:n_bytes]})

    @pytest.mark.parametrize(
        "place",
        [
            ["w", 10**15, [1]],
            ["w", -4, [1]],
            ["w", 2, [1]],
            ["w", 0, [-1]],
            ["w", 0, [2**47]],
            ["w", 0, [2**70]],
            ["w", 0, [1, 1]],
            ["w", 0, []],
            ["w", 0, [1.5]],
            ["w", True, [1]],
            ["w", None, [1]],
            [7, 0, [1]],
            ["w", 0],
            None,
        ],
        ids=str,
    )
    def test_places_outside_all_reason_are_refused(self, place: object) -> None:
        rows = forge(stored({"w": torch.ones(4)}), lambda layout: layout.update(storages=[[place]]))

        with pytest.raises(AdapterError):
            ADAPTER.reconstruct(rows)

    @pytest.mark.parametrize(
        "change",
        [
            {"layout": 2},
            {"entries": None},
            {"entries": ["w"]},
            {"entries": {"w": None}},
            {"entries": {"w": "float32"}},
            {"entries": {"w": ["float32", 4]}},
            {"entries": {"other": ["float32", [4]]}},
            {"plain": None},
            {"metadata": 3},
            {"storages": None},
            {"storages": 7},
        ],
        ids=str,
    )
    def test_a_layout_that_says_nonsense_is_refused(self, change: dict[str, Any]) -> None:
        rows = forge(stored({"w": torch.ones(4)}), lambda layout: layout.update(change))

        with pytest.raises(AdapterError):
            ADAPTER.reconstruct(rows)

    def test_code_that_is_not_importable_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = stored(nn.Bilinear(2, 2, 2))
        monkeypatch.delattr("torch.nn.modules.linear.Bilinear")

        with pytest.raises(AdapterError, match="Bilinear"):
            ADAPTER.reconstruct(rows)
