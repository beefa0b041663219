"""MLflow as its users have it, in a folder of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tracking import active_experiment, empty_database, no_stray_settings, tracking_uri

__all__ = ["empty_database", "no_stray_settings", "tracking_uri"]


@pytest.fixture
def cas_experiment(tracking_uri: str, tmp_path: Path) -> Iterator[str]:
    """Id of the active experiment; our repository keeps its artifacts, below ``tmp_path / "artifacts"``."""
    with active_experiment("ours", f"tensorcas://{tmp_path}/artifacts") as experiment_id:
        yield experiment_id


@pytest.fixture
def plain_experiment(tracking_uri: str, tmp_path: Path) -> Iterator[str]:
    """Id of the active experiment; MLflow keeps its artifacts in a plain folder, ``tmp_path / "artifacts"``."""
    with active_experiment("plain", f"{tmp_path}/artifacts") as experiment_id:
        yield experiment_id


@pytest.fixture(params=["cas_experiment", "plain_experiment"])
def experiment(request: pytest.FixtureRequest) -> str:
    """Id of the active experiment, once of each kind."""
    return str(request.getfixturevalue(request.param))
