"""A cut after a model or a checkpoint was logged where MLflow keeps its artifacts itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import mlflow
import numpy as np
import pytest

from tensorcas_mlflow.integration.forgotten import drop_orphans, orphaned_refs
from tensorcas_mlflow.store import Store
from tests.crash.disk import Disk, fates, put_down
from tests.crash.recorder import Recorder
from tests.crash.world import forget_stores
from tests.tracking import active_experiment, empty_database, no_stray_settings, tracking_uri

__all__ = ["empty_database", "no_stray_settings", "tracking_uri"]

pytestmark = pytest.mark.long


@pytest.fixture
def artifacts(tracking_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The artifact root of the active experiment. MLflow copies files in a way that is seen."""
    monkeypatch.setattr(shutil, "_USE_CP_SENDFILE", False)
    with active_experiment("plain", f"{tmp_path}/artifacts"):
        (tmp_path / "artifacts").mkdir()
        yield tmp_path / "artifacts"


def check_cut(artifacts: Path, act: Callable[[], None], load: Callable[[], object]) -> None:
    """Cut when all is done, in every way, and see that it loads and that nothing is taken for deleted."""
    recorder = Recorder(artifacts)
    with recorder.installed():
        act()
    disk = Disk(folders=recorder.folders)
    for entry in recorder.log:
        disk.apply(entry)
    for fate in fates(disk, n_drawn=3, seed=1):
        artifacts.rename(artifacts.with_name("before"))
        artifacts.mkdir()
        put_down(disk.tree(fate), artifacts)
        shutil.rmtree(artifacts.with_name("before"))
        forget_stores()

        [store] = [Store.open(path.parent) for path in artifacts.rglob(".tensorcas")]
        drop_orphans(store, orphaned_refs(store, grace_s=0))
        load()


def test_a_logged_model_is_there_after_a_cut(artifacts: Path) -> None:
    model = {"weights": np.random.default_rng(0).normal(size=(200, 50))}
    uris: list[str] = []

    def log() -> None:
        with mlflow.start_run():
            uris.append(mlflow.tensorcas.log_model(model, name="model").model_uri)

    def load() -> None:
        assert np.array_equal(mlflow.tensorcas.load_model(uris[0])["weights"], model["weights"])

    check_cut(artifacts, log, load)


def test_a_logged_checkpoint_is_there_after_a_cut(artifacts: Path) -> None:
    weights = np.random.default_rng(0).normal(size=(200, 50))
    keep = mlflow.tensorcas.Keep(last=2)
    runs: list[str] = []

    def log() -> None:
        with mlflow.start_run() as run:
            runs.append(run.info.run_id)
            for step in range(3):
                mlflow.tensorcas.log_checkpoint({"weights": weights + step}, step=step, keep=keep, log_metrics=False)

    def load() -> None:
        for step in (1, 2):
            state = mlflow.tensorcas.load_checkpoint(runs[0], step=step)
            assert np.array_equal(state["weights"], weights + step)

    check_cut(artifacts, log, load)
