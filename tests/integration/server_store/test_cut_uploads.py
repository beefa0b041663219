"""Clients that die within an upload, at a stock server under gunicorn, which keeps what has come of it."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from mlflow.exceptions import MlflowException

from tensorcas_mlflow.integration.checkpoints import Keep, _store_series
from tensorcas_mlflow.integration.server_store import UnreachableError, _open
from tensorcas_mlflow.integration.server_store._shelf import ArtifactShelf
from tensorcas_mlflow.layout._records import record_bytes
from tensorcas_mlflow.maintenance import verify
from tests.deploy.test_uploads import half_an_upload
from tests.integration.server_store.conftest import Experiment

pytestmark = pytest.mark.long

REF = record_bytes({"format": 1, "kind": "checkpoint", "manifest": "0" * 64})
"""Blob of an upload whose client dies."""
LAST_BYTE = b"{"
"""Half of it is nothing, which is what is left where a client dies between the head of its request and the body."""


@pytest.fixture(autouse=True)
def _forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_store_series, "_told", set())


@pytest.fixture(params=[REF, LAST_BYTE], ids=["half", "empty"])
def cut_data(request: pytest.FixtureRequest) -> bytes:
    """Return the blob whose first half is sent."""
    data: bytes = request.param
    return data


def state_of(value: int) -> dict[str, Any]:
    return {"w": np.arange(20_000.0) + value, "value": value}


def log(step: int, value: int | None = None, **options: Any) -> Any:
    state = state_of(step if value is None else value)
    return mlflow.tensorcas.log_checkpoint(state, step=step, log_metrics=False, **options)


def value_at(step: int | None = None) -> Any:
    state = mlflow.tensorcas.load_checkpoint(step=step)
    assert (state["w"] == state_of(state["value"])["w"]).all()
    return state["value"]


def steps() -> list[int]:
    return [record.step for record in mlflow.tensorcas.list_checkpoints()]


def cut(experiment: Experiment, key: str, data: bytes) -> Path:
    """Announce a blob of the store and send half of it; the file that the server has made of it."""
    file = experiment.folder / ".tensorcas" / key
    before = file.stat().st_ino if file.exists() else None
    with half_an_upload(experiment.server, f"{experiment.id}/.tensorcas/{key}", data):
        pass
    give_up = time.monotonic() + 20
    while not file.exists() or file.stat().st_ino == before:
        assert time.monotonic() < give_up, experiment.server.log[-2000:]
        time.sleep(0.02)
    assert file.stat().st_size == len(data) // 2 < len(data)
    return file


def cut_step(experiment: Experiment, run: mlflow.ActiveRun, step: int, data: bytes) -> None:
    cut(experiment, f"refs/runs/{run.info.run_id}/checkpoint/@{step}", data)


def die_while_replacing(experiment: Experiment, step: int, value: int, data: bytes) -> None:
    """Save a step again, and break off when its ref is put in the place of the old one."""
    real = ArtifactShelf.put

    def put(shelf: ArtifactShelf, path: str, file: Path) -> None:
        if path.startswith("refs/runs/"):
            cut(experiment, path, data)
            raise UnreachableError("write", path, "the process died")
        real(shelf, path, file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArtifactShelf, "put", put)
        with pytest.raises(MlflowException):
            log(step, value, overwrite=True)


def test_a_step_that_was_cut_short_bars_no_other(
    carried_by_gunicorn: Experiment, cut_data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with mlflow.start_run() as run:
        log(1)
        cut_step(carried_by_gunicorn, run, 2, cut_data)
        with caplog.at_level(logging.WARNING, "tensorcas_mlflow"):
            listed = [steps(), steps()]
        latest = value_at()
        log(3)

    told = [record.message for record in caplog.records if f"{run.info.run_id}/checkpoint/@2" in record.message]
    assert listed == [[1], [1]]
    assert len(told) == 1
    assert latest == 1
    assert (value_at(1), value_at(3)) == (1, 3)


def test_a_step_that_was_cut_short_says_what_it_is(carried_by_gunicorn: Experiment) -> None:
    with mlflow.start_run() as run:
        log(1)
        cut_step(carried_by_gunicorn, run, 2, REF)

        with pytest.raises(MlflowException, match=r"its save has died .* overwrite=True") as caught:
            value_at(2)
    assert caught.value.error_code == "BAD_REQUEST"


def test_a_step_that_was_cut_short_can_be_deleted(carried_by_gunicorn: Experiment, cut_data: bytes) -> None:
    with mlflow.start_run() as run:
        log(1)
        cut_step(carried_by_gunicorn, run, 2, cut_data)
        mlflow.tensorcas.delete_checkpoint(step=2)
        log(2, 22)

        assert (steps(), value_at(2)) == ([1, 2], 22)
    assert verify(carried_by_gunicorn.store(), full=True).problems == ()


def test_a_step_that_was_cut_short_can_be_saved_again(carried_by_gunicorn: Experiment) -> None:
    with mlflow.start_run() as run:
        log(1)
        cut_step(carried_by_gunicorn, run, 2, REF)
        with pytest.raises(MlflowException, match="already a checkpoint"):
            log(2, 22)
        log(2, 22, overwrite=True)

        assert (steps(), value_at(2)) == ([1, 2], 22)
    assert verify(carried_by_gunicorn.store(), full=True).problems == ()


def test_an_empty_step_takes_no_place_among_those_that_a_rule_keeps(carried_by_gunicorn: Experiment) -> None:
    with mlflow.start_run() as run:
        log(1)
        cut_step(carried_by_gunicorn, run, 2, b"{")
        log(3, keep=Keep(last=2))

        assert steps() == [1, 3]


def test_a_step_whose_replacing_was_cut_short_is_what_was_to_take_its_place(
    carried_by_gunicorn: Experiment, cut_data: bytes
) -> None:
    with mlflow.start_run():
        log(1)
        log(2)
        die_while_replacing(carried_by_gunicorn, 2, 22, cut_data)

        assert steps() == [1, 2]
        assert (value_at(2), value_at()) == (22, 22)


def test_the_only_step_of_a_series_is_found_where_its_replacing_was_cut_short(carried_by_gunicorn: Experiment) -> None:
    with mlflow.start_run():
        log(2)
        die_while_replacing(carried_by_gunicorn, 2, 22, REF)

        assert [(record.name, record.step) for record in mlflow.tensorcas.list_checkpoints()] == [("checkpoint", 2)]


def test_nothing_of_a_step_whose_replacing_was_cut_short_comes_back_once_it_is_deleted(
    carried_by_gunicorn: Experiment,
) -> None:
    with mlflow.start_run() as run:
        log(1)
        log(2)
        die_while_replacing(carried_by_gunicorn, 2, 22, REF)
        mlflow.tensorcas.delete_checkpoint(step=2)
        cut_step(carried_by_gunicorn, run, 2, REF)

        assert steps() == [1]
        assert value_at() == 1


@pytest.mark.parametrize(
    "key", ["index/{}.segment", "packs/{}.pack", "manifests/{0}{0}.01234567", "intents/{}"], ids=lambda key: key[:5]
)
def test_blobs_cut_short_by_a_failed_upload_bar_no_save(
    carried_by_gunicorn: Experiment, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mlflow.start_run():
        log(1)
        cut(carried_by_gunicorn, key.format("a" * 32), REF)
        monkeypatch.setattr(_open, "_roots", {})  # as a new process
        log(2)

        assert (steps(), value_at(1), value_at(2)) == ([1, 2], 1, 2)


def test_a_store_whose_making_was_cut_short_is_made(carried_by_gunicorn: Experiment) -> None:
    cut(carried_by_gunicorn, "format", b"{")
    with mlflow.start_run():
        assert steps() == []
        log(1)

        assert value_at() == 1
