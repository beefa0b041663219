"""Tensors come back bit for bit and share memory again; tensors without an exact array are refused by name."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from tensorcas_mlflow.adapter import SKELETON
from tensorcas_mlflow.errors import AdapterError
from tests.flavors.pytorch.models import ADAPTER, Holder, Tied, round_trip, same, shares_storage, stored

FLOATS = (torch.float16, torch.float32, torch.float64, torch.bfloat16)
FLOAT8S = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
INTEGERS = (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
COMPLEXES = (torch.complex64, torch.complex128)
NOT_IN_ARRAYS = tuple(
    dtype
    for name, dtype in sorted(vars(torch).items())
    if isinstance(dtype, torch.dtype)
    and name == str(dtype).removeprefix("torch.")
    and dtype not in (*FLOATS, *FLOAT8S, *INTEGERS, *COMPLEXES, torch.bool)
    and not name.startswith(("q", "uint4x", "uint2x"))
)
"""All other dtypes of this torch: complex32, float4, bits and the short integers. The quantized ones are refused."""
SHAPES = [(), (0,), (3, 0, 2), (1,), (5,), (2, 3, 4)]


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of every kind of value, NaN payloads and negative zeros among them."""
    n_bytes = math.prod(shape) * dtype.itemsize
    if n_bytes == 0:
        return torch.empty(shape, dtype=dtype)
    bits = np.random.default_rng(0).integers(0, 2 if dtype == torch.bool else 256, n_bytes, dtype=np.uint8)
    return torch.from_numpy(bits).view(dtype).reshape(shape)


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


class TestDtypes:
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8S, *INTEGERS, *COMPLEXES, torch.bool], ids=str)
    def test_every_bit_of_every_dtype_comes_back(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        tensor = random_bits(dtype, shape)

        assert same(round_trip({"w": tensor})["w"], tensor)
        assert same(round_trip(Holder().with_buffer("w", tensor)).w, tensor)

    @pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8S, *INTEGERS, *COMPLEXES, torch.bool], ids=str)
    def test_rows_are_views_of_the_live_tensors(self, dtype: torch.dtype) -> None:
        tensor = random_bits(dtype, (4, 2))

        row = ADAPTER.extract({"w": tensor})["w"]

        assert row.shape == (4, 2)
        assert row.dtype.name == str(dtype).removeprefix("torch.")
        assert row.ctypes.data == tensor.data_ptr()

    @pytest.mark.parametrize("shape", [(), (0,), (3, 4)], ids=str)
    @pytest.mark.parametrize("dtype", NOT_IN_ARRAYS, ids=str)
    @pytest.mark.filterwarnings("ignore:.*ComplexHalf.*")
    def test_dtypes_that_arrays_lack_come_back(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        tensor = random_bits(dtype, shape)
        rows = stored({"w": tensor, "again": tensor.t() if len(shape) == 2 else tensor})

        state = ADAPTER.reconstruct(rows)

        assert same(state["w"], tensor)
        assert same(round_trip(Holder().with_buffer("w", tensor)).w, tensor)
        assert ADAPTER.weights(rows)["w"].dtype == dtype
        assert state["again"].stride() == (tensor.t() if len(shape) == 2 else tensor).stride()

    def test_negative_zero_and_nan_payloads_survive_in_strided_tensors(self) -> None:
        bits = torch.tensor([[0x7FC01234, -0x80000000], [0x7F812345, -0x3FEDCC]], dtype=torch.int32)
        tensor = bits.view(torch.float32).t()

        assert same(round_trip({"w": tensor})["w"], tensor)


class TestSharing:
    def test_tied_weights_are_tied_again(self) -> None:
        model = round_trip(Tied())

        assert model.decode.weight is model.encode.weight
        assert isinstance(model.decode.weight, nn.Parameter)

    def test_tied_weights_are_one_array_under_two_names(self) -> None:
        rows = ADAPTER.extract(Tied())

        assert list(rows) == ["encode.weight", "decode.weight", SKELETON]
        assert rows["encode.weight"] is rows["decode.weight"]

    def test_tied_entries_of_a_state_dict_share_memory_again(self) -> None:
        state = round_trip(Tied().state_dict())

        assert shares_storage(state["encode.weight"], state["decode.weight"])

    @pytest.mark.parametrize(
        "look",
        [
            lambda w: w[:10],
            lambda w: w[5:],
            lambda w: w.t(),
            lambda w: w[:, ::3],
            lambda w: w[7, 3],
            lambda w: w[3:4].expand(5, -1),
            lambda w: w.view(torch.int16)[2:, 3:7],
            lambda w: w.reshape(-1).unfold(0, 5, 2),
            lambda w: w[4:4],
        ],
        ids=["rows", "tail", "transposed", "columns", "scalar", "expanded", "reinterpreted", "windows", "empty"],
    )
    @pytest.mark.parametrize("keep_base", [True, False], ids=["with base", "alone"])
    def test_views_of_one_memory_are_views_of_one_memory_again(
        self, look: Callable[[torch.Tensor], torch.Tensor], keep_base: bool
    ) -> None:
        base = torch.randn(20, 9)
        view = look(base)
        state = {"view": view} | ({"base": base} if keep_base else {})

        back = round_trip(state)
        model = round_trip(Holder(**state))

        assert same(back["view"], view)
        assert same(model.view, view)
        if keep_base and view.numel():
            assert shares_storage(back["view"], back["base"])
            assert shares_storage(model.view, model.base)
            assert back["view"].data_ptr() - back["base"].data_ptr() == view.data_ptr() - base.data_ptr()

    def test_overlapping_views_share_memory_without_a_spanning_tensor(self) -> None:
        flat = torch.arange(100.0)
        state = round_trip({"low": flat[3:60], "high": flat[40:97]})

        state["low"][-1] = -1.0

        assert state["high"][59 - 40] == -1.0
        assert torch.equal(state["low"][:-1], flat[3:59])

    def test_neighbours_in_one_storage_are_rows_of_their_own(self) -> None:
        flat = torch.arange(10.0)
        rows = ADAPTER.extract({"low": flat[:5], "high": flat[5:]})

        assert json.loads(rows[SKELETON].tobytes())["storages"] == []
        assert same(ADAPTER.reconstruct(rows)["high"], flat[5:])

    def test_a_column_is_stored_without_its_neighbours(self) -> None:
        column = torch.randn(50, 1000)[:, 3]
        rows = ADAPTER.extract({"w": column})

        assert rows["w"].nbytes == 50 * 4
        assert same(ADAPTER.reconstruct(stored({"w": column}))["w"], column)

    @pytest.mark.parametrize("layer", [nn.Conv2d(3, 4, 3), nn.Conv3d(2, 3, 3)])
    def test_channels_last_comes_back_with_its_strides(self, layer: nn.Module) -> None:
        memory = torch.channels_last if isinstance(layer, nn.Conv2d) else torch.channels_last_3d
        layer = layer.to(memory_format=memory)

        assert same(round_trip(layer).weight, layer.weight)

    def test_a_parameter_tied_by_transposition_is_tied_again(self) -> None:
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
        model[1].weight = nn.Parameter(model[0].weight.t())

        back = round_trip(model)
        with torch.no_grad():
            back[0].weight[1, 2] = 99.0

        assert back[1].weight[2, 1] == 99.0

    def test_an_attribute_that_is_a_parameter_is_that_parameter_again(self) -> None:
        model = nn.Linear(2, 2)
        model.favourites = [model.weight, model.weight.detach()]

        back = round_trip(model)

        assert back.favourites[0] is back.weight
        assert back.favourites[1] is not back.weight
        assert shares_storage(back.favourites[1], back.weight)

    def test_a_restored_model_extracts_to_the_same_rows(self) -> None:
        model = Holder(tied=Tied(), inner=nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last))
        first = stored(model)

        second = stored(ADAPTER.reconstruct(stored(model)))

        assert list(first) == list(second)
        assert all(first[name].tobytes() == second[name].tobytes() for name in first)


class TestRefusals:
    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (lambda: torch.eye(2).to_mkldnn(), "to_dense"),
            (lambda: torch.ones(2, device="meta"), "meta device"),
            (freed, "no memory behind it"),
        ],
        ids=["mkldnn", "meta", "freed"],
    )
    @pytest.mark.parametrize("place", ["state dict", "buffer", "attribute"])
    @pytest.mark.filterwarnings("ignore")
    def test_a_tensor_without_an_exact_array_is_refused_by_name(
        self, make: Callable[[], torch.Tensor], reason: str, place: str
    ) -> None:
        models: dict[str, Callable[[torch.Tensor], object]] = {
            "state dict": lambda tensor: {"odd": tensor},
            "buffer": lambda tensor: Holder().with_buffer("odd", tensor),
            "attribute": lambda tensor: Holder(odd=tensor),
        }

        with pytest.raises(AdapterError, match=rf"odd' .*{reason}"):
            ADAPTER.extract(models[place](make()))

    def test_an_uninitialized_module_is_refused_by_name(self) -> None:
        with pytest.raises(AdapterError, match=r"'1.weight' is not initialized yet: run the model"):
            ADAPTER.extract(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)))

    @pytest.mark.filterwarnings("ignore:.*jit.*")
    def test_torchscript_is_refused_at_any_depth(self) -> None:
        scripted = torch.jit.script(nn.Linear(2, 2))

        for model in (scripted, nn.Sequential(scripted), Holder(config=[scripted])):
            with pytest.raises(AdapterError, match="TorchScript"):
                ADAPTER.extract(model)

    def test_an_object_that_cannot_be_pickled_is_refused(self) -> None:
        with pytest.raises(AdapterError, match="cannot be pickled"):
            ADAPTER.extract(Holder(file=sys.stdout))
