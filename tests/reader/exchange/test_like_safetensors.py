"""Files of safetensors, read by every reader with the same result. Modelled on the library's own tests."""

from __future__ import annotations

import copy
import multiprocessing
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

from tensorcas_mlflow.errors import AdapterError
from tensorcas_mlflow.reader import SafeOpen
from tests.file_formats.samples import TORCH_DTYPES, of_torch, some_of
from tests.reader.exchange.doors import DOORS, Door

TENSORS = {str(dtype): some_of(dtype) for dtype in TORCH_DTYPES if dtype != torch.complex128} | {
    "scalar": torch.tensor(7.5),
    "empty": torch.empty((0, 5), dtype=torch.float16),
    "cube": torch.arange(60, dtype=torch.bfloat16).reshape(3, 4, 5),
}


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest) -> Door:
    return DOORS[request.param]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    safetensors.torch.save_file(TENSORS, tmp_path / "model.safetensors", metadata={"foo": "bar"})
    return tmp_path / "model.safetensors"


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, of_torch(tensor).tobytes()


def test_safe_open_of_ours_agrees_with_safetensors(door: Door, path: Path) -> None:
    with SafeOpen(door(path, framework="pt")) as ours, safetensors.safe_open(path, "pt") as theirs:
        assert ours.keys() == theirs.keys()
        assert ours.offset_keys() == theirs.offset_keys()
        assert ours.metadata() == theirs.metadata()
        all_of_ours, all_of_theirs = ours.get_tensors(), theirs.get_tensors()
        for name in theirs.offset_keys():
            one, other = ours.get_slice(name), theirs.get_slice(name)
            assert (one.get_dtype(), one.get_shape()) == (other.get_dtype(), other.get_shape())
            assert bits(ours.get_tensor(name)) == bits(theirs.get_tensor(name)) == bits(one[...])
            assert bits(all_of_ours[name]) == bits(all_of_theirs[name])


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_slices_of_ours_equal_those_of_safetensors(door: Door, tmp_path: Path, framework: str) -> None:
    array = np.arange(50, dtype="f4").reshape(10, 5)
    safetensors.torch.save_file({"a": torch.from_numpy(array), "s": torch.tensor(3.0)}, tmp_path / "m.safetensors")
    wanted: list[Any] = [
        (), ..., None, 0, -1, 3, [], slice(None), slice(2), slice(2, None),
        slice(None, None, 3), slice(0, 0), (slice(None), slice(2)), (0, slice(2)), (slice(2, None), -5),
        (..., 0), (9, 4),
    ]  # fmt: skip
    with (
        SafeOpen(door(tmp_path / "m.safetensors", framework=framework)) as ours,
        safetensors.safe_open(tmp_path / "m.safetensors", framework) as theirs,
    ):
        one, other = ours.get_slice("a"), theirs.get_slice("a")
        for index in wanted:
            if index is None and framework == "np":
                continue  # which the library has for torch only
            got, expected = one[index], other[index]
            assert type(got) is type(expected)
            assert (got.dtype, got.shape) == (expected.dtype, expected.shape), index
            assert np.asarray(got).tobytes() == np.asarray(expected).tobytes(), index
        for name, wrong in (("a", 10), ("a", -11), ("a", (0, 0, 0)), ("a", 1.0), ("a", (slice(2, None), -6)), ("s", 0)):
            with pytest.raises((IndexError, safetensors.SafetensorError)):
                theirs.get_slice(name)[wrong]
            with pytest.raises(IndexError):
                ours.get_slice(name)[wrong]


# --- models


class Model(torch.nn.Module):
    """Two layers, which may be one and the same, and whose weights may lie in another order."""

    def __init__(self, seed: int, kind: str) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a = torch.nn.Linear(10, 10)
        if kind == "transposed":
            self.a.weight = torch.nn.Parameter(self.a.weight.detach().t())
        self.b = {"tied": lambda: self.a, "copied": lambda: copy.deepcopy(self.a)}.get(
            kind, lambda: torch.nn.Linear(10, 10)
        )()


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())


@pytest.mark.parametrize("kind", ["tied", "copied", "apart", "transposed"])
def test_model_saved_by_safetensors_is_filled(door: Door, tmp_path: Path, kind: str) -> None:
    safetensors.torch.save_model(Model(1, kind), str(tmp_path / "m.safetensors"))
    filled = Model(2, kind)
    left = door(tmp_path / "m.safetensors").load_into(filled)

    assert same(filled, Model(1, kind))
    assert left.missing == left.unexpected == ()


def test_one_name_of_two_tied_tensors_is_enough(door: Door, tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in Model(1, "tied").state_dict().items() if name.startswith("b.")}
    safetensors.torch.save_file(state, tmp_path / "m.safetensors")
    filled = Model(2, "tied")
    door(tmp_path / "m.safetensors").load_into(filled)

    assert same(filled, Model(1, "tied"))


def test_a_model_that_shares_less_than_the_saved_one_misses_what_was_shared(door: Door, tmp_path: Path) -> None:
    safetensors.torch.save_model(Model(1, "tied"), str(tmp_path / "m.safetensors"))
    reader, filled = door(tmp_path / "m.safetensors"), Model(2, "apart")
    with pytest.raises(RuntimeError, match=r"Missing key.*b\.bias"):
        safetensors.torch.load_model(Model(2, "apart"), tmp_path / "m.safetensors")
    with pytest.raises(AdapterError, match=r"missing: 'b\.weight', 'b\.bias'"):
        reader.load_into(filled)

    assert same(filled, Model(2, "apart"))
    assert reader.load_into(filled, strict=False).missing == ("b.weight", "b.bias")
    assert torch.equal(filled.a.weight, Model(1, "tied").a.weight)


def test_shapes_that_do_not_fit_are_refused_strict_or_not(door: Door, tmp_path: Path) -> None:
    safetensors.torch.save_file({"weight": torch.zeros(2, 4), "bias": torch.zeros(2)}, tmp_path / "m.safetensors")
    reader = door(tmp_path / "m.safetensors")
    for strict in (True, False):
        with pytest.raises(AdapterError, match=r"float32 \(2, 4\) and does not fit one of float32 \(2, 3\)"):
            reader.load_into(torch.nn.Linear(3, 2), strict=strict)


@pytest.mark.long
def test_transformers_loads_a_model_through_it(door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import BertConfig, BertModel, modeling_utils

    config = BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=8,
    )  # fmt: skip
    model = BertModel(config)
    model.save_pretrained(tmp_path / "model")
    opened: list[Path] = []

    def safe_open(filename: str, framework: str, device: str = "cpu", backend: str = "mmap") -> SafeOpen:
        opened.append(Path(filename))
        return SafeOpen(door(Path(filename), framework=framework, device=device))

    monkeypatch.setattr(modeling_utils, "safe_open", safe_open)
    loaded = BertModel.from_pretrained(tmp_path / "model", local_files_only=True)

    assert [path.name for path in opened] == ["model.safetensors"]
    assert same(loaded, model)


# --- threads and processes


@pytest.mark.long
def test_threads_share_one_open_checkpoint(door: Door, path: Path) -> None:
    expected = {name: bits(tensor) for name, tensor in TENSORS.items()}
    wrong: list[str] = []
    with SafeOpen(door(path, framework="pt")) as ours:

        def read() -> None:
            for name in ours.keys() * 3:
                if not bits(ours.get_tensor(name)) == bits(ours.get_slice(name)[...]) == expected[name]:
                    wrong.append(name)

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert not wrong


def test_a_forked_process_reads_on(door: Door, path: Path) -> None:
    ours = SafeOpen(door(path, framework="np"))
    ours.get_tensor("cube")
    context = multiprocessing.get_context("fork")
    told = context.SimpleQueue()
    child = context.Process(target=lambda: told.put(ours.get_slice("cube")[1:].tobytes()))
    child.start()

    assert told.get() == of_torch(TENSORS["cube"][1:]).tobytes()
    child.join()
    assert ours.get_tensor("cube").tobytes() == of_torch(TENSORS["cube"]).tobytes()
