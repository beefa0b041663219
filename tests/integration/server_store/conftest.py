"""Servers that know nothing of this package, servers that do, and the experiments of clients."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
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
        """Return the total size of the server's files."""
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
def stock_gunicorn(empty_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without our package, under gunicorn."""
    folder = tmp_path_factory.mktemp("gunicorn")
    shutil.copy(empty_database, folder / "mlflow.db")
    options = ("--workers", "1", "--gunicorn-opts", "--timeout 120")
    options += ("--artifacts-destination", str(folder / "files"), "--serve-artifacts")
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
    with active(stock) as experiment:
        yield experiment


@pytest.fixture
def carried_by_gunicorn(stock_gunicorn: Server, no_stray_settings: None) -> Iterator[Experiment]:
    """A new experiment at the stock server under gunicorn, the active one."""
    with active(stock_gunicorn) as experiment:
        yield experiment


@pytest.fixture
def served(ours: Server, no_stray_settings: None) -> Iterator[Experiment]:
    """A new experiment at our server, the active one."""
    with active(ours) as experiment:
        yield experiment


@contextmanager
def active(server: Server) -> Iterator[Experiment]:
    """Make a new experiment at a server, the active one for as long as the block lasts."""
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(server.uri)
    experiment_id = mlflow.create_experiment(uuid.uuid4().hex)
    # SQLite gives the id of the last experiment again once `mlflow gc` has removed it; its folder may still be there.
    while (server.folder / "files" / experiment_id).exists():
        experiment_id = mlflow.create_experiment(uuid.uuid4().hex)
    mlflow.set_experiment(experiment_id=experiment_id)
    try:
        yield Experiment(id=experiment_id, server=server, folder=server.folder / "files" / experiment_id)
    finally:
        while mlflow.active_run() is not None:
            mlflow.end_run()
        fluent._active_experiment_id = None
        mlflow.set_tracking_uri(before)
