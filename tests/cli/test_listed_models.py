"""Models of MLflow's own flavors below a store: `list`, `stats` and `du` name them and their runs."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
from tests.cli.conftest import Tensorcas, tensorcas

__all__ = ["tensorcas"]

RUN, OTHER = "c" * 32, "d" * 32
MODEL, UNKNOWN = "m-" + "1" * 32, "m-" + "2" * 32


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store with two files of a model of another flavor, a model without a MLmodel, and a checkpoint."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    store = Store.init(tmp_path / "store")
    for model, name in ((MODEL, "model.skops"), (MODEL, "data/more.npy"), (UNKNOWN, "model.pkl")):
        (tmp_path / "file").write_bytes(name.encode() * 50)
        path = f"models/{model}/artifacts/{name}"
        with store.write_file(tmp_path / "file") as pending:
            pending.commit(RefTarget(path=path, model_id=model))
    folder = tmp_path / "store" / "models" / MODEL / "artifacts"
    folder.mkdir(parents=True)
    (folder / "MLmodel").write_text(f"flavors:\n  sklearn: {{}}\nmodel_id: {MODEL}\nrun_id: {RUN}\n")
    with store.write_checkpoint({"w": np.arange(100.0)}) as pending:
        pending.commit(RefTarget(run_id=OTHER, step=1))
    return store


def make_database(path: Path) -> None:
    """Make the tables of a tracking store that names are read from."""
    with sqlite3.connect(path) as connection:
        connection.executescript(
            f"""
            CREATE TABLE experiments (experiment_id INT, name TEXT, artifact_location TEXT, lifecycle_stage TEXT);
            CREATE TABLE runs (run_uuid TEXT, name TEXT, experiment_id INT, artifact_uri TEXT, start_time INT,
                               lifecycle_stage TEXT);
            CREATE TABLE logged_models (model_id TEXT, name TEXT, source_run_id TEXT);
            INSERT INTO experiments VALUES (1, 'vision', '', 'active');
            INSERT INTO runs VALUES ('{RUN}', 'base', 1, '', 1, 'active');
            INSERT INTO logged_models VALUES ('{MODEL}', 'forest', '{RUN}'), ('{UNKNOWN}', 'pickled', '{RUN}');
            """
        )


def test_a_model_of_another_flavor_stands_under_the_run_that_its_mlmodel_names(
    tensorcas: Tensorcas, store: Store
) -> None:
    told = tensorcas("list", "--root", store.uri)

    [run, no_run] = [told.out.index(f"run {RUN}"), told.out.index("no run")]
    assert run < told.out.index(f"model {MODEL}: file model.skops") < no_run
    assert run < told.out.index(f"model {MODEL}: file data/more.npy") < no_run
    assert no_run < told.out.index(f"model {UNKNOWN}: file model.pkl")


def test_a_model_of_another_flavor_has_the_run_and_the_name_that_mlflow_knows(
    tensorcas: Tensorcas, store: Store, tmp_path: Path
) -> None:
    make_database(tmp_path / "mlflow.db")
    told = tensorcas("list", "--root", store.uri)
    [run] = [run for run in tensorcas("list", "--root", store.uri, "--json").json["runs"] if run["run_id"] == RUN]

    assert "no run" not in told.out
    assert f"model forest {MODEL}: file model.skops" in told.out
    assert f"model pickled {UNKNOWN}: file model.pkl" in told.out
    assert run["run_name"] == "base"
    assert {each["model_name"] for each in run["files"]} == {"forest", "pickled"}
    assert {each["run_id"] for each in run["files"]} == {RUN}


def test_the_files_of_a_model_belong_to_the_content_of_its_run(tensorcas: Tensorcas, store: Store) -> None:
    listed = tensorcas("list", "--run", RUN, "--root", store.uri)
    counted = tensorcas("stats", "--run", RUN, "--root", store.uri, "--json").json
    shares = tensorcas("du", "--root", store.uri, "--json").json["shares"]

    assert "model.skops" in listed.out
    assert "model.pkl" not in listed.out
    assert counted["files"] == 2
    assert {share["run_id"]: share["refs"] for share in shares} == {RUN: 2, OTHER: 1, None: 1}


def test_json_has_the_size_of_checkpoints_and_files(tensorcas: Tensorcas, store: Store) -> None:
    runs = tensorcas("list", "--root", store.uri, "--json").json["runs"]
    shown = tensorcas("show", OTHER, "--root", store.uri, "--json").json

    sizes = {each["key"]: each["bytes"] for run in runs for kind in ("checkpoints", "files") for each in run[kind]}
    assert sorted(sizes.values()) == [450, 550, 650, 800]
    assert shown["checkpoint"]["bytes"] == shown["n_bytes"] == 800


def test_an_experiment_in_place_of_a_run_is_named_as_such(tensorcas: Tensorcas, store: Store, tmp_path: Path) -> None:
    make_database(tmp_path / "mlflow.db")
    done = tensorcas("show", "vision")

    assert done.status == 1
    assert "'vision' is an experiment, and this command takes a run: `tensorcas list vision` lists its runs" in done.err
    assert "did you mean" not in done.err
