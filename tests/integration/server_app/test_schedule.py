"""Scheduled maintenance: who runs it, and what a failure leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest
from flask import Flask
from flask.testing import FlaskClient
from mlflow import MlflowClient

from tensorcas_mlflow import TensorCasStore
from tensorcas_mlflow.base import config
from tensorcas_mlflow.integration.server_app import _app, _schedule
from tensorcas_mlflow.integration.server_app._catalog import Place, place_of
from tensorcas_mlflow.integration.server_app._links import NOTE, add_links
from tensorcas_mlflow.integration.server_app._schedule import Scheduler, run_in_process
from tensorcas_mlflow.maintenance import read_rounds
from tensorcas_mlflow.store import Store
from tests.integration.server_app.conftest import get, get_json, make_state


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A store with two checkpoints, one of them dropped."""
    store = Store.init(tmp_path / "store")
    for step in (1, 2):
        TensorCasStore(store.uri, run_id="0" * 32).save(make_state(step), step)
    store.drop(next(ref for ref in store.checkpoints() if ref.step == 1))
    return place_of(store)


def test_due_actions_run_once_with_two_workers(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    both = threading.Barrier(2)

    def run(root: str, action: str, renew: Callable[[], object]) -> tuple[Any, str]:
        ran.append(action)
        return "done", ""

    monkeypatch.setattr(_schedule, "run_in_process", run)
    workers = [Scheduler(lambda: [place], {"verify": 3600.0, "collect": 3600.0}) for _ in range(2)]

    def work(scheduler: Scheduler) -> None:
        both.wait()
        scheduler.run_due()

    threads = [threading.Thread(target=work, args=(each,)) for each in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in workers:
        each.run_due()

    assert sorted(ran) == ["collect", "verify"]
    assert sorted(each.action for each in read_rounds(place.store.backend)) == ["collect", "verify"]


@pytest.mark.long
def test_collection_and_verification_run_as_the_commands_do(place: Place) -> None:
    packs = sum(file.stat().st_size for file in Path(place.store.uri.removeprefix("tensorcas://")).rglob("*"))
    collect = Scheduler(lambda: [place], {"collect": 3600.0})
    [collected] = collect.run_due()
    [verified] = Scheduler(lambda: [place], {"verify": 3600.0}).run_due()

    assert (collected.outcome, verified.outcome) == ("done", "done"), (collected, verified)
    assert "freed" in collected.summary
    assert "no problem found" in verified.summary
    assert packs > 0
    assert collect.run_due() == []


def test_crash_of_a_round_is_recorded_and_the_next_round_runs(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(lambda: [place], {"verify": 1000.0})
    monkeypatch.setattr(_schedule, "_PROGRAM", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    [died] = scheduler.run_due()
    monkeypatch.setattr(_schedule, "_PROGRAM", "import sys; sys.exit('no memory')")
    scheduler.ask(place, "verify")
    [failed] = scheduler.run_due()

    assert (died.outcome, died.summary) == ("died", "it was ended by signal 9")
    assert failed.outcome == "failed"
    assert "no memory" in failed.summary
    monkeypatch.setattr(_schedule, "_PROGRAM", "print('{}')")
    scheduler.ask(place, "verify")
    assert [each.outcome for each in scheduler.run_due()] == ["done"]


@pytest.mark.long
def test_store_that_is_gone_is_no_failure_of_the_others(place: Place, tmp_path: Path) -> None:
    gone = place_of(Store.init(tmp_path / "gone"))
    (tmp_path / "gone").rename(tmp_path / "away")

    done = Scheduler(lambda: [gone, place], {"collect": 1000.0}).run_due()

    assert [each.outcome for each in done if each.action == "collect"][-1] == "done"


@pytest.mark.long
def test_verification_of_a_damaged_store_finds_problems(place: Place) -> None:
    place.store.backend.put_new("refs/runs/x/@1", [b"damage"])

    outcome, summary = run_in_process(place.store.uri, "verify", lambda: None)

    assert outcome == "problems"
    assert "run x step 1" in summary


@pytest.mark.parametrize(
    "value", ["verify", "verify=", "verify=7", "sweep=1d", "verify=1d verify=2d", "verify=0", "1d"]
)
def test_wrong_schedule_is_refused_by_name(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORCAS_MAINTENANCE", value)

    with pytest.raises(ValueError, match="TENSORCAS_MAINTENANCE must be a list"):
        config.maintenance()


def test_schedule_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.maintenance() == {}
    monkeypatch.setenv("TENSORCAS_MAINTENANCE", "verify=7d, collect=12h optimize=30d")

    assert config.maintenance() == {"verify": 7 * 86400.0, "collect": 12 * 3600.0, "optimize": 30 * 86400.0}


@pytest.fixture
def maintained(
    flask_app: Flask, log: Callable[..., str], location: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[FlaskClient, str]:
    """A server that may verify its store on demand, and the store's name in addresses."""
    log("first", "run", make_state(1))
    monkeypatch.setenv("TENSORCAS_MAINTENANCE", "verify=1000d")
    monkeypatch.setattr(_app, "own_stores", lambda: [place_of(Store.open(location))])
    monkeypatch.setattr(Scheduler, "start", lambda self: None)
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(Scheduler, "ask", lambda self, place, action: asked.append((place.id, action)))
    _app.add_pages(flask_app, has_auth=False)
    client = flask_app.test_client()
    client.asked = asked  # type: ignore[attr-defined]
    return client, place_of(Store.open(location)).id


@pytest.mark.long
def test_what_the_schedule_names_can_be_run_at_once(maintained: tuple[FlaskClient, str]) -> None:
    client, store = maintained

    answer = client.post("/tensorcas/maintenance", data={"store": store, "action": "verify"})

    assert (answer.status_code, answer.headers["Location"]) == (303, "/tensorcas/health")
    assert client.asked == [(store, "verify")]  # type: ignore[attr-defined]
    assert "Run verify now" in get(client, "health")


@pytest.mark.long
@pytest.mark.parametrize(
    ("headers", "data", "status"),
    [
        ({"Origin": "https://evil.example"}, {"action": "verify"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, {"action": "verify"}, 403),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "https://proxy.example"}, {"action": "collect"}, 403),
        ({}, {"action": "optimize"}, 403),
        ({}, {}, 403),
        ({}, {"action": "verify", "store": "none"}, 404),
    ],
)
def test_other_requests_run_nothing(
    maintained: tuple[FlaskClient, str], headers: dict[str, str], data: dict[str, str], status: int
) -> None:
    client, store = maintained

    answer = client.post("/tensorcas/maintenance", data={"store": store} | data, headers=headers)

    assert answer.status_code == status
    assert client.asked == []  # type: ignore[attr-defined]


@pytest.mark.long
def test_health_shows_the_rounds_with_their_reports(
    client: FlaskClient, log: Callable[..., str], location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log("first", "run", make_state(1))
    place = place_of(Store.open(location))
    monkeypatch.setattr(_schedule, "_PROGRAM", "import sys; sys.exit('<b>no</b> memory')")
    Scheduler(lambda: [place], {"verify": 1000.0}).run_due()

    [shown] = get_json(client, "health")["stores"]
    assert shown["last_verify"]["outcome"] == "failed"
    page = get(client, "health")
    assert "&lt;b&gt;no&lt;/b&gt; memory" in page
    assert "failed" in page


@pytest.mark.long
def test_links_are_added_to_empty_descriptions_alone(flask_app: Flask, log: Callable[..., str], location: str) -> None:
    first, second = log("first", "one", make_state(1)), log("first", "two", make_state(2))
    client = MlflowClient()
    client.set_tag(second, NOTE, "my own words")
    with mlflow.start_run(run_id=first):
        info = mlflow.tensorcas.log_model(make_state(3), name="model", pip_requirements=[])
    client.create_registered_model("registered")
    client.create_model_version("registered", info.model_uri, run_id=first, model_id=info.model_id)
    place = place_of(Store.open(location))

    assert add_links(place) == 2
    assert add_links(place) == 0
    assert f"tensorcas/run?id={first}" in client.get_run(first).data.tags[NOTE]
    assert client.get_run(second).data.tags[NOTE] == "my own words"
    assert f"tensorcas/run?id={first}" in str(client.get_model_version("registered", "1").description)
