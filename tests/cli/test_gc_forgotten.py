"""``tensorcas gc --orphans --tracking-uri``: whose word is taken for what, under roots of our own."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from tensorcas_mlflow.integration.forgotten import OrphanPlan, Registry, Tracker, find_holdings, plan_orphans
from tensorcas_mlflow.integration.forgotten._holdings import drop_holding
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
from tests.cli.conftest import Tensorcas
from tests.cli.hosts import Gc, Host
from tests.tracking import empty_database, no_stray_settings, tracking_uri

__all__ = ["empty_database", "no_stray_settings", "tracking_uri"]


@pytest.fixture
def host(tracking_uri: str, tmp_path: Path) -> Host:
    Store.init(tmp_path / "root")
    return Host(tracking_uri, tmp_path / "root")


@pytest.fixture
def other_uri(empty_database: Path, tmp_path: Path) -> str:
    """A tracking store that has nothing to do with the host's."""
    shutil.copy(empty_database, tmp_path / "other.db")
    return f"sqlite:///{tmp_path}/other.db"


@pytest.fixture
def gc(host: Host, tensorcas: Tensorcas) -> Gc:
    return Gc(host, tensorcas)


def plan_of(host: Host) -> OrphanPlan:
    store = Store.open(host.root)
    trackers, registries = [Tracker(host.uri)], [Registry(host.uri)]
    return plan_orphans(store, find_holdings(store), trackers=trackers, registries=registries, grace_s=0)


def test_gc_drops_what_the_tracking_store_forgot_with_its_plain_files(host: Host, gc: Gc) -> None:
    experiment = host.experiment("a")
    kept_run, kept_model = host.run(experiment), host.model(experiment)
    gone_run, gone_model = host.run(experiment), host.model(experiment)
    host.forget(gone_run, gone_model)

    done = gc()

    assert done.status == 0
    assert f"gone: run a/{gone_run}/artifacts: 1 file in the store, 1 plain file (6 B)\n" in done.out
    assert f"gone: model a/models/{gone_model}/artifacts: " in done.out
    assert host.kept() == {kept_run, kept_model}
    assert not (host.root / "a" / gone_run).exists()
    assert not (host.root / "a/models" / gone_model).exists()


@pytest.mark.long
def test_gc_keeps_deleted_runs_that_mlflow_can_restore(host: Host, gc: Gc) -> None:
    experiment = host.experiment("a")
    ids = {host.run(experiment), host.model(experiment)}
    for each in ids:
        delete = host.client.delete_logged_model if each.startswith("m-") else host.client.delete_run
        delete(each)
    host.client.delete_experiment(experiment)

    assert gc().status == 0
    assert host.kept() == ids


def test_gc_asks_the_tracking_store_of_the_environment(
    host: Host, tensorcas: Tensorcas, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = host.experiment("a")
    kept, gone = host.run(experiment), host.run(experiment)
    host.forget(gone)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", host.uri)

    assert tensorcas("gc", "--root", host.root, "--orphans", "--yes", "--grace", "0").status == 0
    assert host.kept() == {kept}


def test_gc_without_a_tracking_store_drops_no_orphans(
    host: Host, tensorcas: Tensorcas, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = host.run(host.experiment("a"))
    host.forget(run_id)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    done = tensorcas("gc", "--root", host.root, "--orphans", "--yes", "--grace", "0")

    assert done.status == 1
    assert "--tracking-uri" in done.err
    assert "MLFLOW_TRACKING_URI" in done.err
    assert host.kept() == {run_id}


def test_gc_refuses_a_tracking_store_with_nothing_in_the_store(host: Host, gc: Gc, other_uri: str) -> None:
    run_id = host.run(host.experiment("a"))
    MlflowClient(other_uri).create_experiment("elsewhere", "tensorcas:///elsewhere/a")

    for words in ((), ("--folder", "a")):
        done = gc(*words, uri=other_uri)
        assert done.status == 1
        assert "cannot identify orphans" in done.err
    assert host.kept() == {run_id}


def test_gc_does_not_make_a_missing_tracking_database(host: Host, gc: Gc, tmp_path: Path) -> None:
    host.run(host.experiment("a"))

    done = gc(uri=f"sqlite:///{tmp_path}/mistyped.db")

    assert done.status == 1
    assert "there is no database" in done.err
    assert not (tmp_path / "mistyped.db").exists()


def test_gc_keeps_orphans_written_within_the_grace(host: Host, gc: Gc) -> None:
    experiment = host.experiment("a")
    kept, gone = host.run(experiment), host.run(experiment)
    host.forget(gone)

    assert gc(grace="1h").status == 0
    assert host.kept() == {kept, gone}


def test_gc_dry_run_drops_no_orphans(host: Host, gc: Gc) -> None:
    experiment = host.experiment("a")
    ids = host.run(experiment), host.run(experiment), host.model(experiment)
    host.forget(*ids[1:])

    found = gc("--dry-run", "--json").json

    assert sorted((root["kind"], root["id"], root["path"]) for root in found["gone_roots"]) == [
        ("model", ids[2], f"a/models/{ids[2]}/artifacts"),
        ("run", ids[1], f"a/{ids[1]}/artifacts"),
    ]
    assert {ref["path"] for ref in found["gone"]} == {
        f"a/models/{ids[2]}/artifacts/weights.bin",
        f"a/{ids[1]}/artifacts/weights.bin",
    }
    assert found["report"] is None
    assert host.kept() == set(ids)


def test_gc_drops_a_folder_of_an_unknown_experiment_only_if_named(host: Host, gc: Gc, other_uri: str) -> None:
    mine = host.run(host.experiment("mine"))
    other = Host(other_uri, host.root)
    theirs = other.model(other.experiment("theirs"))

    done = gc()
    assert f"kept: 1 unknown artifact root in theirs: no evidence links the folder to {host.uri}" in done.out
    assert "pass --folder theirs" in done.out
    assert host.kept() == {mine, theirs}
    assert gc("--folder", "theirs").status == 0

    assert host.kept() == {mine}


def test_gc_refuses_a_named_folder_without_anything_of_mlflow(host: Host, gc: Gc) -> None:
    run_id = host.run(host.experiment("a"))

    done = gc("--folder", "b")

    assert done.status == 1
    assert "'b'" in done.err
    assert host.kept() == {run_id}


@pytest.mark.long
def test_gc_asks_all_tracking_stores_that_share_a_folder(host: Host, gc: Gc, other_uri: str) -> None:
    other = Host(other_uri, host.root)
    mine, theirs = host.experiment("shared"), other.experiment("shared")
    ids = {host.run(mine), host.model(mine), other.run(theirs), other.model(theirs)}
    gone = host.model(mine)
    host.forget(gone)

    assert gc("--tracking-uri", other.uri).status == 0
    assert host.kept() == ids


def test_gc_does_not_believe_a_tracking_store_that_knows_few_of_the_runs(host: Host, gc: Gc) -> None:
    experiment = host.experiment("a")
    kept, *gone = (host.run(experiment) for _ in range(3))
    host.forget(*gone)

    done = gc()
    assert f"kept: 2 unknown artifact roots in a: {host.uri} knows only 1 of the 3 runs" in done.out
    assert host.kept() == {kept, *gone}
    assert gc("--folder", "a").status == 0

    assert host.kept() == {kept}


def test_gc_keeps_what_is_older_than_the_tracking_store(host: Host, gc: Gc) -> None:
    experiment = host.experiment("a")
    kept, before = host.run(experiment), host.model(experiment)
    host.forget(before)
    with sqlite3.connect(host.uri.removeprefix("sqlite:///")) as database:
        database.execute("UPDATE experiments SET creation_time = ?", (4_000_000_000_000,))

    done = gc()

    assert "older than every experiment" in done.out
    assert host.kept() == {kept, before}


def test_gc_recognises_the_folders_of_a_server_by_a_known_run(host: Host, gc: Gc) -> None:
    first = host.experiment("first", location="mlflow-artifacts:/1")
    second = host.experiment("second", location="mlflow-artifacts:/2")
    gone = host.model(second, folder="2")
    host.forget(gone)

    refused = gc()
    assert refused.status == 1
    assert host.kept() == {gone}
    kept = host.run(first, folder="1")
    unknown = host.model(first, folder="3")
    host.forget(unknown)
    assert gc().status == 0

    assert host.kept() == {kept, unknown}


def test_gc_drops_tensors_of_a_forgotten_model_with_artifacts_elsewhere(host: Host, gc: Gc) -> None:
    experiment = host.experiment("remote", location="s3://bucket/1")
    store = Store.open(host.root)
    models = [host.client.create_logged_model(experiment) for _ in range(2)]
    for model in models:
        with store.write_checkpoint({"w": np.arange(10)}) as pending:
            pending.commit(RefTarget(uri=f"{model.artifact_location}/data/checkpoint.arrow", model_id=model.model_id))
    host.forget(models[0].model_id)

    assert gc().status == 0
    assert [ref.model_id for ref in store.checkpoints()] == [models[1].model_id]


def test_gc_leaves_folders_of_mlflows_own_alone(host: Host, gc: Gc) -> None:
    host.run(host.experiment("ours"))
    experiment = host.experiment("own", location=f"file://{host.root}/own")
    with_copy, without = (host.client.create_logged_model(experiment) for _ in range(2))
    store = Store.open(host.root)
    with store.write_checkpoint({"w": np.arange(10)}) as pending:
        folder = host.root / "own/models" / with_copy.model_id / "artifacts"
        folder.mkdir(parents=True)
        (folder / "checkpoint.arrow").write_bytes(pending.manifest.stream)
        pending.commit(RefTarget(copy_path=str((folder / "checkpoint.arrow").relative_to(host.root))))
    host.client.log_model_artifact(without.model_id, str(host.root.parent / "note.txt"))
    host.forget(with_copy.model_id, without.model_id)

    assert gc().status == 0
    assert [ref.copy_path is not None for ref in store.checkpoints()] == [False, True]
    assert {path.name for path in (host.root / "own").rglob("*") if path.is_file()} == {"checkpoint.arrow", "note.txt"}


def test_gc_ignores_paths_outside_mlflows_layout(host: Host, gc: Gc) -> None:
    experiment = host.experiment("a")
    kept, gone = host.run(experiment), host.run(experiment)
    host.forget(gone)
    for folder in ("notes", "a/models/best/artifacts", f"a/{'0' * 31}/artifacts", f"a/{'0' * 32}/other"):
        host.write(f"tensorcas://{host.root}/{folder}")
    aside = host.root.parent / "aside" / ("1" * 32) / "artifacts"
    aside.mkdir(parents=True)
    (aside / "precious.txt").write_text("mine")
    (host.root / "a" / ("1" * 32)).symlink_to(aside.parent)

    assert gc().status == 0

    assert {ref.path for ref in Store.open(host.root).checkpoints()} == {
        f"a/{kept}/artifacts/weights.bin",
        "notes/weights.bin",
        "a/models/best/artifacts/weights.bin",
        f"a/{'0' * 31}/artifacts/weights.bin",
        f"a/{'0' * 32}/other/weights.bin",
    }
    assert (aside / "precious.txt").read_text() == "mine"


def test_gc_spares_an_orphan_written_after_the_plan(host: Host) -> None:
    experiment = host.experiment("a")
    ids = [host.run(experiment), *(host.model(experiment) for _ in range(3))]
    host.forget(*ids[1:])
    plan = plan_of(host)
    root = f"tensorcas://{host.root}/a/models"

    get_artifact_repository(f"{root}/{ids[1]}/artifacts").log_artifact(str(host.root.parent / "weights.bin"))
    get_artifact_repository(f"{root}/{ids[2]}/artifacts").log_artifact(str(host.root.parent / "note.txt"), "more")
    dropped = plan.execute()

    assert [holding.id for holding in dropped] == [ids[3]]
    assert host.kept() == set(ids[:3])


def test_gc_spares_an_orphan_that_mlflow_knows_again_after_the_plan(host: Host, tmp_path: Path) -> None:
    experiment = host.experiment("a")
    ids = {host.run(experiment), host.run(experiment)}
    shutil.copy(tmp_path / "mlflow.db", tmp_path / "backup.db")
    host.forget(max(ids))
    plan = plan_of(host)

    shutil.copy(tmp_path / "backup.db", tmp_path / "mlflow.db")

    assert len(plan.holdings) == 1
    assert plan.execute() == ()
    assert host.kept() == ids


@pytest.mark.long
@pytest.mark.parametrize("name", ["plain", "0" * 32, f"m-{'1' * 32}"])
def test_a_copied_registered_version_keeps_its_model_under_any_name(host: Host, gc: Gc, name: str) -> None:
    experiment = host.experiment("a")
    kept_run, registered, gone = host.run(experiment), host.model(experiment), host.model(experiment)
    host.registered(name, registered)
    host.forget(registered, gone)

    assert gc("--folder", "a").status == 0
    assert host.kept() == {kept_run, registered}


@pytest.mark.long
def test_gc_keeps_what_a_named_registry_in_another_database_loads(host: Host, gc: Gc, other_uri: str) -> None:
    experiment = host.experiment("a")
    kept_run, registered, gone = host.run(experiment), host.model(experiment), host.model(experiment)
    host.registered("used", registered, registry_uri=other_uri)
    host.forget(registered, gone)

    done = gc("--registry-uri", other_uri)

    assert done.status == 0
    assert "kept: 1 unknown artifact root in a: registered model versions are loaded from there\n" in done.out
    assert host.kept() == {kept_run, registered}
    assert gc().status == 0
    assert host.kept() == {kept_run}


@pytest.mark.long
def test_gc_asks_the_registries_of_the_environment_and_of_the_tracking_stores(
    host: Host, gc: Gc, other_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = host.experiment("a")
    kept_run, here, there = host.run(experiment), host.model(experiment), host.model(experiment)
    host.registered("here", here)
    host.registered("there", there, registry_uri=other_uri)
    host.forget(here, there)
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", other_uri)

    assert gc().status == 0
    assert host.kept() == {kept_run, here, there}


def test_gc_refuses_a_missing_registry_and_makes_none(host: Host, gc: Gc, tmp_path: Path) -> None:
    experiment = host.experiment("a")
    run_id, model_id = host.run(experiment), host.model(experiment)
    host.forget(model_id)

    done = gc("--registry-uri", f"sqlite:///{tmp_path}/mistyped.db")

    assert done.status == 1
    assert "there is no database" in done.err
    assert not (tmp_path / "mistyped.db").exists()
    assert host.kept() == {run_id, model_id}


class Unhelpful(BaseHTTPRequestHandler):
    """A proxy that serves another program."""

    def do_GET(self) -> None:
        body = f"<html>there is no {self.path}</html>".encode()
        self.send_response(404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def unhelpful() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Unhelpful)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_gc_takes_a_server_without_the_api_as_an_error(host: Host, gc: Gc, unhelpful: str) -> None:
    experiment = host.experiment("a")
    ids = {host.run(experiment), host.model(experiment)}

    for words in ((), ("--tracking-uri", host.uri)):
        done = gc(*words, uri=unhelpful)
        assert done.status == 1
        assert "could not ask" in done.err
        assert unhelpful in done.err
    assert host.kept() == ids


def test_gc_reports_an_unreachable_server_without_its_password(
    host: Host, gc: Gc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run_id = host.run(host.experiment("a"))

    done = gc(uri="http://user:secret@127.0.0.1:9")

    assert done.status == 1
    assert "could not ask" in done.err
    assert "secret" not in done.err
    assert host.kept() == {run_id}


def test_gc_refuses_a_tracking_store_with_workspaces(
    host: Host, gc: Gc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = host.run(host.experiment("a"))
    monkeypatch.setenv("MLFLOW_ENABLE_WORKSPACES", "true")
    shutil.copy(tmp_path / "mlflow.db", tmp_path / "fresh.db")

    done = gc(uri=f"sqlite:///{tmp_path}/fresh.db")

    assert done.status == 1
    assert "tracking store" in done.err
    assert "workspaces" in done.err
    assert host.kept() == {run_id}


def test_gc_refuses_a_model_registry_with_workspaces(other_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ENABLE_WORKSPACES", "true")

    with pytest.raises(ValueError, match=r"the model registry at .* keeps workspaces"):
        Registry(other_uri)


def test_removal_of_a_run_keeps_a_store_inside_its_folder(tmp_path: Path) -> None:
    store = Store.init(tmp_path)
    artifacts = tmp_path / "1" / ("a" * 32) / "artifacts"
    shutil.copytree(tmp_path / ".tensorcas", artifacts / "inner/.tensorcas")
    (artifacts / "note.txt").write_text("a note")
    [holding] = find_holdings(store)
    drop_holding(store, holding)

    assert holding.n_plain == 1
    assert not (artifacts / "note.txt").exists()
    assert Store.open(artifacts / "inner").id == store.id
