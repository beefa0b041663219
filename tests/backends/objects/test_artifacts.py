"""Models, checkpoints and artifacts of runs whose artifact location is a bucket that clients reach themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import mlflow
import numpy as np
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from sklearn.linear_model import LinearRegression

from tensorcas_mlflow.integration.artifacts import TensorCasArtifactRepository
from tests.backends.objects.faults import Answer
from tests.backends.objects.proxy import Proxy
from tests.backends.objects.requests_seen import Kind
from tests.backends.objects.servers import S3Server
from tests.deploy.calls import contents, fill
from tests.integration.artifacts.odd_names import NAMES, check_name
from tests.tracking import active_experiment, empty_database, no_stray_settings, tracking_uri

__all__ = ["empty_database", "no_stray_settings", "tracking_uri"]

X = np.random.default_rng(0).normal(size=(50, 400))
MODEL = LinearRegression().fit(X, np.random.default_rng(1).normal(size=(50, 30)))
BINARY = b"\0" + bytes(range(256)) * 4000

WRITING = (Kind.PUT, Kind.COPY, Kind.DELETE, Kind.CREATE, Kind.PART, Kind.COMPLETE)
"""Requests that change what is there."""


@pytest.fixture
def at_s3(s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Settings of somebody who may use the bucket, and a chunk cache of the test's own."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TENSORCAS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def root(bucket: str) -> str:
    return f"tensorcas-s3://{bucket}/team/digits"


@pytest.fixture
def experiment(at_s3: None, root: str, tracking_uri: str) -> Iterator[str]:
    """Id of the active experiment, whose artifact location is in a bucket."""
    with active_experiment("digits", root) as experiment_id:
        yield experiment_id


@pytest.fixture
def repo(at_s3: None, root: str) -> TensorCasArtifactRepository:
    return TensorCasArtifactRepository(f"{root}/{'5' * 32}/artifacts")


def keys(s3: S3Server, bucket: str) -> list[str]:
    pages = s3.client().get_paginator("list_objects_v2").paginate(Bucket=bucket)
    return [found["Key"] for page in pages for found in page.get("Contents", ())]


def pack_bytes(s3: S3Server, bucket: str) -> int:
    found = s3.client().list_objects_v2(Bucket=bucket).get("Contents", ())
    return sum(item["Size"] for item in found if "/.tensorcas/packs/" in item["Key"])


def in_another_process(tracking_uri: str, program: str, *words: str) -> Any:
    """Run a program that prints JSON last."""
    program = f"import json, sys, mlflow, numpy as np\nmlflow.set_tracking_uri({tracking_uri!r})\n{program}"
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_a_model_is_logged_and_registered_and_loaded_in_another_process(
    experiment: str, root: str, tracking_uri: str, s3: S3Server, bucket: str
) -> None:
    with mlflow.start_run():
        info = mlflow.tensorcas.log_model(MODEL, name="line", registered_model_name="line", pip_requirements=[])
    program = (
        "X = np.random.default_rng(0).normal(size=(50, 400))\n"
        "print(json.dumps([mlflow.pyfunc.load_model(uri).predict(X).tolist() for uri in sys.argv[1:]]))"
    )
    answers = in_another_process(tracking_uri, program, "models:/line/1", info.model_uri)

    assert np.array_equal(answers[0], MODEL.predict(X))
    assert np.array_equal(answers[1], MODEL.predict(X))
    assert np.array_equal(mlflow.tensorcas.load_model("models:/line/1").coef_, MODEL.coef_)
    assert info.artifact_path.startswith(f"{root}/models/")
    assert {key.split("/")[2] for key in keys(s3, bucket)} == {".tensorcas", "models"}


@pytest.mark.long
def test_a_model_that_is_logged_again_adds_no_tensors(experiment: str, s3: S3Server, bucket: str) -> None:
    with mlflow.start_run():
        mlflow.tensorcas.log_model(MODEL, name="line", pip_requirements=[])
        before = pack_bytes(s3, bucket)
        mlflow.tensorcas.log_model(MODEL, name="again", pip_requirements=[])

    assert before > MODEL.coef_.nbytes / 2
    assert pack_bytes(s3, bucket) - before < 5000


@pytest.mark.long
def test_a_model_of_mlflows_own_flavor_comes_back(experiment: str) -> None:
    with mlflow.start_run():
        info = mlflow.sklearn.log_model(MODEL, name="line", pip_requirements=[])

    assert np.array_equal(mlflow.sklearn.load_model(info.model_uri).coef_, MODEL.coef_)


@pytest.mark.long
def test_an_exported_model_loads_where_the_bucket_is_not_known(
    experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: S3Server
) -> None:
    with mlflow.start_run():
        info = mlflow.tensorcas.log_model(MODEL, name="line", pip_requirements=[])
    mlflow.tensorcas.export_model(info.model_uri, tmp_path / "line")
    for name in s3.environment:
        monkeypatch.delenv(name)

    assert np.array_equal(mlflow.tensorcas.load_model(tmp_path / "line").coef_, MODEL.coef_)


@pytest.mark.long
def test_a_downloaded_model_folder_has_its_tensors(experiment: str, tmp_path: Path) -> None:
    with mlflow.start_run():
        info = mlflow.tensorcas.log_model(MODEL, name="line", pip_requirements=[])
    folder = mlflow.artifacts.download_artifacts(info.model_uri, dst_path=str(tmp_path / "line"))

    assert {"MLmodel", "data/checkpoint.arrow", "data/checkpoint.tensors"} <= contents(folder).keys()


@pytest.mark.long
def test_checkpoints_are_logged_loaded_listed_and_deleted(experiment: str, tracking_uri: str) -> None:
    state = {"weights": np.arange(100_000, dtype=np.float32), "epoch": 0}
    with mlflow.start_run() as run:
        for step in range(4):
            state["weights"][step] = -1
            state["epoch"] = step
            mlflow.tensorcas.log_checkpoint(state, step=step)
    run_id = run.info.run_id
    mlflow.tensorcas.delete_checkpoint(run_id, step=1)
    program = (
        "from tensorcas_mlflow.integration.checkpoints import load_checkpoint\n"
        "print(json.dumps(load_checkpoint(sys.argv[1], step=2)['weights'][:4].tolist()))"
    )

    assert [record.step for record in mlflow.tensorcas.list_checkpoints(run_id)] == [0, 2, 3]
    assert mlflow.tensorcas.load_checkpoint(run_id)["epoch"] == 3
    assert in_another_process(tracking_uri, program, run_id) == [-1, -1, -1, 3]
    with pytest.raises(MlflowException):
        mlflow.tensorcas.load_checkpoint(run_id, step=1)


@pytest.mark.long
def test_read_only_user_loads_models_and_checkpoints(
    experiment: str, s3: S3Server, way: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mlflow.start_run() as run:
        info = mlflow.tensorcas.log_model(MODEL, name="line", pip_requirements=[])
        mlflow.tensorcas.log_checkpoint({"weights": np.ones(100_000)}, step=1)
    way.inject(Answer(status=403, code="AccessDenied"), kinds=WRITING, times=None)
    for name, value in s3.at(way.endpoint).environment.items():
        monkeypatch.setenv(name, value)

    assert np.array_equal(mlflow.tensorcas.load_model(info.model_uri).coef_, MODEL.coef_)
    assert mlflow.tensorcas.load_checkpoint(run.info.run_id)["weights"].sum() == 100_000
    assert [exchange.kind for exchange in way.traffic().exchanges if exchange.fault is not None] == []


@pytest.mark.long
def test_a_folder_comes_back_bit_for_bit(experiment: str, tmp_path: Path) -> None:
    files = {"note.txt": b"text", "sub/weights.bin": BINARY, "sub/deep/er/x.npy": BINARY[:1000], "sub/empty": b""}
    with mlflow.start_run() as run:
        mlflow.log_artifacts(fill(tmp_path / "inbox", files), "folder")
    listed = MlflowClient().list_artifacts(run.info.run_id, "folder/sub")

    assert contents(mlflow.artifacts.download_artifacts(f"runs:/{run.info.run_id}/folder")) == files
    assert contents(mlflow.artifacts.download_artifacts(f"{run.info.artifact_uri}/folder/sub/deep")) == {
        "er/x.npy": BINARY[:1000]
    }
    assert [(info.path, info.is_dir) for info in listed] == [
        ("folder/sub/deep", True),
        ("folder/sub/empty", False),
        ("folder/sub/weights.bin", False),
    ]


@pytest.mark.long
def test_deleting_a_runs_artifacts_leaves_those_of_other_runs(
    experiment: str, tmp_path: Path, s3: S3Server, bucket: str
) -> None:
    files = {"note.txt": b"text", "sub/weights.bin": BINARY}
    runs = []
    for _ in range(2):
        with mlflow.start_run() as run:
            mlflow.log_artifacts(fill(tmp_path / "inbox", files))
        runs.append(run.info)
    get_artifact_repository(runs[0].artifact_uri).delete_artifacts()

    assert MlflowClient().list_artifacts(runs[0].run_id) == []
    # Of a ref stays an object that says that there is none.
    left = [key for key in keys(s3, bucket) if runs[0].run_id in key]
    assert [key.rpartition("/")[2] for key in left] == ["@weights.bin"]
    assert "/.tensorcas/refs/" in left[0]
    assert contents(mlflow.artifacts.download_artifacts(f"runs:/{runs[1].run_id}/")) == files


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_any_name_works_for_files_and_folders(repo: TensorCasArtifactRepository, tmp_path: Path, name: str) -> None:
    check_name(repo, tmp_path / "source", name)
    repo.delete_artifacts(f"1000/{name}")

    assert [info.path for info in repo.list_artifacts()] == ["4"]


def test_an_artifact_that_is_logged_again_is_the_new_one(
    repo: TensorCasArtifactRepository, tmp_path: Path, s3: S3Server, bucket: str
) -> None:
    # Each kind follows each: small text is an object of its own, all else goes to the store.
    versions = [b"text", BINARY, b"other text", b"", BINARY[::-1], b""]
    shown = []
    for version in versions:
        (tmp_path / "a.bin").write_bytes(version)
        repo.log_artifact(tmp_path / "a.bin")
        shown.append(Path(repo.download_artifacts("a.bin")).read_bytes())

    assert shown == versions
    assert [info.path for info in repo.list_artifacts()] == ["a.bin"]
    assert [key for key in keys(s3, bucket) if key.endswith("/a.bin")] != []


def test_unknown_artifact_in_a_bucket_is_said_to_be_missing(repo: TensorCasArtifactRepository, tmp_path: Path) -> None:
    with pytest.raises(MlflowException) as caught:
        repo.download_artifacts("missing.bin", str(tmp_path))

    assert caught.value.error_code == "RESOURCE_DOES_NOT_EXIST"
    assert os.listdir(tmp_path) == []


@pytest.mark.long
@pytest.mark.parametrize("name", ["100%", "a%20b", "with space", "größe", "back\\slash"])
def test_folder_of_artifacts_can_be_a_root(repo: TensorCasArtifactRepository, tmp_path: Path, name: str) -> None:
    files = {"note.txt": b"text", "weights.bin": BINARY}
    repo.log_artifacts(fill(tmp_path / "inbox", files), name)
    folder = TensorCasArtifactRepository(f"{repo.artifact_uri}/{quote(name)}")

    assert [info.path for info in folder.list_artifacts()] == ["note.txt", "weights.bin"]
    assert contents(folder.download_artifacts("")) == files
    folder.delete_artifacts()
    assert repo.list_artifacts() == []
