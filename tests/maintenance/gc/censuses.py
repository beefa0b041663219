"""Helpers of the tests of censuses."""

from __future__ import annotations

import pytest

from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.maintenance import Inventory, census_bytes, read_census
from tensorcas_mlflow.store import Store
from tests.maintenance.gc.collecting import keys


@pytest.fixture(autouse=True)
def always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the smallest change be worth a census."""
    monkeypatch.setattr("tensorcas_mlflow.maintenance._census.LEAST_NEW", 1)
    monkeypatch.setattr("tensorcas_mlflow.maintenance._census._NEW_PART", 1 << 40)


def census_of(store: Store) -> str:
    [key] = keys(store, "census")
    return key


def inventory_in(store: Store) -> Inventory:
    return read_census(census_of(store), store.backend.get(census_of(store)))


def put_census(store: Store, inventory: Inventory) -> str:
    """Put one in the place of those there are."""
    for key in keys(store, "census"):
        store.backend.delete(key)
    store.backend.put_new("census/" + "7" * 32, census_bytes(inventory))
    return "census/" + "7" * 32


def sealed(blob: bytes) -> bytes:
    """A census with the digest that its bytes have."""
    return blob[:32] + digest(blob[64:] + blob[:32]) + blob[64:]
