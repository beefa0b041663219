"""Artifacts of runs, logged models and experiments that MLflow deletes and forgets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts, list_artifacts
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.tracing.attachments import Attachment

from tensorcas_mlflow.maintenance import verify
from tensorcas_mlflow.store import Store
from tests.integration.forgotten.forgetting import (
    N_BYTES,
    array,
    array_file,
    collect,
    forget,
    holders,
    log_model,
    log_run,
    packs_bytes,
)
from tests.tracking import active_experiment


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Root of a store in which experiments have folders of their own."""
    place = tmp_path / "artifacts"
    Store.init(place)
    return place


@pytest.fixture
def experiment_id(tracking_uri: str, root: Path) -> Iterator[str]:
    """Id of the active experiment, one in the store."""
    with active_experiment("in the store", f"tensorcas://{root}/first") as experiment:
        yield experiment


def orphans(root: Path, *words: str) -> int:
    return collect(root, "--orphans", "--tracking-uri", mlflow.get_tracking_uri(), *words)


def trace(image: Any) -> str:
    """Trace something with an attachment, and give the trace's id."""
    with mlflow.start_span("seen") as span:
        span.set_inputs({"image": Attachment(content_type="image/png", content_bytes=image.tobytes())})
    mlflow.flush_trace_async_logging()
    return str(span.trace_id)


def test_a_deleted_run_that_is_restored_has_its_artifacts(experiment_id: str, root: Path, tmp_path: Path) -> None:
    file = array_file(tmp_path, 1)
    run_id = log_run(experiment_id, file)
    model_id = log_model(experiment_id, file, run_id=run_id)
    mlflow.delete_run(run_id)
    MlflowClient().delete_logged_model(model_id)

    assert orphans(root) == 0
    MlflowClient().restore_run(run_id)

    assert holders(root) == {run_id, model_id}
    assert Path(download_artifacts(f"runs:/{run_id}/{file.name}")).read_bytes() == file.read_bytes()
    assert Path(download_artifacts(f"runs:/{run_id}/notes/note.txt")).read_text() == "a note"


@pytest.mark.long
def test_mlflow_gc_of_a_run_frees_what_no_other_run_shares(experiment_id: str, root: Path, tmp_path: Path) -> None:
    kept_file = array_file(tmp_path, 2)
    gone, kept = log_run(experiment_id, array_file(tmp_path, 1, 2)), log_run(experiment_id, kept_file)
    model_id = log_model(experiment_id, kept_file, run_id=gone)  # MLflow still lists it
    mlflow.delete_run(gone)

    forget()
    assert orphans(root) == 0

    assert holders(root) == {kept, model_id}
    assert N_BYTES < packs_bytes(root) < 1.1 * N_BYTES
    assert not (root / "first" / gone / "artifacts").exists()
    assert Path(download_artifacts(f"runs:/{kept}/{kept_file.name}")).read_bytes() == kept_file.read_bytes()


def test_mlflow_gc_of_a_logged_model_frees_what_no_other_shares(experiment_id: str, root: Path, tmp_path: Path) -> None:
    file = array_file(tmp_path, 2)
    gone, kept = log_model(experiment_id, array_file(tmp_path, 1, 2)), log_model(experiment_id, file)
    MlflowClient().delete_logged_model(gone)

    forget()
    assert collect(root) == 0

    assert holders(root) == {kept}
    assert N_BYTES < packs_bytes(root) < 1.1 * N_BYTES
    assert Path(download_artifacts(f"models:/{kept}"), file.name).read_bytes() == file.read_bytes()


@pytest.mark.long
def test_models_that_mlflow_gc_leaves_of_a_deleted_experiment_are_orphans_once_its_folder_is_named(
    experiment_id: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = log_model(experiment_id, array_file(tmp_path, 1))
    other = mlflow.create_experiment("gone", artifact_location=f"tensorcas://{root}/second")
    run_id = log_run(other, array_file(tmp_path, 2))
    model_id = log_model(other, array_file(tmp_path, 3), run_id=run_id)
    mlflow.delete_experiment(other)
    forget()

    assert holders(root) == {kept, model_id}
    assert orphans(root) == 0
    assert holders(root) == {kept, model_id}
    assert "pass --folder second" in capsys.readouterr().out
    assert orphans(root, "--folder", "second") == 0
    assert holders(root) == {kept}
    assert packs_bytes(root) < 1.1 * N_BYTES
    assert not (root / "second/models" / model_id).exists()


@pytest.mark.long
def test_a_model_that_is_still_registered_outlives_the_run_and_experiment_mlflow_has_forgotten(
    experiment_id: str, root: Path, tmp_path: Path
) -> None:
    log_run(experiment_id, array_file(tmp_path, 1))
    other = mlflow.create_experiment("gone", artifact_location=f"tensorcas://{root}/second")
    file = array_file(tmp_path, 2)
    model_id = log_model(other, file, run_id=log_run(other, file))
    client = MlflowClient()
    client.create_registered_model("used")
    client.create_model_version("used", f"models:/{model_id}", model_id=model_id)
    copied = client.copy_model_version("models:/used/1", "copied")
    client.delete_registered_model("used")
    mlflow.delete_experiment(other)
    forget()

    assert orphans(root, "--folder", "second") == 0

    assert copied.source == "models:/used/1"
    assert Path(download_artifacts(f"models:/copied/1/{file.name}")).read_bytes() == file.read_bytes()


@pytest.mark.long
def test_attachments_of_a_deleted_trace_are_orphans(experiment_id: str, root: Path, tmp_path: Path) -> None:
    kept, gone = (trace(array(seed)) for seed in range(2))
    MlflowClient().delete_traces(experiment_id, trace_ids=[gone])

    assert orphans(root) == 0

    [ref] = Store.open(root).checkpoints()
    assert (ref.path or "").startswith(f"first/traces/{kept}/artifacts/")


def test_deleting_a_folder_of_artifacts_leaves_those_beside_it(experiment_id: str, root: Path, tmp_path: Path) -> None:
    client = MlflowClient()
    run_id = client.create_run(experiment_id).info.run_id
    for folder in ("epoch", "epoch/1", "epoch/10", "epochs"):
        client.log_artifact(run_id, str(array_file(tmp_path, 1)), folder)
        client.log_text(run_id, "a note", f"{folder}/note.txt")
    repository = get_artifact_repository(client.get_run(run_id).info.artifact_uri)

    repository.delete_artifacts("epoch/1")
    assert {info.path for info in list_artifacts(run_id=run_id, artifact_path="epoch")} == {
        "epoch/1.npz",
        "epoch/10",
        "epoch/note.txt",
    }
    repository.delete_artifacts("epoch")
    repository.delete_artifacts("epoch")

    assert [info.path for info in list_artifacts(run_id=run_id)] == ["epochs"]
    assert Path(download_artifacts(f"runs:/{run_id}/epochs/1.npz")).read_bytes() == (tmp_path / "1.npz").read_bytes()


def test_checkpoint_saved_into_a_run_after_mlflow_gc_is_an_orphan(
    experiment_id: str, root: Path, tmp_path: Path
) -> None:
    kept, gone = (log_run(experiment_id, array_file(tmp_path, 1)) for _ in range(2))
    repository = get_artifact_repository(MlflowClient().get_run(gone).info.artifact_uri)
    mlflow.delete_run(gone)
    forget()
    repository.log_artifact(str(array_file(tmp_path, 2)))
    assert holders(root) == {kept, gone}

    assert orphans(root) == 0

    assert holders(root) == {kept}
    assert verify(Store.open(root)).problems == ()
    with pytest.raises(MlflowException, match="not found"):
        mlflow.get_run(gone)
