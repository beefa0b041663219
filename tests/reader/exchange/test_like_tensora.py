"""Folders of ServerlessLLM and of safetensors are read as Tensora reads them. After its own tests, in our words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.errors import BackendError, FormatError, TensorNotFoundError
from tensorcas_mlflow.file_formats import open_listing
from tensorcas_mlflow.reader import CheckpointReader, plan_export
from tests.reader.checkpoints import same
from tests.reader.exchange.doors import DOORS, Door

DIM = 12


def gpt2(n_layers: int) -> dict[str, Array]:
    """Tensors with the names of a small GPT-2, and an empty and a scalar one."""
    draw = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"wte": (50, DIM), "wpe": (16, DIM), "empty": (0, 2), "scalar": ()}
    for layer in range(n_layers):
        shapes |= {
            f"h.{layer}.ln_1.weight": (DIM,),
            f"h.{layer}.attn.bias": (1, 1, 16, 16),
            f"h.{layer}.attn.c_attn.weight": (DIM, 3 * DIM),
            f"h.{layer}.mlp.c_fc.weight": (DIM, 3 * DIM),
        }
    return {name: np.asarray(draw.normal(size=shape), "f4") for name, shape in shapes.items()} | {
        "i64": np.arange(3),
        "bool": np.array([True, False, True]),
    }


def by_name(reader: CheckpointReader) -> dict[str, Array]:
    return dict(sorted(reader.full().items()))


@pytest.fixture(params=["where it lies", "imported"])
def door(request: pytest.FixtureRequest) -> Door:
    return DOORS[request.param]


@pytest.mark.parametrize("partitions", [1, 4, 8])
def test_a_model_comes_back_from_any_number_of_partitions(door: Door, tmp_path: Path, partitions: int) -> None:
    safetensors.numpy.save_file(gpt2(2), tmp_path / "source.safetensors")
    plan_export(open_listing(tmp_path / "source.safetensors"), tmp_path / "model", partitions=partitions).execute()

    reader = door(tmp_path / "model")

    assert len([*(tmp_path / "model").glob("tensor.data_*")]) == partitions
    assert same(by_name(reader), dict(sorted(gpt2(2).items())))
    assert {*reader.layer(1)} == {name for name in gpt2(2) if name.startswith("h.1.")}


def test_a_model_in_a_folder_of_one_file_is_the_file(door: Door, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    safetensors.numpy.save_file(gpt2(1), tmp_path / "model" / "model.safetensors")
    reader = door(tmp_path / "model")

    assert same(by_name(reader), dict(sorted(gpt2(1).items())))
    with pytest.raises(TensorNotFoundError):
        reader.tensor("nonexistent")


def test_partitions_without_an_index_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "tensor.data_0").write_bytes(bytes(64))

    with pytest.raises(FormatError):
        open_listing(tmp_path)


def test_an_index_without_its_partitions_is_no_model(tmp_path: Path) -> None:
    safetensors.numpy.save_file(gpt2(1), tmp_path / "source.safetensors")
    plan_export(open_listing(tmp_path / "source.safetensors"), tmp_path / "model", partitions=2).execute()
    (tmp_path / "model" / "tensor.data_1").unlink()

    with pytest.raises((FormatError, BackendError), match=r"tensor\.data_1"):
        open_listing(tmp_path / "model")
