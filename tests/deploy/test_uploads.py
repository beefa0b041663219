"""Uploads to a server with a store as destination: streamed, never past the store, complete or absent."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest
import safetensors.numpy

from tests.deploy.calls import contents, download, fill, log_file, log_folder, new_run, pack_bytes, refs, root_of, sizes
from tests.deploy.clients import Client, client
from tests.deploy.servers import Server
from tests.file_formats.samples import tensorflow_folder

DATA = np.random.default_rng(1).bytes(2_000_000)
SMALL = {"MLFLOW_MULTIPART_UPLOAD_MINIMUM_FILE_SIZE": "1000", "MLFLOW_MULTIPART_DOWNLOAD_MINIMUM_FILE_SIZE": "1000"}
"""With these settings, MLflow's clients use every way for large files that a server offers."""


@pytest.fixture(scope="module")
def eager_client(proxy: Server) -> Iterator[Client]:
    """A client that is told to send and to fetch large files past the server."""
    settings = {"MLFLOW_ENABLE_PROXY_MULTIPART_UPLOAD": "true", "MLFLOW_ENABLE_PROXY_MULTIPART_DOWNLOAD": "true"}
    settings |= {"MLFLOW_MULTIPART_UPLOAD_CHUNK_SIZE": "300000", "MLFLOW_MULTIPART_DOWNLOAD_CHUNK_SIZE": "300000"}
    with client(proxy.uri, plugin=False, **settings, **SMALL) as process:
        yield process


@pytest.fixture(scope="module")
def run(eager_client: Client) -> str:
    """Path of a run's artifacts below the server's destination."""
    return eager_client(root_of, eager_client(new_run)).removeprefix("mlflow-artifacts:/")


@pytest.mark.long
def test_the_server_offers_no_way_past_the_store(proxy: Server) -> None:
    offers = proxy.get("api/3.0/mlflow/server-info").json()

    assert (offers["multipart_uploads_enabled"], offers["multipart_downloads_enabled"]) == (False, False)


@pytest.mark.parametrize(
    ("method", "endpoint"),
    [
        ("POST", "api/2.0/mlflow-artifacts/mpu/create/{run}"),
        ("POST", "api/2.0/mlflow-artifacts/mpu/complete/{run}"),
        ("POST", "api/2.0/mlflow-artifacts/mpu/abort/{run}"),
        ("GET", "api/2.0/mlflow-artifacts/presigned/{run}/weights.bin"),
        ("POST", "api/2.0/mlflow/artifacts/presigned-upload-url"),
        ("POST", "api/2.0/mlflow/artifacts/presigned-download-url"),
    ],
)
def test_a_way_past_the_store_is_refused(proxy: Server, run: str, method: str, endpoint: str) -> None:
    run_id = run.split("/")[1]
    asked = {"path": "weights.bin", "num_parts": 2, "upload_id": "x", "parts": [], "run_id": run_id}
    kwargs = {} if method == "GET" else {"json": asked}
    answer = proxy.request(method, endpoint.format(run=run), **kwargs)

    assert answer.status_code in (400, 501)
    assert "is not supported" in answer.json()["message"]
    assert refs(proxy, run_id) == []


def test_a_client_that_asks_for_a_way_past_the_store_goes_through_it(
    proxy: Server, eager_client: Client, tmp_path: Path
) -> None:
    before = pack_bytes(proxy)
    run_id = eager_client(log_folder, fill(tmp_path, {"weights.bin": DATA}))

    assert "mpu/create" in proxy.log
    assert contents(eager_client(download, f"runs:/{run_id}/")) == {"weights.bin": DATA}
    assert len(refs(proxy, run_id)) == 1
    assert pack_bytes(proxy) - before >= len(DATA)


@contextmanager
def half_an_upload(server: Server, path: str, data: bytes) -> Iterator[socket.socket]:
    """Announce an upload and send half of it; the connection ends with the block."""
    where = urlsplit(server.uri)
    head = f"PUT /api/2.0/mlflow-artifacts/artifacts/{path} HTTP/1.1\r\nHost: {where.netloc}\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    with socket.create_connection((where.hostname or "", where.port or 0), timeout=20) as connection:
        connection.sendall(head.encode() + data[: len(data) // 2])
        yield connection


def settled(server: Server, run: str) -> list[str]:
    """Names of a run's artifacts, after time enough for a worker to see that a client is gone."""
    time.sleep(0.5)
    listing = server.get("api/2.0/mlflow-artifacts/artifacts", path=run).json()
    return [file["path"] for file in listing.get("files", []) if not file["is_dir"]]


@pytest.mark.long
def test_an_upload_that_breaks_off_leaves_nothing_to_be_seen(
    proxy: Server, eager_client: Client, run: str, tmp_path: Path
) -> None:
    data = DATA[::-1]
    with half_an_upload(proxy, f"{run}/half.bin", data):
        pass

    assert settled(proxy, run) == []
    assert refs(proxy, run.split("/")[1]) == []
    eager_client(log_file, run.split("/")[1], fill(tmp_path, {"half.bin": data}) + "/half.bin")
    assert settled(proxy, run) == ["half.bin"]
    assert proxy.proxied("GET", f"{run}/half.bin").content == data


def test_an_upload_that_breaks_off_leaves_what_was_there(proxy: Server, eager_client: Client, tmp_path: Path) -> None:
    run_id = eager_client(log_folder, fill(tmp_path, {"a.bin": DATA}))
    path = eager_client(root_of, run_id).removeprefix("mlflow-artifacts:/") + "/a.bin"
    with half_an_upload(proxy, path, DATA[::-1]):
        pass

    assert settled(proxy, path.removesuffix("/a.bin")) == ["a.bin"]
    assert proxy.proxied("GET", path).content == DATA


def test_a_worker_that_is_killed_during_an_upload_leaves_nothing_to_be_seen(
    proxy: Server, eager_client: Client, tmp_path: Path
) -> None:
    run_id = eager_client(new_run)
    path = eager_client(root_of, run_id).removeprefix("mlflow-artifacts:/")
    with half_an_upload(proxy, f"{path}/half.bin", DATA) as connection:
        time.sleep(0.3)
        os.kill(proxy.worker_of(connection), signal.SIGKILL)
    file = fill(tmp_path, {"half.bin": DATA}) + "/half.bin"
    assert refs(proxy, run_id) == []
    eager_client(log_file, run_id, file)

    assert eager_client(sizes, run_id) == {"half.bin": len(DATA)}
    assert contents(eager_client(download, f"runs:/{run_id}/")) == {"half.bin": DATA}


def onnx_with_external_data(folder: Path, arrays: dict[str, np.ndarray]) -> list[str]:
    """Write an ONNX model with external data, and return its files, the description first."""
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()]
    model = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], tensors))
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    return ["model.onnx", "weights"]


def variables_of_tensorflow(folder: Path, arrays: dict[str, np.ndarray]) -> list[str]:
    """Write TensorFlow's variables, and return their files, the description first."""
    tensorflow_folder(folder, arrays, n_shards=2)
    return ["variables.index", "variables.data-00000-of-00002", "variables.data-00001-of-00002"]


@pytest.mark.long
@pytest.mark.parametrize("write", [onnx_with_external_data, variables_of_tensorflow])
def test_raw_tensors_uploaded_after_their_description_are_not_stored_again(
    proxy: Server,
    plain_client: Client,
    write: Callable[[Path, dict[str, np.ndarray]], list[str]],
    tmp_path: Path,
) -> None:
    draw = np.random.default_rng()
    arrays = {f"layer{nth}": draw.normal(size=(700 + 37 * nth, 512)).astype(np.float32) for nth in range(4)}
    n_bytes = sum(array.nbytes for array in arrays.values())
    first, again = tmp_path / "first", tmp_path / "again"
    first.mkdir()
    again.mkdir()
    safetensors.numpy.save_file(arrays, first / "model.safetensors")
    run_id = plain_client(log_folder, str(first))
    before = pack_bytes(proxy)
    names = write(again, arrays)
    for name in names:
        plain_client(log_file, run_id, str(again / name), "again")

    assert pack_bytes(proxy) - before <= 0.003 * n_bytes
    assert contents(plain_client(download, f"runs:/{run_id}/again")) == contents(again)
