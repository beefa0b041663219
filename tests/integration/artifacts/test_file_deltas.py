"""Models logged each epoch by plain MLflow flavors: later epochs take less room in the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import pytest

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
