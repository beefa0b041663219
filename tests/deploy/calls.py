"""Calls of clients on artifacts, for `Client`, and helpers for their tests."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import mlflow
from mlflow import MlflowClient

from tests.deploy.servers import Server


def new_experiment(location: str | None = None) -> str:
    """Make an experiment; its artifacts lie where the server wants them, unless told."""
    return str(mlflow.create_experiment(uuid.uuid4().hex, artifact_location=location))


def new_run(experiment_id: str | None = None) -> str:
    """Make a run, in an experiment of its own by default."""
    return str(MlflowClient().create_run(experiment_id or new_experiment()).info.run_id)


def root_of(run_id: str) -> str:
    """Give the artifact root of a run."""
    return str(MlflowClient().get_run(run_id).info.artifact_uri)


def log_folder(folder: str, path: str | None = None, run_id: str | None = None) -> str:
    """Log a folder to a run, by default a new one, and give the run."""
    run_id = run_id or new_run()
    MlflowClient().log_artifacts(run_id, folder, path)
    return run_id


def log_file(run_id: str, file: str, path: str | None = None) -> None:
    """Log a file to a run."""
    MlflowClient().log_artifact(run_id, file, path)


def sizes(run_id: str, path: str | None = None) -> dict[str, int | None]:
    """List a folder of a run: sizes by path, None for folders; MLflow tells nobody that a file is empty."""
    return {info.path: info.file_size for info in MlflowClient().list_artifacts(run_id, path)}


def download(uri: str) -> str:
    """Download an artifact to a place of MLflow's choice."""
    return str(mlflow.artifacts.download_artifacts(uri))


def failure(function: Any, *args: Any) -> tuple[str, str, str]:
    """Call what is to fail; the error's type, its code if it is MLflow's, and its sentence."""
    try:
        function(*args)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        return type(error).__name__, getattr(error, "error_code", ""), str(error)
    return "", "", ""


def fill(folder: Path, files: dict[str, bytes]) -> str:
    """Write files into a folder."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return str(folder)


def contents(folder: str | Path) -> dict[str, bytes]:
    """Read all files below a folder, by path."""
    files = (path for path in Path(folder).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def pack_bytes(server: Server) -> int:
    """Add up the packs of a server's store."""
    return sum(blob.size for blob in server.backend.list("packs") if blob.key.endswith(".pack"))


def refs(server: Server, run_id: str = "") -> list[str]:
    """Names of all refs of a server's store, or of one run's."""
    names = (blob.key.removeprefix("refs/artifacts/") for blob in server.backend.list("refs/artifacts"))
    return sorted(name for name in names if run_id in name)
