"""Pages behind MLflow's basic-auth: a reader sees nothing of what MLflow hides from them."""

from __future__ import annotations

import base64
import importlib
import json
import time
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote

import mlflow
import numpy as np
import pytest
from flask.testing import FlaskClient
from mlflow import MlflowClient

from tensorcas_mlflow import TensorCasStore
from tensorcas_mlflow.integration.server_app._app import guard
from tensorcas_mlflow.store import Store
from tests.integration.server_app.conftest import get, log_steps, make_app, make_state
from tests.integration.server_app.test_pages import steps_in

ADMIN, ANN, BEN, CEM = (
    ("admin", "a long password 1"),
    ("ann", "a long password 2"),
    ("ben", "a long password 3"),
    ("cem", "a long password 4"),
)
SECRET = "bens-secret"


@pytest.fixture(scope="module")
def auth(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """MLflow's basic-auth, where nobody may read anything by default."""
    folder = tmp_path_factory.mktemp("auth")
    (folder / "auth.ini").write_text(
        f"[mlflow]\ndefault_permission = NO_PERMISSIONS\ndatabase_uri = sqlite:///{folder}/auth.db\n"
        f"admin_username = {ADMIN[0]}\nadmin_password = {ADMIN[1]}\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
        "auth_cache_ttl_seconds = 60\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_AUTH_CONFIG_PATH", str(folder / "auth.ini"))
        patch.setenv("MLFLOW_FLASK_SERVER_SECRET_KEY", "secret")
        module = importlib.import_module("mlflow.server.auth")
        patch.setattr(module, "auth_config", importlib.import_module("mlflow.server.auth.config").read_auth_config())
        yield module
        patch.setattr(module, "_auth_initialized", False)


def headers(user: tuple[str, str]) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(":".join(user).encode()).decode()}


@pytest.fixture(scope="module")
def world(
    auth: ModuleType, empty_database: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[FlaskClient, dict[str, str]]]:
    """A guarded server; a run of Ann and one of Ben, in one store, of states that are relatives."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "mlflow.db").write_bytes(empty_database.read_bytes())
    before = mlflow.get_tracking_uri()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_FLASK_SERVER_SECRET_KEY", "secret")
        # What MLflow refuses because it knows no rule for a page would look like our own care.
        patch.setenv("MLFLOW_BASIC_AUTH_FAIL_CLOSED", "true")
        uri = f"sqlite:///{folder}/mlflow.db"
        mlflow.set_tracking_uri(uri)
        client: FlaskClient = guard(make_app(uri, folder, patch)).test_client()
        yield client, make_world(client, f"tensorcas://{folder}/store")
    mlflow.set_tracking_uri(before)


def make_world(client: FlaskClient, location: str) -> dict[str, str]:
    for name, password in (ANN, BEN, CEM):
        asked = {"username": name, "password": password}
        assert client.post("/api/2.0/mlflow/users/create", json=asked, headers=headers(ADMIN)).status_code == 200
    base = {f"{SECRET}.weight": np.random.default_rng(1).standard_normal((256, 256)).astype(np.float32)}
    own = {"weight": base[f"{SECRET}.weight"] * np.float32(1.0001)}
    bens = log_steps(
        location, f"{SECRET} experiment", f"{SECRET} run", base, base | make_state(3, names=(f"{SECRET}.more",))
    )
    anns = log_steps(location, "open experiment", "open run", own, make_state(4))
    secret, opened = (mlflow.get_experiment_by_name(name) for name in (f"{SECRET} experiment", "open experiment"))
    assert secret is not None
    assert opened is not None
    with mlflow.start_run(experiment_id=secret.experiment_id):
        info = mlflow.tensorcas.log_model(make_state(5), name=f"{SECRET}-model", pip_requirements=[])
    MlflowClient().create_registered_model(f"{SECRET}-registered")
    MlflowClient().create_model_version(f"{SECRET}-registered", info.model_uri, model_id=info.model_id)
    for user, experiment in ((ANN, opened), (CEM, opened), (BEN, secret)):
        change_permission(client, "grant", user, experiment.experiment_id)
    ids = {"open": opened.experiment_id, "secret": secret.experiment_id, "model": str(info.model_id)}
    return {"ann": anns, "ben": bens, **ids}


def change_permission(client: FlaskClient, change: str, user: tuple[str, str], experiment_id: str) -> None:
    asked = {"username": user[0], "resource_type": "experiment", "resource_id": experiment_id}
    if change == "grant":
        asked["permission"] = "READ"
    answer = client.post(f"/api/3.0/mlflow/users/permissions/{change}", json=asked, headers=headers(ADMIN))
    assert answer.status_code == 200, answer.text


@pytest.fixture
def client(world: tuple[FlaskClient, dict[str, str]]) -> FlaskClient:
    return world[0]


@pytest.fixture
def made(world: tuple[FlaskClient, dict[str, str]]) -> dict[str, str]:
    return world[1]


def checkpoints_of(client: FlaskClient, run_id: str, user: tuple[str, str]) -> list[Any]:
    shown = get_json_as(client, f"run?id={run_id}", user)
    return steps_in(shown)


def get_json_as(client: FlaskClient, page: str, user: tuple[str, str]) -> Any:
    separator = "&" if "?" in page else "?"
    get(client, page, headers=headers(user))
    answer = client.get(f"/tensorcas/{page}{separator}format=json", headers=headers(user))
    return answer.get_json()


@pytest.mark.long
def test_content_that_no_run_owns_is_for_administrators(client: FlaskClient, made: dict[str, str]) -> None:
    [step, _] = checkpoints_of(client, made["ann"], ANN)
    location = next(each["uri"] for each in get_json_as(client, "", ADMIN)["stores"] if each["id"] == step["store"])
    TensorCasStore(location, run_id="f" * 32).save(make_state(6), 1)
    ref = next(ref for ref in Store.open(location).checkpoints() if ref.run_id == "f" * 32)
    page = f"checkpoint?store={step['store']}&key={quote(ref.key)}"

    assert wait_until_found(client, page) == 200
    assert client.get(f"/tensorcas/{page}", headers=headers(ANN)).status_code == 404


def wait_until_found(client: FlaskClient, page: str) -> int:
    """Ask as the administrator until the server has seen a new checkpoint; return the last status."""
    give_up = time.monotonic() + 30
    while True:
        status = client.get(f"/tensorcas/{page}", headers=headers(ADMIN)).status_code
        if status == 200 or time.monotonic() > give_up:
            return status
        time.sleep(0.5)


def test_stranger_is_asked_for_a_password(client: FlaskClient) -> None:
    for page in ("", "health", "run?id=1", "diff", "style.css"):
        assert client.get(f"/tensorcas/{page}").status_code == 401
    assert client.post("/tensorcas/maintenance").status_code == 401
    assert client.get("/tensorcas/", headers=headers(("ann", "wrong"))).status_code == 401


@pytest.mark.long
def test_reader_finds_nothing_of_others_on_any_page(client: FlaskClient, made: dict[str, str]) -> None:
    [step, _] = checkpoints_of(client, made["ann"], ANN)
    key = f"store={step['store']}&key={quote(step['key'])}"

    pages = [
        get(client, page, headers=headers(ANN))
        for page in (
            "",
            f"experiment?id={made['open']}",
            f"run?id={made['ann']}",
            f"checkpoint?{key}",
            "models",
            "health",
            "diff",
            f"diff?a={made['ann']}&b={quote(step['store'] + ':' + step['key'])}&values=1",
        )
    ]

    assert "open experiment" in pages[0]
    assert "open run" in pages[1]
    for page in pages:
        assert SECRET not in page
        assert made["ben"] not in page
        assert made["model"] not in page
        assert "tensorcas://" not in page


@pytest.mark.long
def test_the_unreadable_and_the_missing_look_alike(client: FlaskClient, made: dict[str, str]) -> None:
    [step, _] = checkpoints_of(client, made["ben"], BEN)
    side = quote(f"{step['store']}:{step['key']}")
    own = made["ann"]
    pairs = [
        (f"run?id={made['ben']}", "run?id=" + "0" * 32),
        (f"experiment?id={made['secret']}", "experiment?id=99999"),
        (f"checkpoint?store={step['store']}&key={quote(step['key'])}", f"checkpoint?store={step['store']}&key=none"),
        (f"diff?a={own}&b={side}", f"diff?a={own}&b={step['store']}:none"),
        (f"diff?a={own}&b={made['ben']}", f"diff?a={own}&b=" + "0" * 32),
        (f"diff?a={own}&b={made['model']}", f"diff?a={own}&b=m-" + "0" * 32),
        (f"diff?a={own}&b=models:/{SECRET}-registered/1", f"diff?a={own}&b=models:/none/1"),
    ]
    get(client, "", headers=headers(ANN))

    for unreadable, missing in pairs:
        one, other = (client.get(f"/tensorcas/{page}", headers=headers(ANN)) for page in (unreadable, missing))
        assert (one.status_code, one.text) == (404, other.text), unreadable
        assert other.status_code == 404


def test_relatives_of_others_are_left_out_of_a_lineage(client: FlaskClient, made: dict[str, str]) -> None:
    [step, _] = checkpoints_of(client, made["ann"], ANN)
    page = f"checkpoint?store={step['store']}&key={quote(step['key'])}"

    of_admin = get_json_as(client, page, ADMIN)["relatives"]
    of_ann = get_json_as(client, page, ANN)["relatives"]

    assert any(SECRET in each["words"] for each in of_admin)
    assert of_ann == []


def test_administrator_sees_everything(client: FlaskClient, made: dict[str, str]) -> None:
    page = get(client, "", headers=headers(ADMIN))

    assert SECRET in page
    assert "open experiment" in page
    assert "tensorcas:" in page
    assert f"{SECRET}-registered" in get(client, "models", headers=headers(ADMIN))


def test_permission_that_is_taken_away_counts_at_once(client: FlaskClient, made: dict[str, str]) -> None:
    get(client, f"run?id={made['ann']}", headers=headers(CEM))
    change_permission(client, "revoke", CEM, made["open"])

    get(client, f"run?id={made['ann']}", status=404, headers=headers(CEM))
    assert get_json_as(client, "", CEM)["experiments"] == []


def test_reader_cannot_start_maintenance(client: FlaskClient, made: dict[str, str]) -> None:
    [store] = get_json_as(client, "", ANN)["stores"]

    answer = client.post(
        "/tensorcas/maintenance", data={"store": store["id"], "action": "verify"}, headers=headers(ANN)
    )

    assert answer.status_code == 403
    for page in ("", "health", "diff"):
        assert client.post(f"/tensorcas/{page}", headers=headers(ANN)).status_code in (403, 405)


def test_reader_gets_no_place_and_no_total_of_a_store(client: FlaskClient, made: dict[str, str]) -> None:
    [experiment] = get_json_as(client, "", ANN)["experiments"]
    [store] = get_json_as(client, "", ANN)["stores"]

    assert experiment["name"] == "open experiment"
    assert (store["uri"], store["needed_bytes"]) == (None, None)


@pytest.mark.long
def test_reader_learns_that_a_page_failed_and_an_administrator_learns_why(
    client: FlaskClient, made: dict[str, str], tmp_path: Path
) -> None:
    experiment = mlflow.get_experiment_by_name("open experiment")
    assert experiment is not None
    store = Store.open(experiment.artifact_location)
    before = {info.key for info in store.backend.list("packs")}
    states = [make_state(11, names=("damaged",)), make_state(12, names=("damaged",))]
    run_id = log_steps(experiment.artifact_location, "open experiment", "damaged run", *states)
    damaged = {info.key for info in store.backend.list("packs")} - before
    for key in damaged:
        store.backend.delete(key)
    give_up = time.monotonic() + 30
    while not (steps := checkpoints_of(client, run_id, ANN)) and time.monotonic() < give_up:
        time.sleep(0.5)
    one, other = (f"{each['store']}:{each['key']}" for each in steps[:2])
    diff = f"diff?a={quote(one)}&b={quote(other)}&values=1"
    while (reason := get_json_as(client, diff, ADMIN)["error"]) is None and time.monotonic() < give_up:
        time.sleep(0.2)
    checkpoint = f"checkpoint?store={quote(steps[0]['store'])}&key={quote(steps[0]['key'])}"
    answers = {
        user: [
            client.get(f"/tensorcas/{page}{ending}", headers=headers(user)).text
            for page in (
                diff,
                checkpoint,
                f"run?id={run_id}",
                f"experiment?id={made['open']}",
                "health?",
                "?",
                "models?",
            )
            for ending in ("", "&format=json")
        ]
        for user in (ADMIN, ANN)
    }

    assert damaged
    assert "packs/" in reason or "chunk" in reason
    assert json.loads(answers[ADMIN][1])["error"] == reason
    assert "they cannot be compared" in answers[ANN][0]
    assert json.loads(answers[ANN][1])["error"] == "they cannot be compared"
    for told in answers[ANN]:
        for secret in ("packs/", "manifests/", "Errno", "No such file", str(tmp_path.parent), reason):
            assert secret not in unescape(told)
