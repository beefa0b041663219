"""Arrays of any checkpoint become tensors, and parts of a model are filled with tensors that are read only then."""

from __future__ import annotations

import gc
import mmap
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tensorcas_mlflow.adapter import Array, NotFilled
from tensorcas_mlflow.errors import AdapterError
from tensorcas_mlflow.tensor import Spec
from tests.flavors.torch_models import ADAPTER, Holder, Tied, perceptron, raw, same, shares_storage, stored

BOTH = [
    "bool",
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]
EXTENSIONS = ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]
CONVERTED = st.sampled_from(["float32", "float16", "bfloat16", "int64", "bool", "float64", "uint8"])
SHAPES: list[tuple[int, ...]] = [(), (0,), (2, 0, 3), (5,), (3, 4), (2, 1, 3)]


class Checkpoint:
    """Tensors that are read when they are asked for, and what was asked for."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.arrays = dict(arrays)
        self.specs = {name: Spec.of(name, array) for name, array in self.arrays.items()}
        self.into: list[str] = []
        self.apart: list[list[str]] = []

    @classmethod
    def of(cls, model: Any) -> Checkpoint:
        return cls({name: array for name, array in stored(model).items() if name != "__skeleton__"})

    def read(self, names: Sequence[str], *, out: Mapping[str, Array] | None = None) -> Mapping[str, Array]:
        assert len(set(names)) == len(names)
        if out is None:
            self.apart.append(list(names))
            return {name: self.arrays[name].copy() for name in names}
        for name in names:
            assert out[name].flags.carray
            assert (out[name].dtype, out[name].shape) == (self.arrays[name].dtype, self.arrays[name].shape)
            out[name][...] = self.arrays[name]
        self.into += names
        return out

    def fill(self, model: Any, **options: Any) -> NotFilled:
        return ADAPTER.fill_weights(model, self.specs, self.read, **options)


def read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


def some_array(dtype: str, shape: tuple[int, ...]) -> Array:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    size = int(np.prod(shape)) * kind.itemsize
    low = np.random.default_rng(1).integers(0, 2 if dtype == "bool" else 256, size, dtype=np.uint8)
    return low.view(kind).reshape(shape)


def on_meta(model: nn.Module) -> nn.Module:
    return model.to("meta")


class TestTensors:
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("dtype", [*BOTH, *EXTENSIONS])
    @pytest.mark.parametrize("lend", [np.asarray, read_only])
    def test_an_array_becomes_a_tensor_of_its_own_memory(self, dtype: str, shape: tuple[int, ...], lend: Any) -> None:
        array = lend(some_array(dtype, shape))

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tensor = ADAPTER.weights({"w": array})["w"]

        assert tensor.dtype == getattr(torch, dtype)
        assert tuple(tensor.shape) == shape
        assert tensor.is_contiguous()
        assert not tensor.is_meta
        assert raw(tensor) == array.tobytes()
        assert not array.size or tensor.data_ptr() == array.ctypes.data

    def test_nobody_is_warned_of_read_only_arrays(self) -> None:
        always = torch.is_warn_always_enabled()
        torch.set_warn_always(True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                found = ADAPTER.weights({"w": read_only(np.ones(3)), "b": read_only(np.ones(3, ml_dtypes.bfloat16))})
        finally:
            torch.set_warn_always(always)

        assert found["w"].tolist() == found["b"].tolist() == [1, 1, 1]

    def test_a_mapped_file_stays_mapped_as_long_as_its_tensors(self, tmp_path: Path) -> None:
        (tmp_path / "pack").write_bytes(np.arange(1000, dtype=np.float32).tobytes())
        with (tmp_path / "pack").open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        tensor = ADAPTER.weights({"w": np.frombuffer(mapped, np.float32)[10:]})["w"]
        del mapped
        gc.collect()

        assert torch.equal(tensor, torch.arange(10, 1000, dtype=torch.float32))

    @pytest.mark.parametrize("dtype", [">i2", ">u8", ">f2", ">f4", ">f8", ">c16"])
    def test_the_other_byte_order_is_converted(self, dtype: str) -> None:
        array = np.arange(6).reshape(2, 3).astype(dtype)

        tensor = ADAPTER.weights({"w": array})["w"]

        assert np.array_equal(tensor.numpy(), array)

    @pytest.mark.parametrize("lend", [np.asarray, read_only])
    def test_strides_are_kept_where_torch_has_them(self, lend: Any) -> None:
        array = lend(np.arange(24, dtype=np.float32).reshape(4, 6))
        found = ADAPTER.weights({"t": array.T, "step": array[::2, 1::2], "back": array[::-1], "all": array})

        assert found["t"].stride() == (1, 6)
        assert found["step"].data_ptr() == array.ctypes.data + 4
        for name, expected in {"t": array.T, "step": array[::2, 1::2], "back": array[::-1]}.items():
            assert np.array_equal(found[name].numpy(), expected)

    def test_what_is_not_aligned_is_copied(self) -> None:
        data = np.frombuffer(b"x" + np.arange(4, dtype=np.float32).tobytes(), dtype=np.uint8)

        tensor = ADAPTER.weights({"w": np.frombuffer(data[1:].data, np.float32)})["w"]

        assert tensor.data_ptr() % 4 == 0
        assert tensor.tolist() == [0, 1, 2, 3]

    def test_all_that_torch_has_no_type_for_is_named(self) -> None:
        arrays = {
            "text": np.array(["a"]),
            "record": np.zeros(2, "i1,f4"),
            "int4": np.zeros(2, ml_dtypes.int4),
            "time": np.zeros(2, "m8[s]"),
            "fine": np.zeros(2),
        }

        with pytest.raises(AdapterError) as caught:
            ADAPTER.weights(arrays)

        assert all(repr(name) in str(caught.value) for name in list(arrays)[:4])
        assert "fine" not in str(caught.value)

    def test_weights_are_moved_and_converted_together(self) -> None:
        arrays = {"w": read_only(np.ones(2, np.float32)), "n": np.ones(2, np.int64)}

        found = ADAPTER.weights(arrays, dtype="bfloat16", device="cpu")

        assert (found["w"].dtype, found["n"].dtype) == (torch.bfloat16, torch.int64)

    def test_a_default_device_changes_nothing(self) -> None:
        with torch.device("meta"):
            found = ADAPTER.weights({"w": np.ones(2), "empty": np.ones(0)})

        assert found["w"].tolist() == [1, 1]
        assert not found["empty"].is_meta


class TestFill:
    def test_a_model_is_filled_bit_for_bit_without_a_copy_between(self) -> None:
        source, target = perceptron(), perceptron()
        for parameter in target.parameters():
            nn.init.constant_(parameter, 7)
        before = {name: tensor.data_ptr() for name, tensor in target.state_dict().items()}
        checkpoint = Checkpoint.of(source)

        left = checkpoint.fill(target)

        assert left == NotFilled()
        assert checkpoint.apart == []
        assert {name: tensor.data_ptr() for name, tensor in target.state_dict().items()} == before
        for name, tensor in source.state_dict().items():
            assert same(target.state_dict()[name], tensor)

    @pytest.mark.parametrize("dtype", [*BOTH, *EXTENSIONS, "complex32"])
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.filterwarnings("ignore:.*ComplexHalf")
    def test_every_dtype_is_filled_as_it_was_stored(self, dtype: str, shape: tuple[int, ...]) -> None:
        array = some_array("uint32" if dtype == "complex32" else dtype, shape)
        kind = getattr(torch, dtype)
        for device in ("cpu", "meta"):
            model = Holder().with_buffer("w", torch.empty(shape, dtype=kind, device=device))
            checkpoint = Checkpoint({"w": array})
            checkpoint.fill(model)

            assert model.w.dtype == kind
            assert raw(model.w) == array.tobytes()
            assert checkpoint.into == ["w"]

    @given(
        dtypes=st.tuples(
            *[st.sampled_from(["float32", "float16", "bfloat16", "int64", "bool", "float64", "uint8"])] * 2
        )
    )
    def test_values_are_converted_as_load_state_dict_does(self, dtypes: tuple[str, str]) -> None:
        values = {"w": torch.tensor([0.0, 1.0, 3.0, 100.125]).to(getattr(torch, dtypes[0]))}
        models = [Holder().with_buffer("w", torch.zeros(4, dtype=getattr(torch, dtypes[1]))) for _ in range(3)]
        models[0].load_state_dict(values)
        on_meta(models[2])
        checkpoint = Checkpoint.of(values)
        for model in models[1:]:
            checkpoint.fill(model)

        assert same(models[1].w, models[0].w)
        assert same(models[2].w, models[0].w)

    def test_rounding_is_told_once(self, caplog: pytest.LogCaptureFixture) -> None:
        Checkpoint.of(perceptron().double()).fill(perceptron())

        [record] = caplog.records
        assert "0.weight (float64 to float32)" in record.getMessage()

    def test_big_endian_tensors_are_converted(self) -> None:
        model = nn.Linear(2, 1, bias=False)

        Checkpoint({"weight": np.array([[1.5, -2.0]], ">f4")}).fill(model)

        assert model.weight.tolist() == [[1.5, -2.0]]

    def test_what_is_not_contiguous_is_filled_in_its_own_order(self) -> None:
        source, target = nn.Conv2d(2, 3, 3), nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        stride = target.weight.stride()

        Checkpoint.of(source).fill(target)

        assert torch.equal(source.weight, target.weight)
        assert target.weight.stride() == stride

    def test_tied_weights_are_read_once_and_stay_tied(self) -> None:
        source, target = Tied(), Tied()
        checkpoint = Checkpoint.of(source)

        left = checkpoint.fill(target)

        assert left == NotFilled()
        assert checkpoint.into == ["decode.weight"]
        assert target.encode.weight is target.decode.weight
        assert same(target.encode.weight, source.encode.weight)

    def test_one_of_two_tied_names_is_enough(self) -> None:
        source, target = Tied(), Tied()
        checkpoint = Checkpoint({"encode.weight": stored(source)["encode.weight"]})

        left = checkpoint.fill(target)

        assert left == NotFilled()
        assert same(target.decode.weight, source.encode.weight)

    def test_of_tied_weights_that_were_stored_apart_the_last_one_wins_as_in_torch(self) -> None:
        arrays = {"encode.weight": np.zeros((7, 4), np.float32), "decode.weight": np.ones((7, 4), np.float32)}
        target, other = Tied(), Tied()
        Checkpoint(arrays).fill(target)
        other.load_state_dict(ADAPTER.weights(arrays))

        assert same(target.encode.weight, other.encode.weight)

    def test_overlapping_tensors_are_filled_one_after_the_other(self) -> None:
        memory = torch.zeros(6)
        model = Holder().with_buffer("a", memory[:4]).with_buffer("b", memory[2:])
        checkpoint = Checkpoint({"a": np.full(4, 1, np.float32), "b": np.full(4, 2, np.float32)})

        checkpoint.fill(model)

        assert memory.tolist() == [1, 1, 2, 2, 2, 2]
        assert checkpoint.into == []

    def test_memory_that_two_storages_share_is_seen(self) -> None:
        array = np.zeros(6, np.float32)
        model = Holder().with_buffer("a", torch.from_numpy(array)).with_buffer("b", torch.from_numpy(array[:4]))
        checkpoint = Checkpoint({"a": np.full(6, 1, np.float32), "b": np.full(4, 2, np.float32)})

        checkpoint.fill(model)

        assert array.tolist() == [2, 2, 2, 2, 1, 1]
        assert checkpoint.into == []

    def test_an_expanded_buffer_takes_what_repeats_likewise(self) -> None:
        model = Holder(weight=nn.Parameter(torch.zeros(2))).with_buffer("rows", torch.zeros(1, 3).expand(4, 3))
        row = np.arange(3, dtype=np.float32)

        Checkpoint({"rows": np.tile(row, (4, 1)), "weight": np.ones(2, np.float32)}).fill(model)

        assert model.rows.stride() == (0, 1)
        assert model.rows.tolist() == [[0, 1, 2]] * 4

    def test_an_expanded_buffer_that_cannot_take_it_is_named_and_nothing_is_changed(self) -> None:
        model = Holder(weight=nn.Parameter(torch.zeros(2))).with_buffer("rows", torch.zeros(1, 3).expand(4, 3))
        checkpoint = Checkpoint(
            {"rows": np.arange(12, dtype=np.float32).reshape(4, 3), "weight": np.ones(2, np.float32)}
        )

        with pytest.raises(AdapterError, match=r"'rows' is expanded"):
            checkpoint.fill(model)

        assert model.weight.tolist() == [0, 0]

    def test_a_graph_that_needs_the_old_values_does_not_go_on(self) -> None:
        model = nn.Linear(2, 2)
        loss = (model(torch.ones(1, 2, requires_grad=True)) ** 2).sum()
        Checkpoint.of(nn.Linear(2, 2)).fill(model)

        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_a_model_of_inference_mode_is_filled(self) -> None:
        source = perceptron()
        with torch.inference_mode():
            target = perceptron()
        Checkpoint.of(source).fill(target)

        assert torch.equal(source[4].weight, target[4].weight)

    @pytest.mark.parametrize(
        "wrap", [nn.DataParallel, torch.compile, lambda model: nn.DataParallel(torch.compile(model))]
    )
    def test_wrapped_modules_are_filled_on_either_side(self, wrap: Any) -> None:
        source = perceptron()
        bare = Checkpoint.of(source)
        wrapped = Checkpoint({name: tensor.numpy() for name, tensor in wrap(source).state_dict().items()})
        targets = [wrap(perceptron()), perceptron()]
        for target, checkpoint in zip(targets, (bare, wrapped), strict=True):
            for parameter in target.parameters():
                nn.init.zeros_(parameter)
            left = checkpoint.fill(target)

            assert left == NotFilled()
            assert torch.equal(next(target.parameters()), source[0].weight)

    def test_a_thousand_small_tensors_are_one_read(self) -> None:
        model = nn.ParameterList([nn.Parameter(torch.zeros(3)) for _ in range(1000)])
        checkpoint = Checkpoint({str(n): np.full(3, n, np.float32) for n in range(1000)})

        checkpoint.fill(model)

        assert len(checkpoint.into) == 1000
        assert model[999].tolist() == [999] * 3


class TestParts:
    def test_only_what_is_wanted_is_read_filled_and_missed(self) -> None:
        source, target = perceptron(), perceptron()
        nn.init.zeros_(target[4].weight)
        nn.init.zeros_(target[0].weight)
        checkpoint = Checkpoint.of(source)
        del checkpoint.specs["4.bias"]

        left = checkpoint.fill(target, wanted=lambda name: name == "4.weight")

        assert left == NotFilled()
        assert checkpoint.into == ["4.weight"]
        assert same(target[4].weight, source[4].weight)
        assert not target[0].weight.any()

    def test_stored_names_may_be_others_than_the_models(self) -> None:
        source, target = perceptron(), perceptron()
        nn.init.zeros_(target[4].weight)
        checkpoint = Checkpoint.of({"model": source, "epoch": 3})
        specs = {name.removeprefix("model."): spec for name, spec in checkpoint.specs.items()}

        ADAPTER.fill_weights(target, specs, checkpoint.read, wanted=lambda name: name in target.state_dict())

        assert same(target[4].weight, source[4].weight)

    def test_without_strict_is_told_what_was_left(self) -> None:
        checkpoint = Checkpoint({"0.weight": np.zeros((4, 3), np.float32), "9.weight": np.zeros(1, np.float32)})

        left = checkpoint.fill(perceptron(), strict=False)

        assert left.unexpected == ("9.weight",)
        assert left.missing == tuple(name for name in perceptron().state_dict() if name != "0.weight")

    def test_all_that_does_not_fit_is_said_at_once_and_nothing_is_changed(self) -> None:
        target = perceptron()
        before = {name: raw(tensor) for name, tensor in target.state_dict().items()}
        checkpoint = Checkpoint.of(perceptron())
        arrays = checkpoint.arrays
        del arrays["0.bias"]
        bad = {"4.weight": np.zeros((4, 2), np.float32), "1.bias": np.array(["a"] * 4), "5.weight": np.zeros(1)}

        with pytest.raises(AdapterError) as caught:
            Checkpoint(arrays | bad).fill(target)

        assert str(caught.value) == (
            "pytorch: the Sequential cannot be filled: tensor '1.bias' has the dtype <U1, which is not one of torch; "
            "tensor '4.weight' was stored as float32 (4, 2) and does not fit one of float32 (2, 4); "
            "missing: '0.bias'; unexpected: '5.weight'"
        )
        assert {name: raw(tensor) for name, tensor in target.state_dict().items()} == before

    def test_shapes_must_fit_without_strict_too(self) -> None:
        with pytest.raises(AdapterError, match="does not fit"):
            Checkpoint({"weight": np.zeros(3, np.float32)}).fill(nn.Linear(3, 1), strict=False)

    def test_a_non_persistent_buffer_is_filled_where_it_was_stored_and_never_missed(self) -> None:
        model = Holder().with_buffer("cache", torch.zeros(2), persistent=False)

        assert Checkpoint({}).fill(model) == NotFilled()
        assert Checkpoint({"cache": np.ones(2, np.float32)}).fill(model) == NotFilled()
        assert model.cache.tolist() == [1, 1]

    @pytest.mark.parametrize(
        ("tensor", "reason"),
        [
            (nn.parameter.UninitializedParameter(), "not initialized"),
            (torch.zeros(2).to_sparse(), "sparse"),
            (torch.nested.nested_tensor([torch.zeros(2)]), "nested"),
        ],
        ids=["lazy", "sparse", "nested"],
    )
    @pytest.mark.filterwarnings("ignore:.*nested tensors")
    def test_a_tensor_that_takes_no_values_is_named(self, tensor: torch.Tensor, reason: str) -> None:
        model = Holder()
        model.register_buffer("w", tensor) if not isinstance(tensor, nn.Parameter) else setattr(model, "w", tensor)

        with pytest.raises(AdapterError, match=f"'w' is .*{reason}"):
            Checkpoint({"w": np.zeros(2, np.float32)}).fill(model)

    def test_memory_that_was_given_back_is_seen(self) -> None:
        model = nn.Linear(2, 2)
        model.weight.untyped_storage().resize_(0)

        with pytest.raises(AdapterError, match="'weight' has no memory behind it"):
            Checkpoint.of(nn.Linear(2, 2)).fill(model)

    @pytest.mark.parametrize("target", [{"weight": torch.zeros(2)}, torch.zeros(2), None])
    def test_only_modules_are_filled(self, target: Any) -> None:
        with pytest.raises(AdapterError, match="only a module"):
            Checkpoint({}).fill(target)


class TestMeta:
    def test_a_module_without_memory_gets_it(self) -> None:
        source = perceptron()
        with torch.device("meta"):
            target = perceptron()
        target[0].weight.requires_grad_(False)
        checkpoint = Checkpoint.of(source)

        left = checkpoint.fill(target)

        assert left == NotFilled()
        assert checkpoint.apart == []
        assert not target[0].weight.requires_grad
        target[0].weight.requires_grad_(True)
        for name, tensor in source.state_dict(keep_vars=True).items():
            assert same(target.state_dict(keep_vars=True)[name], tensor)
        assert torch.equal(source.eval()(torch.ones(2, 3)), target.eval()(torch.ones(2, 3)))

    def test_it_is_filled_inside_of_the_meta_device_too(self) -> None:
        checkpoint = Checkpoint.of(perceptron())
        with torch.device("meta"):
            target = perceptron().double()
            checkpoint.fill(target)

        assert torch.equal(target[0].weight, perceptron()[0].weight.double())

    def test_parameters_alone_may_be_without_memory(self) -> None:
        source, target = perceptron(), perceptron()
        for module in target.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        running = target[1].running_mean

        Checkpoint.of(source).fill(target)

        assert target[1].running_mean is running
        assert same(target[4].weight, source[4].weight)

    def test_tied_parameters_stay_tied(self) -> None:
        source = Tied()
        target = on_meta(Tied())
        assert isinstance(target, Tied)
        target.decode.weight = target.encode.weight

        Checkpoint({"encode.weight": stored(source)["encode.weight"]}).fill(target)

        assert target.encode.weight is target.decode.weight
        assert torch.equal(target(torch.arange(3)), source(torch.arange(3)))

    def test_two_parameters_of_one_memory_share_it_again(self) -> None:
        with torch.device("meta"):
            first = nn.Linear(2, 2, bias=False)
            target = Holder(one=first, two=nn.Linear(2, 2, bias=False))
        target.two.weight = nn.Parameter(first.weight.data)

        Checkpoint({"one.weight": np.ones((2, 2), np.float32)}).fill(target)

        assert target.one.weight is not target.two.weight
        assert shares_storage(target.one.weight, target.two.weight)

    def test_a_parameters_class_and_attributes_are_kept(self) -> None:
        class Marked(nn.Parameter):
            pass

        model = Holder(w=Marked(torch.zeros(2, device="meta"))).with_buffer("b", torch.zeros(2, device="meta"))
        model.w.shard = 3

        Checkpoint({"w": np.ones(2, np.float32), "b": np.ones(2, np.float32)}).fill(model)

        assert type(model.w) is Marked
        assert model.w.shard == 3
        assert dict(model.named_buffers())["b"].tolist() == [1, 1]
        assert [name for name, _ in model.named_parameters()] == ["w"]

    def test_memory_formats_are_kept(self) -> None:
        source = nn.Conv2d(2, 3, 3)
        target = on_meta(nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last))

        Checkpoint.of(source).fill(target)

        assert torch.equal(target.weight, source.weight)
        assert target.weight.is_contiguous(memory_format=torch.channels_last)

    def test_memory_that_overlaps_itself_is_made_without(self) -> None:
        target = Holder().with_buffer("w", torch.empty(9, device="meta").as_strided((3, 3), (2, 2)))
        array = np.arange(9, dtype=np.float32).reshape(3, 3)

        Checkpoint({"w": array}).fill(target)

        assert np.array_equal(target.w.numpy(), array)

    def test_an_lstm_computes_with_its_new_weights(self) -> None:
        source = nn.LSTM(3, 4)
        with torch.device("meta"):
            target = nn.LSTM(3, 4)

        Checkpoint.of(source).fill(target)

        assert torch.equal(target(torch.ones(2, 3))[0], source(torch.ones(2, 3))[0])

    def test_parametrized_weights_get_memory(self) -> None:
        source, target = (nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)) for _ in range(2))
        on_meta(target)

        Checkpoint.of(source).fill(target)

        assert torch.equal(target(torch.ones(1, 3)), source(torch.ones(1, 3)))

    def test_what_no_checkpoint_holds_stays_without_memory_and_is_named(self) -> None:
        model = on_meta(Holder(lin=nn.Linear(2, 2)).with_buffer("table", torch.zeros(3), persistent=False))
        checkpoint = Checkpoint.of({"lin.weight": torch.ones(2, 2)})

        left = checkpoint.fill(model, strict=False)

        assert left == NotFilled(missing=("lin.bias",), without_memory=("table", "lin.bias"))
        assert model.table.is_meta
        assert model.lin.weight.tolist() == [[1, 1], [1, 1]]

    def test_a_read_that_fails_leaves_a_module_without_memory_as_it_was(self) -> None:
        target = on_meta(perceptron())
        checkpoint = Checkpoint.of(perceptron().double())
        del checkpoint.arrays["4.bias"]

        with pytest.raises(KeyError):
            checkpoint.fill(target)

        assert all(parameter.is_meta for parameter in target.parameters())

    @pytest.mark.parametrize("device", ["meta", "cuda:77", "nonsense", "cpu:x"])
    def test_a_device_that_holds_nothing_is_refused(self, device: str) -> None:
        with pytest.raises(AdapterError, match="device"):
            Checkpoint.of(nn.Linear(2, 2)).fill(on_meta(nn.Linear(2, 2)), device=device)

    def test_what_is_converted_is_read_in_batches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tensorcas_flavors._torch_weights.BATCH_BYTES", 1000)
        source = nn.Sequential(*[nn.Linear(10, 10, bias=False) for _ in range(5)], nn.Linear(10, 40, bias=False))
        checkpoint = Checkpoint.of(source)
        target = on_meta(nn.Sequential(*source).bfloat16())

        checkpoint.fill(target)

        assert checkpoint.apart == [["0.weight", "1.weight"], ["2.weight", "3.weight"], ["4.weight"], ["5.weight"]]


MEMORY = """
import resource, sys
import numpy as np, torch
from tensorcas_flavors.pytorch import PyTorchAdapter
from tensorcas_mlflow.tensor import Spec

with torch.device("meta"):
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(24)])  # 384 MiB
stored = sys.argv[1]
specs = {name: Spec(name=name, dtype=stored, shape=tuple(t.shape)) for name, t in model.state_dict().items()}

def read(names, *, out=None):
    out = out or {name: np.empty(specs[name].shape, stored) for name in names}
    for name in names:
        out[name].fill(int(name.partition(".")[0]))
    return out

first = {"weight": specs["0.weight"]}  # of a first time, torch's own code remains
PyTorchAdapter().fill_weights(torch.nn.Linear(2048, 2048, bias=False), first, read)
with open("/proc/self/statm") as file:
    before = int(file.read().split()[1]) * resource.getpagesize()
PyTorchAdapter().fill_weights(model, specs, read)
assert model[23].weight[5, 5] == 23
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) >> 20)
"""


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_large_module_takes_little_memory_besides_its_own(dtype: str) -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY, dtype], capture_output=True, text=True, check=True)

    assert 384 <= int(done.stdout) <= 384 + 64 + 8
