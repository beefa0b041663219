"""Errors about damage for a user of MLflow: each names the checkpoint, tensors and file."""

from __future__ import annotations

from pathlib import Path

import mlflow
import numpy as np
import pytest
from mlflow.exceptions import MlflowException
from sklearn.linear_model import LinearRegression

from tensorcas_mlflow.integration.checkpoints import load_checkpoint, log_checkpoint
from tensorcas_mlflow.tensorcas_store import TensorCasStore
from tests.integration.checkpoints.states import make_state


def damage_packs(root: Path) -> set[str]:
    """Change a byte of every chunk, and give the packs' keys."""
    keys = set()
    for pack in root.rglob("*.pack"):
        data = bytearray(pack.read_bytes())
        data[8 : len(data) // 2] = bytes(255 - byte for byte in data[8 : len(data) // 2])
        pack.write_bytes(data)
        keys.add(f"packs/{pack.name}")
    return keys


@pytest.mark.usefixtures("store_of_files")
def test_a_damaged_checkpoint_is_named_with_tensors_and_pack(experiment: str, tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        log_checkpoint(make_state(), step=5)
    keys = damage_packs(tmp_path / "artifacts")

    with pytest.raises(MlflowException, match=r"tensors? '.*chunk [0-9a-f]{64} is damaged in") as caught:
        load_checkpoint(run.info.run_id, step=5)
    assert "5" in caught.value.message.partition(", tensor")[0]
    assert any(key in caught.value.message for key in keys)


@pytest.mark.usefixtures("store_of_files")
def test_a_damaged_model_is_named_with_tensors_and_pack(experiment: str, tmp_path: Path) -> None:
    model = LinearRegression().fit(np.arange(40.0).reshape(10, 4), np.arange(10.0))
    info = mlflow.tensorcas.log_model(model, name="m")
    keys = damage_packs(tmp_path / "artifacts")

    for load in (mlflow.tensorcas.load_model, mlflow.pyfunc.load_model):
        with pytest.raises(MlflowException, match=r"tensors? '.*chunk [0-9a-f]{64} is damaged in") as caught:
            load(info.model_uri)
        assert info.model_id in caught.value.message
        assert any(key in caught.value.message for key in keys)


def test_a_manifest_that_has_changed_in_a_models_folder_is_refused(plain_experiment: str, tmp_path: Path) -> None:
    model = LinearRegression().fit(np.arange(40.0).reshape(10, 4), np.arange(10.0))
    info = mlflow.tensorcas.log_model(model, name="m")
    [file] = (tmp_path / "artifacts" / "models").rglob("checkpoint.arrow")
    # A tensor by another name: all chunks are found.
    whole = file.read_bytes()
    assert b"coef_" in whole
    file.write_bytes(whole.replace(b"coef_", b"coeg_"))

    with pytest.raises(MlflowException, match=r"checkpoint\.arrow.*it hashes to [0-9a-f]{64}, and the MLmodel says"):
        mlflow.tensorcas.load_model(info.model_uri, weights_only=True)


@pytest.mark.usefixtures("store_of_files")
def test_store_without_mlflow_names_the_tensors_and_pack_of_damage(tmp_path: Path) -> None:
    store = TensorCasStore(tmp_path, "run-1")
    store.save(LinearRegression().fit(np.arange(40.0).reshape(10, 4), np.arange(10.0)), step=7)
    [key] = damage_packs(tmp_path)

    with pytest.raises(Exception, match=rf"run run-1 step 7, tensors '.*{key}"):
        TensorCasStore(tmp_path, "run-1").load(7)
