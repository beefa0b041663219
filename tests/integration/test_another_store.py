"""A store that is deleted, or made anew, under a running training: what a call acknowledges can be loaded."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from sklearn.linear_model import LinearRegression

from tensorcas_mlflow.backends import LocalBackend
from tensorcas_mlflow.store import Store

WEIGHTS = np.random.default_rng(0).normal(size=100_000)


def delete(artifacts: Path) -> None:
    for folder in list(artifacts.rglob(".tensorcas")):
        shutil.rmtree(folder)


def make_anew(artifacts: Path) -> None:
    roots = [folder.parent for folder in artifacts.rglob(".tensorcas")]
    delete(artifacts)
    for root in roots:
        Store.init(root)


@pytest.fixture(params=[delete, make_anew], ids=["deleted", "made anew"])
def happen(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], None]:
    """Return a function that deletes or replaces the store."""
    return lambda: request.param(tmp_path / "artifacts")


def says_why(call: Callable[[], Any]) -> tuple[Any, bool]:
    """Return a call's result and True, or None and False if it raised an error about the store."""
    try:
        return call(), True
    except MlflowException as error:
        if "store" not in str(error):
            raise
        return None, False


def log(seed: int, step: int, **options: Any) -> Any:
    return mlflow.tensorcas.log_checkpoint({"w": WEIGHTS + seed}, step=step, **options)  # type: ignore[attr-defined]


def loads(seed: int, step: int) -> bool:
    found = mlflow.tensorcas.load_checkpoint(step=step)  # type: ignore[attr-defined]
    return np.array_equal(found["w"], WEIGHTS + seed)


@pytest.mark.parametrize("seed", [0, 1], ids=["unchanged", "changed"])
def test_checkpoint_logged_after_its_store_was_replaced_loads(
    experiment: str, happen: Callable[[], None], seed: int
) -> None:
    with mlflow.start_run():
        log(0, 0)
        happen()
        _, is_done = says_why(lambda: log(seed, 1))

        assert not is_done or loads(seed, 1)


def test_a_checkpoint_in_the_background_says_that_the_store_has_gone(
    experiment: str, happen: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_begun, go_on = threading.Event(), threading.Event()
    put_all = LocalBackend.put_all

    def wait_first(self: LocalBackend, blobs: Any) -> Any:
        is_begun.set()
        assert go_on.wait(30)
        return put_all(self, blobs)

    with mlflow.start_run():
        log(0, 0)
        monkeypatch.setattr(LocalBackend, "put_all", wait_first)
        info = log(1, 1, blocking=False)
        assert is_begun.wait(30)
        happen()
        go_on.set()
        with pytest.raises(MlflowException, match=r"there is no store at|no longer"):
            info.wait()


def test_artifact_logged_after_its_store_was_replaced_can_be_read(
    cas_experiment: str, happen: Callable[[], None], tmp_path: Path
) -> None:
    file = tmp_path / "weights.npy"
    np.save(file, WEIGHTS)
    with mlflow.start_run() as run:
        mlflow.log_artifact(str(file), "first")
        happen()
        _, is_done = says_why(lambda: mlflow.log_artifact(str(file), "second"))

        if is_done:
            found = mlflow.artifacts.download_artifacts(f"runs:/{run.info.run_id}/second/weights.npy")
            assert Path(found).read_bytes() == file.read_bytes()


def test_stream_whose_store_goes_away_midway_is_refused(
    cas_experiment: str, happen: Callable[[], None], tmp_path: Path
) -> None:
    with mlflow.start_run() as run:
        log(0, 0)
        repository = get_artifact_repository(run.info.artifact_uri)

        class Source:
            """Bytes without end, until the store is gone."""

            n_left = 20

            def read(self, n_bytes: int = -1) -> bytes:
                self.n_left -= 1
                if self.n_left == 10:
                    happen()
                return np.random.default_rng(self.n_left).bytes(n_bytes) if self.n_left > 0 else b""

        with pytest.raises(MlflowException, match="store"):
            repository.log_artifact_from_stream(Source(), "file.bin", "a")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["cas_experiment", "plain_experiment"])
def test_model_logged_after_its_store_was_replaced_loads(
    kind: str, request: pytest.FixtureRequest, happen: Callable[[], None]
) -> None:
    request.getfixturevalue(kind)
    model = LinearRegression().fit(np.eye(300), np.arange(300.0))
    with mlflow.start_run():
        mlflow.tensorcas.log_model(model, name="first")  # type: ignore[attr-defined]
        happen()
        info, is_done = says_why(lambda: mlflow.tensorcas.log_model(model, name="second"))  # type: ignore[attr-defined]

        if is_done:
            assert np.array_equal(mlflow.tensorcas.load_model(info.model_uri).coef_, model.coef_)  # type: ignore[attr-defined]
