"""Many processes save into one database, and take turns."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store

N_SAVES = 8


def save(root: str, number: int) -> None:
    """Save steps of one run."""
    store = Store.open(root)
    state = {"a": np.random.default_rng(number).normal(size=(20, 30)), "b": np.arange(50.0)}
    for step in range(N_SAVES):
        state["a"][step] += 1
        with store.write_checkpoint(state) as pending:
            pending.commit(RefTarget(run_id=f"run{number}", step=step))


@pytest.mark.parametrize("n_writers", [2, 8])
def test_many_writers_take_turns(tmp_path: Path, n_writers: int) -> None:
    """No writer gets `database is locked`, and all that they saved is there."""
    store = Store.init(tmp_path, database=True)
    save(str(tmp_path), n_writers)  # what is imported by a first save is there in all of them
    with multiprocessing.get_context("fork").Pool(n_writers) as pool:
        pool.starmap(save, [(str(tmp_path), number) for number in range(n_writers)], chunksize=1)

    refs = {info.key for info in store.backend.list("refs")}
    assert refs == {f"refs/runs/run{number}/@{step}" for number in range(n_writers + 1) for step in range(N_SAVES)}
