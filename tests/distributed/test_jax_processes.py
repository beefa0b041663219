"""Checkpoints of several processes of JAX: ordinary checkpoints, loaded by other meshes and by one process."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import jax
import mlflow
import numpy as np
import pytest

import tensorcas_mlflow as tensorcas
from tensorcas_mlflow.maintenance import plan_gc, verify
from tensorcas_mlflow.store import Store
from tests.distributed.jax_states import whole_state

pytestmark = pytest.mark.long


def run_two(work: str, tmp_path: Path) -> tuple[str, list[int], str]:
    """Run a function of `jax_states` in two processes.

    Returns:
        The id of their run, their exit statuses, and what they have printed.
    """
    tracking = f"sqlite:///{tmp_path}/mlflow.db"
    mlflow.set_tracking_uri(tracking)
    experiment_id = mlflow.create_experiment("processes", f"{tmp_path}/artifacts")
    run_id = mlflow.MlflowClient().create_run(experiment_id).info.run_id
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    program = [sys.executable, "-m", "tests.distributed.jax_states"]
    folder = tmp_path / "orbax"
    folder.mkdir()
    given = [json.dumps([rank, port, work, tracking, run_id, str(folder)]) for rank in (0, 1)]
    ranks = [subprocess.Popen([*program, each], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for each in given]
    try:
        told = [rank.communicate(timeout=120)[0].decode()[-6000:] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()

    return run_id, [rank.returncode for rank in ranks], "\n".join(told)


def test_two_processes_save_ordinary_checkpoints_and_other_meshes_load_them(tmp_path: Path) -> None:
    run_id, statuses, told = run_two("work", tmp_path)

    assert statuses == [0, 0], told
    assert [record.step for record in tensorcas.list_checkpoints(run_id, name="checkpoint")] == [1, 2]
    back = tensorcas.load_checkpoint(run_id, step=2)
    for name, value in whole_state(2).items():
        assert np.asarray(back["params"][name]).tobytes() == np.asarray(value).tobytes()
    assert back["key"] == jax.random.key(2)
    assert tensorcas.diff((run_id, 1), (run_id, 2)).changed == (
        "params.rows",
        "params.columns",
        "params.copies",
        "params.scalar",
        "key",
    )
    one = tensorcas.log_checkpoint(whole_state(2), step=3, run_id=run_id)
    assert one.new_bytes is not None
    assert one.new_bytes < one.total_bytes / 10, "one process shares the chunks of the two"


def test_a_process_that_dies_in_a_save_leaves_no_step_and_nothing_that_stays(tmp_path: Path) -> None:
    run_id, statuses, told = run_two("die", tmp_path)

    assert statuses == [0, 9], told
    assert [record.step for record in tensorcas.list_checkpoints(run_id)] == [1]
    store = Store.open(str(tmp_path / "artifacts"))
    assert verify(store, full=True).problems == ()
    plan_gc(store, grace_s=0).execute()
    back = tensorcas.load_checkpoint(run_id, step=1)
    for name, value in whole_state(1).items():
        assert np.asarray(back[name]).tobytes() == np.asarray(value).tobytes()
    again = tensorcas.log_checkpoint(whole_state(2), step=2, run_id=run_id)
    assert again.step == 2
