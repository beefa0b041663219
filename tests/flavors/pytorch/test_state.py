"""State dicts come back exactly, and live models are filled in place without a pickle."""

from __future__ import annotations

import argparse
import io
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.errors import AdapterError
from tests.flavors.pytorch.models import (
    ADAPTER,
    Holder,
    Noted,
    Tied,
    perceptron,
    raw,
    round_trip,
    same,
    shares_storage,
    stored,
)

Pair = namedtuple("Pair", "a b")


class Scaled(nn.Linear):
    """Gives its scale as a file in memory, as layers of TransformerEngine do."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale = torch.ones(2)
        self.history: list[float] | None = None

    def get_extra_state(self) -> Any:
        file = io.BytesIO()
        torch.save({"scale": self.scale, "history": self.history}, file)
        return file

    def set_extra_state(self, state: Any) -> None:
        state.seek(0)
        vars(self).update(torch.load(state))


class PackedScaled(Scaled):
    def get_extra_state(self) -> Any:
        return torch.frombuffer(bytearray(super().get_extra_state().getvalue()), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        super().set_extra_state(io.BytesIO(state.numpy().tobytes()))


def without_its_pickle(skeleton: Array) -> Array:
    """Spoil the pickle and leave the layout."""
    spoiled = skeleton.copy()
    n_layout = int.from_bytes(skeleton[-8:].tobytes(), "little") + 8
    spoiled[6:-n_layout] = ord("?")
    return spoiled


class TestStateDicts:
    def test_a_state_dict_comes_back_in_order_and_loads(self) -> None:
        model = perceptron()
        state = round_trip(model.state_dict())

        assert type(state) is OrderedDict
        assert list(state) == list(model.state_dict())
        assert state._metadata == model.state_dict()._metadata
        assert perceptron().load_state_dict(state).missing_keys == []

    def test_a_plain_dict_comes_back_as_a_plain_dict(self) -> None:
        state = round_trip(dict(nn.Linear(2, 2).state_dict()))

        assert type(state) is dict
        assert type(state["weight"]) is torch.Tensor

    @pytest.mark.parametrize("note", [None, True, 3, 0.1, "text", [1, {"deep": [None, 2.5]}], {"version": 2}])
    def test_plain_extra_state_is_kept_in_its_place(self, note: object) -> None:
        state = round_trip(Noted(note).state_dict())

        assert list(state) == ["weight", "bias", "_extra_state"]
        assert state["_extra_state"] == note
        assert type(state["_extra_state"]) is type(note)

    @pytest.mark.parametrize("note", [(1, 2), {1: 2}, {1, 2}, b"bytes", np.float64(1.0)])
    def test_extra_state_beyond_json_types_needs_no_pickle(self, note: object) -> None:
        rows = stored(Noted(note).state_dict())
        back = ADAPTER.reconstruct(rows)["_extra_state"]

        assert not ADAPTER.unpickles(rows)
        assert (type(back), back) == (type(note), note)

    def test_extra_state_of_a_users_own_kind_comes_with_a_pickle(self) -> None:
        rows = stored(Noted(argparse.Namespace(a=1)).state_dict())

        assert ADAPTER.unpickles(rows)
        assert ADAPTER.reconstruct(rows)["_extra_state"] == argparse.Namespace(a=1)

    def test_extra_state_may_be_a_tensor(self) -> None:
        note = torch.arange(3, dtype=torch.uint8)

        assert same(round_trip(Noted(note).state_dict())["_extra_state"], note)

    def test_weights_come_without_a_pickle(self) -> None:
        rows = stored(Tied())
        weights = ADAPTER.weights(rows | {SKELETON: without_its_pickle(rows[SKELETON])})

        assert list(weights) == ["encode.weight", "decode.weight"]
        assert shares_storage(weights["encode.weight"], weights["decode.weight"])

    def test_weights_come_without_a_skeleton_or_in_part(self) -> None:
        model = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
        rows = stored(model)

        assert torch.equal(ADAPTER.weights({"weight": rows["weight"]})["weight"], model.weight)
        assert list(ADAPTER.weights({"bias": rows["bias"], SKELETON: rows[SKELETON]})) == ["bias"]


class TestFilling:
    def test_a_module_is_filled_in_place_without_a_pickle(self) -> None:
        rows = stored(perceptron())
        rows[SKELETON] = without_its_pickle(rows[SKELETON])
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2))
        weight = model[0].weight

        back = ADAPTER.reconstruct(rows, model)

        assert back is model
        assert model[0].weight is weight
        assert all(raw(t) == rows[name].tobytes() for name, t in model.state_dict().items())

    def test_the_skeleton_may_be_missing(self) -> None:
        rows = stored(Tied())
        del rows[SKELETON]
        model = ADAPTER.reconstruct(rows, Tied())

        assert raw(model.decode.weight) == rows["encode.weight"].tobytes()
        assert model.decode.weight is model.encode.weight

    def test_non_persistent_buffers_and_tensors_in_attributes_are_filled(self) -> None:
        def make(value: float) -> Holder:
            model = Holder(scale=torch.tensor(value), w=nn.Parameter(torch.tensor(value)))
            return model.with_buffer("mask", torch.full((2,), value), persistent=False)

        model = ADAPTER.reconstruct(stored(make(1.0)), make(2.0))

        assert (model.w.item(), model.mask.tolist(), model.scale.item()) == (1.0, [1.0, 1.0], 1.0)

    def test_extra_state_is_set(self) -> None:
        assert ADAPTER.reconstruct(stored(Noted([1, 2])), Noted()).note == [1, 2]

    @pytest.mark.parametrize("note", [object(), argparse.Namespace(a=1), {"deep": [Pair(1, 2)]}, lambda: 1])
    def test_extra_state_that_only_a_pickle_restores_is_refused_at_the_save(self, note: object) -> None:
        with pytest.raises(AdapterError, match=r"'0._extra_state.* which only a pickle can restore.*get_extra_state"):
            stored(nn.Sequential(Noted(note)))

    def test_extra_state_stored_for_loads_without_a_live_object_is_reported_missing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TENSORCAS_TRY_FILL", "false")
        rows = stored(Noted(argparse.Namespace(a=1)))

        assert ADAPTER.reconstruct(rows).note.a == 1
        with pytest.raises(AdapterError, match=r'Missing key\(s\) in state_dict: "_extra_state"'):
            ADAPTER.reconstruct(rows, Noted())

    @pytest.mark.parametrize("strict", [True, False])
    @pytest.mark.parametrize("as_plain", [True, False])
    def test_extra_state_in_memory_files_is_set(self, strict: bool, as_plain: bool) -> None:
        model, target = Scaled(), Scaled()
        model.history, model.scale = [1.5], torch.arange(3.0)
        rows = stored(model.state_dict() if as_plain else model)

        ADAPTER.reconstruct(rows, target, strict=strict)

        assert (target.history, target.scale.tolist()) == ([1.5], [0.0, 1.0, 2.0])
        assert not as_plain or not ADAPTER.unpickles(rows)

    def test_extra_state_in_a_tensor_of_another_length_is_set(self) -> None:
        model, target = PackedScaled(), PackedScaled()
        model.scale = torch.randn(500)

        ADAPTER.reconstruct(stored(model), target)

        assert torch.equal(target.scale, model.scale)

    def test_extra_state_of_another_dtype_than_the_live_one_is_set_as_it_is(self) -> None:
        target = Noted(torch.zeros(2, dtype=torch.float16))

        ADAPTER.reconstruct(stored(Noted(torch.rand(2))), target)

        assert target.note.dtype == torch.float32

    def test_position_of_a_memory_file_comes_back(self) -> None:
        file = io.BytesIO(b"abcdef")
        file.seek(2)

        assert round_trip({"file": file, "w": torch.ones(1)})["file"].read() == b"cdef"

    def test_a_lazy_module_gets_the_stored_shapes(self) -> None:
        rows = stored(nn.Linear(3, 2))

        assert raw(ADAPTER.reconstruct(rows, nn.LazyLinear(2)).weight) == rows["weight"].tobytes()

    @pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
    def test_a_wrapped_module_is_filled(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        rows = stored(nn.Linear(3, 2))
        model = nn.Linear(3, 2)
        wrapped = wrap(model)

        assert ADAPTER.reconstruct(rows, wrapped) is wrapped
        assert raw(model.weight) == rows["weight"].tobytes()

    def test_a_state_dict_fills_a_module(self) -> None:
        model = perceptron()
        rows = stored(model.state_dict())
        other = ADAPTER.reconstruct(rows, perceptron())

        assert all(same(one, two) for one, two in zip(other.parameters(), model.parameters(), strict=True))

    def test_a_misfit_is_reported_in_the_words_of_torch(self) -> None:
        rows = stored(nn.Linear(3, 2))

        with pytest.raises(AdapterError, match="size mismatch for weight"):
            ADAPTER.reconstruct(rows, nn.Linear(4, 2))
        with pytest.raises(AdapterError, match=r'Unexpected key\(s\) in state_dict: "bias"'):
            ADAPTER.reconstruct(rows, nn.Linear(3, 2, bias=False))

    @pytest.mark.parametrize("with_skeleton", [True, False])
    @pytest.mark.parametrize("name", ["0.weight", "1.running_mean", "1.num_batches_tracked"])
    def test_a_missing_tensor_is_reported(self, name: str, with_skeleton: bool) -> None:
        rows = stored(perceptron())
        del rows[name]
        if not with_skeleton:
            del rows[SKELETON]

        with pytest.raises(AdapterError, match=rf'Missing key\(s\) in state_dict: "{name}"'):
            ADAPTER.reconstruct(rows, perceptron())

    @pytest.mark.parametrize("make", [dict, lambda model: {"m": model}])
    def test_tensor_that_would_lose_digits_is_refused_by_name(self, make: Callable[[Any], Any]) -> None:
        make = {dict: lambda model: dict(model.state_dict())}.get(make, make)  # type: ignore[call-overload]
        target = nn.Linear(3, 2).half()
        before = raw(target.weight)

        with pytest.raises(AdapterError, match=r"weight \(float32 to float16\), .*strict=False to let torch round"):
            ADAPTER.reconstruct(stored(make(nn.Linear(3, 2))), make(target))
        assert raw(target.weight) == before

    def test_another_dtype_is_converted_without_strict_with_one_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        model = nn.Linear(3, 2)
        half = ADAPTER.reconstruct(stored(model), nn.Linear(3, 2).half(), strict=False)

        [record] = caplog.records
        assert record.levelname == "WARNING"
        assert record.getMessage().endswith(": weight (float32 to float16), bias (float32 to float16)")
        assert torch.equal(half.weight, model.weight.half())

    def test_a_wider_dtype_causes_no_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        model = nn.Linear(3, 2)
        double = ADAPTER.reconstruct(stored(model), nn.Linear(3, 2).double())

        assert caplog.records == []
        assert torch.equal(double.weight, model.weight.double())

    def test_a_state_dict_is_filled_in_place(self) -> None:
        rows = stored(perceptron())
        state = perceptron().state_dict()
        torch.nn.init.zeros_(state["0.weight"])

        assert ADAPTER.reconstruct(rows, state) is state
        assert raw(state["0.weight"]) == rows["0.weight"].tobytes()

    def test_a_part_of_a_state_dict_is_filled(self) -> None:
        rows = stored(perceptron())
        part = {"0.weight": torch.zeros(4, 3)}

        ADAPTER.reconstruct(rows, part)

        assert raw(part["0.weight"]) == rows["0.weight"].tobytes()

    @pytest.mark.parametrize("bad", [torch.ones(3), torch.ones(2, 1)])
    def test_a_live_state_dict_that_does_not_fit_is_unchanged(self, bad: torch.Tensor) -> None:
        state = {"a": torch.zeros(2), "b": bad}

        with pytest.raises(AdapterError, match="'b' was stored as"):
            ADAPTER.reconstruct(stored({"a": torch.ones(2), "b": torch.ones(2)}), state)
        assert state["a"].tolist() == [0.0, 0.0]

    @pytest.mark.parametrize("persistent", [True, False])
    def test_expanded_buffer_is_filled_from_a_buffer_that_repeats(self, persistent: bool) -> None:
        def make(value: float) -> nn.Module:
            module = nn.Linear(2, 2)
            module.register_buffer("grid", torch.full((1, 4), value).expand(5, 4), persistent=persistent)
            return module

        target = ADAPTER.reconstruct(stored(make(1.0)), make(2.0))

        assert target.grid.stride() == (0, 1)
        assert torch.equal(target.grid, torch.ones(5, 4))

    def test_an_expanded_buffer_is_not_filled_with_different_values(self) -> None:
        source, target = nn.Linear(2, 2), nn.Linear(2, 2)
        source.register_buffer("grid", torch.arange(20.0).reshape(5, 4))
        target.register_buffer("grid", torch.zeros(1, 4).expand(5, 4))
        before = target.weight.clone()

        with pytest.raises(AdapterError, match="'grid' of the model to fill is expanded"):
            ADAPTER.reconstruct(stored(source), target)
        assert torch.equal(target.weight, before)

    def test_an_expanded_target_is_refused_by_name(self) -> None:
        with pytest.raises(AdapterError, match="'w' cannot be filled"):
            ADAPTER.reconstruct(stored({"w": torch.ones(3)}), {"w": torch.zeros(1).expand(3)})
