"""Parts of a module are filled from any checkpoint, which is read only then."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tensorcas_flavors.pytorch import _modules
from tensorcas_mlflow.adapter import NotFilled
from tensorcas_mlflow.errors import AdapterError
from tests.flavors.pytorch.checkpoints import BOTH, EXTENSIONS, SHAPES, Checkpoint, some_array
from tests.flavors.pytorch.models import ADAPTER, Holder, Tied, perceptron, raw, same, stored


@pytest.fixture(autouse=True, params=["staged", "straight"])
def is_staged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Fill models of this size after all is read, and then as large ones are filled: while reading."""
    if request.param == "straight":
        monkeypatch.setattr(_modules, "STAGED_BYTES", -1)
    return bool(request.param == "staged")


CONVERTED = st.sampled_from(["float32", "float16", "bfloat16", "int64", "bool", "float64", "uint8"])


class TestFill:
    def test_a_model_is_filled_bit_for_bit_in_its_own_memory(self, is_staged: bool) -> None:
        source, target = perceptron(), perceptron()
        for parameter in target.parameters():
            nn.init.constant_(parameter, 7)
        before = {name: tensor.data_ptr() for name, tensor in target.state_dict().items()}
        checkpoint = Checkpoint.of(source)

        left = checkpoint.fill(target)

        assert left == NotFilled()
        assert bool(checkpoint.apart) is is_staged
        assert {name: tensor.data_ptr() for name, tensor in target.state_dict().items()} == before
        for name, tensor in source.state_dict().items():
            assert same(target.state_dict()[name], tensor)

    @pytest.mark.parametrize("dtype", [*BOTH, *EXTENSIONS, "complex32"])
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.filterwarnings("ignore:.*ComplexHalf")
    def test_every_dtype_is_filled_as_it_was_stored(self, dtype: str, shape: tuple[int, ...], is_staged: bool) -> None:
        array = some_array("uint32" if dtype == "complex32" else dtype, shape)
        kind = getattr(torch, dtype)
        for device in ("cpu", "meta"):
            model = Holder().with_buffer("w", torch.empty(shape, dtype=kind, device=device))
            checkpoint = Checkpoint({"w": array})
            checkpoint.fill(model)

            assert model.w.dtype == kind
            assert raw(model.w) == array.tobytes()
            assert checkpoint.into == ([] if is_staged and device == "cpu" else ["w"])

    @given(
        dtypes=st.tuples(
            *[st.sampled_from(["float32", "float16", "bfloat16", "int64", "bool", "float64", "uint8"])] * 2
        )
    )
    def test_values_are_converted_as_load_state_dict_does(self, dtypes: tuple[str, str]) -> None:
        values = {"w": torch.tensor([0.0, 1.0, 3.0, 100.125]).to(getattr(torch, dtypes[0]))}
        models = [Holder().with_buffer("w", torch.zeros(4, dtype=getattr(torch, dtypes[1]))) for _ in range(3)]
        models[0].load_state_dict(values)
        models[2].to("meta")
        checkpoint = Checkpoint.of(values)
        for model in models[1:]:
            checkpoint.fill(model)

        assert same(models[1].w, models[0].w)
        assert same(models[2].w, models[0].w)

    def test_rounding_is_warned_of_once(self, caplog: pytest.LogCaptureFixture) -> None:
        Checkpoint.of(perceptron().double()).fill(perceptron())

        [record] = caplog.records
        assert "0.weight (float64 to float32)" in record.getMessage()

    def test_big_endian_tensors_are_converted(self) -> None:
        model = nn.Linear(2, 1, bias=False)

        Checkpoint({"weight": np.array([[1.5, -2.0]], ">f4")}).fill(model)

        assert model.weight.tolist() == [[1.5, -2.0]]

    def test_a_tensor_that_is_not_contiguous_keeps_its_order(self) -> None:
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
        assert checkpoint.names == ["decode.weight"]
        assert target.encode.weight is target.decode.weight
        assert same(target.encode.weight, source.encode.weight)

    def test_filling_a_tied_weight_needs_one_of_its_two_names(self) -> None:
        source, target = Tied(), Tied()
        checkpoint = Checkpoint({"encode.weight": stored(source)["encode.weight"]})

        left = checkpoint.fill(target)

        assert left == NotFilled()
        assert same(target.decode.weight, source.encode.weight)

    def test_the_last_of_tied_weights_stored_apart_wins_as_in_torch(self) -> None:
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

    def test_memory_shared_by_two_storages_is_detected(self) -> None:
        array = np.zeros(6, np.float32)
        model = Holder().with_buffer("a", torch.from_numpy(array)).with_buffer("b", torch.from_numpy(array[:4]))
        checkpoint = Checkpoint({"a": np.full(6, 1, np.float32), "b": np.full(4, 2, np.float32)})

        checkpoint.fill(model)

        assert array.tolist() == [2, 2, 2, 2, 1, 1]
        assert checkpoint.into == []

    def test_an_expanded_buffer_is_filled_with_equally_repeated_values(self) -> None:
        model = Holder(weight=nn.Parameter(torch.zeros(2))).with_buffer("rows", torch.zeros(1, 3).expand(4, 3))
        row = np.arange(3, dtype=np.float32)

        Checkpoint({"rows": np.tile(row, (4, 1)), "weight": np.ones(2, np.float32)}).fill(model)

        assert model.rows.stride() == (0, 1)
        assert model.rows.tolist() == [[0, 1, 2]] * 4

    def test_a_misfit_of_an_expanded_buffer_is_named_and_nothing_changes(self) -> None:
        model = Holder(weight=nn.Parameter(torch.zeros(2))).with_buffer("rows", torch.zeros(1, 3).expand(4, 3))
        checkpoint = Checkpoint(
            {"rows": np.arange(12, dtype=np.float32).reshape(4, 3), "weight": np.ones(2, np.float32)}
        )

        with pytest.raises(AdapterError, match=r"'rows' is expanded"):
            checkpoint.fill(model)

        assert model.weight.tolist() == [0, 0]

    def test_autograd_refuses_a_graph_that_needs_overwritten_values(self) -> None:
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

        assert len(checkpoint.names) == 1000
        assert model[999].tolist() == [999] * 3


class TestParts:
    def test_only_wanted_tensors_are_read_filled_and_reported_missing(self) -> None:
        source, target = perceptron(), perceptron()
        nn.init.zeros_(target[4].weight)
        nn.init.zeros_(target[0].weight)
        checkpoint = Checkpoint.of(source)
        del checkpoint.specs["4.bias"]

        left = checkpoint.fill(target, wanted=lambda name: name == "4.weight")

        assert left == NotFilled()
        assert checkpoint.names == ["4.weight"]
        assert same(target[4].weight, source[4].weight)
        assert not target[0].weight.any()

    def test_tensors_stored_under_other_names_fill_a_model(self) -> None:
        source, target = perceptron(), perceptron()
        nn.init.zeros_(target[4].weight)
        checkpoint = Checkpoint.of({"model": source, "epoch": 3})
        specs = {name.removeprefix("model."): spec for name, spec in checkpoint.specs.items()}

        ADAPTER.fill_weights(target, specs, checkpoint.read, wanted=lambda name: name in target.state_dict())

        assert same(target[4].weight, source[4].weight)

    def test_without_strict_the_result_names_unfilled_tensors(self) -> None:
        checkpoint = Checkpoint({"0.weight": np.zeros((4, 3), np.float32), "9.weight": np.zeros(1, np.float32)})

        left = checkpoint.fill(perceptron(), strict=False)

        assert left.unexpected == ("9.weight",)
        assert left.missing == tuple(name for name in perceptron().state_dict() if name != "0.weight")

    def test_one_error_names_all_misfits_and_nothing_changes(self) -> None:
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

    def test_tensors_outside_of_state_dicts_are_passed_over(self) -> None:
        source, target = nn.Linear(2, 2), nn.Linear(2, 2)
        source.plain = torch.ones(3)
        checkpoint = Checkpoint.of(source)

        assert len(checkpoint.arrays) == 3
        assert checkpoint.fill(target) == NotFilled(passed_over=("__tensor__/plain",))

    def test_shapes_must_fit_without_strict(self) -> None:
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
    def test_a_tensor_that_cannot_be_filled_is_named(self, tensor: torch.Tensor, reason: str) -> None:
        model = Holder()
        model.register_buffer("w", tensor) if not isinstance(tensor, nn.Parameter) else setattr(model, "w", tensor)

        with pytest.raises(AdapterError, match=f"'w' is .*{reason}"):
            Checkpoint({"w": np.zeros(2, np.float32)}).fill(model)

    def test_a_tensor_with_freed_memory_is_refused(self) -> None:
        model = nn.Linear(2, 2)
        model.weight.untyped_storage().resize_(0)

        with pytest.raises(AdapterError, match="'weight' has no memory behind it"):
            Checkpoint.of(nn.Linear(2, 2)).fill(model)

    @pytest.mark.parametrize("target", [{"weight": torch.zeros(2)}, torch.zeros(2), None])
    def test_pytorch_adapter_fills_only_modules(self, target: Any) -> None:
        with pytest.raises(AdapterError, match="only a module"):
            Checkpoint({}).fill(target)


@pytest.mark.parametrize("is_staged", ["staged"], indirect=True)
@pytest.mark.parametrize("odd", ["expanded", "inference", "meta"])
@pytest.mark.parametrize("lost", ["weight", "rows"])
def test_failed_read_leaves_a_small_module_unchanged(odd: str, lost: str) -> None:
    model = Holder(weight=nn.Parameter(torch.zeros(2)))
    with torch.inference_mode(odd == "inference"):
        rows = torch.zeros(1, 3).expand(4, 3) if odd == "expanded" else torch.zeros(4, 3)
    model.with_buffer("rows", rows.to("meta") if odd == "meta" else rows)
    checkpoint = Checkpoint({"weight": np.ones(2, np.float32), "rows": np.ones((4, 3), np.float32)})
    del checkpoint.arrays[lost]

    with pytest.raises(KeyError):
        checkpoint.fill(model)

    assert model.weight.tolist() == [0, 0]
    assert model.rows is rows or model.rows.is_meta
    assert odd == "meta" or not model.rows.any()
