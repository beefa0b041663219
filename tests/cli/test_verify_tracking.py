"""``tensorcas verify --tracking-uri``: refs that are gone without a trace are missed by what MLflow lists."""

from __future__ import annotations

from pathlib import Path

import mlflow
import numpy as np
import pytest
from sklearn.linear_model import LinearRegression

from tensorcas_mlflow.store import Store
from tests.cli.conftest import Tensorcas
from tests.tracking import active_experiment, empty_database, no_stray_settings, tracking_uri

__all__ = ["empty_database", "no_stray_settings", "tracking_uri"]


@pytest.fixture(params=["tensorcas", "file"])
def root(request: pytest.FixtureRequest, tmp_path: Path, tracking_uri: str) -> Path:
    """A root of a store in which two models and two checkpoints are logged."""
    with active_experiment("a", f"{request.param}://{tmp_path}/root"):
        data = np.random.default_rng(0).normal(size=(50, 3))
        for target in range(2):
            mlflow.tensorcas.log_model(LinearRegression().fit(data, data[:, target]), name=f"model{target}")
        with mlflow.start_run():
            for step in range(2):
                mlflow.tensorcas.log_checkpoint({"w": np.arange(1000.0) + step}, step=step)
    return tmp_path / "root"


def test_verify_with_tracking_finds_a_store_with_all_refs_sound(
    root: Path, tracking_uri: str, tensorcas: Tensorcas
) -> None:
    done = tensorcas("verify", "--root", root, "--tracking-uri", tracking_uri)

    assert (done.status, done.err) == (0, "")
    assert "no problem found" in done.out


@pytest.mark.long
def test_verify_with_tracking_names_a_model_without_a_ref(root: Path, tracking_uri: str, tensorcas: Tensorcas) -> None:
    store = Store.open(root)
    lost, kept = (ref for ref in store.checkpoints() if ref.model_id is not None)
    store.drop(lost)

    assert tensorcas("verify", "--root", root).status == 0
    done = tensorcas("verify", "--root", root, "--tracking-uri", tracking_uri)
    assert done.status == 3
    told = [line for line in done.out.splitlines() if "no ref of this store keeps" in line]
    assert told
    assert all(str(lost.model_id) in line and lost.manifest[:64] in line for line in told)
    assert str(kept.model_id) not in done.out


@pytest.mark.long
def test_verify_with_tracking_names_a_step_whose_copy_mlflow_lists(
    root: Path, tracking_uri: str, tensorcas: Tensorcas
) -> None:
    store = Store.open(root)
    lost = next(ref for ref in store.checkpoints() if ref.step == 1 and ref.model_id is None)
    store.drop(lost)
    done = tensorcas("verify", "--root", root, "--tracking-uri", tracking_uri)

    # In a root of our own nothing shows a step but its ref.
    shows_copies = lost.copy_path is not None
    assert done.status == (3 if shows_copies else 0)
    assert (f"run {lost.run_id}, checkpoints/checkpoint/step-00000001.arrow: it names" in done.out) == shows_copies


def test_verify_ignores_a_tracking_store_that_keeps_nothing_here(
    root: Path, empty_database: Path, tensorcas: Tensorcas
) -> None:
    store = Store.open(root)
    store.drop(store.checkpoints()[0])

    assert tensorcas("verify", "--root", root, "--tracking-uri", f"sqlite:///{empty_database}").status == 0
