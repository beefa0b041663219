"""A stock server becomes one of ours, on the folder it has had: nothing of what was logged is lost to anybody."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import mlflow
import numpy as np
import pytest
import torch

from tests.deploy.servers import serve
from tests.integration.server_store.conftest import active

pytestmark = pytest.mark.long


def log(step: int) -> Any:
    state = {"frozen": np.random.default_rng(0).normal(size=60_000), "step": step}
    return mlflow.tensorcas.log_checkpoint(state, step=step, log_metrics=False)


def test_carried_checkpoints_and_models_go_on_where_the_server_gets_a_store(
    empty_database: Path, tmp_path: Path, no_stray_settings: None
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300)
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    options = ("--workers", "1", "--artifacts-destination")
    with (
        serve(tmp_path, (*options, str(tmp_path / "files"), "--serve-artifacts"), plugin=False) as stock,
        active(stock) as before,
        mlflow.start_run() as run,
    ):
        log(1)
        mlflow.log_text("text " * 100, "note.txt")
        info = mlflow.tensorcas.log_model(model, name="model", pip_requirements=[])
        mlflow.tensorcas.wait()

    port = urlsplit(stock.uri).port
    with serve(tmp_path, (*options, f"tensorcas://{tmp_path}/files"), port=port) as ours, active(ours):
        with mlflow.start_run():
            sent = log(1)
        mlflow.set_experiment(experiment_id=before.id)
        with mlflow.start_run(run_id=run.info.run_id):
            again = log(2)
            mlflow.tensorcas.wait()
            steps = [record.step for record in mlflow.tensorcas.list_checkpoints()]
            loaded = [mlflow.tensorcas.load_checkpoint(step=step)["step"] for step in steps]
            mlflow.log_artifact(str(tmp_path / "server.log"))
        rebuilt = mlflow.tensorcas.load_model(info.model_uri)
        note = mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/note.txt")

    assert loaded == steps == [1, 2]
    assert again.new_bytes < 10_000
    assert torch.equal(rebuilt.weight, model.weight)
    assert note == "text " * 100
    assert sent.uri.endswith(".tensors")
    stores = sorted(path.parent for path in (tmp_path / "files").rglob(".tensorcas"))
    assert stores == [tmp_path / "files", tmp_path / "files" / before.id]
