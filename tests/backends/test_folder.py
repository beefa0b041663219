"""A folder with a database keeps every promise of the contract, and what its files say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorcas_mlflow.backends import FolderBackend
from tensorcas_mlflow.testing import BackendConformance


class TestFolderBackend(BackendConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> FolderBackend:
        backend = FolderBackend(tmp_path / "store")
        backend.prepare(database=True)
        return backend


class TestFolderBackendWithoutDatabase(BackendConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> FolderBackend:
        return FolderBackend(tmp_path / "store")
