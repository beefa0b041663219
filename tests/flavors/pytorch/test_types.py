"""Tensors of dtypes that only torch has: other arrays hold their bytes, and no reader returns these arrays."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tensorcas_flavors.pytorch import PyTorchAdapter
from tensorcas_flavors.pytorch._objects import is_tensor
from tensorcas_mlflow.errors import TensorNotFoundError
from tensorcas_mlflow.reader import diff, open_path
from tensorcas_mlflow.store import write_payload
from tensorcas_mlflow.tensorcas_store import TensorCasStore

BYTES = torch.arange(64, dtype=torch.uint8)
STATE = {
    "h": BYTES.view(torch.complex32),
    "i4": BYTES.view(torch.int4),
    "w": torch.ones(3),
    "array": np.arange(300),
    "numbers": list(range(300)),
    "kinds": {'","kinds":{"w":"int4"}': 1},
}
TYPES = {"h": "complex32", "i4": "int4"}


@pytest.fixture
def store(tmp_path: Path) -> TensorCasStore:
    return TensorCasStore(tmp_path / "store", "run")


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("framework", ["np", "pt"])
def test_a_reader_names_tensors_of_torch_dtypes_as_left_out(store: TensorCasStore, framework: str, live: bool) -> None:
    store.save(STATE | ({"model": torch.nn.Linear(1, 1)} if live else {}), step=0)
    reader = store.open(0, framework=framework)

    assert dict(reader.left_out) == TYPES
    assert set(reader) & {"h", "i4", "w"} == {"w"}
    assert {spec.dtype for spec in reader.specs()} == {"float32", "int64"}
    with pytest.raises(TensorNotFoundError, match="'h' cannot be read: its type is complex32"):
        reader.tensor("h")
    with pytest.raises(TensorNotFoundError):
        reader.digest("i4")
    with pytest.raises(TensorNotFoundError, match="complex32"):
        store.load_tensors(0)


def test_a_load_returns_tensors_of_torch_dtypes(store: TensorCasStore) -> None:
    store.save(STATE, step=0)
    loaded = store.load(0)

    assert (loaded["h"].dtype, loaded["i4"].dtype) == (torch.complex32, torch.int4)
    assert torch.equal(loaded["h"].view(torch.uint8), BYTES)


def test_an_export_leaves_out_tensors_of_torch_dtypes_only_on_request(store: TensorCasStore, tmp_path: Path) -> None:
    store.save({"h": STATE["h"], "w": STATE["w"]}, step=0)
    with pytest.raises(ValueError, match=r"1 tensor cannot be taken .*'h' \(complex32\)"):
        store.export_file(tmp_path / "x.pt", 0)
    store.export_file(tmp_path / "x.pt", 0, allow_left_out=True)

    assert list(torch.load(tmp_path / "x.pt")) == ["w"]


def test_digests_and_differences_tell_apart_tensors_of_torch_dtypes(store: TensorCasStore) -> None:
    other = BYTES.flip(0)
    states: list[dict[str, Any]] = [
        {"w": BYTES},
        {"w": BYTES.view(torch.int4)},
        {"w": BYTES.view(torch.uint4)},
        {"w": other.view(torch.int4)},
        {"w": BYTES.view(torch.int4), "v": other.view(torch.int4)},
        {"w": other.view(torch.int4), "v": BYTES.view(torch.int4)},
    ]
    for step, state in enumerate(states):
        store.save(state, step=step)
    kinds = [store.open(step)._other_content().get("left_out") for step in range(len(states))]

    assert kinds[0] is None
    assert len(set(kinds)) == len(kinds)
    assert len({store.open(step).digest() for step in range(len(states))}) == len(states)
    assert "left_out" in diff(store.open(1), store.open(3)).other


def test_a_self_contained_file_names_tensors_of_torch_dtypes(tmp_path: Path) -> None:
    adapter = PyTorchAdapter()
    tensors = adapter.extract(STATE)
    write_payload(tmp_path, tensors, flavor=adapter.name, left_out=adapter.left_out(tensors))

    assert dict(open_path(tmp_path / "checkpoint.tensors").left_out) == TYPES


def test_no_value_is_a_tensor_while_torch_is_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))

    assert not is_tensor(3)
