"""Collections that ask a server's MLflow for forgotten artifacts in its store."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import mlflow
import numpy as np
import pytest
from click.testing import CliRunner
from mlflow import MlflowClient
from mlflow.cli import gc as mlflow_gc

from tensorcas_mlflow.cli import main
from tensorcas_mlflow.store import Store
from tests.deploy.servers import Server

pytestmark = pytest.mark.long


@pytest.fixture
def tracking_to_restore() -> Iterator[None]:
    before = mlflow.get_tracking_uri()
    yield
    mlflow.set_tracking_uri(before)


def test_models_of_a_deleted_experiment_are_orphans_and_others_stay(
    gunicorn: Server, tracking_to_restore: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client = MlflowClient(gunicorn.uri)
    file = tmp_path / "weights.npy"
    np.save(file, np.random.default_rng(0).normal(size=1000))
    kept, gone = (client.create_experiment(uuid.uuid4().hex) for _ in range(2))
    run_id = client.create_run(kept).info.run_id
    client.log_artifact(run_id, str(file))
    models = [client.create_logged_model(experiment).model_id for experiment in (kept, kept, gone)]
    for model_id in models:
        client.log_model_artifact(model_id, str(file))
    client.delete_logged_model(models[1])
    client.delete_experiment(gone)
    words = [
        "--backend-store-uri",
        gunicorn.backend_store_uri,
        "--tracking-uri",
        gunicorn.uri,
        "--experiment-ids",
        gone,
    ]
    done = CliRunner().invoke(mlflow_gc, [*words, "--logged-model-ids", models[1]])
    assert done.exit_code == 0, done.output

    collect = [
        "gc",
        "--root",
        str(gunicorn.store_root),
        "--orphans",
        "--tracking-uri",
        gunicorn.uri,
        "--yes",
        "--grace",
        "0",
    ]
    assert main(collect) == 0
    assert kept_for(gunicorn, models) == [models[0], models[2]]
    assert f"in {gone}: no evidence links the folder to {gunicorn.uri}" in capsys.readouterr().out
    assert main([*collect, "--folder", gone]) == 0

    assert kept_for(gunicorn, models) == [models[0]]
    assert Path(client.download_artifacts(run_id, file.name)).read_bytes() == file.read_bytes()


def kept_for(server: Server, models: list[str]) -> list[str]:
    """Those of some logged models that a server's store keeps a file for."""
    paths = [ref.path or "" for ref in Store.open(server.store_root).checkpoints()]
    return [model_id for model_id in models if any(f"/{model_id}/" in path for path in paths)]
