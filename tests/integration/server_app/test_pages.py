"""Pages of an MLflow server without authentication: their figures, links, and headers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import mlflow
import numpy as np
import pytest
from flask import Flask
from flask.testing import FlaskClient
from mlflow import MlflowClient
from safetensors.numpy import save_file

from tensorcas_mlflow.integration.server_app._app import add_pages
from tensorcas_mlflow.maintenance import find_shares
from tensorcas_mlflow.store import Store
from tests.integration.server_app.conftest import get, get_json, make_state
from tests.tracking import active_experiment

COMMIT_BYTES = 200
"""Most bytes that a commit takes."""
HOSTILE = "<script>alert(1)</script>\u202e\"'&" + "x" * 500


class Elements(HTMLParser):
    """The elements of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def links(self) -> Iterator[str]:
        """Yield the addresses of our own pages and files."""
        for _, attributes in self.found:
            for name in ("href", "src"):
                address = attributes.get(name)
                if address and not address.startswith("#") and "/#/" not in address:
                    yield address


def check_is_safe(page: str) -> None:
    """Check that a page holds nothing that its policy forbids, and no markup of a name."""
    for tag, attributes in Elements(page).found:
        assert tag != "style"
        assert "style" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        assert tag != "script" or (attributes.get("src") or "").endswith("/tensorcas/script.js")
        for name in ("href", "src", "action"):
            assert not (attributes.get(name) or "").lower().startswith(("javascript:", "data:", "http"))
    assert "<script>alert" not in page
    assert "\u202e" not in page


def steps_in(run: Any) -> list[Any]:
    """Return the checkpoints on a run's page, the earliest step first."""
    return [each for each in reversed(run["refs"]) if each["kind"] == "checkpoint"]


@pytest.fixture
def runs(log: Callable[..., str]) -> tuple[str, str]:
    """Two runs of two experiments: the second begins with the first one's last state."""
    first = make_state(1)
    second = first | {"head.weight": first["head.weight"] + np.float32(1)}
    return log("first", "run a", first, second, first), log("second", "run b", second, make_state(2))


@pytest.mark.long
def test_overview_shows_the_bytes_of_each_experiment(client: FlaskClient, runs: tuple[str, str], location: str) -> None:
    shown = get_json(client, "")

    [store] = shown["stores"]
    assert (store["uri"], store["n_refs"] >= 5, store["error"]) == (Store.open(location).uri, True, None)
    shares = {share.experiment: share for share in find_shares(Store.open(location), "run").shares}
    assert len(shares) == 1
    by_run = {share.run_id: share for share in find_shares(Store.open(location), "run").shares}
    found = {each["name"]: each["owned"] for each in shown["experiments"]}
    for name, run_id in zip(("first", "second"), runs, strict=True):
        assert found[name]["exclusive_bytes"] == by_run[run_id].exclusive_bytes
        assert found[name]["marginal_bytes"] == by_run[run_id].marginal_bytes
    assert found["second"]["shared_bytes"] > 64 * 64 * 4
    page = get(client, "")
    assert page.index("first") > 0
    assert "second" in page


@pytest.mark.long
def test_all_tensors_of_a_checkpoint_are_on_its_pages(client: FlaskClient, log: Callable[..., str]) -> None:
    run_id = log("many", "run", {f"w.{number}": np.full(64, number, np.float32) for number in range(1001)})
    [step] = steps_in(get_json(client, f"run?id={run_id}"))
    address = f"checkpoint?store={step['store']}&key={quote(step['key'])}"
    found = [get_json(client, f"{address}&page={number}")["tensors"] for number in (1, 2, 3, 4)]

    assert [len(each) for each in found] == [500, 500, 2, 0]  # with what is no tensor of the state
    assert {f"w.{number}" for number in range(1001)} < {each["name"] for part in found for each in part}
    middle = get(client, f"{address}&page=2")
    assert "tensors 501 to 1,000 of 1,002" in middle
    assert "Search the tensors on this page by name" in middle
    assert [f"page={n}" in link for n, link in zip((1, 3), list(Elements(middle).links())[-2:], strict=True)] == [
        True
    ] * 2


@pytest.mark.long
def test_steps_logged_through_a_server_are_checkpoints(
    client: FlaskClient, location: str, tracking_uri: str, tmp_path: Path
) -> None:
    with active_experiment("proxied", location), mlflow.start_run() as run:
        for step in (1, 2):
            file = tmp_path / f"step-{step:08d}.tensors"
            save_file(make_state(step), file)
            mlflow.log_artifact(str(file), "checkpoints/ema")

    shown = get_json(client, f"run?id={run.info.run_id}")
    assert [(each["kind"], each["name"], each["step"]) for each in shown["refs"]] == [
        ("file", "ema", 2),
        ("file", "ema", 1),
    ]
    assert "Compare the two" in get(client, f"run?id={run.info.run_id}")
    last, first = shown["refs"]
    page = get_json(client, f"checkpoint?store={last['store']}&key={quote(last['key'])}")
    assert [each["name"] for each in page["tensors"]] == ["body.weight", "head.weight"]
    assert page["before"]["key"] == first["key"]
    assert get_json(client, f"diff?a={run.info.run_id}&b={run.info.run_id}")["a"].endswith(last["key"])


@pytest.mark.long
def test_every_link_of_every_page_resolves(client: FlaskClient, runs: tuple[str, str], location: str) -> None:
    seen: set[str] = set()
    waiting = ["/tensorcas/"]
    while waiting:
        address = waiting.pop()
        if address in seen or not address.startswith("/tensorcas/"):
            continue
        seen.add(address)
        page = get(client, address.removeprefix("/tensorcas/"))
        if "html" in page[:20]:
            check_is_safe(page)
            waiting += Elements(page).links()

    pages = {re.sub(r"\?.*", "", address) for address in seen}
    assert pages == {
        f"/tensorcas/{name}"
        for name in ("", "experiment", "run", "checkpoint", "diff", "models", "health", "style.css", "script.js")
    }


@pytest.mark.long
def test_answers_carry_a_strict_policy_and_are_not_kept_by_caches(client: FlaskClient, runs: tuple[str, str]) -> None:
    for page in ("", f"run?id={runs[0]}", "run?id=missing", "health", "diff"):
        answer = client.get(f"/tensorcas/{page}")

        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.long
def test_run_shows_what_deleting_each_step_frees(client: FlaskClient, runs: tuple[str, str], location: str) -> None:
    shown = get_json(client, f"run?id={runs[0]}")

    assert [each["step"] for each in shown["refs"] if each["kind"] == "checkpoint"] == [2, 1, 0]
    steps = steps_in(shown)
    assert steps[0]["owned"]["marginal_bytes"] > 2 * 64 * 64 * 2
    assert steps[2]["owned"]["marginal_bytes"] < 64 * 64
    before = find_shares(Store.open(location), "run").needed_bytes
    store = Store.open(location)
    [step] = [ref for ref in store.checkpoints() if ref.run_id == runs[0] and ref.step == 1]
    store.drop(step)
    freed = before - find_shares(store, "run").needed_bytes
    # The deletion writes a commit, and the blobs share the bytes of the database.
    assert freed <= steps[1]["owned"]["exclusive_bytes"] <= freed + COMMIT_BYTES


@pytest.mark.long
def test_diff_lists_the_largest_change_first_and_measures_on_demand(
    client: FlaskClient, log: Callable[..., str]
) -> None:
    before = make_state(1, names=("a", "b", "c"))
    after = before | {"a": before["a"] * np.float32(1.001), "b": before["b"] + np.float32(5)}
    run_id = log("first", "run", before, after)
    steps = steps_in(get_json(client, f"run?id={run_id}"))
    a, b = (quote(f"{each['store']}:{each['key']}") for each in steps)

    plain = get_json(client, f"diff?a={a}&b={b}")
    assert {each["name"]: each["change"] for each in plain["changes"]} == {"a": "changed", "b": "changed"}
    assert plain["counts"]["equal"][0] == 1
    assert all(each["relative_norm"] is None for each in plain["changes"])
    measured = get_json(client, f"diff?a={a}&b={b}&values=1")
    assert [each["name"] for each in measured["changes"]] == ["b", "a"]
    assert measured["changes"][1]["relative_norm"] == pytest.approx(0.001, rel=0.01)
    page = get(client, f"diff?a={a}&b={b}&values=1")
    assert "Relative norm" in page


@pytest.mark.long
def test_diff_takes_runs_and_model_versions(client: FlaskClient, log: Callable[..., str], location: str) -> None:
    run_id = log("first", "run", make_state(1), make_state(2))
    other = log("first", "other", make_state(2))
    experiment = mlflow.get_experiment_by_name("first")
    assert experiment is not None
    with mlflow.start_run(experiment_id=experiment.experiment_id):
        for number in (1, 2):
            info = mlflow.tensorcas.log_model(make_state(number), name=f"model{number}", pip_requirements=[])
            MlflowClient().create_registered_model(f"registered{number}")
            MlflowClient().create_model_version(
                f"registered{number}", f"models:/{info.model_id}", model_id=info.model_id
            )

    same = get_json(client, f"diff?a={run_id}&b=runs:/{other}")
    assert same["counts"]["equal"][0] == 2
    assert same["changes"] == []
    versions = get_json(client, "diff?a=models:/registered1/1&b=models:/registered2/1")
    assert versions["counts"]["changed"][0] == 2
    across = get_json(client, f"diff?a={run_id}&b={info.model_id}")
    assert across["counts"]["equal"][0] == 2
    for alias in ("best", "champion"):
        MlflowClient().set_registered_model_alias("registered1", alias, "1")
    listed = get_json(client, "models")["versions"]
    assert {each["name"]: each["owned"] is not None for each in listed} == {"registered1": True, "registered2": True}
    assert {each["name"]: each["aliases"] for each in listed} == {
        "registered1": ["best", "champion"],
        "registered2": [],
    }
    assert "registered1 version 1" in get(client, "models")


@pytest.mark.long
def test_page_of_a_run_tells_its_models_from_its_checkpoints(client: FlaskClient, log: Callable[..., str]) -> None:
    run_id = log("first", "run", make_state(1))
    with mlflow.start_run(run_id=run_id):
        mlflow.tensorcas.log_model(make_state(2), name="net", step=7, pip_requirements=[])
    page = get(client, f"run?id={run_id}")

    assert "checkpoint step 0" in page
    assert "model step 7" in page
    assert "checkpoint step 7" not in page


@pytest.mark.long
def test_checkpoint_shows_its_tensors_and_its_relatives(client: FlaskClient, log: Callable[..., str]) -> None:
    base = {"body.weight": np.random.default_rng(1).standard_normal((256, 256)).astype(np.float32)}
    tuned = {"body.weight": base["body.weight"] * np.float32(1.0001)}
    log("first", "pretrained", base)
    run_id = log("first", "tuned", tuned)
    [step] = steps_in(get_json(client, f"run?id={run_id}"))

    shown = get_json(client, f"checkpoint?store={step['store']}&key={quote(step['key'])}")

    assert [each["name"] for each in shown["tensors"]][:1] == ["body.weight"]
    [relative] = [each for each in shown["relatives"] if "pretrained" in each["words"]]
    assert relative["is_older"]
    assert relative["n_changed"] == 1


def test_health_shows_what_a_collection_would_free(client: FlaskClient, log: Callable[..., str], location: str) -> None:
    log("first", "run", make_state(1), make_state(2))
    store = Store.open(location)
    [step] = [ref for ref in store.checkpoints() if ref.step == 0 and ref.kind == "checkpoint"]
    store.drop(step)

    [shown] = get_json(client, "health")["stores"]

    assert shown["collectable_bytes"] + shown["wasted_bytes"] > 64 * 64
    assert sum(each["n_chunks"] for each in shown["encoded"]) > 0
    assert shown["last_verify"] is None
    assert "Collectable" in get(client, "health")


@pytest.mark.long
def test_names_of_others_are_text_on_every_page(client: FlaskClient, log: Callable[..., str]) -> None:
    state = make_state(1, names=(HOSTILE, "plain"))
    run_id = log("<b>bold</b>", HOSTILE[:200], state, state | {HOSTILE: state["plain"]})
    experiment = mlflow.get_experiment_by_name("<b>bold</b>")
    assert experiment is not None
    steps = steps_in(get_json(client, f"run?id={run_id}"))
    a, b = (quote(f"{each['store']}:{each['key']}") for each in steps)

    pages = [
        get(client, ""),
        get(client, f"experiment?id={experiment.experiment_id}"),
        get(client, f"run?id={run_id}"),
        get(client, f"checkpoint?store={steps[0]['store']}&key={quote(steps[0]['key'])}"),
        get(client, f"diff?a={a}&b={b}&values=1"),
        get(client, f"diff?a={quote(HOSTILE)}&b=", status=200),
    ]

    for page in pages:
        check_is_safe(page)
        assert "<b>bold" not in page
    assert "&lt;script&gt;alert(1)" in pages[2]
    assert "&lt;script&gt;alert(1)" in pages[4]


@pytest.mark.long
@pytest.mark.parametrize(
    "page",
    [
        "run?id=" + "0" * 32,
        "run?id=<script>alert(1)</script>",
        "run",
        "experiment?id=999",
        "checkpoint?store=none&key=refs/x",
        "diff?a=nothing&b=nothing",
        "diff?a=models:/none/1&b=m-" + "0" * 32,
    ],
)
def test_what_is_not_there_is_not_found(client: FlaskClient, runs: tuple[str, str], page: str) -> None:
    get(client, "")

    check_is_safe(get(client, page, status=404))


def test_damaged_manifest_shows_as_a_problem_and_the_server_goes_on(
    client: FlaskClient, log: Callable[..., str], location: str
) -> None:
    log("first", "run", make_state(1))
    store = Store.open(location)
    store.backend.put_new("refs/runs/x/@1", [b"damage"])

    [shown] = get_json(client, "")["stores"]

    assert shown["n_damaged"] == 1
    assert shown["error"] is None


@pytest.mark.long
def test_pages_lie_below_the_static_prefix(
    flask_app: Flask, log: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_MLFLOW_STATIC_PREFIX", "/team/")
    from mlflow.server import handlers

    app = Flask("prefixed")
    for path, handler, methods in handlers.get_endpoints():
        app.add_url_rule(path, handler.__name__, handler, methods=methods)
    add_pages(app, has_auth=False)
    log("first", "run", make_state(1))
    client = app.test_client()

    answer = client.get("/team/tensorcas/")

    assert answer.status_code == 200
    addresses = list(Elements(answer.text).links())
    assert addresses
    assert all(address.startswith("/team/") for address in addresses)
    assert client.get("/tensorcas/").status_code == 404


@pytest.mark.long
def test_many_runs_are_shown_page_by_page(client: FlaskClient, log: Callable[..., str]) -> None:
    state = make_state(1, names=("w",))
    for number in range(3):
        log("first", f"run {number}", state)
    experiment = mlflow.get_experiment_by_name("first")
    assert experiment is not None
    import tensorcas_mlflow.integration.server_app._content as content

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(content, "ROWS", 2)
        pages: list[Any] = [
            get_json(client, f"experiment?id={experiment.experiment_id}&sort=name&page={page}") for page in (1, 2, 3)
        ]

    assert [[run["name"] for run in page["runs"]] for page in pages] == [["run 0", "run 1"], ["run 2"], []]
    assert {page["n_runs"] for page in pages} == {3}
