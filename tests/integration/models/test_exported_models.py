"""Models in MLflow's default format for PyTorch, archives of `torch.export`: opened, compared, exported, loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import safetensors.numpy
import torch
from mlflow.exceptions import MlflowException
from mlflow.models import ModelSignature
from mlflow.types import Schema, TensorSpec

from tests.file_formats.samples import pt2_entry, pt2_of, pt2_table, torch_file
from tests.reader import checkpoints
from tests.stored_bytes import pack_bytes

pytestmark = pytest.mark.filterwarnings("ignore")

EXAMPLE = np.ones((2, 64), np.float32)
SIGNATURE = ModelSignature(inputs=Schema([TensorSpec(np.dtype("float32"), (2, 64))]))


class Network(torch.nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.encoder = torch.nn.Linear(64, 256)
        self.norm = torch.nn.BatchNorm1d(256)
        self.head = torch.nn.Linear(256, 64)
        self.register_buffer("offset", torch.arange(64.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(torch.relu(self.encoder(x))))
        return out + self.offset


def arrays(network: Network) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in network.state_dict().items()} | {"offset": network.offset.numpy()}


def same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return checkpoints.same(dict(sorted(found.items())), dict(sorted(wanted.items())))


def log(network: Network, **settings: Any) -> str:
    with mlflow.start_run():
        info = mlflow.pytorch.log_model(
            network.eval(),
            name="model",
            input_example=EXAMPLE,
            signature=SIGNATURE,
            pip_requirements=["torch"],
            serialization_format="pt2",
            **settings,
        )
    return info.model_uri


@pytest.mark.long
def test_the_weights_of_a_model_are_listed_and_its_example_input_is_named(experiment: str) -> None:
    network = Network()
    with mlflow.tensorcas.open_checkpoint(log(network)) as reader:
        assert same(reader.full(), arrays(network))
        assert same(reader.match("*"), arrays(network))
        assert {*reader.left_out.values()} == {"example input"}
        assert "and 1 example input, no part of the model" in str(reader.summary())


@pytest.mark.long
def test_different_models_have_different_digests_and_equal_ones_the_same(experiment: str) -> None:
    one, again, other = log(Network()), log(Network()), log(Network(1))
    digests = [mlflow.tensorcas.open_checkpoint(uri).digest("head.weight") for uri in (one, again, other)]
    found = mlflow.tensorcas.diff(one, other)

    assert digests[0] == digests[1] != digests[2]
    assert mlflow.tensorcas.open_checkpoint(one).digest() != mlflow.tensorcas.open_checkpoint(other).digest()
    assert {*found.changed} >= {"encoder.weight", "encoder.bias", "head.weight", "head.bias"}
    assert not mlflow.tensorcas.diff(one, again).changed


def test_an_export_writes_the_weights(experiment: str, tmp_path: Path) -> None:
    network = Network()
    written = mlflow.tensorcas.export_checkpoint(log(network), tmp_path / "out.safetensors")

    assert written.n_tensors == len(arrays(network))
    assert same(safetensors.numpy.load_file(tmp_path / "out.safetensors"), arrays(network))


def test_an_import_takes_the_weights(experiment: str, tmp_path: Path) -> None:
    network = Network()
    torch.export.save(torch.export.export(network.eval(), (torch.ones(2, 64),)), tmp_path / "model.pt2")
    with mlflow.start_run():
        info = mlflow.tensorcas.import_checkpoint(tmp_path / "model.pt2", step=0)

    assert same(mlflow.tensorcas.open_checkpoint(info.uri).full(), arrays(network))


@pytest.mark.long
def test_exported_program_fills_a_model(experiment: str) -> None:
    network, other = Network(), Network(1)
    reader = mlflow.tensorcas.open_checkpoint(log(network))
    reader.load_into(other.encoder, prefix="encoder")

    assert torch.equal(other.encoder.weight, network.encoder.weight)
    assert torch.equal(other.encoder.bias, network.encoder.bias)
    assert not torch.equal(other.head.weight, network.head.weight)


@pytest.mark.long
def test_exported_model_loads(cas_experiment: str) -> None:
    network = Network()
    loaded = mlflow.pytorch.load_model(log(network))
    x = torch.randn(2, 64)

    assert torch.equal(loaded(x), network(x))


def test_the_file_comes_back_to_the_bit(cas_experiment: str, tmp_path: Path) -> None:
    mlflow.pytorch.save_model(
        Network().eval(),
        tmp_path / "saved",
        input_example=EXAMPLE,
        signature=SIGNATURE,
        pip_requirements=["torch"],
        serialization_format="pt2",
    )
    with mlflow.start_run() as run:
        mlflow.log_artifacts(str(tmp_path / "saved"), "model")
    (tmp_path / "down").mkdir()
    uri = f"runs:/{run.info.run_id}/model/data/model.pt2"
    back = Path(mlflow.artifacts.download_artifacts(uri, dst_path=str(tmp_path / "down")))

    assert back.read_bytes() == (tmp_path / "saved/data/model.pt2").read_bytes()


@pytest.mark.long
def test_files_beside_the_model_are_not_taken_for_it(experiment: str, tmp_path: Path) -> None:
    (tmp_path / "vocabulary.txt").write_text("a\nb\n")
    network = Network()
    uri = log(network, extra_files=[str(tmp_path / "vocabulary.txt")])

    assert same(mlflow.tensorcas.open_checkpoint(uri).full(), arrays(network))


@pytest.mark.long
def test_a_small_step_costs_little(cas_experiment: str, tmp_path: Path) -> None:
    network = Network()
    sizes = []
    for _ in range(3):
        log(network)
        sizes.append(pack_bytes(tmp_path / "artifacts"))
        with torch.no_grad():
            for weight in network.parameters():
                weight += 1e-6 * torch.randn_like(weight)

    assert sizes[2] - sizes[1] < 0.6 * sizes[0]


def test_a_stored_file_that_its_reader_refuses_is_not_opened_in_part(experiment: str, tmp_path: Path) -> None:
    weights = {"weights/weight_0": bytes(80), "weights/weight_1": torch_file(torch.ones(30))}
    table = pt2_table({"w": pt2_entry("weight_0", 7, (20,), (1,)), "lost": pt2_entry("weight_2", 7, (20,), (1,))})
    (tmp_path / "model.pt2").write_bytes(pt2_of({**weights, "weights/model_weights_config.json": table}))
    with mlflow.start_run() as run:
        mlflow.log_artifact(str(tmp_path / "model.pt2"))

    with pytest.raises(MlflowException, match="is missing"):
        mlflow.tensorcas.open_checkpoint(f"runs:/{run.info.run_id}/model.pt2")
