"""A real MLflow server: its UI's requests answered out of the store, and uploads from clients that know no store."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import requests
from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts
from mlflow.exceptions import MlflowException
from sklearn.linear_model import LinearRegression

from tensorcas_mlflow.store import Store
from tests.integration.artifacts.pages import Page
from tests.stored_bytes import pack_bytes

BINARY = b"\0" + bytes(range(256)) * 8000
TEXT = "flavors: {}\n"
START_S = 60
ANSWER_S = 20
"""An answer that takes longer is a failure: MLflow's clients repeat what fails with HTTP 5xx for minutes."""


class Server:
    """A server whose own artifact destination is a store, as the UI sees it."""

    def __init__(self, uri: str, folder: Path) -> None:
        self.uri = uri
        self.folder = folder
        self.own = folder / "own"
        """The artifact destination."""

    def get(self, endpoint: str, /, **params: str) -> requests.Response:
        return requests.get(f"{self.uri}/{endpoint}", params=params, timeout=ANSWER_S)

    def list(self, endpoint: str, /, **params: str) -> dict[str, int | None]:
        """Sizes by path, None for folders, as the UI's artifact browser gets them."""
        response = self.get(endpoint, **params)
        assert response.status_code == 200, response.text
        files: list[dict[str, Any]] = response.json().get("files", [])
        assert all(file["is_dir"] == ("file_size" not in file) for file in files)
        return {file["path"]: int(file["file_size"]) if "file_size" in file else None for file in files}

    def list_run(self, run_id: str, path: str = "") -> dict[str, int | None]:
        params = {"run_id": run_id} | ({"path": path} if path else {})
        return self.list("ajax-api/2.0/mlflow/artifacts/list", **params)

    def get_run_file(self, run_id: str, path: str) -> requests.Response:
        return self.get("get-artifact", run_id=run_id, path=path)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def server(empty_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "mlflow.db").write_bytes(empty_database.read_bytes())
    port = free_port()
    env = {name: value for name, value in os.environ.items() if not name.lstrip("_").startswith("MLFLOW_")}
    env["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    command += ["--artifacts-destination", f"tensorcas://{folder}/own"]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        server = Server(f"http://127.0.0.1:{port}", folder)
        wait_for(process, server)
        yield server
    finally:
        # The whole process group: the server's workers are its children. It began the group, so the id is its own.
        os.killpg(process.pid, 9)
        process.wait(timeout=30)


def wait_for(process: subprocess.Popen[bytes], server: Server) -> None:
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up and process.poll() is None:
        try:
            if server.get("health").ok:
                return
        except requests.ConnectionError:
            pass
        time.sleep(0.1)
    pytest.fail(f"the server did not start:\n{(server.folder / 'server.log').read_text()[-3000:]}")


@pytest.fixture
def client(server: Server) -> Iterator[MlflowClient]:
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(server.uri)
    yield MlflowClient()
    mlflow.set_tracking_uri(before)


@pytest.fixture
def direct(server: Server, client: MlflowClient, request: pytest.FixtureRequest) -> Path:
    """The artifact location of a new experiment, which clients reach without the server."""
    location = server.folder / f"direct-{request.node.name}"
    client.create_experiment(request.node.name, artifact_location=f"tensorcas://{location}")
    return location


@pytest.fixture
def run_id(direct: Path, client: MlflowClient, request: pytest.FixtureRequest) -> str:
    """A run of that experiment."""
    experiment = client.get_experiment_by_name(request.node.name)
    assert experiment is not None
    return str(client.create_run(experiment.experiment_id).info.run_id)


@pytest.fixture
def proxied_run_id(client: MlflowClient) -> str:
    """A run whose artifacts only the server reaches."""
    experiment_id = client.create_experiment(uuid.uuid4().hex)
    return str(client.create_run(experiment_id).info.run_id)


@pytest.fixture
def inbox(tmp_path: Path) -> Path:
    inbox = tmp_path / "inbox"
    (inbox / "data").mkdir(parents=True)
    (inbox / "MLmodel").write_text(TEXT)
    (inbox / "data/größe 1.bin").write_bytes(BINARY)
    return inbox


@pytest.mark.long
def test_the_ui_lists_what_the_store_keeps_in_full_size(
    server: Server, client: MlflowClient, run_id: str, inbox: Path
) -> None:
    assert server.list_run(run_id) == {}
    client.log_artifacts(run_id, str(inbox), "model")

    assert server.list_run(run_id) == {"model": None}
    assert server.list_run(run_id, "model") == {"model/MLmodel": len(TEXT), "model/data": None}
    assert server.list_run(run_id, "model/data") == {"model/data/größe 1.bin": len(BINARY)}


def test_the_ui_downloads_the_exact_bytes(server: Server, client: MlflowClient, run_id: str, inbox: Path) -> None:
    client.log_artifacts(run_id, str(inbox), "model")

    text = server.get_run_file(run_id, "model/MLmodel")
    binary = server.get_run_file(run_id, "model/data/größe 1.bin")

    assert (text.status_code, text.content) == (200, TEXT.encode())
    assert (binary.status_code, binary.content) == (200, BINARY)
    assert int(binary.headers["Content-Length"]) == len(BINARY)
    assert "attachment" in binary.headers["Content-Disposition"]


def test_a_wrong_path_is_answered_at_once_and_for_good(
    server: Server, client: MlflowClient, direct: Path, run_id: str, inbox: Path
) -> None:
    client.log_artifacts(run_id, str(inbox))
    (direct / "secret").write_text("secret")

    assert server.get_run_file(run_id, "missing.bin").status_code == 404
    assert server.get_run_file(run_id, "x" * 300).status_code == 400
    assert server.get_run_file(run_id, "../../secret").status_code == 400
    assert server.get_run_file(run_id, "data").status_code == 400
    assert server.list_run(run_id, ".tensorcas") == {}


def test_a_file_the_ui_uploads_is_kept_by_the_store(
    server: Server, client: MlflowClient, direct: Path, run_id: str, inbox: Path
) -> None:
    client.log_artifacts(run_id, str(inbox))
    response = requests.post(
        f"{server.uri}/ajax-api/2.0/mlflow/upload-artifact",
        params={"run_uuid": run_id, "path": "uploads/copy.bin"},
        data=BINARY,
        timeout=ANSWER_S,
    )

    assert response.status_code == 200
    assert server.list_run(run_id, "uploads") == {"uploads/copy.bin": len(BINARY)}
    assert len({ref.manifest[:64] for ref in Store.open(direct).checkpoints()}) == 1


def test_a_logged_model_and_its_versions_are_shown(
    server: Server, client: MlflowClient, direct: Path, inbox: Path, request: pytest.FixtureRequest
) -> None:
    experiment = client.get_experiment_by_name(request.node.name)
    assert experiment is not None
    model = client.create_logged_model(experiment.experiment_id, name="model")
    client.log_model_artifacts(model.model_id, str(inbox))
    client.create_registered_model("registered")
    version = client.create_model_version("registered", f"models:/{model.model_id}", model_id=model.model_id)

    base = f"ajax-api/2.0/mlflow/logged-models/{model.model_id}/artifacts"
    path = "data/größe 1.bin"
    assert server.list(f"{base}/directories") == {"MLmodel": len(TEXT), "data": None}
    assert server.list(f"{base}/directories", artifact_directory_path="data") == {path: len(BINARY)}
    assert server.get(f"{base}/files", artifact_file_path=path).content == BINARY
    of_version = server.get("model-versions/get-artifact", name="registered", version=str(version.version), path=path)
    assert of_version.content == BINARY
    [ref] = Store.open(direct).checkpoints()
    assert ref.model_id == model.model_id


def test_a_client_uploads_and_downloads_through_the_server(
    server: Server, client: MlflowClient, proxied_run_id: str, inbox: Path
) -> None:
    client.log_artifacts(proxied_run_id, str(inbox), "model")

    assert client.get_run(proxied_run_id).info.artifact_uri.startswith("mlflow-artifacts:")
    assert server.list_run(proxied_run_id, "model/data") == {"model/data/größe 1.bin": len(BINARY)}
    assert server.get_run_file(proxied_run_id, "model/data/größe 1.bin").content == BINARY
    folder = Path(download_artifacts(f"runs:/{proxied_run_id}/model"))
    assert (folder / "MLmodel").read_text() == TEXT
    assert (folder / "data/größe 1.bin").read_bytes() == BINARY
    assert [path.name for path in server.own.iterdir() if path.name.startswith(".")] == [".tensorcas"]


def test_repeated_upload_stores_no_further_chunks(
    server: Server, client: MlflowClient, proxied_run_id: str, inbox: Path
) -> None:
    client.log_artifacts(proxied_run_id, str(inbox), "first")
    once = pack_bytes(server.own)
    client.log_artifacts(proxied_run_id, str(inbox), "second")

    assert 0 < pack_bytes(server.own) == once


@pytest.mark.long
def test_a_client_that_loads_a_model_fetches_no_page_and_the_server_draws_no_bar(
    server: Server, client: MlflowClient
) -> None:
    experiment_id = client.create_experiment(uuid.uuid4().hex)
    model = LinearRegression().fit(np.ones((9, 300)), np.ones(9))
    with mlflow.start_run(experiment_id=experiment_id):
        info = mlflow.tensorcas.log_model(model, name="model", pip_requirements=[])
    folder = Path(download_artifacts(info.model_uri))
    mlflow.pyfunc.load_model(info.model_uri, suppress_warnings=True)

    assert sorted(path.name for path in (folder / "data").iterdir()) == ["checkpoint.arrow", "checkpoint.tensors"]
    base = f"ajax-api/2.0/mlflow/logged-models/{info.model_id}/artifacts"
    shown = server.get(f"{base}/directories", artifact_directory_path="data").json()["files"]
    names = sorted(file["path"].removeprefix("data/") for file in shown)
    assert names == ["checkpoint.arrow", "checkpoint.html", "checkpoint.tensors"]
    page = server.get(f"{base}/files", artifact_file_path="data/checkpoint.html")
    assert "coef_" in Page(page.content).tensors
    assert "Downloading artifacts" not in (server.folder / "server.log").read_text()


def test_a_client_deletes_through_the_server(
    server: Server, client: MlflowClient, proxied_run_id: str, inbox: Path
) -> None:
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    client.log_artifacts(proxied_run_id, str(inbox), "model")
    repo = get_artifact_repository(client.get_run(proxied_run_id).info.artifact_uri)
    repo.delete_artifacts("model/data/")

    assert server.list_run(proxied_run_id, "model") == {"model/MLmodel": len(TEXT)}
    repo.delete_artifacts()
    repo.delete_artifacts()
    assert server.list_run(proxied_run_id) == {}
    assert [ref for ref in Store.open(server.own).checkpoints() if ref.run_id == proxied_run_id] == []


def test_a_client_learns_at_once_that_an_artifact_is_missing(
    server: Server, client: MlflowClient, proxied_run_id: str, inbox: Path
) -> None:
    client.log_artifacts(proxied_run_id, str(inbox))
    begun = time.monotonic()

    with pytest.raises(MlflowException):
        download_artifacts(f"runs:/{proxied_run_id}/missing.bin")
    with pytest.raises((MlflowException, requests.HTTPError), match=r"400|folder"):
        client.log_artifact(proxied_run_id, str(inbox / "MLmodel"), "MLmodel/below")
    assert time.monotonic() - begun < ANSWER_S


@pytest.mark.long
def test_a_client_cannot_make_the_server_read_a_folder_that_is_no_store(
    server: Server, client: MlflowClient, tmp_path: Path
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/secret.txt").write_text("secret")
    experiment_id = client.create_experiment("prying", artifact_location=f"tensorcas://{tmp_path}/home")
    run_id = client.create_run(experiment_id).info.run_id
    model = client.create_logged_model(experiment_id, name="model")
    # A version's source may be any URI; it is read as the artifact root.
    client.create_registered_model("prying")
    version = client.create_model_version("prying", f"tensorcas://{tmp_path}/home")

    assert server.list_run(run_id) == {}
    response = server.get("model-versions/get-artifact", name="prying", version=str(version.version), path="secret.txt")
    assert response.status_code in (400, 403)
    assert "secret" not in response.text.replace("secret.txt", "")
    listed = server.get(f"ajax-api/2.0/mlflow/logged-models/{model.model_id}/artifacts/directories")
    assert listed.json().get("files", []) == []
    upload = requests.post(
        f"{server.uri}/ajax-api/2.0/mlflow/upload-artifact",
        params={"run_uuid": run_id, "path": "planted.txt"},
        data=b"text",
        timeout=ANSWER_S,
    )
    assert upload.status_code == 403
    assert [path.name for path in (tmp_path / "home").rglob("*")] == ["secret.txt"]
