"""Servers that know nothing of this package, servers that do, and the experiments of clients."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlflow
import pytest
from mlflow.tracking import fluent

from tensorcas_mlflow.store import Store
from tests.deploy.servers import Server, serve
from tests.tracking import empty_database, no_stray_settings

__all__ = ["empty_database", "no_stray_settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A client's active experiment, and where the server keeps its artifacts."""

    id: str
    server: Server
    folder: Path

    @property
    def uri(self) -> str:
        return f"mlflow-artifacts:/{self.id}"

    def store(self) -> Store:
        """The store, as somebody sees it who has access to the server's folder."""
        return Store.open(self.folder)

    def n_bytes(self) -> int:
        """What the server keeps, every file counted."""
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())


@pytest.fixture(scope="session")
def stock(empty_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without our package."""
    folder = tmp_path_factory.mktemp("stock")
    shutil.copy(empty_database, folder / "mlflow.db")
    options = ("--workers", "1", "--artifacts-destination", str(folder / "files"), "--serve-artifacts")
    with serve(folder, options, plugin=False) as server:
        yield server


@pytest.fixture(scope="session")
def ours(empty_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that keeps its artifacts in a store."""
    folder = tmp_path_factory.mktemp("ours")
    shutil.copy(empty_database, folder / "mlflow.db")
    with serve(folder, ("--workers", "1", "--artifacts-destination", f"tensorcas://{folder}/files")) as server:
        yield server


@pytest.fixture
def carried(stock: Server, no_stray_settings: None) -> Iterator[Experiment]:
    """A new experiment at the stock server, the active one."""
    yield from _active(stock)


@pytest.fixture
def served(ours: Server, no_stray_settings: None) -> Iterator[Experiment]:
    """A new experiment at our server, the active one."""
    yield from _active(ours)


def _active(server: Server) -> Iterator[Experiment]:
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(server.uri)
    experiment_id = mlflow.create_experiment(uuid.uuid4().hex)
    mlflow.set_experiment(experiment_id=experiment_id)
    yield Experiment(id=experiment_id, server=server, folder=server.folder / "files" / experiment_id)
    while mlflow.active_run() is not None:
        mlflow.end_run()
    fluent._active_experiment_id = None
    mlflow.set_tracking_uri(before)
