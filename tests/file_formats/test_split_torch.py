from __future__ import annotations

import io
import tracemalloc
import warnings
import zipfile
from typing import Any

import numpy as np
import pytest
import torch

from tensorcas_mlflow.file_formats import PlainBytes, Skeleton, Tensor, _pickle_machine, _torch_pickle
from tensorcas_mlflow.file_formats._pickle_machine import PickleLimits
from tests.file_formats.parts import damaged, joined, take_apart, tensors


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


def saved_before_zip(state: Any) -> bytes:
    out = io.BytesIO()
    torch.save(state, out, _use_new_zipfile_serialization=False)
    return out.getvalue()


def archive(pickled: bytes, **storages: bytes) -> bytes:
    """Make an archive of any pickle and storages."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as entries:
        entries.writestr("archive/data.pkl", pickled)
        entries.writestr("archive/byteorder", "little")
        for key, content in storages.items():
            entries.writestr(f"archive/data/{key}", content)
    return out.getvalue()


def pickled_state(data: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as entries:
        return entries.read("archive/data.pkl")


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


def test_bytes_outside_of_tensors_are_skeleton(network: Network) -> None:
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
    assert any(isinstance(part, PlainBytes) for part, _ in take_apart(lie))


def test_a_damaged_file_comes_back_bit_for_bit() -> None:
    data = saved({"a": torch.arange(100.0), "b": torch.arange(33), "c": [torch.ones(5)]})

    for broken in damaged(data):
        assert joined(take_apart(broken)) == broken


def test_a_thousand_tensors_are_found() -> None:
    data = saved({f"layer.{i}": torch.full((64,), i) for i in range(1000)})
    found = tensors(data)

    assert len(found) == 1000
    assert np.frombuffer(found["layer.777"][1], "<i8")[0] == 777


# --- what the pickle says, and the archive does not have


def test_tensor_without_its_storage_changes_no_other_tensor() -> None:
    state = {"gone": torch.arange(100.0), "there": torch.arange(200)}
    data = archive(pickled_state(saved(state)), **{"1": raw(state["there"])})

    assert joined(take_apart(data)) == data
    assert {name: content for name, (_, content) in tensors(data).items()} == {"there": raw(state["there"])}


def test_a_storage_that_no_tensor_has_is_called_by_its_entry() -> None:
    state = {"a": torch.arange(100.0)}
    data = archive(pickled_state(saved(state)), **{"7": bytes(range(256)) * 4, "0": raw(state["a"])})
    found = tensors(data)

    assert {name: tensor.dtype for name, (tensor, _) in found.items()} == {"archive/data/7": None, "a": "float32"}


def test_tensors_of_a_pickle_too_long_to_be_walked_have_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch_pickle, "TORCH_LIMITS", PickleLimits(max_ops=100, max_items=100, max_memo=100))
    data = saved({f"layer.{i}": torch.full((64,), i) for i in range(10)})

    assert joined(take_apart(data)) == data
    assert list(tensors(data)) == [f"archive/data/{i}" for i in range(10)]


N_OPS = 100_000
HOSTILE = {
    "nested lists": b"]" * N_OPS,
    "nested tuples": b")" + b"\x85" * N_OPS + b".",
    "lists in the memo": b"]\x940" * N_OPS + b"N.",
    "lists in a list": b"]" + (b"(" + b"]" * 1000 + b"e") * (N_OPS // 1000) + b".",
    "tuples that double": b")" + b"2\x86" * 5000 + b".",
    "a dict in itself": b"}\x94X\x01\0\0\0ah\0s.",
    "numbers in the memo that leave gaps": b"Nr\xff\xff\xff\xff" * 1000 + b".",
    "persistent ids of nothing": b")Q" * N_OPS + b".",
    "a persistent id without end": b")" + b"\x85" * N_OPS + b"Q.",
    "a storage of nothing": b"(X\x07\0\0\0storageNNNNtQ.",
    "a tensor of nothing": b"ctorch._utils\n_rebuild_tensor_v2\n()Q((ttR.",
    "an opcode that is none": b"N\x00.",
    "no stack": b"0.",
    "no mark": b"Nt.",
    "no end": b"N" * 5,
    "half a number": b"J\x01",
    "bytes that never come": b"\x8e" + b"\xff" * 7 + b"\x7f.",
}


@pytest.mark.long
@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_an_archive_with_a_hostile_pickle_gives_its_tensors_without_names_at_little_cost(body: bytes) -> None:
    storage = np.arange(500.0).tobytes()
    data = archive(b"\x80\x02" + body, **{"0": storage})
    tracemalloc.start()
    try:
        parts = take_apart(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert joined(parts) == data
    assert [(part.name, taken) for part, taken in parts if isinstance(part, Tensor)] == [("archive/data/0", storage)]
    assert peak < 120 * len(data) + (8 << 20)


def test_a_pickle_that_makes_too_many_objects_gives_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pickle_machine, "_MAX_MADE", 100_000)
    n_lists = 150_000
    lists = b"(" + (b"(" + b"]" * 1000 + b"l") * (n_lists // 1000) + b"t0"
    state = {"a": torch.arange(200.0)}
    pickled = pickled_state(saved(state))
    head, rest = pickled[:2], pickled[2:]

    assert tensors(archive(head + rest, **{"0": raw(state["a"])})).keys() == {"a"}
    assert tensors(archive(head + lists + rest, **{"0": raw(state["a"])})).keys() == {"archive/data/0"}


@pytest.mark.long
def test_a_state_dict_makes_three_objects_a_tensor_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pickle_machine, "_MAX_MADE", 3000)
    module = torch.nn.ParameterDict({f"layer {i}": torch.full((64,), 1.0 * i) for i in range(1000)})

    assert "layer 777" in tensors(saved(module.state_dict()))


# --- files from before torch 1.6


def test_a_checkpoint_from_before_the_archives_gives_model_and_optimizer(network: Network) -> None:
    optimizer = torch.optim.Adam(network.parameters())
    network(torch.ones(1, 700)).sum().backward()
    optimizer.step()
    data = saved_before_zip({"model": network.state_dict(), "optimizer": optimizer.state_dict()})
    found = tensors(data)

    assert joined(take_apart(data)) == data
    assert {"model.first.weight", "optimizer.state.0.exp_avg", "optimizer.state.2.exp_avg_sq"} <= found.keys()
    tensor, content = found["model.first.weight"]
    assert (tensor.dtype, tensor.shape) == ("float32", (700, 700))
    assert content == raw(network.first.weight)


def test_a_module_from_before_the_archives_gives_the_tensors_of_its_state_dict(network: Network) -> None:
    data = saved_before_zip(network)

    assert tensors(data).keys() == {"first.weight", "first.bias", "second.weight"}


def test_a_file_from_before_the_archives_that_names_a_storage_it_never_told_of_is_plain_from_there_on() -> None:
    data = saved_before_zip({"a": torch.arange(100.0)})
    at = data.rindex(b"X", 0, data.rindex(b"."))
    lie = data[: at + 5] + b"?" + data[at + 6 :]
    parts = take_apart(lie)

    assert joined(parts) == lie
    assert [type(part) for part, _ in parts if not isinstance(part, Skeleton)] == [PlainBytes]


def test_a_damaged_file_from_before_the_archives_comes_back_bit_for_bit() -> None:
    data = saved_before_zip({"a": torch.arange(100.0), "b": torch.arange(33), "c": [torch.ones(5)]})

    for broken in damaged(data):
        assert joined(take_apart(broken)) == broken
