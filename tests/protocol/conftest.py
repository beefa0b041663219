"""Makes a run of several actors a function of its schedule."""

from __future__ import annotations

import threading
import uuid
from types import SimpleNamespace

import pytest

from tensorcas_mlflow.store._sketches import Sketches
from tests.protocol import schedules
from tests.protocol.interleave import actors_uuid4

SOME = 4
"""The tests of every change try one of so many interruptions, and the long tests all."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the tests that no schedule breaks anything an exploration of some schedules, and a long one of all."""
    is_long = any(mark.name == "long" for mark in metafunc.definition.iter_markers())
    if metafunc.function.__name__.startswith("test_no_schedule") and not is_long:
        of_all = pytest.param(1, id="all", marks=pytest.mark.long)
        metafunc.parametrize("every", [pytest.param(SOME, id="some"), of_all])


@pytest.fixture
def every() -> int:
    return 1


@pytest.fixture(autouse=True)
def _explores(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "EVERY", every)


class SketchesOfEachActor(threading.local):
    """The sketches that one actor knows, by store: every actor stands for a process that has just begun."""

    def __init__(self) -> None:
        self._of_store: dict[str, Sketches] = {}

    def setdefault(self, store_id: str, new: Sketches) -> Sketches:
        return self._of_store.setdefault(store_id, new)


@pytest.fixture(autouse=True)
def _repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORCAS_THREADS", "1")
    monkeypatch.setenv("TENSORCAS_CACHE", "off")  # no run finds what another one has left there
    monkeypatch.setattr("tensorcas_mlflow.base.threads.N_WAITING", 1)
    monkeypatch.setattr(uuid, "uuid4", actors_uuid4)
    monkeypatch.setattr("tensorcas_mlflow.base.files._draw", lambda n_bytes: actors_uuid4().bytes)
    monkeypatch.setattr("tensorcas_mlflow.layout._records.now", lambda: "2026-01-31T12:00:00.000+00:00")
    monkeypatch.setattr("tensorcas_mlflow.layout._format_blob.now", lambda: "2026-01-31T12:00:00.000+00:00")
    # Packs of remote stores have the time in their names.
    for module in ("chunk_io._catalog", "layout.packs._pack"):
        monkeypatch.setattr(f"tensorcas_mlflow.{module}.time", SimpleNamespace(time=lambda: 1.77e9))
    monkeypatch.setattr("tensorcas_mlflow.store._sketches._of_store", SketchesOfEachActor())
    # Every chunk of a stream is a batch.
    monkeypatch.setattr("tensorcas_mlflow.store._ingest.BATCH_BYTES", 4096)
    monkeypatch.setattr("tensorcas_mlflow.store._ingest._LOOK_BYTES", 1024)
    monkeypatch.setattr("tensorcas_mlflow.store._ingest._TAKE_BYTES", 4096)
