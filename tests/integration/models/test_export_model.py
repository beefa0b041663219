"""Exporting a model: a folder that loads where there is no store."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import mlflow
import numpy as np
import pytest
from mlflow.exceptions import MlflowException
from mlflow.models import Model
from sklearn.linear_model import LinearRegression

from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.store import MANIFEST_FILE, PAYLOAD_FILE, Store
from tests.zygote import run_program

X = np.random.default_rng(0).normal(size=(50, 4))
MODEL = LinearRegression().fit(X, np.random.default_rng(1).normal(size=(50, 3)))
FILES = [
    "MLmodel",
    "conda.yaml",
    f"data/{MANIFEST_FILE}",
    f"data/{PAYLOAD_FILE}",
    "python_env.yaml",
    "requirements.txt",
]


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def assert_loads(folder: Path) -> None:
    np.testing.assert_array_equal(mlflow.tensorcas.load_model(folder).coef_, MODEL.coef_)
    np.testing.assert_array_equal(mlflow.pyfunc.load_model(str(folder)).predict(X), MODEL.predict(X))


def assert_names_no_store(folder: Path, *places: Path) -> None:
    manifest = Manifest.from_bytes((folder / "data" / MANIFEST_FILE).read_bytes())
    model = Model.load(folder)
    said = (folder / "MLmodel").read_text()

    assert manifest.store_id is None
    assert model.flavors["tensorcas"]["manifest"] == manifest.digest
    assert not {"store", "store_id"} & model.flavors["tensorcas"].keys()
    assert "config" not in model.flavors["python_function"]
    assert not any(os.fspath(place) in said for place in places)


@pytest.mark.long
def test_a_logged_model_is_exported_and_loads_in_a_process_that_has_no_store(
    cas_experiment: str, tmp_path: Path
) -> None:
    info = mlflow.tensorcas.log_model(MODEL, name="model", input_example=X[:2], step=3)
    mlflow.tensorcas.export_model(info.model_uri, tmp_path / "out")
    store = Store.find(tmp_path / "artifacts")[0]
    shutil.move(tmp_path / "artifacts", tmp_path / "gone")
    script = "import sys, mlflow; print(mlflow.tensorcas.load_model(sys.argv[1]).coef_.tobytes().hex())"
    run = run_program(script, tmp_path / "out", cwd=tmp_path, check=True)

    assert run.stdout.strip() == MODEL.coef_.tobytes().hex()
    assert_loads(tmp_path / "out")
    assert_names_no_store(tmp_path / "out", tmp_path / "artifacts", Path(store.id))
    assert set(FILES) < set(files(tmp_path / "out"))
    assert Model.load(tmp_path / "out").flavors["tensorcas"]["step"] == 3
    assert Model.load(tmp_path / "out").signature is not None


@pytest.mark.parametrize("form", ["runs:/{run_id}/model", "models:/best/1", "{artifact_path}"])
def test_any_uri_of_a_model_is_exported(experiment: str, tmp_path: Path, form: str) -> None:
    with mlflow.start_run() as run:
        info = mlflow.tensorcas.log_model(MODEL, name="model", registered_model_name="best")
    uri = form.format(run_id=run.info.run_id, artifact_path=info.artifact_path)
    mlflow.tensorcas.export_model(uri, tmp_path / "out")
    shutil.move(tmp_path / "artifacts", tmp_path / "gone")

    assert files(tmp_path / "out") == FILES
    assert_loads(tmp_path / "out")


def test_a_model_folder_deep_among_a_runs_artifacts_is_exported(experiment: str, tmp_path: Path) -> None:
    mlflow.tensorcas.save_model(MODEL, tmp_path / "saved")
    with mlflow.start_run() as run:
        mlflow.log_artifacts(str(tmp_path / "saved"), "deep/down/model")
    mlflow.tensorcas.export_model(f"runs:/{run.info.run_id}/deep/down/model", tmp_path / "out")

    assert files(tmp_path / "out") == FILES
    assert_loads(tmp_path / "out")


def test_a_download_that_names_its_store_is_exported_from_its_own_tensors(cas_experiment: str, tmp_path: Path) -> None:
    info = mlflow.tensorcas.log_model(MODEL, name="model")
    folder = mlflow.artifacts.download_artifacts(info.model_uri, dst_path=str(tmp_path / "here"))
    shutil.move(tmp_path / "artifacts", tmp_path / "gone")
    mlflow.tensorcas.export_model(folder, tmp_path / "out")

    assert_loads(tmp_path / "out")
    assert_names_no_store(tmp_path / "out", tmp_path / "artifacts")
    assert sorted(tmp_path.glob(".*")) == []


def test_a_model_of_another_flavor_comes_complete(cas_experiment: str, tmp_path: Path) -> None:
    info = mlflow.sklearn.log_model(MODEL, name="model", pip_requirements=[], serialization_format="pickle")
    mlflow.tensorcas.export_model(info.model_uri, tmp_path / "out")
    shutil.move(tmp_path / "artifacts", tmp_path / "gone")

    np.testing.assert_array_equal(mlflow.sklearn.load_model(str(tmp_path / "out")).coef_, MODEL.coef_)


def test_a_model_whose_store_has_moved_is_exported_from_where_it_is_said_to_be(
    plain_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORCAS_STORE", str(tmp_path / "first"))
    info = mlflow.tensorcas.log_model(MODEL, name="model")
    shutil.move(tmp_path / "first", tmp_path / "second")
    with pytest.raises(MlflowException, match="no store"):
        mlflow.tensorcas.export_model(info.model_uri, tmp_path / "out")
    monkeypatch.setenv("TENSORCAS_STORE", str(tmp_path / "second"))
    mlflow.tensorcas.export_model(info.model_uri, tmp_path / "out")

    assert_loads(tmp_path / "out")


def test_a_folder_that_holds_something_is_refused_and_left_alone(experiment: str, tmp_path: Path) -> None:
    info = mlflow.tensorcas.log_model(MODEL, name="model")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")

    for name in ("out", "file"):
        with pytest.raises(MlflowException, match="not empty") as refusal:
            mlflow.tensorcas.export_model(info.model_uri, tmp_path / name)
        assert refusal.value.error_code == "RESOURCE_ALREADY_EXISTS"
    assert files(tmp_path / "out") == ["mine.txt"]


def test_an_empty_folder_is_filled(experiment: str, tmp_path: Path) -> None:
    info = mlflow.tensorcas.log_model(MODEL, name="model")
    (tmp_path / "out").mkdir()
    mlflow.tensorcas.export_model(info.model_uri, tmp_path / "out")

    assert_loads(tmp_path / "out")


@pytest.mark.usefixtures("store_of_files")
def test_damage_leaves_no_folder_behind(cas_experiment: str, tmp_path: Path) -> None:
    info = mlflow.tensorcas.log_model(MODEL, name="model")
    mlflow.tensorcas.wait()  # the database has a journal while figures are logged
    before = sorted(tmp_path.iterdir())
    for pack in (tmp_path / "artifacts/.tensorcas/packs").rglob("*.pack"):
        data = bytearray(pack.read_bytes())
        data[80] ^= 0xFF
        pack.write_bytes(data)

    with pytest.raises(MlflowException, match="damaged") as refusal:
        mlflow.tensorcas.export_model(info.model_uri, tmp_path / "out")
    assert refusal.value.error_code == "BAD_REQUEST"
    assert sorted(tmp_path.iterdir()) == before


def test_a_model_is_not_exported_into_itself(tmp_path: Path) -> None:
    mlflow.tensorcas.save_model(MODEL, tmp_path / "saved")

    with pytest.raises(MlflowException, match="into itself"):
        mlflow.tensorcas.export_model(tmp_path / "saved", tmp_path / "saved/below")
    assert files(tmp_path / "saved") == FILES


@pytest.mark.parametrize("place", ["s3://bucket/model", "runs:/1/model"])
def test_a_uri_is_no_folder_to_write_to(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mlflow.tensorcas.save_model({"w": np.ones(9)}, "model")

    with pytest.raises(MlflowException, match="is a URI, and what is written goes to a path of this machine"):
        mlflow.tensorcas.export_model("model", place)
    with pytest.raises(MlflowException, match="is a URI, and what is written goes to a path of this machine"):
        mlflow.tensorcas.save_model({"w": np.ones(9)}, place)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
