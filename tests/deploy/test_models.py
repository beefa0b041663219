"""Models, the registry and the life of runs through a server whose destination is a store, without our package."""

from __future__ import annotations

import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from mlflow import MlflowClient

from tests.deploy.calls import (
    contents,
    download,
    fill,
    log_file,
    log_folder,
    new_experiment,
    new_run,
    refs,
    root_of,
    sizes,
)
from tests.deploy.clients import Client, client
from tests.deploy.models import round_trip_pytorch, round_trip_sklearn, round_trip_xgboost
from tests.deploy.servers import Server, environment

DATA = np.random.default_rng(0).bytes(500_000)


@pytest.fixture(scope="module")
def user(uvicorn: Server) -> Iterator[Client]:
    """A client where our package is not installed."""
    # Which packages a model needs is found out by loading it in another process. Few tests want to wait for that.
    with client(uvicorn.uri, plugin=False, MLFLOW_REQUIREMENTS_INFERENCE_TIMEOUT="1") as process:
        yield process


@pytest.mark.long
@pytest.mark.parametrize("round_trip", [round_trip_pytorch, round_trip_sklearn, round_trip_xgboost])
def test_a_model_comes_back_as_it_was(user: Client, round_trip: Any) -> None:
    assert user(round_trip) == []


def copy_and_load() -> dict[str, Any]:
    from sklearn.linear_model import LinearRegression

    mlflow.set_experiment(experiment_id=new_experiment())
    model = LinearRegression().fit([[0.0], [1.0]], [1.0, 3.0])
    first, second = uuid.uuid4().hex, uuid.uuid4().hex
    for _ in range(2):
        mlflow.sklearn.log_model(model, name="model", registered_model_name=first, pip_requirements=[])
    users = MlflowClient()
    users.set_registered_model_alias(first, "best", 2)
    copied = users.copy_model_version(f"models:/{first}@best", second)
    uris = [f"models:/{first}/1", f"models:/{first}@best", f"models:/{second}/{copied.version}"]
    return {
        "versions": sorted(int(version.version) for version in users.search_model_versions(f"name = '{first}'")),
        "answers": [mlflow.pyfunc.load_model(uri).predict([[2.0]]).round(6).tolist() for uri in uris],
        "copied": contents(download(uris[2])).keys() == contents(download(uris[1])).keys(),
    }


@pytest.mark.long
def test_registered_versions_aliases_and_copies_load(user: Client) -> None:
    found = user(copy_and_load)

    assert found == {"versions": [1, 2], "answers": [[5.0]] * 3, "copied": True}


def nested_runs() -> list[list[str]]:
    with mlflow.start_run(experiment_id=new_experiment()) as outer:
        mlflow.log_text("outer", "note.txt")
        with mlflow.start_run(nested=True) as inner:
            mlflow.log_text("inner", "note.txt")
    return [
        [mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/note.txt"), *sizes(run.info.run_id)]
        for run in (outer, inner)
    ]


@pytest.mark.long
def test_a_nested_run_has_artifacts_of_its_own(user: Client) -> None:
    assert user(nested_runs) == [["outer", "note.txt"], ["inner", "note.txt"]]


def autologged() -> tuple[str, list[str], float]:
    from sklearn.tree import DecisionTreeClassifier

    mlflow.set_experiment(experiment_id=new_experiment())
    mlflow.sklearn.autolog(log_input_examples=False, log_model_signatures=False, silent=True)
    try:
        features, labels = np.arange(40.0).reshape(20, 2), np.arange(20) % 2
        with mlflow.start_run() as run:
            model = DecisionTreeClassifier(random_state=0).fit(features, labels)
        [logged] = mlflow.search_logged_models(output_format="list")
        loaded = mlflow.sklearn.load_model(logged.model_uri)
        return (
            run.info.run_id,
            list(sizes(run.info.run_id)),
            float((loaded.predict(features) == model.predict(features)).mean()),
        )
    finally:
        mlflow.sklearn.autolog(disable=True)


@pytest.mark.long
def test_autologging_logs_models_and_pictures(user: Client) -> None:
    _, names, agreement = user(autologged)

    assert "training_confusion_matrix.png" in names
    assert agreement == 1.0


def delete(run_id: str) -> None:
    MlflowClient().delete_run(run_id)


def restore(run_id: str) -> None:
    MlflowClient().restore_run(run_id)


@pytest.mark.long
def test_a_run_that_is_deleted_and_restored_has_its_artifacts(user: Client, tmp_path: Path) -> None:
    run_id = user(log_folder, fill(tmp_path, {"weights.bin": DATA}))
    user(delete, run_id)
    user(restore, run_id)

    assert contents(user(download, f"runs:/{run_id}/")) == {"weights.bin": DATA}


def doomed_things(folder: str) -> dict[str, str]:
    """Make a run, an experiment with a run, and a logged model, and delete each of them as MLflow does it: for show."""
    users = MlflowClient()
    experiment_id, other = new_experiment(), new_experiment()
    deleted = log_folder(folder, run_id=new_run(experiment_id))
    of_other = log_folder(folder, run_id=new_run(other))
    model = users.create_logged_model(experiment_id, name="model")
    users.log_model_artifacts(model.model_id, folder)
    kept = log_folder(folder, run_id=new_run(experiment_id))
    users.delete_run(deleted)
    users.delete_experiment(other)
    users.delete_logged_model(model.model_id)
    return {"kept": kept, "run": deleted, "experiment": other, "its run": of_other, "model": model.model_id}


def collect(server: Server, *options: str) -> None:
    command = [sys.executable, "-m", "mlflow", "gc", "--backend-store-uri", server.backend_store_uri, *options]
    env = environment(plugin=False, MLFLOW_TRACKING_URI=server.uri)
    done = subprocess.run(command, env=env, cwd=server.folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_mlflow_gc_drops_what_runs_experiments_and_logged_models_had(
    uvicorn: Server, user: Client, tmp_path: Path
) -> None:
    ids = user(doomed_things, fill(tmp_path, {"weights.bin": DATA, "MLmodel": b"flavors: {}\n"}))
    doomed = ["run", "its run", "model"]
    assert [len(refs(uvicorn, ids[key])) for key in doomed] == [1, 1, 1]
    of_each = ("--run-ids", ids["run"], "--experiment-ids", ids["experiment"], "--logged-model-ids", ids["model"])
    collect(uvicorn, *of_each)

    assert [refs(uvicorn, ids[key]) for key in doomed] == [[], [], []]
    assert [list(uvicorn.store_root.rglob(f"{ids[key]}/artifacts/MLmodel")) for key in doomed] == [[], [], []]
    assert contents(user(download, f"runs:/{ids['kept']}/"))["weights.bin"] == DATA


def log_until_deleted(run_id: str, folder: str, n_files: int) -> list[str]:
    """Log files to a run while another thread deletes its artifacts; what went wrong."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    repo = get_artifact_repository(root_of(run_id))
    stop = threading.Event()

    def delete_again_and_again() -> None:
        while not stop.is_set():
            repo.delete_artifacts()

    deleter = threading.Thread(target=delete_again_and_again)
    deleter.start()
    wrong = []
    try:
        for number in range(n_files):
            try:
                log_file(run_id, f"{folder}/{number}.bin", "model/data")
            except Exception as error:  # noqa: BLE001 - whatever it is, it is told
                wrong.append(str(error))
    finally:
        stop.set()
        deleter.join()
    repo.delete_artifacts()
    return wrong


@pytest.mark.long
def test_deleting_a_run_while_it_is_written_hurts_no_other_run(uvicorn: Server, user: Client, tmp_path: Path) -> None:
    files = {f"{number}.bin": DATA[number:] for number in range(10)}
    kept = user(log_folder, fill(tmp_path, files))
    run_id = user(new_run)
    wrong = user(log_until_deleted, run_id, str(tmp_path), len(files))

    assert wrong == []
    assert refs(uvicorn, run_id) == []
    assert user(sizes, run_id) == {}
    assert contents(user(download, f"runs:/{kept}/")) == files


def folders_of_a_logged_model(n_steps: int, *, trained: bool) -> tuple[str, int]:
    """Log a network step by step, half of it trained or nothing; its experiment, and its bytes as plain files."""
    import torch

    torch.manual_seed(0)
    mlflow.set_experiment(experiment_id=(experiment_id := new_experiment()))
    network = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))
    plain_bytes = 0
    for step in range(n_steps):
        if trained:
            with torch.no_grad():
                network[1].weight.add_(torch.randn(512, 512) * 0.01)
        info = mlflow.pytorch.log_model(
            network, name="network", step=step, pip_requirements=[], serialization_format="pickle"
        )
        plain_bytes += sum(map(len, contents(download(info.model_uri)).values()))
    return experiment_id, plain_bytes


@pytest.mark.parametrize(
    ("trained", "share"),
    [
        pytest.param(True, 0.60, id="half-frozen", marks=pytest.mark.long),
        pytest.param(False, 0.11, id="identical", marks=pytest.mark.long),
    ],
)
def test_ten_steps_of_a_network_take_a_fraction_of_their_bytes(
    uvicorn: Server, user: Client, trained: bool, share: float
) -> None:
    from tests.stored_bytes import bytes_below  # clients without the package import this module too

    before = bytes_below(uvicorn.store_root)
    _, plain_bytes = user(folders_of_a_logged_model, 10, trained=trained)

    assert plain_bytes > 10 * 2_000_000
    assert (bytes_below(uvicorn.store_root) - before) / plain_bytes <= share
