"""Deletions that meet saves, in processes that run at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlflow
import numpy as np
import pytest
from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from tensorcas_mlflow.maintenance import verify
from tensorcas_mlflow.store import Store
from tests.integration.forgotten.forgetting import array, array_file, collect, forget, holders, log_run, packs_bytes
from tests.tracking import active_experiment

RUN_S = 2.0

# Says what it was refused, if anything; waits for a line, so that all begin together.
SAVER = """
import sys, time
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

folder, run_s, *uris = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
until = time.monotonic() + float(run_s)
n_saved, refused = 0, set()
while time.monotonic() < until:
    for uri in uris:
        try:
            get_artifact_repository(uri).log_artifacts(folder, "deep/down")
            n_saved += 1
        except MlflowException as error:
            refused.add(f"{error.error_code}: {error}")
assert n_saved > 0
print(*sorted(refused), sep="\\n", flush=True)
"""

COLLECTOR = """
import sys, time
from tensorcas_mlflow.cli import main

root, run_s, tracking_uri = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
until = time.monotonic() + float(run_s)
words = ["gc", "--root", root, "--yes", "--grace", "1s", "--orphans", "--tracking-uri", tracking_uri]
while time.monotonic() < until:
    assert main(words) == 0
"""


class Together:
    """Processes that begin at once."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []

    def add(self, program: str, *words: object) -> None:
        command = [sys.executable, "-c", program, *map(str, words)]
        pipe = subprocess.PIPE
        self._processes.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))

    def begin(self) -> None:
        for process in self._processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()

    def are_running(self) -> bool:
        return any(process.poll() is None for process in self._processes)

    def told(self) -> list[str]:
        """Wait for every process, check its exit status, and return their outputs."""
        said = []
        for process in self._processes:
            out, error = process.communicate(timeout=60)
            assert process.returncode == 0, error
            said.append(out)
        return said

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


@pytest.fixture
def together() -> Iterator[Together]:
    processes = Together()
    yield processes
    processes.end()


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """Write the files of a save: two for the store and two plain ones, in two folders."""
    folder = tmp_path / "model"
    (folder / "data").mkdir(parents=True)
    for place, seed in ((folder, 1), (folder / "data", 2)):
        np.save(place / "weights.npy", array(seed))
        (place / "note.txt").write_text("a note")
    return folder


@pytest.mark.long
def test_a_root_that_is_deleted_again_and_again_takes_every_save(
    no_stray_settings: None, tmp_path: Path, model_folder: Path, together: Together
) -> None:
    root = tmp_path / "artifacts"
    store = Store.init(root)
    uri, other = (f"tensorcas://{root}/1/{digit * 32}/artifacts" for digit in "ab")
    get_artifact_repository(other).log_artifacts(str(model_folder))
    together.add(SAVER, model_folder, RUN_S, uri)
    together.begin()
    while together.are_running():
        get_artifact_repository(uri).delete_artifacts()
    refused = together.told()
    get_artifact_repository(uri).delete_artifacts()

    assert refused == ["\n"]
    assert not (root / "1" / ("a" * 32) / "artifacts").exists()
    assert {ref.path for ref in store.checkpoints()} == {
        f"1/{'b' * 32}/artifacts/weights.npy",
        f"1/{'b' * 32}/artifacts/data/weights.npy",
    }
    assert verify(store, full=True).problems == ()


@pytest.mark.long
def test_runs_are_deleted_and_collected_while_they_are_saved_to(
    tracking_uri: str, tmp_path: Path, model_folder: Path, together: Together
) -> None:
    root = tmp_path / "artifacts"
    Store.init(root)
    with active_experiment("in the store", f"tensorcas://{root}/1") as experiment_id:
        file = array_file(tmp_path, 1)
        kept = [log_run(experiment_id, file) for _ in range(4)]
        doomed = [log_run(experiment_id, array_file(tmp_path, seed)) for seed in (3, 4, 5)]
        uris = [MlflowClient().get_run(run_id).info.artifact_uri for run_id in (kept[0], *doomed)]
        together.add(SAVER, model_folder, RUN_S, *uris)
        together.add(COLLECTOR, root, RUN_S, tracking_uri)
        together.begin()
        for run_id in doomed:
            mlflow.delete_run(run_id)
            forget("--run-ids", run_id)
        refused, _ = together.told()
        assert holders(root) >= set(kept)
        assert collect(root, "--orphans", "--tracking-uri", tracking_uri) == 0

        assert refused == "\n"
        assert holders(root) == set(kept)
        assert verify(Store.open(root), full=True).problems == ()
        assert packs_bytes(root) < 1.2 * (model_folder_bytes(model_folder) + file.stat().st_size)
        for name in ("weights.npy", "data/weights.npy"):
            there = Path(download_artifacts(f"runs:/{kept[0]}/deep/down/{name}"))
            assert there.read_bytes() == (model_folder / name).read_bytes()
        assert Path(download_artifacts(f"runs:/{kept[1]}/{file.name}")).read_bytes() == file.read_bytes()


def model_folder_bytes(folder: Path) -> int:
    return sum(place.stat().st_size for place in folder.rglob("*.npy"))
