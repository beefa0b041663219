"""A run as MLflow knows it, and links from a page to MLflow's UI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, urlsplit

from tensorcas_mlflow.base import config

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

_MOST_METRICS = 4
_MOST_VERSIONS = 20
_STORAGE_METRICS = ("tensorcas/", "system/")
"""Beginnings of the names of metrics that say nothing of the model."""


class RunFacts(NamedTuple):
    """A run as MLflow knows it. A field that is not known is empty."""

    run_id: str = ""
    name: str = ""
    experiment_id: str = ""
    metrics: Mapping[str, Sequence[tuple[int, float]]] = {}
    """Steps and values of some metrics, the chosen one first."""
    versions: Sequence[tuple[str, str, str]] = ()
    """Registered versions: name, version, and the id of the logged model, if it is one."""
    ui: str = ""
    """URL of MLflow's UI, without a slash at its end; of its host, only this process may know the name."""

    @property
    def label(self) -> str:
        """A name of the run for people."""
        return self.name or (f"run {self.run_id}" if self.run_id else "")

    @property
    def prefix(self) -> str:
        """The path of MLflow's UI on its host, without a slash at its end."""
        return urlsplit(self.ui).path

    def to(self, *path: str) -> str:
        """Return the address of a page of MLflow's UI below its root, from segments of its path."""
        return f"/#/{'/'.join(quote(each, safe='/') for each in path)}"

    def to_run(self, *below: str) -> str:
        """Return the address of the run's page, or of one below it."""
        return self.to("experiments", self.experiment_id, "runs", self.run_id, *below)


def run_facts(client: MlflowClient, run_id: str, *, metric: str | None = None, ui: str = "") -> RunFacts:
    """Ask MLflow for a run and the history of some of its metrics.

    Args:
        client: A client of its tracking store.
        run_id: The run.
        metric: Its metric of choice; by default the first one by name.
        ui: URL of MLflow's UI, if known.

    Raises:
        MlflowException: There is no such run, or the tracking store cannot be reached.
    """
    run = client.get_run(run_id)
    names = sorted(name for name in run.data.metrics if not name.startswith(_STORAGE_METRICS))
    names = [name for name in names if name == metric] + [name for name in names if name != metric]
    histories = {name: client.get_metric_history(run_id, name) for name in names[:_MOST_METRICS]}
    return RunFacts(
        run_id=run_id,
        name=run.info.run_name or "",
        experiment_id=run.info.experiment_id,
        metrics={
            name: [(each.step, each.value) for each in sorted(history, key=lambda each: (each.step, each.timestamp))]
            for name, history in histories.items()
        },
        ui=ui or _ui_at(str(getattr(client, "tracking_uri", ""))),
    )


def run_facts_here(run_id: str | None) -> RunFacts:
    """Ask the tracking store of this process, or of this process's server, for a run; empty if it does not answer."""
    if not run_id:
        return RunFacts()
    facts = RunFacts(run_id=run_id)
    # A page without the run's name is better than no page, and a tracking store may fail in its own ways.
    with suppress(Exception):
        client = _client_here()
        if client is not None:
            facts = run_facts(client, run_id, ui=config.server_prefix())
            facts = facts._replace(versions=_versions(client, run_id))
    return facts


def _client_here() -> MlflowClient | None:
    import mlflow
    from mlflow.tracking import MlflowClient

    if config.in_mlflow_server():
        stores = config.server_stores()
        return None if stores is None else MlflowClient(*stores)
    # The default tracking store would be made in the working directory.
    return MlflowClient() if mlflow.is_tracking_uri_set() else None


def _versions(client: MlflowClient, run_id: str) -> list[tuple[str, str, str]]:
    """Return the registered versions of a run's models.

    A server with logins gives access to registered models one by one, so it names none.
    """
    import sys

    if config.in_mlflow_server() and "mlflow.server.auth" in sys.modules:
        return []
    found = client.search_model_versions(f"run_id = '{run_id}'", max_results=_MOST_VERSIONS)
    # A version registered while its model is logged knows the model by its source alone.
    return [
        (each.name, str(each.version), each.model_id or (each.source or "").removeprefix("models:/")) for each in found
    ]


def _ui_at(tracking_uri: str) -> str:
    """Return the URL of the UI of a tracking server, without a login; "" for other tracking stores."""
    parts = urlsplit(tracking_uri)
    if parts.scheme not in ("http", "https"):
        return ""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
