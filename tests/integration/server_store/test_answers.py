"""Errors for a server's answers: not found, refused, failed, cut off, or unreachable."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import mlflow
import pytest

from tensorcas_mlflow.errors import BlobNotFoundError, ForbiddenError, RefusedError, TensorCasError
from tensorcas_mlflow.integration._mlflow_errors import to_mlflow
from tensorcas_mlflow.integration.server_store import NoAnswerError, Shelf, UnreachableError, shelf_at
from tensorcas_mlflow.integration.server_store._shelf import BrokenOffError
from tests.deploy.servers import free_port

BLOB = bytes(range(256)) * 4096


class Answers(BaseHTTPRequestHandler):
    """Answers by the name asked for: ``blob``, ``broken`` after half of it, a status, or ``nothing`` at all."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if name == "nothing":
            self.close_connection = True
            return
        body = BLOB if name in ("blob", "broken") else b"{}"
        self.send_response(int(name) if name.isdigit() else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if name == "broken" else body)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0")
    monkeypatch.setenv("MLFLOW_ENABLE_PROXY_MULTIPART_DOWNLOAD", "false")


@pytest.fixture
def shelf(no_stray_settings: None) -> Iterator[Shelf]:
    """A shelf whose server answers as it is asked to."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield _shelf_of(server.server_port)
    server.shutdown()
    thread.join()
    server.server_close()


def _shelf_of(port: int) -> Shelf:
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"http://127.0.0.1:{port}")
    try:
        return shelf_at("mlflow-artifacts:/1", "folder")
    finally:
        mlflow.set_tracking_uri(before)


def error_of(shelf: Shelf, name: str, out: Path) -> TensorCasError:
    with pytest.raises(TensorCasError) as caught:
        shelf.fetch(name, out / "blob")
    return caught.value


@pytest.mark.parametrize(
    ("name", "kind", "code"),
    [
        ("404", BlobNotFoundError, "RESOURCE_DOES_NOT_EXIST"),
        ("400", RefusedError, "BAD_REQUEST"),
        ("401", ForbiddenError, "PERMISSION_DENIED"),
        ("403", ForbiddenError, "PERMISSION_DENIED"),
        ("429", NoAnswerError, "TEMPORARILY_UNAVAILABLE"),
        ("500", NoAnswerError, "TEMPORARILY_UNAVAILABLE"),
        ("nothing", NoAnswerError, "TEMPORARILY_UNAVAILABLE"),
        ("broken", BrokenOffError, "TEMPORARILY_UNAVAILABLE"),
    ],
)
def test_answer_of_a_server_becomes_the_fitting_error(
    shelf: Shelf, tmp_path: Path, name: str, kind: type[TensorCasError], code: str
) -> None:
    error = error_of(shelf, name, tmp_path)

    assert type(error) is kind
    assert to_mlflow(error).error_code == code
    assert f"/folder/{name}" in str(error)


def test_a_server_that_is_gone_is_named(tmp_path: Path, no_stray_settings: None) -> None:
    port = free_port()
    error = error_of(_shelf_of(port), "blob", tmp_path)

    assert type(error) is UnreachableError
    assert f"'http://127.0.0.1:{port}/" in str(error)


def test_the_beginning_of_a_file_is_read_without_the_rest(shelf: Shelf) -> None:
    assert shelf.head("blob", 300) == BLOB[:300]
    assert shelf.head("broken", 300) == BLOB[:300]
    with pytest.raises(BlobNotFoundError):
        shelf.head("404", 300)
