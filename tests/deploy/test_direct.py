"""Clients that reach the store themselves, of a server whose default artifact root is a store and that serves none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import mlflow
import pytest
import requests

from tests.deploy.calls import contents, fill, log_folder, new_experiment, new_run, root_of
from tests.deploy.clients import Client, client
from tests.deploy.models import round_trip_sklearn, round_trip_tensorcas, round_trip_xgboost
from tests.deploy.servers import ANSWER_S, START_S, UVICORN, Server, environment, free_port, serve

pytestmark = pytest.mark.long

DATA = b"\0" + bytes(range(256)) * 2000


@pytest.fixture(scope="module")
def server(new_server_folder: Callable[[], Path]) -> Iterator[Server]:
    folder = new_server_folder()
    root = f"tensorcas://{folder}/artifacts"
    with serve(folder, (*UVICORN, "--no-serve-artifacts", "--default-artifact-root", root)) as server:
        yield server


@pytest.fixture(scope="module")
def user(server: Server) -> Iterator[Client]:
    """A client where our package is installed."""
    with client(server.uri, plugin=True) as process:
        yield process


def test_the_server_shows_what_clients_put_into_the_store(server: Server, user: Client, tmp_path: Path) -> None:
    run_id = user(log_folder, fill(tmp_path, {"sub/weights.bin": DATA, "note.txt": b"text"}))

    # MLflow writes one slash for three.
    assert user(root_of, run_id).startswith(f"tensorcas:{server.store_root}/")
    listing = server.get("ajax-api/2.0/mlflow/artifacts/list", run_id=run_id, path="sub").json()
    assert [(file["path"], int(file["file_size"])) for file in listing["files"]] == [("sub/weights.bin", len(DATA))]
    assert server.get("get-artifact", run_id=run_id, path="sub/weights.bin").content == DATA
    assert server.get("get-artifact", run_id=run_id, path="note.txt").content == b"text"


def test_the_server_takes_no_uploads(server: Server, user: Client) -> None:
    run_id = user(new_run)

    assert server.proxied("PUT", f"1/{run_id}/artifacts/x.bin", data=DATA).status_code == 503
    assert not (server.folder / "mlartifacts").exists()


@pytest.mark.parametrize("round_trip", [round_trip_sklearn, round_trip_xgboost, round_trip_tensorcas])
def test_a_model_comes_back_as_it_was(user: Client, round_trip: Any) -> None:
    assert user(round_trip) == []


def log_line(flavor: str) -> str:
    """Log a model that answers 2 x + 1."""
    from sklearn.linear_model import LinearRegression

    model = LinearRegression().fit([[0.0], [1.0]], [1.0, 3.0])
    mlflow.set_experiment(experiment_id=new_experiment())
    with mlflow.start_run():
        return str(getattr(mlflow, flavor).log_model(model, name="line", pip_requirements=[]).model_uri)


def models_command(server: Server, *arguments: str) -> tuple[list[str], dict[str, str]]:
    command = [sys.executable, "-m", "mlflow", "models", *arguments, "--env-manager", "local"]
    return command, environment(plugin=True, MLFLOW_TRACKING_URI=server.uri)


@contextmanager
def scoring(server: Server, uri: str, folder: Path) -> Iterator[str]:
    """Run ``mlflow models serve`` for as long as the block lasts, and give its address."""
    port = free_port()
    command, env = models_command(server, "serve", "-m", uri, "--port", str(port), "--workers", "1")
    with (folder / "scoring.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)
    address, give_up = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while time.monotonic() < give_up and process.poll() is None:
            with suppress(requests.ConnectionError):
                if requests.get(f"{address}/ping", timeout=ANSWER_S).ok:
                    break
            time.sleep(0.1)
        else:
            pytest.fail((folder / "scoring.log").read_text()[-3000:])
        yield address
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)


@pytest.mark.parametrize("flavor", ["sklearn", "tensorcas"])
def test_mlflow_models_serve_answers(server: Server, user: Client, tmp_path: Path, flavor: str) -> None:
    uri = user(log_line, flavor)
    with scoring(server, uri, tmp_path) as address:
        answer = requests.post(f"{address}/invocations", json={"inputs": [[2.0], [3.0]]}, timeout=ANSWER_S)

    assert answer.json()["predictions"] == pytest.approx([5.0, 7.0])


@pytest.mark.parametrize("flavor", ["sklearn", "tensorcas"])
def test_mlflow_models_predict_answers(server: Server, user: Client, tmp_path: Path, flavor: str) -> None:
    asked = fill(tmp_path, {"asked.json": b'{"inputs": [[2.0], [3.0]]}'}) + "/asked.json"
    said = tmp_path / "said.json"
    uri = user(log_line, flavor)
    command, env = models_command(server, "predict", "-m", uri, "-i", asked, "-o", str(said), "-t", "json")
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=START_S)

    assert done.returncode == 0, done.stderr
    assert json.loads(said.read_text())["predictions"] == pytest.approx([5.0, 7.0])
    assert set(contents(tmp_path)) == {"asked.json", "said.json"}
