"""Stores to collect, and the way to what the tests beside this file share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.store import Store
from tests.maintenance.gc.collecting import CHUNK_BYTES


@pytest.fixture
def store() -> Store:
    return Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)


@pytest.fixture
def local_store(tmp_path: Path) -> Store:
    return Store.init(tmp_path / "root", chunk_bytes=CHUNK_BYTES)
