"""Listing and deleting checkpoints of a run."""

from __future__ import annotations

from dataclasses import dataclass

from mlflow.entities import Run

from tensorcas_mlflow import config
from tensorcas_mlflow._mlflow_errors import translate_errors
from tensorcas_mlflow._steps import DEFAULT_NAME, as_step
from tensorcas_mlflow.checkpoints._background import saves
from tensorcas_mlflow.checkpoints._find import all_series_of, series_of
from tensorcas_mlflow.checkpoints._runs import run_to_read
from tensorcas_mlflow.errors import StoreNotFoundError


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """An entry of `list_checkpoints`: one checkpoint, without its content."""

    run_id: str
    name: str
    step: int
    uri: str
    """``runs:/<run>/checkpoints/<name>/step-…``; `load_checkpoint` takes it."""
    created: str | None
    """ISO 8601, UTC. None where a server keeps it as a file."""
    flavor: str | None
    """The adapter that saved it. None where a server keeps it as a file."""


@translate_errors()
def list_checkpoints(run_id: str | Run | None = None, *, name: str | None = None) -> list[CheckpointRecord]:
    """List the checkpoints of a run, by name and step. Nothing of them is read.

    Errors are also `mlflow.exceptions.MlflowException`.

    Args:
        run_id: The run: its id, ``runs:/<id>`` or a `mlflow.entities.Run`. By default the active run, else the last one
            that was active in this process.
        name: The series of checkpoints; by default all series.

    Returns:
        The checkpoints, ascending by name, then by step.

    Raises:
        NotFoundError: There is no such run, or TENSORCAS_STORE names a place without a store.
        BackendError: The storage failed.
        TensorCasError: An earlier save in the background failed, and no call has raised its error yet.
    """
    saves.wait()
    try:
        return _records(run_id, name)
    except StoreNotFoundError:
        if config.store_uri() is not None:
            raise  # the checkpoints may be in the store that was meant
        return []


@translate_errors()
def list_before_logging(run_id: str | Run | None, name: str | None = None) -> list[CheckpointRecord]:
    """List checkpoints as `list_checkpoints` does, but none where logging is going to make the store."""
    saves.wait()
    try:
        return _records(run_id, name)
    except StoreNotFoundError:
        return []


def _records(run_id: str | Run | None, name: str | None) -> list[CheckpointRecord]:
    run = run_to_read(run_id)
    every_series = all_series_of(run) if name is None else [series_of(run, name)]
    return [
        CheckpointRecord(
            run_id=run.run_id,
            name=series.name,
            step=checkpoint.step,
            uri=series.uri(checkpoint.step),
            created=checkpoint.created,
            flavor=checkpoint.flavor,
        )
        for series in every_series
        for checkpoint in series.checkpoints()
    ]


@translate_errors()
def delete_checkpoint(run_id: str | Run | None = None, *, step: int, name: str = DEFAULT_NAME) -> bool:
    """Delete a checkpoint of a run. The next collection (``tensorcas gc``) frees the bytes that only it needed.

    Errors are also `mlflow.exceptions.MlflowException`.

    Args:
        run_id: The run: its id, ``runs:/<id>`` or a `mlflow.entities.Run`. By default the active run, else the last one
            that was active in this process.
        step: The step of the checkpoint.
        name: The series of checkpoints.

    Returns:
        Whether there was such a checkpoint.

    Raises:
        NotFoundError: There is no such run or store.
        BackendError: The storage failed.
        TensorCasError: An earlier save in the background failed, and no call has raised its error yet.
    """
    saves.wait()
    checkpoint = series_of(run_to_read(run_id), name).find(as_step(step))
    if checkpoint is None:
        return False
    checkpoint.drop()
    return True
