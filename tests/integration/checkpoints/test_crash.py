"""A process killed at any moment of logging checkpoints loses nothing that was committed."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import mlflow
import numpy as np
import pytest

from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.store import Store

PROGRAM = """
import sys, mlflow, numpy as np
mlflow.set_tracking_uri(sys.argv[1])
run_id, blocking, first = sys.argv[2], sys.argv[3] == "True", int(sys.argv[4])
state = {"w": np.zeros(200_000), "step": 0}
for step in range(first, first + 10_000):
    state["w"][:] = step
    state["w"][::1000] = np.arange(200)
    state["step"] = step
    info = mlflow.tensorcas.log_checkpoint(state, step=step, run_id=run_id, blocking=blocking, log_metrics=False)
    if blocking:
        print(step, flush=True)
"""


@pytest.mark.parametrize("blocking", [True, pytest.param(False, marks=pytest.mark.long)])
def test_every_step_that_was_committed_loads_after_a_kill(
    experiment: str, tracking_uri: str, tmp_path: Path, blocking: bool
) -> None:
    run_id = mlflow.MlflowClient().create_run(experiment).info.run_id
    told: list[int] = []
    for attempt in range(2):
        arguments = [sys.executable, "-c", PROGRAM, tracking_uri, run_id, str(blocking), str(attempt * 10_000)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
            while not mlflow.tensorcas.list_checkpoints(run_id) or process.poll() is not None:
                time.sleep(0.05)
            time.sleep(random.uniform(0.2, 0.6))
            process.kill()
            assert process.stdout is not None
            told += [int(line) for line in process.stdout.read().split()]
    plan_gc(Store.find(tmp_path / "artifacts")[0], grace_s=0).execute()

    steps = {record.step for record in mlflow.tensorcas.list_checkpoints(run_id)}
    assert steps
    assert set(told) <= steps
    for step in steps:
        state = mlflow.tensorcas.load_checkpoint(run_id, step=step)
        assert state["step"] == step
        assert np.array_equal(state["w"][::1000], np.arange(200))
        assert state["w"][1] == step
