"""Stores whose knowledge a test can forget, as another process has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tensorcas_mlflow.backends import LocalBackend, MemoryBackend
from tensorcas_mlflow.store import Store, _bases, _sketches
from tensorcas_mlflow.store._recent import RecentManifests

InAnotherProcess = Callable[[Store], Store]


@pytest.fixture
def in_another_process(monkeypatch: pytest.MonkeyPatch) -> InAnotherProcess:
    """Return a function that forgets what this process knows about a store."""

    def forget(store: Store) -> Store:
        recent = RecentManifests()
        monkeypatch.setattr(_bases, "RECENT", recent)
        monkeypatch.setattr("tensorcas_mlflow.store._store.RECENT", recent)
        _sketches.forget_sketches()
        return Store.open_backend(store.backend)

    return forget


@pytest.fixture(params=["in memory", "of files"])
def store(request: pytest.FixtureRequest, tmp_path: Path, in_another_process: InAnotherProcess) -> Store:
    is_in_memory = request.param == "in memory"
    return in_another_process(Store.init_backend(MemoryBackend() if is_in_memory else LocalBackend(tmp_path / "store")))
