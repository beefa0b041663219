"""Fixtures for tests with MLflow: a tracking database of the test's own. A conftest imports those it wants by name."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import mlflow
import mlflow.store.db.utils
import pytest
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from mlflow.tracking import fluent
from sqlalchemy import Engine, event

STRAY_SETTINGS = (
    "MLFLOW_EXPERIMENT_ID",
    "MLFLOW_EXPERIMENT_NAME",
    "MLFLOW_REGISTRY_URI",
    "MLFLOW_RUN_ID",
    "MLFLOW_TRACKING_URI",
    "TENSORCAS_STORE",
    "_MLFLOW_SERVER_ARTIFACT_DESTINATION",
    "_MLFLOW_SERVER_ARTIFACT_ROOT",
)

# MLflow imports all its migrations, some seventy files, to check the schema of each database that it opens.
mlflow.store.db.utils._get_latest_schema_revision = cache(mlflow.store.db.utils._get_latest_schema_revision)

_databases: list[Path] = []
"""The empty database of this process, once it is made."""


@event.listens_for(Engine, "connect")
def sync_no_databases(connection: Any, _: object) -> None:
    """Let SQLite in this process leave syncs to the system; no test cuts its power."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous = OFF")


@pytest.fixture(autouse=True)
def no_stray_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in STRAY_SETTINGS:
        # Set and then deleted, so that what MLflow sets in between is taken back even where nothing was set before.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tracking database with nothing in it; making one takes longer than most tests."""
    if not _databases:  # each conftest that imports the fixture has one of its own
        _databases.append(_new_database(tmp_path_factory.mktemp("database") / "mlflow.db"))
    return _databases[0]


def _new_database(file: Path) -> Path:
    SqlAlchemyStore(f"sqlite:///{file}", str(file.parent / "mlruns"))
    return file


@pytest.fixture
def tracking_uri(empty_database: Path, tmp_path: Path, no_stray_settings: None) -> Iterator[str]:
    """A fresh tracking database, which the whole process uses during the test."""
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(uri)
    yield uri
    while mlflow.active_run() is not None:
        mlflow.end_run()
    mlflow.set_tracking_uri(before)


@contextmanager
def active_experiment(name: str, artifact_location: str) -> Iterator[str]:
    """Id of a new experiment, the active one for a while."""
    experiment_id = mlflow.create_experiment(name, artifact_location=artifact_location)
    mlflow.set_experiment(experiment_id=experiment_id)
    yield experiment_id
    fluent._active_experiment_id = None
