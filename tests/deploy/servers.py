"""Real MLflow servers on loopback, with or without this package, and what a browser asks of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import requests

if TYPE_CHECKING:
    from tensorcas_mlflow.backends import Backend

START_S = 120
ANSWER_S = 20
"""An answer that takes longer is a failure: MLflow's clients repeat what fails with HTTP 5xx for minutes."""

WITHOUT_PLUGIN = Path(__file__).parent / "without_plugin"
"""On PYTHONPATH, this folder hides our package from a process and its children."""

UVICORN = ("--workers", "2")
GUNICORN = ("--workers", "2", "--gunicorn-opts", "--access-logfile - --timeout 120")

running: list[Server] = []
"""The servers that run now, for the report of a test that fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One MLflow server, with all its worker processes."""

    uri: str
    folder: Path
    """Its working directory."""
    backend_store_uri: str
    process: subprocess.Popen[bytes]
    backend: Backend
    """Of the store at its artifact destination, if it keeps one."""

    @property
    def store_root(self) -> Path:
        """Artifact folder of a server started with the package's scheme."""
        return self.folder / "artifacts"

    @property
    def log(self) -> str:
        """Output of the server's processes."""
        return (self.folder / "server.log").read_text(errors="replace")

    def request(self, method: str, endpoint: str, /, **kwargs: Any) -> requests.Response:
        return requests.request(method, f"{self.uri}/{endpoint}", timeout=ANSWER_S, **kwargs)

    def get(self, endpoint: str, /, **params: str) -> requests.Response:
        return self.request("GET", endpoint, params=params)

    def get_as(self, user: tuple[str, str], endpoint: str, /, **params: str) -> requests.Response:
        """Get something with a name and password."""
        return self.request("GET", endpoint, params=params, auth=user)

    def proxied(self, method: str, path: str, /, **kwargs: Any) -> requests.Response:
        """Ask for one artifact by its path below the server's destination, as MLflow's clients do."""
        return self.request(method, f"api/2.0/mlflow-artifacts/artifacts/{path}", **kwargs)

    def worker_of(self, connection: socket.socket) -> int:
        """Find the worker process that has accepted a connection."""
        import psutil

        ends = connection.getpeername(), connection.getsockname()
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if any((tuple(it.laddr), tuple(it.raddr)) == ends for it in child.net_connections("tcp")):
                return int(child.pid)
        raise LookupError(f"no worker of {self.uri} has accepted the connection")


def environment(*, plugin: bool, **settings: str) -> dict[str, str]:
    """Make the environment of a process that uses MLflow: nothing of what this process was told, but ``settings``."""
    ours = ("MLFLOW_", "_MLFLOW_", "TENSORCAS_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    if not plugin:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(WITHOUT_PLUGIN), env.get("PYTHONPATH"))))
    # Where MLflow starts a program by its name, the one of this Python is meant.
    env["PATH"] = os.pathsep.join(filter(None, (str(Path(sys.executable).parent), env.get("PATH"))))
    return env | {"MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false", "MPLBACKEND": "Agg"} | settings


def free_port() -> int:
    """Find a port on loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serve(
    folder: Path,
    options: tuple[str, ...],
    *,
    plugin: bool = True,
    backend_store_uri: str | None = None,
    settings: Mapping[str, str] | None = None,
    port: int | None = None,
    backend: Backend | None = None,
) -> Iterator[Server]:
    """Run ``mlflow server`` for as long as the block lasts.

    Args:
        folder: Its working directory.
        options: Its options, host, port and backend store aside.
        plugin: Whether this package is installed where it runs.
        backend_store_uri: Where it keeps all but artifacts; by default an SQLite file in its folder.
        settings: Environment variables.
        port: Where it listens; a free port unless given.
        backend: Of the store at its artifact destination, if that is not the local folder ``artifacts``.
    """
    # Clients without this package import this module too.
    from tensorcas_mlflow.backends import STORE_FOLDER, FolderBackend

    backend_store_uri = backend_store_uri or f"sqlite:///{folder}/mlflow.db"
    port = port or free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), *options]
    command += ["--backend-store-uri", backend_store_uri]
    env = environment(plugin=plugin, MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false", **(settings or {}))
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)
    server = Server(
        uri=f"http://127.0.0.1:{port}",
        folder=folder,
        backend_store_uri=backend_store_uri,
        process=process,
        backend=backend or FolderBackend(folder / "artifacts" / STORE_FOLDER),
    )
    running.append(server)
    try:
        _wait(server)
        yield server
    finally:
        running.remove(server)
        # The whole process group: the server's workers are its children. It began the group, so the id is its own.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)


def _wait(server: Server) -> None:
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up and server.process.poll() is None:
        # Gunicorn takes connections before its workers answer any.
        with suppress(requests.ConnectionError, requests.Timeout):
            # With a static prefix, its path is another one.
            if server.get("health").status_code in (200, 404):
                return
        time.sleep(0.1)
    raise RuntimeError(f"the server did not start:\n{server.log[-3000:]}")
