"""Checkpoints and files of a run that are derived from checkpoints of another run."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import mlflow
import numpy as np
import pytest
import safetensors.numpy

from tensorcas_mlflow.store import Store
from tests.derived.made import as_bfloat16, gguf_file, model, n_bytes, renamed, tuned
from tests.integration.checkpoints.states import load, log, store_below


def size_of(store: Store) -> int:
    return n_bytes(Store.open_backend(store.backend))


def test_bfloat16_checkpoint_of_a_float32_run_takes_little(experiment: str, tmp_path: Path) -> None:
    with mlflow.start_run():
        log(model(0), 0)
    before = size_of(store_below(tmp_path))
    with mlflow.start_run():
        log(as_bfloat16(model(0)), 0, name="export")
        found = load(step=0, name="export")
    taken = size_of(store_below(tmp_path)) - before

    assert taken < 0.01 * sum(array.nbytes for array in as_bfloat16(model(0)).values())
    for name, array in as_bfloat16(model(0)).items():
        assert found[name].dtype == ml_dtypes.bfloat16
        assert found[name].tobytes() == array.tobytes()


@pytest.mark.long
def test_steps_of_a_series_after_a_derived_one_load(experiment: str) -> None:
    with mlflow.start_run():
        log(model(0), 0)
    states = [as_bfloat16(model(0)), as_bfloat16(tuned(model(0), 1)), as_bfloat16(tuned(model(0), 2))]
    with mlflow.start_run():
        for step, state in enumerate(states):
            log(state, step, name="export")
        found = [load(step=step, name="export") for step in range(len(states))]

    for state, loaded in zip(states, found, strict=True):
        assert all(loaded[name].tobytes() == array.tobytes() for name, array in state.items())


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_artifact_of_logged_weights_takes_little(experiment: str, tmp_path: Path, kind: str) -> None:
    with mlflow.start_run():
        log(model(0), 0)
    data = gguf_file(renamed(model(0))) if kind == "gguf" else safetensors.numpy.save(renamed(as_bfloat16(model(0))))
    file = tmp_path / f"model.{kind}"
    file.write_bytes(data)
    before = size_of(store_below(tmp_path))
    with mlflow.start_run() as run:
        mlflow.log_artifact(file)
        back = mlflow.artifacts.download_artifacts(
            run_id=run.info.run_id, artifact_path=file.name, dst_path=str(tmp_path / "out")
        )
    taken = size_of(store_below(tmp_path)) - before

    assert Path(back).read_bytes() == data
    assert taken < 0.02 * len(data)


def test_background_checkpoints_of_a_derived_series_load(experiment: str) -> None:
    with mlflow.start_run():
        log(model(0), 0)
    states = [as_bfloat16(model(0))]
    for step in range(1, 4):
        states.append({name: array.copy() for name, array in states[-1].items()})
        states[-1]["embed.weight"][step, :100] += np.float32(1)
    with mlflow.start_run():
        for step, state in enumerate(states):
            log(state, step, name="export", blocking=False)
        mlflow.tensorcas.wait()
        found = [load(step=step, name="export") for step in range(len(states))]

    for state, loaded in zip(states, found, strict=True):
        assert all(loaded[name].tobytes() == array.tobytes() for name, array in state.items())
