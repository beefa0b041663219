"""A damaged or forged checkpoint gives one clear error."""

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
from tests.flavors.pytorch.models import ADAPTER, perceptron, stored


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

    @pytest.mark.parametrize("bad", [np.array(["a"]), np.array([None]), np.ones(1, "i1,f4"), np.ones(2, "m8[s]")])
    def test_an_array_without_a_tensor_type_is_refused(self, bad: Array) -> None:
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
    def test_a_skeleton_of_garbage_is_refused(self, text: bytes) -> None:
        with pytest.raises(AdapterError):
            ADAPTER.reconstruct({SKELETON: np.frombuffer(text, dtype=np.uint8)})

    def test_a_damaged_pickle_is_refused(self) -> None:
        skeleton = stored(nn.Linear(2, 2))[SKELETON]
        for at in range(6, 200, 7):
            rows = stored(nn.Linear(2, 2)) | {SKELETON: skeleton.copy()}
            rows[SKELETON][at : at + 3] = 0xFF

            with pytest.raises(AdapterError):
                ADAPTER.reconstruct(rows)

    def test_every_truncated_skeleton_is_refused(self) -> None:
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
    def test_impossible_positions_in_a_storage_are_refused(self, place: object) -> None:
        rows = forge(stored({"w": torch.ones(4)}), lambda layout: layout.update(storages=[[place]]))

        with pytest.raises(AdapterError):
            ADAPTER.reconstruct(rows)

    @pytest.mark.parametrize(
        "change",
        [
            {"layout": 3},
            {"layout": 1},
            {"layout": True},
            {"layout": "2"},
            {"storages": None},
            {"storages": 7},
            {"kinds": None},
            {"kinds": {"w": 3}},
            {"kinds": {"w": "no_dtype"}},
            {"kinds": {"w": "float64"}},
            {"kinds": {"w": "array"}},
            {"values": None},
            {"values": [1]},
            {"values": {"a": 1}},
        ],
        ids=str,
    )
    def test_a_damaged_layout_is_refused(self, change: dict[str, Any]) -> None:
        rows = forge(stored({"w": torch.ones(4)}), lambda layout: layout.update(change))

        with pytest.raises(AdapterError):
            ADAPTER.reconstruct(rows)

    @pytest.mark.parametrize(
        "tree",
        [
            0,
            1.5,
            {},
            {"what": 1},
            {"tuple": None},
            {"tuple": 5},
            {"size": ["a"]},
            {"size": [{"opaque": "x"}]},
            {"set": [[]]},
            {"set": [{"tuple": [{"dict": []}]}]},
            {"dict": {"a": 1}},
            {"dict": [["a"]]},
            {"dict": [["a", None], ["a", None]]},
            {"dict": [[[], None]]},
            {"dict": [[{"tuple": [{"what": 1}]}, None]]},
            {"OrderedDict": [], "metadata": 3},
            {"OrderedDict": [], "attributes": None},
            {"dict": [], "attributes": {"dict": []}},
            {"defaultdict": []},
            {"defaultdict": [], "factory": "eval"},
            {"defaultdict": [], "factory": []},
            {"text": "zz"},
            {"text": "ff"},
            {"bytes": 3},
            {"bytes": "0"},
            {"dtype": "Tensor"},
            {"dtype": "nn"},
            {"dtype": 3},
            {"device": "nowhere"},
            {"device": 0},
            {"tensor": None},
            {"tensor": ["w"]},
            {"tensor": ["other", "float32", [4]]},
            {"tensor": [["w"], "float32", [4]]},
            {"tensor": ["w", "float64", [4]]},
            {"tensor": ["w", "manual_seed", [4]]},
            {"tensor": ["w", "float32", 4]},
            {"tensor": ["w", "float32", [5]]},
            {"tensor": ["w", "float32", [4]], "is": 0},
            {"tensor": ["w", "float32", [4]], "is": -1},
            {"tensor": ["__skeleton__", "uint8", [4]]},
            {"array": ["w", "float32", [4]]},
            {"array": ["w"]},
            {"ints": "w"},
            {"floats": None},
            {"ref": 0},
            {"ref": -1},
            {"ref": "0"},
            [{"ref": 1}],
            {"object": "x"},
            {"object": 3, "state": None},
            {"object": "x", "state": None},
            {"object": "x", "state": None, "beside": {"a": 1}},
            {"opaque": "x"},
            {"opaque": 3},
            [{"tuple": [{"object": "x", "state": {"ref": 1}}]}],
        ],
        ids=str,
    )
    def test_a_damaged_tree_is_refused(self, tree: object) -> None:
        rows = forge(stored({"w": torch.ones(4)}), lambda layout: layout.update(tree=tree))

        with pytest.raises(AdapterError):
            ADAPTER.reconstruct(rows)
        for original in ({"w": torch.zeros(4)}, [torch.zeros(4)], nn.Linear(2, 2), torch.optim.SGD([torch.ones(1)])):
            with pytest.raises(AdapterError):
                ADAPTER.reconstruct(rows, original)

    @pytest.mark.parametrize(
        "value",
        [None, True, [], "", "x", "i", "ixyz", "f", "f00", "c00", "s", "s:", "sfloat64:00", "snone:00", "sV8:00"],
    )
    def test_a_value_that_is_no_number_is_refused(self, value: object) -> None:
        rows = forge(stored({"w": torch.ones(4), "n": 1}), lambda layout: layout.update(values=[value]))

        with pytest.raises(AdapterError):
            ADAPTER.reconstruct(rows)

    def test_too_few_numbers_in_a_stored_tree_are_refused(self) -> None:
        rows = forge(stored({"w": torch.ones(4), "n": 1}), lambda layout: layout.update(values=[]))

        with pytest.raises(AdapterError, match="StopIteration"):
            ADAPTER.reconstruct(rows)

    def test_a_tree_nested_too_deep_is_refused(self) -> None:
        text = b'{"layout":2,"storages":[],"kinds":{},"values":[],"tree":%b%b}' % (b"[" * 900, b"]" * 900)

        for original in (None, [torch.zeros(4)]):
            with pytest.raises(AdapterError):
                ADAPTER.reconstruct({SKELETON: np.frombuffer(text, dtype=np.uint8)}, original)

    def test_aliases_of_aliases_are_read_in_linear_time(self) -> None:
        # Each list holds the one before twice: as a tree it would have 2 ** 200 leaves.
        tree: list[Any] = [[]]
        for n in range(1, 200):
            tree.append([{"ref": n}, {"ref": n}])
        rows = forge(stored({"w": torch.ones(4)}), lambda layout: layout.update(tree=tree))

        back = ADAPTER.reconstruct(rows)

        assert back[199][0] is back[198]
        assert ADAPTER.reconstruct(rows, [None] * 200)[199][0] is not None
        with pytest.raises(AdapterError):
            ADAPTER.reconstruct(rows, [torch.ones(1)])

    def test_a_tree_that_holds_itself_fills_its_other_entries(self) -> None:
        rows = forge(stored({"w": torch.ones(4)}), lambda layout: layout["tree"]["dict"].append(["me", {"ref": 0}]))
        target: dict[str, Any] = {"w": torch.zeros(4), "me": {"w": torch.zeros(4), "me": None}}

        ADAPTER.reconstruct(rows, target)

        assert target["w"].sum() == target["me"]["w"].sum() == 4

    def test_a_damaged_state_dict_of_an_optimizer_is_refused(self) -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters())
        for bad in (
            {},
            {"param_groups": None},
            {"param_groups": [1]},
            {"param_groups": [{"params": [0]}], "state": {}},
        ):
            with pytest.raises(AdapterError):
                ADAPTER.reconstruct(stored({"o": bad, "w": torch.ones(1)}), {"o": optimizer, "w": torch.ones(1)})

    def test_code_that_is_not_importable_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = stored(nn.Bilinear(2, 2, 2))
        monkeypatch.delattr("torch.nn.modules.linear.Bilinear")

        with pytest.raises(AdapterError, match="Bilinear"):
            ADAPTER.reconstruct(rows)
