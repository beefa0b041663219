"""Helpers for tests of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import numpy as np

from tensorcas_mlflow.integration.checkpoints import CheckpointInfo
from tensorcas_mlflow.store import Store

State = dict[str, Any]


def make_state(seed: int = 0, n_rows: int = 40_000) -> State:
    rng = np.random.default_rng(seed)
    return {"weights": rng.normal(size=(n_rows, 4)), "moments": {"m": rng.normal(size=1_000)}, "epoch": seed}


def assert_same(one: State, other: State) -> None:
    assert one["weights"].tobytes() == other["weights"].tobytes()
    assert one["moments"]["m"].tobytes() == other["moments"]["m"].tobytes()
    assert one["epoch"] == other["epoch"]


def log(state: State, step: int, **options: Any) -> CheckpointInfo:
    info: CheckpointInfo = mlflow.tensorcas.log_checkpoint(state, step=step, **options)
    return info


def load(*arguments: Any, **options: Any) -> Any:
    return mlflow.tensorcas.load_checkpoint(*arguments, **options)


def steps(**options: Any) -> list[int]:
    return [record.step for record in mlflow.tensorcas.list_checkpoints(**options)]


def shown(run_id: str) -> list[str]:
    """Names of the manifests that MLflow lists of a run's checkpoints."""
    files = mlflow.artifacts.list_artifacts(run_id=run_id, artifact_path="checkpoints/checkpoint")
    return [Path(file.path).name for file in files if file.path.endswith(".arrow")]


def store_below(tmp_path: Path) -> Store:
    return Store.find(tmp_path / "artifacts")[0]
