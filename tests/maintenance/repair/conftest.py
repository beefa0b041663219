"""Stores that the tests of repair damage."""

from __future__ import annotations

import pytest

from tensorcas_mlflow.store import Store
from tests.maintenance.repair.damaging import new_store, save


@pytest.fixture
def store() -> Store:
    """Three steps that share chunks: step 0 has a and b, step 1 b and c, step 2 d."""
    store = new_store()
    save(store, "ab", 0)
    save(store, "bc", 1)
    save(store, "d", 2)
    return store


@pytest.fixture
def backup() -> Store:
    """Another store that has the same steps."""
    store = new_store()
    save(store, "ab", 0)
    save(store, "bc", 1)
    save(store, "d", 2)
    return store
