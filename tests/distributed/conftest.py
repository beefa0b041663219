"""An experiment with a store in a folder, for the tests of many ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import mlflow
import pytest

from tests.tracking import empty_database

__all__ = ["empty_database"]


@pytest.fixture
def tracking(empty_database: Path, tmp_path: Path) -> str:
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment(experiment_id=mlflow.create_experiment("ranks", f"{tmp_path}/artifacts"))
    return uri


@pytest.fixture
def run_id(tracking: str) -> str:
    with mlflow.start_run() as run:
        return str(run.info.run_id)
