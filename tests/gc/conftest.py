"""Stores to collect, and the way to what the tests beside this file share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from collecting import CHUNK_BYTES

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.store import Store


@pytest.fixture
def store() -> Store:
    return Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)


@pytest.fixture
def local_store(tmp_path: Path) -> Store:
    return Store.init(tmp_path / "root", chunk_bytes=CHUNK_BYTES)
