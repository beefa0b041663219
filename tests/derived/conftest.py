"""Stores whose knowledge a test can forget, as another process has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tensorcas_mlflow.backends import LocalBackend, MemoryBackend
from tensorcas_mlflow.store import Store
from tests.deltas.another_process import forget_all

InAnotherProcess = Callable[[Store], Store]


@pytest.fixture
def in_another_process(monkeypatch: pytest.MonkeyPatch) -> InAnotherProcess:
    """Return a function that forgets what this process knows about a store."""

    def forget(store: Store) -> Store:
        forget_all(monkeypatch)
        return Store.open_backend(store.backend)

    return forget


@pytest.fixture(params=["in memory", "of files"])
def store(request: pytest.FixtureRequest, tmp_path: Path, in_another_process: InAnotherProcess) -> Store:
    is_in_memory = request.param == "in memory"
    return in_another_process(Store.init_backend(MemoryBackend() if is_in_memory else LocalBackend(tmp_path / "store")))
