"""Runs by id, URI or object, and their artifact roots."""

from __future__ import annotations

import re
from dataclasses import dataclass

import mlflow
from mlflow.entities import Run, RunInfo
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode
from mlflow.tracking import MlflowClient

from tensorcas_mlflow.errors import NotFoundError

_MAX_KNOWN = 1024
_RUN_URI = re.compile(r"runs:/+(?P<run_id>[^/]+)/?")

_known: dict[tuple[str, str], RunRoot] = {}
"""Runs that were asked for by id. A run's artifact root never changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRoot:
    """A run and its artifact root."""

    run_id: str
    artifact_uri: str


def run_to_write(run_id: str | Run | None) -> RunRoot:
    """Find a run to log to: the one named, else the active one, else, as everywhere in MLflow, a new active one."""
    if run_id is not None:
        return _named(run_id)
    run = mlflow.active_run() or mlflow.start_run()
    return RunRoot(run_id=run.info.run_id, artifact_uri=run.info.artifact_uri)


def run_to_read(run_id: str | Run | None) -> RunRoot:
    """Find a run to read from: the one named, else the active one, else the last that was active in this process.

    Raises:
        NotFoundError: There is none.
    """
    if run_id is not None:
        return _named(run_id)
    run = mlflow.active_run() or mlflow.last_active_run()
    if run is None:
        raise NotFoundError("no run is active: name the one that is meant")
    return RunRoot(run_id=run.info.run_id, artifact_uri=run.info.artifact_uri)


def run_id_of(run: object) -> str:
    """Give the id of a run: a `mlflow.entities.Run` or its info, ``runs:/<id>``, or the id itself.

    Raises:
        TypeError: It is none of these.
    """
    if isinstance(run, Run):
        run = run.info
    if isinstance(run, RunInfo):
        run = run.run_id
    if not isinstance(run, str):
        raise TypeError(f"a run is named by its id, such as mlflow.active_run().info.run_id, and not by {run!r:.200}")
    uri = _RUN_URI.fullmatch(run)
    return run if uri is None else uri["run_id"]


def _named(run: object) -> RunRoot:
    run_id = run_id_of(run)
    active = mlflow.active_run()
    if active is not None and active.info.run_id == run_id:
        return RunRoot(run_id=run_id, artifact_uri=active.info.artifact_uri)
    key = (mlflow.get_tracking_uri(), run_id)
    if key not in _known:
        try:
            info = MlflowClient().get_run(run_id).info
        except MlflowException as error:
            if error.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                raise NotFoundError(error.message) from error
            raise
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[key] = RunRoot(run_id=info.run_id, artifact_uri=info.artifact_uri)
    return _known[key]
