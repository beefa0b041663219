"""Refusals of a server with a store as destination: users without permission, and paths below other roots."""

from __future__ import annotations

import http.client
import os
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import mlflow
import pytest
from mlflow import MlflowClient

from tests.deploy.calls import fill, log_folder, new_experiment, new_run, refs, root_of
from tests.deploy.clients import Client, client
from tests.deploy.servers import ANSWER_S, UVICORN, Server, serve

pytestmark = pytest.mark.long

ADMIN = ("admin", "password of the admin")
OWNER = ("owner", "password of the owner")
OTHER = ("other", "password of the other")
SECRET = b"\0secret weights" * 1000


@pytest.fixture(scope="module")
def server(new_server_folder: Callable[[], Path]) -> Iterator[Server]:
    """A server that asks who one is, and lets nobody see an experiment who was not allowed to."""
    folder = new_server_folder()
    (folder / "auth.ini").write_text(
        f"[mlflow]\ndefault_permission = NO_PERMISSIONS\ndatabase_uri = sqlite:///{folder}/auth.db\n"
        f"admin_username = {ADMIN[0]}\nadmin_password = {ADMIN[1]}\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
        "auth_cache_ttl_seconds = 60\n"
    )
    options = (
        *UVICORN,
        "--app-name",
        "basic-auth",
        "--artifacts-destination",
        f"tensorcas://{folder}/artifacts",
    )
    settings = {
        "MLFLOW_AUTH_CONFIG_PATH": str(folder / "auth.ini"),
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "of these tests",
    }
    with serve(folder, options, settings=settings) as server:
        for name, password in (OWNER, OTHER):
            asked = {"username": name, "password": password}
            assert server.request("POST", "api/2.0/mlflow/users/create", json=asked, auth=ADMIN).ok
        yield server


@pytest.fixture(scope="module")
def users(server: Server) -> Iterator[Client]:
    """A process without our package, in which each call says whose it is."""
    with client(server.uri, plugin=False) as process:
        yield process


def as_user(user: tuple[str, str], function: Any, /, *args: Any) -> Any:
    """Call a function with the name and password of a user."""
    os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"] = user
    return function(*args)


@pytest.fixture(scope="module")
def run(server: Server, users: Client, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Artifact path, below the destination, of a run of the owner's."""
    folder = fill(tmp_path_factory.mktemp("inbox"), {"weights.bin": SECRET, "note.txt": b"secret note"})
    run_id = users(as_user, OWNER, log_folder, folder)
    return str(users(as_user, OWNER, root_of, run_id)).removeprefix("mlflow-artifacts:/")


@pytest.fixture(scope="module")
def own(server: Server, users: Client) -> str:
    """Artifact path, below the destination, of a run of the other user's."""
    return str(users(as_user, OTHER, root_of, users(as_user, OTHER, new_run))).removeprefix("mlflow-artifacts:/")


def ask(server: Server, user: tuple[str, str], path: str) -> dict[str, int]:
    """Try what one can do with the artifacts of a run; HTTP codes."""
    listing = server.get_as(user, "api/2.0/mlflow-artifacts/artifacts", path=path)
    return {
        "list": listing.status_code,
        "read": server.proxied("GET", f"{path}/weights.bin", auth=user).status_code,
        "read a note": server.proxied("GET", f"{path}/note.txt", auth=user).status_code,
        "write": server.proxied("PUT", f"{path}/more.bin", data=b"\0", auth=user).status_code,
        "delete": server.proxied("DELETE", f"{path}/more.bin", auth=user).status_code,
    }


def allow(server: Server, user: tuple[str, str], path: str, permission: str) -> None:
    """Give a user a permission on the experiment of a run."""
    asked = {"username": user[0], "resource_type": "experiment", "resource_id": path.split("/")[0]}
    asked["permission"] = permission
    answer = server.request("POST", "api/3.0/mlflow/users/permissions/grant", json=asked, auth=ADMIN)
    assert answer.ok, answer.text


def test_a_user_without_permission_reaches_no_artifact(server: Server, run: str) -> None:
    before = refs(server)

    assert set(ask(server, OTHER, run).values()) == {403}
    assert set(ask(server, ("nobody", "x"), run).values()) == {401}
    assert refs(server) == before
    assert ask(server, OWNER, run) == {"list": 200, "read": 200, "read a note": 200, "write": 200, "delete": 200}


@pytest.mark.parametrize(("permission", "write"), [("READ", 403), ("EDIT", 200)])
def test_a_user_does_what_the_permission_allows(
    server: Server, users: Client, tmp_path: Path, permission: str, write: int
) -> None:
    run_id = users(as_user, OWNER, log_folder, fill(tmp_path, {"weights.bin": SECRET, "note.txt": b"a note"}))
    path = str(users(as_user, OWNER, root_of, run_id)).removeprefix("mlflow-artifacts:/")
    allow(server, OTHER, path, permission)

    assert ask(server, OTHER, path) == {"list": 200, "read": 200, "read a note": 200, "write": write, "delete": 403}


def get_raw(server: Server, path: str) -> tuple[int, bytes]:
    """Get a proxied artifact by a path that nobody tidies up on its way."""
    where = urlsplit(server.uri)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=ANSWER_S)
    token = b64encode(":".join(OTHER).encode()).decode()
    connection.request(
        "GET", f"/api/2.0/mlflow-artifacts/artifacts/{path}", headers={"Authorization": f"Basic {token}"}
    )
    answer = connection.getresponse()
    return answer.status, answer.read()


@pytest.mark.parametrize(
    "path",
    [
        "{own}/../../../{run}/weights.bin",
        "{own}/%2e%2e/%2e%2e/%2e%2e/{run}/weights.bin",
        "{own}/%252e%252e/%252e%252e/%252e%252e/{run}/weights.bin",
        "./{run}/weights.bin",
        "%2e/{run}/weights.bin",
        "/{run}/weights.bin",
        "%2f{run}/weights.bin",
        "{own}%2f..%2f..%2f..%2f{run}/weights.bin",
        ".tensorcas/format",
        "{own}/../../../.tensorcas/format",
        ".TensorCAS/format",
    ],
)
def test_no_spelling_of_a_path_evades_the_permission(server: Server, own: str, run: str, path: str) -> None:
    status, body = get_raw(server, path.format(own=own, run=run))

    assert status in (400, 403, 404)
    assert b"secret weights" not in body
    assert b"chunk_bytes" not in body


def test_a_manifest_of_others_tensors_opens_nothing(server: Server, own: str, run: str) -> None:
    [stolen, *_] = server.backend.list("manifests")
    forged = server.backend.get(stolen.key)
    assert server.proxied("PUT", f"{own}/checkpoint.arrow", data=forged, auth=OTHER).ok

    # It is kept as the bytes it is, and nothing is made of it.
    assert server.proxied("GET", f"{own}/checkpoint.arrow", auth=OTHER).content == forged
    listing = server.get_as(OTHER, "api/2.0/mlflow-artifacts/artifacts", path=own).json()
    assert [file["path"] for file in listing["files"]] == ["checkpoint.arrow"]


def things_at(location: str) -> dict[str, str]:
    """Make an experiment at a location, with a run, a logged model, a trace and a registered version there."""
    users = MlflowClient()
    experiment_id = new_experiment(location)
    mlflow.set_experiment(experiment_id=experiment_id)
    with mlflow.start_span("look") as span:
        pass
    mlflow.flush_trace_async_logging()
    name = f"at {experiment_id}"
    users.create_registered_model(name)
    version = users.create_model_version(name, location)
    return {
        "run": new_run(experiment_id),
        "model": users.create_logged_model(experiment_id, name="model").model_id,
        "trace": span.trace_id,
        "name": name,
        "version": str(version.version),
    }


@pytest.mark.parametrize("place", ["home", "etc"])
def test_a_root_that_is_no_store_is_neither_read_nor_written(
    server: Server, users: Client, tmp_path: Path, place: str
) -> None:
    root = Path("/etc") if place == "etc" else tmp_path / "home"
    secret, before = Path("/etc/passwd"), []
    if place == "home":
        fill(root, {"secret.txt": b"root: secret", "deep/weights.bin": SECRET})
        secret, before = root / "secret.txt", sorted(root.rglob("*"))
    made = users(as_user, ADMIN, things_at, f"tensorcas://{root}")

    ajax = "ajax-api/2.0/mlflow"
    answers = [
        server.get_as(ADMIN, f"{ajax}/artifacts/list", run_id=made["run"]),
        server.get_as(ADMIN, f"{ajax}/artifacts/list", run_id=made["run"], path="deep"),
        server.get_as(ADMIN, f"{ajax}/logged-models/{made['model']}/artifacts/directories"),
        server.get_as(ADMIN, "get-artifact", run_id=made["run"], path=secret.name),
        server.get_as(ADMIN, f"{ajax}/logged-models/{made['model']}/artifacts/files", artifact_file_path=secret.name),
        server.get_as(
            ADMIN, "model-versions/get-artifact", name=made["name"], version=made["version"], path=secret.name
        ),
        server.get_as(ADMIN, "ajax-api/3.0/mlflow/get-trace-artifact", request_id=made["trace"], path="traces.json"),
        server.request(
            "POST", f"{ajax}/upload-artifact", params={"run_uuid": made["run"], "path": "x.txt"}, data=b"x", auth=ADMIN
        ),
    ]
    assert [answer.text for answer in answers if "root:" in answer.text] == []
    assert [answer.json().get("files", []) for answer in answers[:3]] == [[], [], []]
    assert [answer.status_code for answer in answers[3:] if answer.ok] == []
    assert "no store at or above it" in answers[-1].json()["message"]
    if place == "home":
        assert sorted(root.rglob("*")) == before
    assert not (root / ".tensorcas").exists()
    assert list(root.glob("*/artifacts")) == []
