"""A folder with logs keeps every promise of the contract, and agrees with a dict."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorcas_mlflow.backends import LoggedBackend
from tensorcas_mlflow.testing import BackendConformance


def made(folder: Path) -> LoggedBackend:
    backend = LoggedBackend(folder)
    backend.make_logs()
    return backend


class TestLoggedBackend(BackendConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> LoggedBackend:
        return made(tmp_path / "store")


class TestLoggedBackendWithoutLogs(BackendConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> LoggedBackend:
        return LoggedBackend(tmp_path / "store")
