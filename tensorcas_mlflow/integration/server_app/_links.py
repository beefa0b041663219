"""Links to our pages in the descriptions of runs and model versions, for servers that ask for them."""

from __future__ import annotations

import logging
from typing import Any
from urllib.parse import urlencode

from tensorcas_mlflow.errors import TensorCasError
from tensorcas_mlflow.integration.server_app._catalog import Place
from tensorcas_mlflow.integration.server_app._survey import owner_of_ref

_log = logging.getLogger(__name__)

NOTE = "mlflow.note.content"
"""Tag of a run with its description."""
_MOST = 500
"""Descriptions that one look adds."""
_seen: set[str] = set()


def add_links(place: Place) -> int:
    """Add a link to the description of each run in a store, and of each model version from one, that has none yet.

    A description that somebody has written stays as it is. Returns the number of descriptions added.
    """
    try:
        refs, _ = place.store.readable_checkpoints()
    except TensorCasError as error:
        _log.warning("no links are added for %s: %s", place.store.uri, error)
        return 0
    run_ids = dict.fromkeys(run_id for ref in refs if (run_id := owner_of_ref(ref).run_id) is not None)
    n_added = 0
    for run_id in run_ids:
        if run_id not in _seen and n_added < _MOST:
            n_added += _describe_run(run_id) + _describe_versions(run_id)
            _seen.add(run_id)
    return n_added


def link_text(run_id: str) -> str:
    """Return the description: a link relative to MLflow's page, so it holds under any host and prefix."""
    return f"[Checkpoints, bytes and lineage](tensorcas/run?{urlencode({'id': run_id})})"


def _describe_run(run_id: str) -> int:
    from mlflow.entities import RunTag
    from mlflow.exceptions import MlflowException
    from mlflow.server.handlers import _get_tracking_store

    tracking: Any = _get_tracking_store()
    try:
        run = tracking.get_run(run_id)
        if run.info.lifecycle_stage != "active" or run.data.tags.get(NOTE):
            return 0
        tracking.set_tag(run_id, RunTag(NOTE, link_text(run_id)))
    except MlflowException:
        return 0  # it is gone, or of another server
    return 1


def _describe_versions(run_id: str) -> int:
    from mlflow.exceptions import MlflowException
    from mlflow.server.handlers import _get_model_registry_store

    registry: Any = _get_model_registry_store()
    n_added = 0
    try:
        for version in registry.search_model_versions(f"run_id = '{run_id}'", max_results=100):
            if not version.description:
                registry.update_model_version(version.name, version.version, description=link_text(run_id))
                n_added += 1
    except MlflowException as error:
        _log.warning("no link was added to the model versions of run %s: %s", run_id, error)
    return n_added
