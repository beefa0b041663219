"""A process that knows nothing of a store, without starting one."""

from __future__ import annotations

import pytest

from tensorcas_mlflow.store import _bases, _sketches
from tensorcas_mlflow.store._recent import RecentManifests


def forget_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the recent manifests and sketches, as in a new process."""
    monkeypatch.setattr(_bases, "RECENT", RecentManifests())
    monkeypatch.setattr("tensorcas_mlflow.store._store.RECENT", _bases.RECENT)
    for known in ("_of_store", "_listed"):
        monkeypatch.setattr(_sketches, known, {})
