"""Checkpoints in MLflow's UI: a copy of the manifest among the run's artifacts, and figures as metrics.

Where our repository serves the artifacts the ref is what is shown, and there is nothing to copy. A copy keeps nothing
alive, so losing one loses nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import posixpath
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mlflow.entities import Metric
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.tracking import MlflowClient

from tensorcas_mlflow.backends import Root, is_ours
from tensorcas_mlflow.base.files import sync_folder
from tensorcas_mlflow.base.text import without_secrets
from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.errors import BackendError
from tensorcas_mlflow.integration._home import as_lookup
from tensorcas_mlflow.integration.checkpoints._background import reports
from tensorcas_mlflow.integration.checkpoints._series import FOLDER
from tensorcas_mlflow.integration.server_store import is_carrier_uri, shelf_at
from tensorcas_mlflow.layout import Manifest

if TYPE_CHECKING:
    from tensorcas_mlflow.integration.checkpoints._store_series import StoreSeries

_logger = logging.getLogger(__name__)


_MAX_FAILURES = 3
_failures: dict[str, int] = {}
"""Uploads in a row that have failed, by artifact root: one that does not answer costs minutes each time."""

_figures: dict[tuple[str, str], list[Metric]] = {}
"""Metrics not yet logged, by tracking store and run."""
_lock = Lock()


def prepare(series: StoreSeries, step: int, manifest: Manifest) -> bool:
    """Make the folder in which MLflow keeps the run's artifacts, before a checkpoint is committed.

    That it is gone again is how a collection knows that MLflow has deleted the run. So it is looked for at every save:
    the run may be deleted while a process saves into it.

    Returns:
        Whether the step is shown already: behind a server, a folder is only made by a file in it.

    Raises:
        BackendError: It cannot be made.
        ConflictError: A file of the user's has the name of the step.
    """
    root = series.run.artifact_uri
    if is_carrier_uri(root) and series.home.path is not None:
        is_there = bool(shelf_at(root, "").entries(""))
        if not is_there:
            _put_copy(series, step, manifest)
        return not is_there
    folder = _plain_folder(series)
    if _is_anothers(series, step):
        raise series.in_the_way(step)
    if folder is None or (folder in _prepared and os.path.isdir(folder)):
        return False
    try:
        os.makedirs(folder, exist_ok=True)
        # The name of the run's folder lies four folders up, in the experiment's.
        for above in (Path(folder), *Path(folder).parents[:4]):
            sync_folder(above)
    except OSError as error:
        raise BackendError("make", folder, f"{type(error).__name__}: {error}") from error
    if len(_prepared) >= _MAX_PREPARED:
        _prepared.clear()
    _prepared.add(folder)
    return False


def _is_anothers(series: StoreSeries, step: int) -> bool:
    """Tell whether a file of this machine has the artifact path of a step and is no copy of a manifest."""
    lookup = as_lookup(series.run.artifact_uri)
    if lookup is None or not (place := Root.parse(lookup)).is_local:
        return False
    try:
        with open(place.folder / series.artifact(step), "rb") as file:
            return not Manifest.looks_like(file.read(_HEAD_BYTES))
    except OSError:
        return False  # there is none, or the copy cannot be put there either


_HEAD_BYTES = 64 << 10

_MAX_PREPARED = 1024
_prepared: set[str] = set()
"""Local folders whose names are durable, up to that of the run."""


def _plain_folder(series: StoreSeries) -> str | None:
    """The folder in which MLflow keeps the copies of a series, if MLflow itself keeps them in a local one."""
    if is_ours(series.run.artifact_uri):
        return None
    lookup = as_lookup(series.run.artifact_uri)
    return None if lookup is None else os.path.join(lookup, FOLDER, series.name)


def show(series: StoreSeries, step: int, manifest: Manifest) -> None:
    """Give MLflow a copy of a manifest to show."""
    if series.home.is_ours:
        return
    folder = _plain_folder(series)
    if folder is None:
        reports.submit(lambda: _upload(series, step, manifest))
        return
    # MLflow passes over names like this in its listings.
    staging = os.path.join(folder, f".artifact.uploading.{uuid.uuid4().hex}")
    with _as_warning("a copy of a checkpoint's manifest cannot be shown"):
        with open(staging, "wb", buffering=0) as file:
            file.write(manifest.stream)
        os.replace(staging, os.path.join(folder, posixpath.basename(series.artifact(step))))


def hide(series: StoreSeries, step: int) -> None:
    """Take back the copy that MLflow shows of a step; none there is no error."""
    if series.home.is_ours:
        return
    folder = _plain_folder(series)
    if folder is None:
        # After the upload, which may be waiting still.
        reports.submit(lambda: _delete(series, step))
        return
    with _as_warning("a copy of a deleted checkpoint's manifest stays"):
        Path(folder, posixpath.basename(series.artifact(step))).unlink(missing_ok=True)


def log_figures(run_id: str, step: int, figures: Mapping[str, float], tracking_uri: str) -> None:
    """Log metrics of a step, later; those of several steps together, if the tracking store is slower than the steps."""
    metrics = [Metric(key, value, int(time.time() * 1000), step) for key, value in figures.items()]
    key = (tracking_uri, run_id)
    with _lock:
        waiting = _figures.setdefault(key, [])
        waiting += metrics
        is_first = len(waiting) == len(metrics)
    if is_first:
        reports.submit(lambda: _log_waiting(key))


def _log_waiting(key: tuple[str, str]) -> None:
    tracking_uri, run_id = key
    with _lock:
        metrics = _figures.pop(key, [])
    with _as_warning("figures of checkpoints cannot be logged"):
        client = MlflowClient(tracking_uri)
        for begin in range(0, len(metrics), _MAX_METRICS):
            client.log_batch(run_id, metrics=metrics[begin : begin + _MAX_METRICS])


_MAX_METRICS = 1000
"""What MLflow takes in one call."""


def _upload(series: StoreSeries, step: int, manifest: Manifest) -> None:
    root = series.run.artifact_uri
    if _failures.get(root, 0) >= _MAX_FAILURES:
        return
    _failures[root] = _failures.get(root, 0) + 1
    more = ", and no more are tried" if _failures[root] == _MAX_FAILURES else ""
    with _as_warning(f"a copy of a checkpoint's manifest cannot be shown{more}"):
        _put_copy(series, step, manifest)
        _failures[root] = 0


def _put_copy(series: StoreSeries, step: int, manifest: Manifest) -> None:
    artifact = series.artifact(step)
    with tempfile.TemporaryDirectory(prefix="tensorcas-") as scratch:
        file = Path(scratch, posixpath.basename(artifact))
        file.write_bytes(manifest.stream)
        shelf_at(series.run.artifact_uri, posixpath.dirname(artifact)).put(file.name, file)


def _delete(series: StoreSeries, step: int) -> None:
    with _as_warning("a copy of a deleted checkpoint's manifest stays"):
        get_artifact_repository(series.run.artifact_uri).delete_artifacts(series.artifact(step))


@contextlib.contextmanager
def _as_warning(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 -- MLflow's stores fail in their own ways, and nothing of ours is lost
        _logger.warning("%s: %s", what, without_secrets(str(error)))
