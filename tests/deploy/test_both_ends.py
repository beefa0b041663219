"""Clients with our package, of a server whose destination is a store: there is never a store within a store."""

from __future__ import annotations

from collections.abc import Iterator

import mlflow
import numpy as np
import pytest

from tests.deploy.calls import new_experiment, refs
from tests.deploy.clients import Client, client
from tests.deploy.models import round_trip_sklearn, round_trip_tensorcas
from tests.deploy.servers import Server

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def user(uvicorn: Server) -> Iterator[Client]:
    """A client where our package is installed."""
    with client(uvicorn.uri, plugin=True) as process:
        yield process


@pytest.fixture(scope="module")
def stranger(uvicorn: Server) -> Iterator[Client]:
    """A client where our package is not installed."""
    with client(uvicorn.uri, plugin=False) as process:
        yield process


@pytest.fixture(autouse=True)
def one_store(uvicorn: Server) -> Iterator[None]:
    yield

    found = [folder.relative_to(uvicorn.store_root).as_posix() for folder in uvicorn.store_root.rglob(".tensorcas*")]
    assert found == [".tensorcas"]


def test_models_of_mlflows_flavors_come_back_as_they_were(user: Client) -> None:
    assert user(round_trip_sklearn) == []


def test_models_of_our_flavor_come_back_as_they_were(user: Client) -> None:
    assert user(round_trip_tensorcas) == []


def log_weights(n_steps: int) -> tuple[str, str]:
    """Log a state as checkpoints, step by step, and as a model; the run and the model's URI."""
    from sklearn.linear_model import LinearRegression

    mlflow.set_experiment(experiment_id=new_experiment())
    state = {"weights": np.arange(200_000, dtype=np.float32)}
    with mlflow.start_run() as run:
        for step in range(n_steps):
            state["weights"][step] = -1
            mlflow.tensorcas.log_checkpoint(state, step=step)
        line = LinearRegression().fit([[0.0], [1.0]], [1.0, 3.0])
        info = mlflow.tensorcas.log_model(line, name="line", pip_requirements=[])
    return run.info.run_id, info.model_uri


def load_step(run_id: str, step: int) -> list[float]:
    state = {"weights": np.zeros(200_000, dtype=np.float32)}
    loaded = mlflow.tensorcas.load_checkpoint(run_id, step=step, into=state)
    return [float(value) for value in loaded["weights"][:5]]


def test_checkpoints_of_a_training_come_back(uvicorn: Server, user: Client) -> None:
    run_id, _ = user(log_weights, 3)

    assert user(load_step, run_id, 0) == [-1.0, 1.0, 2.0, 3.0, 4.0]
    assert user(load_step, run_id, 2) == [-1.0, -1.0, -1.0, 3.0, 4.0]
    assert len(refs(uvicorn, run_id)) == 3


def files_of(uri: str) -> list[str]:
    from pathlib import Path

    folder = Path(mlflow.artifacts.download_artifacts(uri))
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_client_without_the_package_gets_a_whole_folder(user: Client, stranger: Client) -> None:
    _, uri = user(log_weights, 1)

    assert stranger(files_of, uri) == user(files_of, uri)
    assert "MLmodel" in stranger(files_of, uri)
