"""Helpers for tests of deletion: artifacts of runs and logged models, and MLflow's ways to forget them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
from click.testing import CliRunner
from mlflow import MlflowClient
from mlflow.cli import gc as mlflow_gc
from mlflow.entities import RunStatus

from tensorcas_mlflow.cli import main
from tensorcas_mlflow.store import Store

N_BYTES = 300_000


def array(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, N_BYTES, dtype=np.uint8)


def array_file(folder: Path, *seeds: int) -> Path:
    """A file whose bytes no compression makes smaller, and that shares those of each seed with other such files."""
    file = folder / f"{'-'.join(map(str, seeds))}.npz"
    np.savez(file, **{str(seed): array(seed) for seed in seeds})
    return file


def log_run(experiment_id: str, file: Path) -> str:
    """Log a file, and a note that stays a plain file, and give the run's id."""
    client = MlflowClient()
    run_id = client.create_run(experiment_id).info.run_id
    client.log_artifact(run_id, str(file))
    client.log_text(run_id, "a note", "notes/note.txt")
    client.set_terminated(run_id, RunStatus.to_string(RunStatus.FINISHED))
    return str(run_id)


def log_model(experiment_id: str, file: Path, *, run_id: str | None = None) -> str:
    """Log a file as a logged model's, beside a plain MLmodel, and give the model's id."""
    client = MlflowClient()
    model_id = client.create_logged_model(experiment_id, source_run_id=run_id).model_id
    client.log_model_artifact(model_id, str(file))
    plain = file.parent / "MLmodel"
    plain.write_text(f"model_id: {model_id}\n")
    client.log_model_artifact(model_id, str(plain))
    return str(model_id)


def forget(*words: str) -> None:
    """Run ``mlflow gc``."""
    done = CliRunner().invoke(mlflow_gc, ["--backend-store-uri", mlflow.get_tracking_uri(), *words])
    assert done.exit_code == 0, done.output


def collect(root: Path, *words: str) -> int:
    """Run ``tensorcas gc`` on everything that no save under way needs."""
    return main(["gc", "--root", str(root), "--yes", "--grace", "0", "--max-waste", "0", *words])


def packs_bytes(root: Path) -> int:
    store = Store.open(root)
    return sum(info.size for info in store.backend.list("packs"))


def holders(root: Path) -> set[str]:
    """Ids of the runs and logged models that the store keeps a file for."""
    return {ref.model_id or ref.run_id or "" for ref in Store.open(root).checkpoints()}
