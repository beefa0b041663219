"""Models logged each epoch by plain MLflow flavors: later epochs take less room in the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest
import safetensors.numpy

from tensorcas_mlflow.store import Store


def stored_bytes(root: Path) -> int:
    return sum(info.size for info in Store.open(root).backend.list("packs"))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", [{"serialization_format": "pickle"}, {}], ids=["pickle", "default"])
def test_each_epoch_that_pytorch_logs_is_stored_as_a_difference_and_loads(
    settings: dict[str, Any], cas_experiment: str, tmp_path: Path
) -> None:
    import torch

    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Tanh(), torch.nn.Linear(512, 256))
    optimiser = torch.optim.Adam(network.parameters(), 1e-4)
    inputs = torch.randn(128, 256)
    states, uris, sizes = [], [], [0]
    for epoch in range(3):
        for batch in inputs.split(32):
            optimiser.zero_grad()
            torch.nn.functional.mse_loss(network(batch), batch.flip(1)).backward()
            optimiser.step()
        info = mlflow.pytorch.log_model(
            network,
            name="model",
            step=epoch,
            pip_requirements=["torch"],
            input_example=inputs[:2].numpy(),
            **settings,
        )
        uris.append(info.model_uri)
        states.append({name: tensor.clone() for name, tensor in network.state_dict().items()})
        sizes.append(stored_bytes(tmp_path / "artifacts"))
    loaded = [mlflow.pytorch.load_model(uri).state_dict() for uri in uris]

    assert all(
        torch.equal(back[name], tensor)
        for back, state in zip(loaded, states, strict=True)
        for name, tensor in state.items()
    )
    assert sizes[2] - sizes[1] < 0.85 * sizes[1]
    assert sizes[3] - sizes[2] < 0.85 * sizes[1]


@pytest.mark.parametrize("by", ["folder", "file"])
def test_external_data_of_an_onnx_model_shares_chunks_with_the_weights(
    by: str, cas_experiment: str, tmp_path: Path
) -> None:
    weights = {
        f"w{nth}": np.random.default_rng(nth).normal(size=(300 + nth, 257)).astype(np.float32) for nth in range(4)
    }
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()]
    model = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], tensors))
    folder = tmp_path / "model"
    folder.mkdir()
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data")
    with mlflow.start_run():
        mlflow.log_artifact(tmp_path / "model.safetensors")
        before = stored_bytes(tmp_path / "artifacts")
        if by == "folder":
            mlflow.log_artifacts(folder)
        else:
            mlflow.log_artifact(folder / "model.onnx.data")
        after = stored_bytes(tmp_path / "artifacts")
        back = mlflow.artifacts.download_artifacts(artifact_uri=mlflow.get_artifact_uri("model.onnx.data"))

    assert after - before < 0.003 * sum(array.nbytes for array in weights.values())
    assert Path(back).read_bytes() == (folder / "model.onnx.data").read_bytes()
