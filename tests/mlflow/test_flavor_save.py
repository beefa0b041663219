"""Saving to a folder that needs nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import mlflow
import numpy as np
import pytest
from mlflow.exceptions import MlflowException
from mlflow.models import Model
from sklearn.linear_model import LinearRegression

from tensorcas_mlflow.store import MANIFEST_FILE, PAYLOAD_FILE

X = np.random.default_rng(0).normal(size=(50, 4))
MODEL = LinearRegression().fit(X, X @ np.ones((4, 2)))


def assert_loads(folder: Path) -> None:
    np.testing.assert_array_equal(mlflow.tensorcas.load_model(folder).coef_, MODEL.coef_)
    np.testing.assert_array_equal(mlflow.pyfunc.load_model(str(folder)).predict(X), MODEL.predict(X))


def test_a_saved_folder_is_laid_out_as_mlflows_own(tmp_path: Path) -> None:
    mlflow.tensorcas.save_model(MODEL, tmp_path / "saved")

    names = {path.relative_to(tmp_path / "saved").as_posix() for path in (tmp_path / "saved").rglob("*.*")}
    assert names == {
        "conda.yaml",
        "python_env.yaml",
        "requirements.txt",
        f"data/{MANIFEST_FILE}",
        f"data/{PAYLOAD_FILE}",
    }
    assert (tmp_path / "saved/MLmodel").is_file()


def test_a_saved_folder_loads_after_a_move_with_no_store_anywhere(tmp_path: Path) -> None:
    mlflow.tensorcas.save_model(MODEL, tmp_path / "saved")
    shutil.move(tmp_path / "saved", tmp_path / "moved")

    assert_loads(tmp_path / "moved")
    assert not list(tmp_path.rglob(".tensorcas"))


def test_a_saved_folder_needs_no_store_even_if_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow.tensorcas.save_model(MODEL, tmp_path / "saved")
    monkeypatch.setenv("TENSORCAS_STORE", str(tmp_path / "nowhere"))

    assert_loads(tmp_path / "saved")


def test_a_saved_folder_can_be_logged_and_loaded(cas_experiment: str, tmp_path: Path) -> None:
    mlflow.tensorcas.save_model(MODEL, tmp_path / "saved")
    with mlflow.start_run() as run:
        mlflow.log_artifacts(str(tmp_path / "saved"), "model")
    shutil.rmtree(tmp_path / "saved")

    model_uri = f"runs:/{run.info.run_id}/model"
    np.testing.assert_array_equal(mlflow.tensorcas.load_model(model_uri).coef_, MODEL.coef_)
    np.testing.assert_array_equal(mlflow.pyfunc.load_model(model_uri).predict(X), MODEL.predict(X))


def test_loading_a_folder_without_its_tensors_names_the_missing_file(tmp_path: Path) -> None:
    mlflow.tensorcas.save_model(MODEL, tmp_path / "saved")
    (tmp_path / "saved/data" / PAYLOAD_FILE).unlink()

    with pytest.raises(MlflowException, match=PAYLOAD_FILE) as refusal:
        mlflow.tensorcas.load_model(tmp_path / "saved")
    assert refusal.value.error_code == "RESOURCE_DOES_NOT_EXIST"


def test_a_damaged_payload_is_refused(tmp_path: Path) -> None:
    mlflow.tensorcas.save_model(MODEL, tmp_path / "saved")
    pack = tmp_path / "saved/data" / PAYLOAD_FILE
    data = bytearray(pack.read_bytes())
    data[64] ^= 0xFF
    pack.write_bytes(data)

    with pytest.raises(MlflowException, match="damaged") as refusal:
        mlflow.tensorcas.load_model(tmp_path / "saved")
    assert refusal.value.error_code == "BAD_REQUEST"


def test_description_of_a_model_is_in_its_mlmodel(tmp_path: Path) -> None:
    mlflow_model = Model()
    mlflow.tensorcas.save_model(
        MODEL, tmp_path / "saved", mlflow_model=mlflow_model, step=5, input_example=X[:2], metadata={"origin": "here"}
    )

    saved = Model.load(tmp_path / "saved")
    assert saved.signature == mlflow.models.infer_signature(X[:2], MODEL.predict(X[:2]))
    assert saved.metadata == {"origin": "here"}
    assert (saved.flavors["tensorcas"]["adapter"], saved.flavors["tensorcas"]["step"]) == ("sklearn", 5)
    assert saved.flavors["python_function"]["loader_module"] == "tensorcas_mlflow.pyfunc"
    assert mlflow_model.model_uuid == saved.model_uuid


def test_no_signature_is_inferred_where_none_is_wanted(tmp_path: Path) -> None:
    mlflow.tensorcas.save_model(MODEL, tmp_path / "saved", input_example=X[:2], signature=False)

    assert Model.load(tmp_path / "saved").signature is None


def test_a_folder_that_holds_something_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "something").touch()

    with pytest.raises(MlflowException, match="not empty"):
        mlflow.tensorcas.save_model(MODEL, tmp_path)


def test_a_model_no_adapter_takes_is_refused_before_the_folder_is_made(tmp_path: Path) -> None:
    with pytest.raises(MlflowException, match=r"no adapter takes a builtins\.int"):
        mlflow.tensorcas.save_model(3, tmp_path / "saved")

    assert not (tmp_path / "saved").exists()


def test_mlflows_own_log_takes_the_flavor_as_a_module(plain_experiment: str) -> None:
    info = Model.log(artifact_path=None, name="model", flavor=mlflow.tensorcas, model=MODEL)

    np.testing.assert_array_equal(mlflow.tensorcas.load_model(info.model_uri).coef_, MODEL.coef_)
