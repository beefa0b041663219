"""The recorder that all callbacks share."""

from __future__ import annotations

import logging
from pathlib import Path

import mlflow
import numpy as np
import pytest

from tensorcas_mlflow.callbacks._common import Recorder
from tensorcas_mlflow.errors import CheckpointExistsError
from tensorcas_mlflow.integration.checkpoints import Keep


def state(step: int) -> dict[str, np.ndarray]:
    return {"weights": np.full(8, step, dtype=np.float32)}


def recorder_of_best() -> Recorder:
    recorder = Recorder(keep=Keep(last=1, best="loss", n_best=50), log_metrics=False)
    recorder.begin()
    return recorder


@pytest.mark.usefixtures("store_of_files")
def test_save_by_the_best_metric_reads_no_ref_of_another_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with mlflow.start_run():
        recorder = recorder_of_best()
        for step in range(3):
            recorder.save(state(step), step, {"loss": 1 / (1 + step)})
        [ref] = (tmp_path / "artifacts/.tensorcas/refs").rglob("@*00000001*")
        ref.write_bytes(b"damaged")

        with caplog.at_level(logging.WARNING):
            recorder.save(state(3), 3, {"loss": 0.1})

    assert "step 1" not in caplog.text


def test_metric_of_a_logged_step_is_not_replaced_by_that_of_a_refused_state() -> None:
    with mlflow.start_run() as run:
        recorder = recorder_of_best()
        recorder.save(state(0), 0, {"loss": 1.0})
        recorder.begin()
        with pytest.raises(CheckpointExistsError):
            recorder.save(state(0), 0, {"loss": 0.5})

    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [metric.value for metric in history] == [1.0]


def test_run_of_a_training_that_was_broken_off_is_ended_when_the_next_one_begins() -> None:
    recorder = Recorder()
    recorder.begin()
    recorder.save(state(0), 0, {})
    broken_off = str(recorder.run_id)
    recorder.begin()

    assert mlflow.active_run() is None
    assert mlflow.get_run(broken_off).info.status == "FAILED"


def test_run_of_a_failed_last_save_does_not_count_as_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(blocking=False)
    recorder.begin()
    recorder.save(state(0), 0, {})
    run_id = str(recorder.run_id)
    assert recorder._pending is not None
    recorder._pending.wait()

    def fail(*args: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(type(recorder._pending), "wait", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        recorder.finish()

    assert mlflow.active_run() is None
    assert mlflow.get_run(run_id).info.status == "FAILED"


def test_run_that_the_program_started_stays_open() -> None:
    recorder = Recorder()
    with mlflow.start_run():
        recorder.begin()
        recorder.save(state(0), 0, {})
        recorder.finish()

        assert mlflow.active_run() is not None
