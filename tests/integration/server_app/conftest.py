"""Applications with MLflow's own handlers and our pages, in this process, and what two people have logged."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from flask import Flask
from flask.testing import FlaskClient
from mlflow.server import handlers
from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore as Registry
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore as Tracking

from tensorcas_mlflow.integration.server_app._app import add_pages
from tests.tracking import active_experiment, empty_database, no_stray_settings, tracking_uri

__all__ = ["empty_database", "no_stray_settings", "tracking_uri"]

State = dict[str, np.ndarray[Any, Any]]


@pytest.fixture
def location(tmp_path: Path) -> str:
    """The artifact location of all experiments: one store."""
    return f"tensorcas://{tmp_path}/store"


def make_app(tracking_uri: str, folder: Path, patch: pytest.MonkeyPatch) -> Flask:
    """Make MLflow's API over a database, without our pages."""
    patch.setattr(handlers, "_tracking_store", Tracking(tracking_uri, str(folder / "mlruns")))
    patch.setattr(handlers, "_model_registry_store", Registry(tracking_uri))
    app = Flask("test")
    for path, handler, methods in handlers.get_endpoints():
        app.add_url_rule(path, handler.__name__, handler, methods=methods)
    return app


@pytest.fixture
def flask_app(tracking_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Flask:
    """MLflow's API over the test's database, without our pages."""
    return make_app(tracking_uri, tmp_path, monkeypatch)


@pytest.fixture
def client(flask_app: Flask) -> FlaskClient:
    """A browser at a server with our pages."""
    add_pages(flask_app, has_auth=False)
    return flask_app.test_client()


@pytest.fixture
def log(tracking_uri: str, location: str) -> Callable[..., str]:
    """Log steps of a state into a run of an experiment; returns the run's id."""
    return partial(log_steps, location)


def log_steps(location: str, experiment: str, run: str, *states: State) -> str:
    known = mlflow.get_experiment_by_name(experiment)
    if known is None:
        with active_experiment(experiment, location):
            return log_steps(location, experiment, run, *states)
    with mlflow.start_run(experiment_id=known.experiment_id, run_name=run) as active:
        for step, state in enumerate(states):
            mlflow.tensorcas.log_checkpoint(state, step=step)
        mlflow.tensorcas.wait()
        return str(active.info.run_id)


def make_state(seed: int = 0, *, names: tuple[str, ...] = ("body.weight", "head.weight")) -> State:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal((64, 64)).astype(np.float32) for name in names}


def get(client: FlaskClient, page: str, *, status: int = 200, **kwargs: Any) -> str:
    """Get a page of ours, once its figures are there."""
    give_up = time.monotonic() + 30
    while True:
        answer = client.get(f"/tensorcas/{page}", **kwargs)
        assert answer.status_code == status, answer.text
        if "being computed" not in answer.text or time.monotonic() > give_up:
            return answer.text
        time.sleep(0.05)


def get_json(client: FlaskClient, page: str, **kwargs: Any) -> Any:
    """Get the content of a page as JSON, once its figures are there."""
    give_up = time.monotonic() + 30
    while True:
        answer = client.get(f"/tensorcas/{page}", headers={"Accept": "application/json"}, **kwargs)
        assert answer.status_code == 200, answer.text
        if not answer.get_json()["is_pending"] or time.monotonic() > give_up:
            return answer.get_json()
        time.sleep(0.05)
