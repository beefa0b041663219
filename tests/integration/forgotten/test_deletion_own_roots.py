"""Checkpoints and models under MLflow's own artifact roots, deleted and forgotten by MLflow."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow import MlflowClient
from sklearn.linear_model import LinearRegression

from tensorcas_mlflow.backends import FolderBackend
from tensorcas_mlflow.integration.forgotten import drop_orphans, orphaned_refs
from tensorcas_mlflow.store import Store
from tests.integration.forgotten.forgetting import N_BYTES, array, collect, forget, holders, packs_bytes
from tests.tracking import active_experiment


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "artifacts"


@pytest.fixture
def experiment_id(tracking_uri: str, root: Path) -> Iterator[str]:
    """Id of the active experiment, whose artifacts MLflow keeps in plain folders."""
    with active_experiment("plain", str(root)) as experiment:
        yield experiment


def checkpoints(*seeds: int) -> str:
    """Log checkpoints of a run, of steps 0, 1, …, and give the run's id."""
    with mlflow.start_run() as run:
        for step, seed in enumerate(seeds):
            mlflow.tensorcas.log_checkpoint({"w": array(seed)}, step=step, log_metrics=False)
    return str(run.info.run_id)


def model(seed: int) -> Any:
    made = LinearRegression()
    made.coef_, made.intercept_ = array(seed), 0.0
    with mlflow.start_run():
        return mlflow.tensorcas.log_model(made, name="model", pip_requirements=[])


@pytest.mark.long
def test_checkpoints_of_a_run_are_freed_after_mlflow_gc_and_others_stay(experiment_id: str, root: Path) -> None:
    gone, kept = checkpoints(1, 2), checkpoints(2)
    mlflow.delete_run(gone)

    assert collect(root, "--orphans") == 0
    assert holders(root) == {gone, kept}
    forget()
    assert collect(root, "--orphans") == 0

    assert holders(root) == {kept}
    assert N_BYTES < packs_bytes(root) < 1.1 * N_BYTES
    assert (mlflow.tensorcas.load_checkpoint(kept)["w"] == array(2)).all()


def test_checkpoints_of_the_only_run_are_freed_after_mlflow_gc(experiment_id: str, root: Path) -> None:
    mlflow.delete_run(checkpoints(1))
    forget()

    assert collect(root, "--orphans") == 0
    assert holders(root) == set()
    assert packs_bytes(root) == 0


@pytest.mark.long
def test_a_deleted_model_is_freed_after_mlflow_gc(experiment_id: str, root: Path) -> None:
    gone, kept = model(1), model(2)
    MlflowClient().delete_logged_model(gone.model_id)
    forget()

    assert collect(root, "--orphans") == 0
    assert holders(root) == {kept.model_id}
    assert packs_bytes(root) < 1.1 * N_BYTES
    assert (mlflow.tensorcas.load_model(kept.model_uri).coef_ == array(2)).all()


@pytest.mark.long
def test_models_of_an_experiment_that_mlflow_gc_has_deleted_are_freed_once_their_folders_are_removed(
    experiment_id: str, root: Path, tracking_uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """MLflow leaves the models, and it is MLflow that keeps their folders: nobody else removes them."""
    checkpoints(1)
    left = model(2)
    mlflow.delete_experiment(experiment_id)
    forget("--experiment-ids", experiment_id)

    assert collect(root, "--orphans") == 0
    assert {ref.model_id for ref in Store.open(root).checkpoints()} == {left.model_id}
    capsys.readouterr()
    assert collect(root, "--orphans", "--tracking-uri", tracking_uri, "--folder", ".") == 1
    assert "MLflow keeps the artifacts in '.' in folders of its own: remove" in capsys.readouterr().err
    shutil.rmtree(root / "models" / left.model_id)
    assert collect(root, "--orphans") == 0

    assert holders(root) == set()
    assert packs_bytes(root) == 0


@pytest.mark.long
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("is_mount_point", [False, True])
def test_nothing_is_gone_that_lies_behind_a_link_to_a_disk_that_is_not_mounted(
    experiment_id: str, root: Path, tmp_path: Path, depth: int, is_mount_point: bool
) -> None:
    checkpoints(0)
    run_id, info = checkpoints(1), model(2)
    disk = tmp_path / "disk"
    disk.mkdir()
    for number, place in enumerate((f"{run_id}/artifacts", f"models/{info.model_id}/artifacts/data/checkpoint.arrow")):
        linked = root.joinpath(*Path(place).parts[: depth + 1])
        linked.rename(disk / str(number))
        linked.symlink_to(disk / str(number))
    before = orphaned_refs(Store.open(root), grace_s=0)
    disk.rename(tmp_path / "unmounted")
    if is_mount_point:
        for number in range(2):
            (disk / str(number)).mkdir(parents=True)

    assert before == []
    assert orphaned_refs(Store.open(root), grace_s=0) == []


@pytest.mark.long
def test_a_model_whose_folder_was_a_link_is_freed_after_mlflow_gc(
    experiment_id: str, root: Path, tmp_path: Path
) -> None:
    info, kept = model(1), model(2)
    (root / "models").rename(tmp_path / "elsewhere")
    (root / "models").symlink_to(tmp_path / "elsewhere")
    MlflowClient().delete_logged_model(info.model_id)
    forget()

    assert collect(root, "--orphans") == 0
    assert holders(root) == {kept.model_id}


@pytest.mark.long
def test_a_checkpoint_that_is_its_runs_first_artifact_is_no_orphan_when_it_is_committed(
    experiment_id: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never show a commit before its run's artifact folder: a missing folder means a forgotten run."""
    checkpoints(1)
    promote = FolderBackend.promote
    seen: list[list[str | None]] = []

    def look_after_it(self: FolderBackend, *words: Any, **options: Any) -> Any:
        done = promote(self, *words, **options)
        seen.append([ref.run_id for ref in orphaned_refs(Store.open(root), grace_s=0)])
        return done

    monkeypatch.setattr(FolderBackend, "promote", look_after_it)
    checkpoints(2)

    assert seen == [[]]


def test_a_ref_is_made_again_if_its_place_cannot_be_looked_at_while_it_is_dropped(
    experiment_id: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, _ = checkpoints(1), checkpoints(2)
    shutil.rmtree(root / run_id)
    store = Store.open(root)
    orphans = orphaned_refs(store, grace_s=0)
    withdraw = FolderBackend.withdraw

    def then_fail(self: FolderBackend, key: str, token: Any) -> bool:
        is_withdrawn = withdraw(self, key, token)
        if key == orphans[0].key:
            (root / run_id).symlink_to(root / run_id)
        return is_withdrawn

    monkeypatch.setattr(FolderBackend, "withdraw", then_fail)

    with pytest.raises(OSError, match="symbolic links"):
        drop_orphans(store, orphans)
    assert holders(root) >= {run_id}


def test_a_run_that_is_saved_into_after_mlflow_gc_keeps_what_was_saved(experiment_id: str, root: Path) -> None:
    run_id = checkpoints(1)
    mlflow.delete_run(run_id)
    MlflowClient().restore_run(run_id)
    shutil.rmtree(root / run_id / "artifacts")
    assert [ref.step for ref in orphaned_refs(Store.open(root), grace_s=0)] == [0]

    with mlflow.start_run(run_id):
        mlflow.tensorcas.log_checkpoint({"w": array(2)}, step=1, log_metrics=False)

    assert collect(root, "--orphans") == 0
    assert (mlflow.tensorcas.load_checkpoint(run_id, step=1)["w"] == array(2)).all()
