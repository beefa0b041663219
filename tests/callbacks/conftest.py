"""MLflow in a folder of the test's own, with an experiment whose artifacts our repository keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorcas_mlflow.callbacks import autolog
from tests.tracking import active_experiment, empty_database, no_stray_settings, tracking_uri

__all__ = ["empty_database", "no_stray_settings", "tracking_uri"]


@pytest.fixture(autouse=True)
def _experiment(tracking_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An active experiment, in a folder where training may write."""
    monkeypatch.chdir(tmp_path)
    with active_experiment("training", f"tensorcas://{tmp_path}/artifacts"):
        yield
    autolog(disable=True)
