"""Small trainings with the real frameworks, and what their checkpoints are compared with."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import mlflow
import numpy as np
import torch
import xgboost

from tensorcas_mlflow.integration.checkpoints import list_checkpoints

GENERATOR = np.random.default_rng(0)
FEATURES = GENERATOR.normal(size=(64, 4)).astype("float32")
TARGETS = FEATURES @ np.array([1, -2, 3, 0.5], dtype="float32")
LABELS = (TARGETS > 0).astype("int64")

PARAMETERS = {"max_depth": 2, "nthread": 1}


def data() -> xgboost.DMatrix:
    return xgboost.DMatrix(FEATURES, TARGETS)


def steps_of(run_id: str, name: str = "checkpoint") -> list[int]:
    return [record.step for record in list_checkpoints(run_id, name=name)]


def names_of(run_id: str) -> set[str]:
    return {record.name for record in list_checkpoints(run_id)}


def only_run() -> Any:
    (run,) = mlflow.search_runs(output_format="list")
    return run


def make_module(lightning: ModuleType) -> Any:
    """A module of either Lightning package, whose loader gives the same batches in every epoch."""

    class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            features, targets = batch
            return torch.nn.functional.mse_loss(self.net(features)[:, 0], targets)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]

        def train_dataloader(self) -> Any:
            dataset = torch.utils.data.TensorDataset(torch.from_numpy(FEATURES), torch.from_numpy(TARGETS))
            return torch.utils.data.DataLoader(dataset, batch_size=16)

    torch.manual_seed(0)
    return Module()


def make_trainer(lightning: ModuleType, folder: Path, **options: Any) -> Any:
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(default_root_dir=folder, **{**quiet, **options})


def same(one: Any, other: Any) -> bool:
    """Tell whether two nested states are equal, bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
