"""Requests of one training step to an object store, including those of MLflow."""

from __future__ import annotations

from pathlib import Path

import mlflow
import numpy as np
import pytest

from tests.backends.objects.proxy import Proxy
from tests.backends.objects.servers import S3Server
from tests.tracking import active_experiment, empty_database, no_stray_settings, tracking_uri

__all__ = ["empty_database", "no_stray_settings", "tracking_uri"]


def test_a_step_that_changed_nothing_makes_six_requests_and_loading_it_on_the_same_machine_two(
    tracking_uri: str, s3: S3Server, bucket: str, way: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.at(way.endpoint).environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TENSORCAS_CACHE", str(tmp_path / "cache"))
    state = {"weights": np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8), "epoch": 3}
    with active_experiment("far away", f"tensorcas-s3://{bucket}/team/experiment"), mlflow.start_run():
        mlflow.tensorcas.log_checkpoint(state, step=0)  # type: ignore[attr-defined]
        way.forget()
        mlflow.tensorcas.log_checkpoint(state, step=1)  # type: ignore[attr-defined]
        saving = way.traffic()
        way.forget()
        found = mlflow.tensorcas.load_checkpoint(step=1)  # type: ignore[attr-defined]
        loading = way.traffic()

    assert len(saving) == 6, str(saving)
    assert len(loading) == 2, str(loading)
    assert np.array_equal(found["weights"], state["weights"])
