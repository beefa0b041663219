from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from tensorcas_mlflow.containers import Plain, Skeleton, Tensor
from tests.containers.parts import damaged, joined, take_apart, tensors


class Network(torch.nn.Module):
    """Two layers, one of them longer than a splitter's window."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(700, 700)
        self.second = torch.nn.Linear(700, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


@pytest.fixture(scope="module")
def network() -> Network:
    torch.manual_seed(0)
    return Network()


def saved(state: Any) -> bytes:
    out = io.BytesIO()
    torch.save(state, out)
    return out.getvalue()


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_a_state_dict_gives_its_tensors_as_it_names_them(network: Network) -> None:
    data = saved(network.state_dict())
    found = tensors(data)

    assert joined(take_apart(data)) == data
    assert {name: (tensor.dtype, tensor.shape) for name, (tensor, _) in found.items()} == {
        "first.weight": ("float32", (700, 700)),
        "first.bias": ("float32", (700,)),
        "second.weight": ("float32", (3, 700)),
    }
    assert all(content == raw(network.state_dict()[name]) for name, (_, content) in found.items())


def test_a_module_gives_the_tensors_of_its_state_dict(network: Network) -> None:
    data = saved(network)

    assert joined(take_apart(data)) == data
    assert tensors(data).keys() == {"first.weight", "first.bias", "second.weight"}


def test_a_training_checkpoint_gives_model_and_optimizer(network: Network) -> None:
    optimizer = torch.optim.Adam(network.parameters())
    network(torch.ones(1, 700)).sum().backward()
    optimizer.step()
    data = saved({"epoch": 3, "model": network.state_dict(), "optimizer": optimizer.state_dict()})
    found = tensors(data)

    assert joined(take_apart(data)) == data
    assert {"model.first.weight", "optimizer.state.0.exp_avg", "optimizer.state.2.exp_avg_sq"} <= found.keys()
    moment = optimizer.state_dict()["state"][0]["exp_avg"]
    assert found["optimizer.state.0.exp_avg"][1] == raw(moment)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int64", "bool", "complex64", "float8_e4m3fn", "uint16"])
def test_dtypes_keep_their_names(dtype: str) -> None:
    tensor = torch.ones(8, 16).to(getattr(torch, dtype))
    found = tensors(saved({"a": tensor}))

    assert (found["a"][0].dtype, found["a"][0].shape) == (dtype, (8, 16))
    assert found["a"][1] == raw(tensor)


def test_a_storage_of_which_tensors_see_parts_is_one_tensor_in_one_dimension() -> None:
    whole = torch.arange(100.0)
    data = saved({"head": whole[:40], "tail": whole[40:]})
    [(tensor, content)] = tensors(data).values()

    assert tensor.shape is None
    assert content == raw(whole)


def test_the_tensors_of_an_archive_of_the_other_byte_order_have_no_dtype() -> None:
    state = {"a": torch.arange(100.0)}
    data = saved(state).replace(b"little", b"big\n\n\n")
    [(tensor, _)] = tensors(data).values()

    assert joined(take_apart(data)) == data
    assert (tensor.name, tensor.dtype) == ("a", None)


@pytest.mark.filterwarnings("ignore")
def test_an_exported_program_gives_its_weights(network: Network) -> None:
    out = io.BytesIO()
    torch.export.save(torch.export.export(network, (torch.ones(2, 700),)), out)
    data = out.getvalue()
    contents = {content for _, content in tensors(data).values()}

    assert joined(take_apart(data)) == data
    assert {raw(network.first.weight), raw(network.first.bias), raw(network.second.weight)} <= contents


def test_a_scripted_module_gives_its_weights(network: Network) -> None:
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(network, torch.ones(2, 700)), out)
    data = out.getvalue()
    contents = {content for _, content in tensors(data).values()}

    assert joined(take_apart(data)) == data
    assert {raw(network.first.weight), raw(network.first.bias), raw(network.second.weight)} <= contents


def test_what_is_no_tensor_is_skeleton(network: Network) -> None:
    parts = take_apart(saved(network))

    assert {type(part) for part, _ in parts} == {Skeleton, Tensor}


def test_an_archive_with_a_pickle_of_nonsense_gives_its_tensors_without_names(network: Network) -> None:
    data = saved(network.state_dict())
    nonsense = data.replace(b"\x80\x02ccollections", b"\x80\x02\xffcollections")
    parts = take_apart(nonsense)
    contents = {taken for part, taken in parts if isinstance(part, Tensor)}

    assert nonsense != data
    assert joined(parts) == nonsense
    assert {raw(network.first.weight), raw(network.first.bias)} <= contents


def test_a_pickle_that_lies_about_a_size_costs_the_rest_of_the_file_and_no_byte() -> None:
    data = saved({"a": torch.arange(100, dtype=torch.uint8), "b": torch.arange(100.0)})
    at = data.index(b"K\x64") + 1
    lie = data[:at] + b"\x63" + data[at + 1 :]

    assert joined(take_apart(lie)) == lie
    assert any(isinstance(part, Plain) for part, _ in take_apart(lie))


def test_a_damaged_file_comes_back_bit_for_bit() -> None:
    data = saved({"a": torch.arange(100.0), "b": torch.arange(33), "c": [torch.ones(5)]})

    for broken in damaged(data):
        assert joined(take_apart(broken)) == broken


def test_a_thousand_tensors_are_found() -> None:
    data = saved({f"layer.{i}": torch.full((64,), i) for i in range(1000)})
    found = tensors(data)

    assert len(found) == 1000
    assert np.frombuffer(found["layer.777"][1], "<i8")[0] == 777
