"""A backup made by ``tensorcas copy`` is as good as what it was made of: other processes load from it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mlflow
import numpy as np
import pytest
from sklearn.linear_model import LinearRegression

from tensorcas_mlflow.cli import main
from tensorcas_mlflow.store import Store

pytestmark = pytest.mark.long

X = np.random.default_rng(0).normal(size=(50, 4))

OF_EITHER_ID = pytest.mark.parametrize(
    "words", [pytest.param([], id="same id"), pytest.param(["--new-id"], id="new id", marks=pytest.mark.long)]
)

LOAD_AND_PREDICT = """
import sys
import mlflow, numpy as np
mlflow.set_tracking_uri(sys.argv[1])
np.save(sys.argv[4], mlflow.pyfunc.load_model(sys.argv[2]).predict(np.load(sys.argv[3])))
"""

LOAD_CHECKPOINT = """
import sys
import mlflow, numpy as np

mlflow.set_tracking_uri(sys.argv[1])
np.save(sys.argv[3], mlflow.tensorcas.load_checkpoint(sys.argv[2], step=2)["w"])
"""


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    """Return the folder of the experiment's artifacts."""
    return tmp_path / "artifacts"


@pytest.fixture
def backup(tmp_path: Path) -> Path:
    return tmp_path / "backup"


def make_model() -> LinearRegression:
    return LinearRegression().fit(X, np.random.default_rng(1).normal(size=(50, 3)))


def elsewhere(program: str, *arguments: str | Path) -> None:
    """Run a program in another process."""
    words = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=dict(os.environ))
    assert done.returncode == 0, done.stderr


def predicted_elsewhere(uri: str, tracking_uri: str, tmp_path: Path) -> np.ndarray:
    np.save(tmp_path / "x.npy", X)
    elsewhere(LOAD_AND_PREDICT, tracking_uri, uri, tmp_path / "x.npy", tmp_path / "y.npy")
    return np.load(tmp_path / "y.npy")


def test_a_model_loads_from_a_backup_that_is_put_back_in_place(
    experiment: str, tracking_uri: str, artifacts: Path, backup: Path, tmp_path: Path
) -> None:
    model = make_model()
    info = mlflow.tensorcas.log_model(model, name="model")
    assert main(["copy", str(artifacts), str(backup), "--quiet"]) == 0
    artifacts.rename(tmp_path / "lost")
    backup.rename(artifacts)

    np.testing.assert_array_equal(predicted_elsewhere(info.model_uri, tracking_uri, tmp_path), model.predict(X))


@OF_EITHER_ID
def test_a_model_loads_from_where_the_backup_is(
    plain_experiment: str, tracking_uri: str, artifacts: Path, backup: Path, tmp_path: Path, words: list[str]
) -> None:
    model = make_model()
    info = mlflow.tensorcas.log_model(model, name="model")
    assert main(["copy", str(artifacts), str(backup), "--quiet", *words]) == 0
    artifacts.rename(tmp_path / "lost")
    folder = f"{backup}/models/{info.model_id}/artifacts"

    assert (Store.open(backup).id == Store.open(tmp_path / "lost").id) == (words == [])
    np.testing.assert_array_equal(predicted_elsewhere(folder, tracking_uri, tmp_path), model.predict(X))


@OF_EITHER_ID
def test_a_model_under_a_location_of_ours_loads_from_the_backup_that_is_named(
    cas_experiment: str,
    tracking_uri: str,
    artifacts: Path,
    backup: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
) -> None:
    model = make_model()
    info = mlflow.tensorcas.log_model(model, name="model")
    assert main(["copy", str(artifacts), str(backup), "--quiet", *words]) == 0
    artifacts.rename(tmp_path / "lost")
    uri = f"tensorcas://{backup}/models/{info.model_id}/artifacts"
    monkeypatch.setenv("TENSORCAS_STORE", str(backup))

    np.testing.assert_array_equal(predicted_elsewhere(uri, tracking_uri, tmp_path), model.predict(X))
    monkeypatch.delenv("TENSORCAS_STORE")
    np.testing.assert_array_equal(mlflow.tensorcas.load_model(uri).coef_, model.coef_)


def test_a_model_of_another_flavor_loads_from_a_restored_backup(
    cas_experiment: str, tracking_uri: str, artifacts: Path, backup: Path, tmp_path: Path
) -> None:
    model = make_model()
    info = mlflow.sklearn.log_model(model, name="model", serialization_format="cloudpickle")
    assert main(["copy", str(artifacts), str(backup), "--quiet"]) == 0
    artifacts.rename(tmp_path / "lost")
    assert main(["copy", str(backup), str(artifacts), "--quiet"]) == 0

    np.testing.assert_array_equal(predicted_elsewhere(info.model_uri, tracking_uri, tmp_path), model.predict(X))


def test_a_runs_checkpoints_are_restored_by_its_id(
    experiment: str, tracking_uri: str, artifacts: Path, backup: Path, tmp_path: Path
) -> None:
    with mlflow.start_run() as run:
        for step in (1, 2):
            mlflow.tensorcas.log_checkpoint({"w": np.full(1000, step)}, step=step)
    with mlflow.start_run():
        mlflow.tensorcas.log_checkpoint({"w": np.full(1000, 7)}, step=1)
    run_id = run.info.run_id
    assert main(["copy", str(artifacts), str(backup), "--quiet"]) == 0
    artifacts.rename(tmp_path / "lost")
    assert main(["copy", str(backup), str(artifacts), "--quiet", "--run", run_id]) == 0
    elsewhere(LOAD_CHECKPOINT, tracking_uri, run_id, tmp_path / "w.npy")

    np.testing.assert_array_equal(np.load(tmp_path / "w.npy"), np.full(1000, 2))
    assert {ref.run_id for ref in Store.open(artifacts).checkpoints()} == {run_id}
