"""Disks that answer at once."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a cut leaves is told by what was asked of the disk, so nobody has to wait for a real one."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr("tensorcas_mlflow.maintenance._gc_survey._INTENT_PAUSE_S", 0)
