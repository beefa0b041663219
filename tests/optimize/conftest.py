"""Lets the tests of `optimize` import what they share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from trainings import new_store

from tensorcas_mlflow.store import Store


@pytest.fixture
def store() -> Store:
    return new_store()
