"""Servers started as the documentation says, with our pages: uvicorn and gunicorn, with a prefix, and basic-auth."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import requests

from tests.deploy.servers import GUNICORN, UVICORN, Server, serve

ADMIN = ("admin", "a long password 1")


@pytest.fixture(scope="module", params=["uvicorn", "gunicorn"])
def server(
    request: pytest.FixtureRequest, new_server_folder: Callable[[], Path], postgresql_uri: str
) -> Iterator[Server]:
    """A server with our pages, two workers and a schedule: uvicorn with PostgreSQL, gunicorn with SQLite."""
    folder = new_server_folder()
    options = ["--app-name", "tensorcas", "--artifacts-destination", f"tensorcas://{folder}/artifacts"]
    options += UVICORN if request.param == "uvicorn" else GUNICORN
    uri = postgresql_uri if request.param == "uvicorn" else None
    settings = {"TENSORCAS_MAINTENANCE": "verify=100d"}
    with serve(folder, tuple(options), backend_store_uri=uri, settings=settings) as server:
        yield server


def get_json(server: Server, page: str, **kwargs: Any) -> Any:
    """Get the content of a page, once its figures are there."""
    give_up = time.monotonic() + 60
    while True:
        answer = server.request("GET", f"tensorcas/{page}", headers={"Accept": "application/json"}, **kwargs)
        assert answer.status_code == 200, answer.text
        if not answer.json()["is_pending"] or time.monotonic() > give_up:
            return answer.json()
        time.sleep(0.2)


def log(server: Server, experiment: str, n_steps: int) -> str:
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(server.uri)
    try:
        experiment_id = mlflow.create_experiment(experiment)
        with mlflow.start_run(experiment_id=experiment_id, run_name="training") as run:
            for step in range(n_steps):
                mlflow.tensorcas.log_checkpoint({"w": np.full((64, 64), step, np.float32)}, step=step)
            mlflow.tensorcas.wait()
            return str(run.info.run_id)
    finally:
        mlflow.set_tracking_uri(before)


def wait_for(look: Callable[[], Any]) -> Any:
    give_up = time.monotonic() + 120
    while not (found := look()) and time.monotonic() < give_up:
        time.sleep(0.5)
    return found


@pytest.mark.long
def test_pages_and_mlflow_are_served_side_by_side_and_the_schedule_runs_once(server: Server) -> None:
    """Both kinds of servers; the same code is tested without processes on every change."""
    run_id = log(server, "pages", 2)

    assert "MLflow" in server.get("").text
    shown = get_json(server, f"run?id={run_id}")
    assert [each["step"] for each in shown["refs"] if each["step"] is not None] == [1, 0]
    page = server.get(f"tensorcas/run?id={run_id}")
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert requests.get(f"{server.uri}/tensorcas/", headers={"Host": "evil.example"}, timeout=20).status_code == 403

    def rounds() -> Any:
        # The server keeps what it saw for a minute.
        from tensorcas_mlflow.maintenance import read_rounds

        return read_rounds(server.backend)

    found = wait_for(rounds)
    time.sleep(2)
    assert [(each.action, each.outcome) for each in rounds()] == [("verify", "done")]
    assert found


@pytest.mark.long
def test_static_prefix_leads_to_the_pages(new_server_folder: Callable[[], Path]) -> None:
    """One more start of a server."""
    folder = new_server_folder()
    options = ("--app-name", "tensorcas", "--static-prefix", "/team", "--workers", "1")
    with serve(folder, options) as server:
        answer = server.get("team/tensorcas/")

        assert answer.status_code == 200
        assert 'href="/team/tensorcas/style.css"' in answer.text
        assert server.get("team/tensorcas/style.css").headers["Content-Type"].startswith("text/css")
        assert server.get("tensorcas/").status_code == 404


@pytest.mark.long
def test_basic_auth_guards_the_pages_of_a_server(new_server_folder: Callable[[], Path]) -> None:
    """The rules are tested without a process on every change."""
    folder = new_server_folder()
    (folder / "auth.ini").write_text(
        f"[mlflow]\ndefault_permission = NO_PERMISSIONS\ndatabase_uri = sqlite:///{folder}/auth.db\n"
        f"admin_username = {ADMIN[0]}\nadmin_password = {ADMIN[1]}\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    settings = {"MLFLOW_AUTH_CONFIG_PATH": str(folder / "auth.ini"), "MLFLOW_FLASK_SERVER_SECRET_KEY": "secret"}
    options = ("--app-name", "tensorcas-basic-auth", "--artifacts-destination", f"tensorcas://{folder}/artifacts")
    with serve(folder, (*options, *UVICORN), settings=settings) as server:
        assert server.get("tensorcas/").status_code == 401
        assert server.get_as(ADMIN, "tensorcas/").status_code == 200
        asked = {"username": "ann", "password": "a long password 2"}
        assert server.request("POST", "api/2.0/mlflow/users/create", json=asked, auth=ADMIN).ok
        ann = ("ann", "a long password 2")
        assert get_json(server, "", auth=ann)["experiments"] == []
        assert server.request("POST", "tensorcas/maintenance", auth=ann).status_code == 403
