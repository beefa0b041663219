"""A store for the tests of optimization."""

from __future__ import annotations

import pytest

from tensorcas_mlflow.store import Store
from tests.maintenance.optimize.trainings import new_store


@pytest.fixture
def store() -> Store:
    return new_store()
