"""``tensorcas copy`` out of a store that is carried by a server, and back into it."""

from __future__ import annotations

from pathlib import Path

import mlflow
import numpy as np

from tensorcas_mlflow.cli import main
from tensorcas_mlflow.maintenance import verify
from tensorcas_mlflow.store import Store
from tests.integration.server_store.conftest import Experiment


def test_carried_store_is_backed_up_and_restored(carried: Experiment, tmp_path: Path) -> None:
    states = [{"w": np.random.default_rng(step).normal(size=20_000)} for step in range(3)]
    with mlflow.start_run():
        for step, state in enumerate(states):
            mlflow.tensorcas.log_checkpoint(state, step=step, log_metrics=False)
        backup = tmp_path / "backup"
        assert main(["copy", carried.uri, str(backup), "--quiet"]) == 0
        for step in range(2):
            mlflow.tensorcas.delete_checkpoint(step=step)
        assert main(["copy", str(backup), carried.uri, "--quiet"]) == 0

        for step, state in enumerate(states):
            np.testing.assert_array_equal(mlflow.tensorcas.load_checkpoint(step=step)["w"], state["w"])
    assert verify(Store.open(backup), full=True).problems == ()
    assert verify(carried.store(), full=True).problems == ()
    assert carried.store().id == Store.open(backup).id
    assert list(carried.store().backend.list("intents")) == []
