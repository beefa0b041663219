"""Storage figures for MLflow: metrics of checkpoints, and tags of logged models and registered versions.

All of it is sent in the background (`_background`). A failure costs figures, never a checkpoint or a model.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache

from mlflow.entities import Metric
from mlflow.tracking import MlflowClient

from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.errors import without_secrets
from tensorcas_mlflow.integration._background import reports
from tensorcas_mlflow.layout import DEFAULT_NAME, Ref
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.store import Store, find_shared

_logger = logging.getLogger(__name__)

NEW_BYTES_TAG = "tensorcas.new_bytes"
"""Tag: size of the chunks that the store did not hold."""
STORED_BYTES_TAG = "tensorcas.stored_bytes"
"""Tag: growth of the store by the save."""
SHARES_WITH_TAG = "tensorcas.shares_with"
"""Tag: the runs and models that share most bytes with a model."""

FIGURES = "tensorcas"
"""First part of the names of metrics."""

_NO_METRIC = re.compile(r"[^A-Za-z0-9_. /-]")
"""Characters that MLflow refuses in a metric's name."""

_N_NAMED = 3
"""Number of runs and models that the tag names."""

_waiting: dict[tuple[str, str], list[Metric]] = {}
"""Metrics not yet logged, by tracking store and run."""
_lock = Lock()


@contextmanager
def as_warning(what: str) -> Iterator[None]:
    """Turn any error of a block into a warning: MLflow's stores fail in their own ways, and nothing of ours is lost."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 -- see the docstring
        _logger.warning("%s: %s", what, without_secrets(str(error)))


@lru_cache(maxsize=1024)
def figure_name(series: str, figure: str) -> str:
    """Return the name of the metric of a figure.

    Args:
        series: Part of the name that tells the series of a run apart; none for the default name or "".
        figure: The figure.
    """
    return f"{FIGURES}/" + ("" if series in ("", DEFAULT_NAME) else f"{_NO_METRIC.sub('_', series)}/") + figure


def log_figures(
    run_id: str,
    step: int,
    *,
    series: str,
    total_bytes: int,
    new_bytes: int,
    stored_bytes: int,
    tracking_uri: str,
) -> None:
    """Log the figures of a save as metrics of a step, later.

    If the tracking store is slower than the steps, several steps share one call. MLflow's work on a call competes with
    the training for the interpreter, so a pause follows each call.

    Args:
        run_id: The run.
        step: The step.
        series: Part of the metrics' names that tells the series of a run apart; may be empty.
        total_bytes: Size of the whole state.
        new_bytes: Size of the chunks that the store did not hold.
        stored_bytes: Growth of the store.
        tracking_uri: The tracking store.
    """
    figures = {
        "total_bytes": float(total_bytes),
        "new_bytes": float(new_bytes),
        "stored_bytes": float(stored_bytes),
        "saved_ratio": 1 - new_bytes / total_bytes if total_bytes else 1.0,
    }
    now_ms = int(time.time() * 1000)
    metrics = [Metric(figure_name(series, name), value, now_ms, step, run_id=run_id) for name, value in figures.items()]
    key = (tracking_uri, run_id)
    with _lock:
        waiting = _waiting.setdefault(key, [])
        waiting += metrics
        is_first = len(waiting) == len(metrics)
    if is_first:
        reports.submit(lambda: _log_waiting(key), begin_s=lambda: _next_figures_s)


def _log_waiting(key: tuple[str, str]) -> None:
    tracking_uri, run_id = key
    with _lock:
        metrics = _waiting.pop(key, [])
    began = time.monotonic()
    with as_warning("figures of checkpoints cannot be logged"):
        client = MlflowClient(tracking_uri)
        for begin in range(0, len(metrics), _MAX_METRICS):
            client.log_batch(run_id, metrics=metrics[begin : begin + _MAX_METRICS])
    global _next_figures_s
    ended = time.monotonic()
    _next_figures_s = ended + min(_PAUSE * (ended - began), _MAX_PAUSE_S)


_PAUSE = 4
"""Pause after a call for figures, in durations of the call."""
_MAX_PAUSE_S = 1.0
_next_figures_s = 0.0
"""Earliest begin of the next call for figures, by `time.monotonic`."""
_MAX_METRICS = 1000
"""MLflow's limit for one call."""


def tag_model_later(model_id: str, tags: Callable[[], Mapping[str, str]], tracking_uri: str) -> None:
    """Set tags of a logged model in one request, later.

    Args:
        model_id: The logged model.
        tags: Returns the tags; called in the background.
        tracking_uri: The tracking store.
    """

    def send() -> None:
        with as_warning("a logged model's tags cannot be set"):
            MlflowClient(tracking_uri).set_logged_model_tags(model_id, dict(tags()))

    reports.submit(send)


def model_tags(
    store: Store, manifest: Manifest, *, new_bytes: int, stored_bytes: int, model_id: str | None, until: datetime
) -> dict[str, str]:
    """Return the tags for a model.

    A logged model gets no metrics: MLflow reads the history of each metric of the run whenever it logs a model there.

    Args:
        store: Its store.
        manifest: Its manifest.
        new_bytes: Size of its chunks that the store did not hold.
        stored_bytes: Growth of the store.
        model_id: Its id; its own refs are not named.
        until: Refs of a later time are not named: the tags may be made long after the model.
    """
    tags = {NEW_BYTES_TAG: str(new_bytes), STORED_BYTES_TAG: str(stored_bytes)}
    with as_warning("the runs and models that share a model's bytes cannot be found"):
        most: dict[str, int] = {}
        for ref, n_bytes in find_shared(store, manifest):
            owner = _owner(ref)
            is_other = model_id is None or ref.model_id != model_id
            if owner is not None and is_other and ref.created_s <= until.timestamp():
                most[owner] = max(n_bytes, most.get(owner, 0))
        named = sorted(most.items(), key=lambda item: -item[1])[:_N_NAMED]
        if named:
            tags[SHARES_WITH_TAG] = ", ".join(f"{owner} ({n / manifest.n_bytes:.1%})" for owner, n in named)
    return tags


def _owner(ref: Ref) -> str | None:
    """Return the URI of the model or run that a ref belongs to."""
    if ref.model_id is not None:
        return f"models:/{ref.model_id}"
    return None if ref.run_id is None else f"runs:/{ref.run_id}"
