"""MLflow's artifact functions, client and deletions in an experiment with a store."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib
import mlflow
import numpy as np
import pytest
from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts, list_artifacts, load_dict, load_image, load_text
from mlflow.exceptions import MlflowException
from PIL import Image

from tensorcas_mlflow.store import Store

matplotlib.use("Agg")

BINARY = b"\0" + bytes(range(256)) * 4000


@pytest.fixture
def artifacts(cas_experiment: str, tmp_path: Path) -> Path:
    """Return the folder of the experiment's artifacts."""
    return tmp_path / "artifacts"


@pytest.fixture
def inbox(tmp_path: Path) -> Path:
    inbox = tmp_path / "inbox"
    (inbox / "sub/empty").mkdir(parents=True)
    (inbox / "note.txt").write_text("text")
    (inbox / "sub/weights.bin").write_bytes(BINARY)
    return inbox


def sizes(run_id: str, path: str | None = None) -> dict[str, int | None]:
    return {info.path: info.file_size for info in list_artifacts(run_id=run_id, artifact_path=path)}


def test_files_and_folders_come_back_through_every_address(artifacts: Path, inbox: Path) -> None:
    with mlflow.start_run() as run:
        mlflow.log_artifact(str(inbox / "sub/weights.bin"))
        mlflow.log_artifacts(str(inbox), "folder")
        uri = mlflow.get_artifact_uri("weights.bin")
    run_id = run.info.run_id

    assert sizes(run_id) == {"folder": None, "weights.bin": len(BINARY)}
    assert sizes(run_id, "folder/sub") == {"folder/sub/empty": None, "folder/sub/weights.bin": len(BINARY)}
    for address in (
        {"artifact_uri": uri},
        {"artifact_uri": uri.replace("tensorcas:///", "tensorcas:/")},
        {"artifact_uri": f"runs:/{run_id}/weights.bin"},
        {"artifact_uri": f"runs:/{run_id}/folder/sub/weights.bin"},
        {"run_id": run_id, "artifact_path": "folder/sub/weights.bin"},
    ):
        assert Path(download_artifacts(**address)).read_bytes() == BINARY
    folder = Path(download_artifacts(run_id=run_id, artifact_path="folder"))
    assert (folder / "sub/empty").is_dir()
    assert load_text(f"runs:/{run_id}/folder/note.txt") == "text"


@pytest.mark.long
def test_whatever_mlflow_logs_can_be_loaded(artifacts: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    axes.plot([1, 2])
    pixels = np.random.default_rng(0).integers(0, 255, size=(20, 30, 3), dtype=np.uint8)
    settings = {"depth": 3, "names": ["ä", "b"]}
    with mlflow.start_run() as run:
        mlflow.log_text("a note", "notes/note.txt")
        mlflow.log_dict(settings, "settings.json")
        mlflow.log_dict(settings, "settings.yaml")
        mlflow.log_image(pixels, "image.png")
        mlflow.log_image(pixels, key="sample", step=3, synchronous=True)
        mlflow.log_figure(figure, "figure.png")
        mlflow.log_table({"x": [1, 2], "y": ["a", "b"]}, "table.json")
        mlflow.log_table({"x": [3], "y": ["c"]}, "table.json")
        root = run.info.artifact_uri

    assert load_text(f"{root}/notes/note.txt") == "a note"
    assert load_dict(f"{root}/settings.json") == settings
    np.testing.assert_array_equal(np.array(load_image(f"{root}/image.png")), pixels)
    assert Image.open(download_artifacts(f"{root}/figure.png")).size == (640, 480)
    assert mlflow.load_table("table.json", run_ids=[run.info.run_id])["x"].tolist() == [1, 2, 3]
    assert len(sizes(run.info.run_id, "images")) == 2
    # One can read the texts without us.
    plain = {path.name for path in (artifacts / run.info.run_id / "artifacts").rglob("*") if path.is_file()}
    assert {"note.txt", "settings.json", "settings.yaml", "table.json"} <= plain
    assert not {"image.png", "figure.png"} & plain


@pytest.mark.long
def test_images_that_are_logged_in_the_background_arrive(artifacts: Path) -> None:
    with mlflow.start_run() as run:
        for step in range(5):
            mlflow.log_image(np.full((8, 8, 3), step, np.uint8), key="sample", step=step)
        mlflow.flush_artifact_async_logging()

    assert len(sizes(run.info.run_id, "images")) == 10


@pytest.mark.long
def test_many_threads_log_and_load_at_once(artifacts: Path, tmp_path: Path) -> None:
    client = MlflowClient()
    run_id = client.create_run(mlflow.get_experiment_by_name("ours").experiment_id).info.run_id

    def log_and_load(number: int) -> bool:
        data = b"\0" + np.random.default_rng(number % 4).bytes(300_000)
        file = tmp_path / f"{number}.bin"
        file.write_bytes(data)
        client.log_artifact(run_id, str(file), f"folder/{number % 3}")
        return Path(client.download_artifacts(run_id, f"folder/{number % 3}/{number}.bin")).read_bytes() == data

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(log_and_load, range(24)))
    assert sum(len(sizes(run_id, f"folder/{number}")) for number in range(3)) == 24


@pytest.mark.long
def test_runs_of_one_experiment_share_a_store(artifacts: Path, inbox: Path) -> None:
    for _ in range(3):
        with mlflow.start_run():
            mlflow.log_artifacts(str(inbox))

    refs = Store.open(artifacts).checkpoints()
    assert len(refs) == 3
    assert len({ref.run_id for ref in refs}) == 3
    assert len({ref.manifest for ref in refs}) == 1


def test_a_missing_artifact_is_said_to_be_missing(artifacts: Path) -> None:
    with mlflow.start_run() as run:
        mlflow.log_text("text", "note.txt")

    with pytest.raises(MlflowException) as caught:
        download_artifacts(f"runs:/{run.info.run_id}/missing.bin")
    assert caught.value.error_code == "RESOURCE_DOES_NOT_EXIST"


@pytest.mark.long
def test_mlflow_gc_deletes_the_artifacts_of_deleted_runs(tracking_uri: str, artifacts: Path, inbox: Path) -> None:
    with mlflow.start_run() as kept:
        mlflow.log_artifacts(str(inbox))
    with mlflow.start_run() as deleted:
        mlflow.log_artifacts(str(inbox))
    mlflow.delete_run(deleted.info.run_id)

    command = [sys.executable, "-m", "mlflow", "gc", "--backend-store-uri", tracking_uri]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    assert [ref.run_id for ref in Store.open(artifacts).checkpoints()] == [kept.info.run_id]
    assert not (artifacts / deleted.info.run_id / "artifacts").exists()
    assert Path(download_artifacts(f"runs:/{kept.info.run_id}/sub/weights.bin")).read_bytes() == BINARY
