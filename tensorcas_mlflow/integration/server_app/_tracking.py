"""Experiments, names and owners in MLflow's databases. It answers for everything: `_access` decides who sees what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

_BATCH = 500
"""Identifiers in one query; SQLite takes some 30,000 parameters, others fewer."""


class Named(NamedTuple):
    """A run or a logged model."""

    id: str
    name: str
    experiment_id: str
    is_deleted: bool
    source_run_id: str | None = None
    """The run that logged a model."""


def find_runs(ids: Iterable[str]) -> dict[str, Named]:
    """Find runs by id, deleted ones too; unknown ones are left out."""
    from mlflow.store.tracking.dbmodels.models import SqlRun

    columns = (SqlRun.run_uuid, SqlRun.name, SqlRun.experiment_id, SqlRun.lifecycle_stage)
    return {
        run_id: Named(run_id, name or run_id, str(experiment_id), stage == "deleted")
        for run_id, name, experiment_id, stage in _rows_of(columns, SqlRun.run_uuid, ids)
    }


def find_models(ids: Iterable[str]) -> dict[str, Named]:
    """Find logged models by id; unknown ones are left out."""
    from mlflow.store.tracking.dbmodels.models import SqlLoggedModel

    columns = (
        SqlLoggedModel.model_id,
        SqlLoggedModel.name,
        SqlLoggedModel.experiment_id,
        SqlLoggedModel.lifecycle_stage,
        SqlLoggedModel.source_run_id,
    )
    return {
        model_id: Named(model_id, name or model_id, str(experiment_id), stage == "deleted", run_id)
        for model_id, name, experiment_id, stage, run_id in _rows_of(columns, SqlLoggedModel.model_id, ids)
    }


def _rows_of(columns: Sequence[Any], key: Any, ids: Iterable[str]) -> Iterator[Any]:
    waiting = iter(sorted(set(ids)))
    while some := list(islice(waiting, _BATCH)):
        with _tracking_store().ManagedSessionMaker() as session:
            yield from session.query(*columns).filter(key.in_(some)).all()


def _tracking_store() -> Any:
    from mlflow.server.handlers import _get_tracking_store

    return _get_tracking_store()
