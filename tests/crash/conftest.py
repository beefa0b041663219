"""Disks that answer at once."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip real syncs and pauses: the recorded calls alone say which bytes a cut leaves."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr("tensorcas_mlflow.maintenance._gc_survey._INTENT_PAUSE_S", 0)
