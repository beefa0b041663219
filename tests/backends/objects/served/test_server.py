"""A server with a store in S3 as destination: the objects it keeps in the bucket, frees, and leaves alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import requests

from tests.backends.objects.conftest import fresh_name
from tests.backends.objects.served.calls import PREFIX, log_folders, mlflow_command, objects_in, tensorcas_command
from tests.backends.objects.servers import S3Server
from tests.deploy.calls import contents, download, fill, log_folder, new_experiment, new_run, pack_bytes, refs, root_of
from tests.deploy.clients import Client, client
from tests.deploy.servers import Server
from tests.deploy.test_guards import things_at
from tests.deploy.test_models import doomed_things

pytestmark = pytest.mark.long

N_BYTES = 1_500_000
WEIGHTS = np.random.default_rng(3).bytes(N_BYTES)
HEADER = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({N_BYTES},), }}"
NPY = b"\x93NUMPY\x01\x00v\x00" + HEADER.ljust(117).encode() + b"\n" + WEIGHTS
SECRET = b"\0secret weights" * 1000


@pytest.fixture(scope="module")
def user(uvicorn: Server) -> Iterator[Client]:
    """A client where our package is not installed."""
    with client(uvicorn.uri, plugin=False) as process:
        yield process


def test_a_file_that_is_sent_twice_is_in_the_bucket_once(gunicorn: Server) -> None:
    for name in ("a/weights.npy", "b/again.npy", "b/note.txt"):
        data = b"text" if name.endswith(".txt") else NPY
        assert gunicorn.proxied("PUT", f"7/{name}", data=data).ok

    listing = gunicorn.get("api/2.0/mlflow-artifacts/artifacts", path="7/b").json()["files"]
    assert [(file["path"], file.get("file_size")) for file in listing] == [
        ("again.npy", len(NPY)),
        ("note.txt", len("text")),
    ]
    assert gunicorn.proxied("GET", "7/b/again.npy").content == NPY
    assert gunicorn.proxied("GET", "7/b/note.txt").content == b"text"
    assert len(WEIGHTS) < pack_bytes(gunicorn) < 1.1 * len(WEIGHTS)
    assert gunicorn.proxied("DELETE", "7/b/again.npy").ok
    assert refs(gunicorn) == ["7/a/@weights.npy"]
    assert gunicorn.proxied("GET", "7/b/again.npy").status_code == 404
    assert gunicorn.proxied("GET", "7/a/weights.npy").content == NPY


def test_clients_that_upload_at_once_store_equal_weights_once(
    uvicorn: Server, s3: S3Server, team_bucket: str, user: Client, tmp_path: Path
) -> None:
    before = pack_bytes(uvicorn)
    folders = [{"MLmodel": b"flavors: {}\n", "data/weights.npy": NPY, "data/own.bin": b"\0%d" % n} for n in range(3)]
    run_ids: list[str] = []
    with client(uvicorn.uri, plugin=False) as second:
        places = [fill(tmp_path / str(n), files) for n, files in enumerate(folders)]
        user(log_folder, places[0])
        for process in (user, second):
            run_ids += process(log_folders, places, 6)

    for n, run_id in enumerate(run_ids):
        assert contents(user(download, f"runs:/{run_id}/")) == folders[n % 3]
    assert pack_bytes(uvicorn) - before < 1.1 * N_BYTES
    names = objects_in(s3, team_bucket, PREFIX)
    texts = [run_id for run_id in run_ids for name in names if name.endswith(f"/{run_id}/artifacts/MLmodel")]
    assert sorted(texts) == sorted(run_ids)


def test_artifacts_that_mlflow_forgets_are_freed_in_the_bucket(
    uvicorn: Server, s3: S3Server, team_bucket: str, user: Client, tmp_path: Path
) -> None:
    own = np.random.default_rng(5).bytes(N_BYTES)
    ids = user(doomed_things, fill(tmp_path / "all", {"weights.bin": own, "MLmodel": b"flavors: {}\n"}))
    doomed = [ids[key] for key in ("run", "its run", "model")]
    of_each = ("--run-ids", ids["run"], "--experiment-ids", ids["experiment"], "--logged-model-ids", ids["model"])
    mlflow_command(uvicorn, "gc", "--backend-store-uri", uvicorn.backend_store_uri, *of_each)
    left = [name for name in objects_in(s3, team_bucket) for id in doomed if f"/{id}/artifacts/" in name]

    assert left == []
    assert contents(user(download, f"runs:/{ids['kept']}/"))["weights.bin"] == own

    user(delete_for_good, ids["kept"])
    before = pack_bytes(uvicorn)
    root = f"tensorcas-s3://{team_bucket}/{PREFIX}"
    tensorcas_command(s3, "gc", "--root", root, "--grace", "0", "--yes")
    assert before - pack_bytes(uvicorn) > 0.9 * N_BYTES


def delete_for_good(run_id: str) -> None:
    """Delete all artifacts of a run."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    get_artifact_repository(root_of(run_id)).delete_artifacts()


def send(server: Server, run_id: str, path: str, data: bytes) -> requests.Response:
    """Send an artifact to a run as a browser does."""
    params = {"run_uuid": run_id, "path": path}
    return server.request("POST", "ajax-api/2.0/mlflow/upload-artifact", params=params, data=data)


@pytest.mark.parametrize("place", ["another bucket", "beside the server's own"])
def test_a_root_that_is_no_store_is_neither_read_nor_written(
    uvicorn: Server, s3: S3Server, team_bucket: str, user: Client, place: str
) -> None:
    bucket = team_bucket if place == "beside the server's own" else s3.make_bucket(fresh_name())
    for name in ("team/secret.txt", "team/deep/weights.bin"):
        s3.client().put_object(Bucket=bucket, Key=name, Body=b"root: secret" + SECRET)
    before = objects_in(s3, bucket)
    made = user(things_at, f"tensorcas-s3://{bucket}/team")

    ajax = "ajax-api/2.0/mlflow"
    version = {"name": made["name"], "version": made["version"]}
    answers = [
        uvicorn.get(f"{ajax}/artifacts/list", run_id=made["run"]),
        uvicorn.get(f"{ajax}/artifacts/list", run_id=made["run"], path="deep"),
        uvicorn.get(f"{ajax}/logged-models/{made['model']}/artifacts/directories"),
        uvicorn.get("get-artifact", run_id=made["run"], path="secret.txt"),
        uvicorn.get(f"{ajax}/logged-models/{made['model']}/artifacts/files", artifact_file_path="secret.txt"),
        uvicorn.get("model-versions/get-artifact", path="secret.txt", **version),
        uvicorn.get("ajax-api/3.0/mlflow/get-trace-artifact", request_id=made["trace"], path="traces.json"),
        uvicorn.request(
            "POST", f"{ajax}/upload-artifact", params={"run_uuid": made["run"], "path": "x.txt"}, data=b"x"
        ),
    ]
    assert [answer.text for answer in answers if "root:" in answer.text] == []
    assert [answer.json().get("files", []) for answer in answers[:3]] == [[], [], []]
    assert [answer.status_code for answer in answers[3:] if answer.ok] == []
    assert "no store at or above it" in answers[-1].json()["message"]
    assert objects_in(s3, bucket) == before


def test_a_store_in_another_bucket_is_served(uvicorn: Server, s3: S3Server, user: Client) -> None:
    root = f"tensorcas-s3://{s3.make_bucket(fresh_name())}/shared"
    tensorcas_command(s3, "init", root)
    run_id = user(things_at, root)["run"]

    ajax = "ajax-api/2.0/mlflow"
    assert send(uvicorn, run_id, "x.npy", NPY).ok
    listing = uvicorn.get(f"{ajax}/artifacts/list", run_id=run_id).json()
    assert [file["path"] for file in listing["files"]] == ["x.npy"]
    assert uvicorn.get("get-artifact", run_id=run_id, path="x.npy").content == NPY


@pytest.mark.parametrize("root", ["tensorcas-s3://no-such-bucket/x", "tensorcas-az://box/x"])
def test_a_root_that_the_server_cannot_reach_is_an_error_at_once(uvicorn: Server, user: Client, root: str) -> None:
    run_id = user(new_run, user(new_experiment, root))
    answer = uvicorn.get("get-artifact", run_id=run_id, path="x.txt")

    assert answer.status_code in (400, 403, 404)
