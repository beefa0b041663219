"""Loading: every way MLflow has to name a model, every place its tensors may be, and what is refused."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
import yaml
from mlflow.exceptions import MlflowException
from mlflow.models.model import ModelInfo
from sklearn.linear_model import LinearRegression

from tensorcas_mlflow.adapter import adapter_named
from tensorcas_mlflow.store import Store

X = np.random.default_rng(0).normal(size=(50, 4))

Edit = Callable[[str], str]


def make_model(seed: int = 0) -> LinearRegression:
    """Fit a model that differs from those of other seeds."""
    return LinearRegression().fit(X, np.random.default_rng(seed).normal(size=(50, 3)))


def make_net(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))


def assert_same(model: LinearRegression, other: Any) -> None:
    np.testing.assert_array_equal(model.coef_, other.coef_)
    np.testing.assert_array_equal(model.intercept_, other.intercept_)


def assert_same_state(net: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    expected = net.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def location(experiment_id: str) -> str:
    return str(mlflow.get_experiment(experiment_id).artifact_location)


def assert_loads_anywhere(model_uri: str, model: LinearRegression) -> None:
    assert_same(model, mlflow.tensorcas.load_model(model_uri))
    np.testing.assert_array_equal(mlflow.pyfunc.load_model(model_uri).predict(X), model.predict(X))


# --- every URI form


def test_a_logged_model_is_loaded_by_its_id(experiment: str) -> None:
    info = mlflow.tensorcas.log_model(make_model(), name="model")

    assert info.model_uri == f"models:/{info.model_id}"
    assert_loads_anywhere(info.model_uri, make_model())


@pytest.mark.long
def test_a_runs_model_is_loaded_by_run_and_name_and_the_latest_step_counts(experiment: str) -> None:
    with mlflow.start_run() as run:
        for step in range(3):
            mlflow.tensorcas.log_model(make_model(step), name="model", step=step)
        mlflow.tensorcas.log_model(make_model(9), name="other")

    assert_loads_anywhere(f"runs:/{run.info.run_id}/model", make_model(2))


@pytest.mark.long
def test_a_model_folder_among_a_runs_artifacts_is_loaded(experiment: str, tmp_path: Path) -> None:
    mlflow.tensorcas.save_model(make_model(), tmp_path / "saved")
    with mlflow.start_run() as run:
        mlflow.log_artifacts(str(tmp_path / "saved"), "deep/model")

    assert_loads_anywhere(f"runs:/{run.info.run_id}/deep/model", make_model())


@pytest.mark.long
def test_registered_models_are_loaded_by_version_and_alias(experiment: str) -> None:
    for seed in range(2):
        mlflow.tensorcas.log_model(make_model(seed), name="model", registered_model_name="best")
    mlflow.MlflowClient().set_registered_model_alias("best", "champion", "1")

    assert_loads_anywhere("models:/best/1", make_model(0))
    assert_loads_anywhere("models:/best/2", make_model(1))
    assert_loads_anywhere("models:/best/latest", make_model(1))
    assert_loads_anywhere("models:/best@champion", make_model(0))


@pytest.mark.long
def test_a_model_registered_by_its_artifact_uri_is_loaded(experiment: str) -> None:
    info = mlflow.tensorcas.log_model(make_model(), name="model")
    mlflow.register_model(info.artifact_path, "by-uri")

    assert_loads_anywhere("models:/by-uri/1", make_model())


def test_a_model_is_loaded_by_its_artifact_uri(experiment: str) -> None:
    info = mlflow.tensorcas.log_model(make_model(), name="model")

    assert_loads_anywhere(info.artifact_path, make_model())


@pytest.mark.parametrize("edit", [str, lambda path: f"tensorcas:{path}", lambda path: f"tensorcas://{path}"])
def test_uris_with_and_without_slashes_and_plain_paths_name_one_model(edit: Edit, plain_experiment: str) -> None:
    info = mlflow.tensorcas.log_model(make_model(), name="model")

    assert_loads_anywhere(edit(info.artifact_path), make_model())


def test_local_folders_are_loaded_by_uri_and_by_relative_path(
    plain_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    info = mlflow.tensorcas.log_model(make_model(), name="model")

    assert_loads_anywhere(Path(info.artifact_path).as_uri(), make_model())
    assert_loads_anywhere(str(Path(info.artifact_path).relative_to(tmp_path)), make_model())


def test_a_folder_may_be_named_by_a_path_object(plain_experiment: str) -> None:
    info = mlflow.tensorcas.log_model(make_model(), name="model")

    assert_same(make_model(), mlflow.tensorcas.load_model(Path(info.artifact_path)))


def test_a_downloaded_model_finds_its_store(experiment: str, tmp_path: Path) -> None:
    info = mlflow.tensorcas.log_model(make_model(), name="model")
    (tmp_path / "here").mkdir()
    folder = mlflow.artifacts.download_artifacts(info.model_uri, dst_path=str(tmp_path / "here"))

    assert_loads_anywhere(folder, make_model())


def test_a_folder_that_is_not_there_is_said_to_be_missing(tracking_uri: str) -> None:
    with pytest.raises(MlflowException, match="no folder 'nowhere'") as refusal:
        mlflow.tensorcas.load_model("nowhere")
    assert refusal.value.error_code == "RESOURCE_DOES_NOT_EXIST"

    with pytest.raises(MlflowException, match=r"did you mean 'models:/m-123'"):
        mlflow.tensorcas.load_model("m-123")


def test_a_model_of_another_flavor_is_refused_by_name(tmp_path: Path) -> None:
    mlflow.sklearn.save_model(make_model(), str(tmp_path / "saved"), pip_requirements=[], serialization_format="pickle")

    with pytest.raises(MlflowException, match=r"not saved by mlflow.tensorcas, but by .*sklearn"):
        mlflow.tensorcas.load_model(tmp_path / "saved")


# --- what is made of it


@pytest.mark.long
def test_a_live_model_is_filled_in_place_without_pickle(experiment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
    info = mlflow.tensorcas.log_model(make_net(0), name="net")
    live = make_net(1)
    weight = live[0].weight

    assert mlflow.tensorcas.load_model(info.model_uri, into=live) is live
    assert live[0].weight is weight
    assert_same_state(make_net(0), live.state_dict())


def test_weights_only_gives_tensors_by_name_without_pickle(experiment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
    info = mlflow.tensorcas.log_model(make_net(), name="net")

    assert_same_state(make_net(), mlflow.tensorcas.load_model(info.model_uri, weights_only=True))


def test_weights_only_gives_arrays_where_the_framework_has_no_tensors(experiment: str) -> None:
    info = mlflow.tensorcas.log_model(make_model(), name="model")

    weights = mlflow.tensorcas.load_model(info.model_uri, weights_only=True)
    assert any(np.array_equal(array, make_model().coef_) for array in weights.values())
    assert "__skeleton__" not in weights


@pytest.mark.long
def test_a_model_that_needs_pickle_is_refused_where_pickle_is_forbidden(
    experiment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = mlflow.tensorcas.log_model(make_net(), name="net")
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")

    for load in (mlflow.tensorcas.load_model, mlflow.pyfunc.load_model):
        with pytest.raises(MlflowException, match=r"into=.*weights_only=True") as refusal:
            load(info.model_uri)
        assert refusal.value.error_code == "INVALID_PARAMETER_VALUE"


def test_a_state_dict_needs_no_pickle(experiment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
    info = mlflow.tensorcas.log_model(make_net().state_dict(), name="state")

    assert_same_state(make_net(), mlflow.tensorcas.load_model(info.model_uri))


def test_into_and_weights_only_refuse_each_other(experiment: str) -> None:
    with pytest.raises(MlflowException, match="give one of the two"):
        mlflow.tensorcas.load_model("models:/m-1", into=make_net(), weights_only=True)


def test_a_live_model_that_does_not_fit_is_refused(experiment: str) -> None:
    info = mlflow.tensorcas.log_model(make_net(), name="net")

    with pytest.raises(MlflowException, match="pytorch") as refusal:
        mlflow.tensorcas.load_model(info.model_uri, into=torch.nn.Linear(4, 2))
    assert refusal.value.error_code == "INVALID_PARAMETER_VALUE"


def test_code_that_was_logged_is_on_the_path_when_the_model_is_made(
    experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "tensorcas_test_code.py"
    code.write_text("from sklearn.linear_model import LinearRegression\n\n\nclass Own(LinearRegression):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = __import__("tensorcas_test_code").Own().fit(X, X)
    info = mlflow.tensorcas.log_model(own, name="model", code_paths=[str(code)])
    code.unlink()
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
    sys.modules.pop("tensorcas_test_code")

    loaded = mlflow.tensorcas.load_model(info.model_uri)
    assert type(loaded).__name__ == "Own"
    assert sys.modules["tensorcas_test_code"].__file__ != str(code)
    sys.modules.pop("tensorcas_test_code")
    assert_same(own, mlflow.pyfunc.load_model(info.model_uri).get_raw_model())
    sys.modules.pop("tensorcas_test_code")


@pytest.mark.parametrize("load", ["tensorcas", "pyfunc"])
def test_the_code_that_was_logged_goes_before_that_in_the_working_directory(
    load: str, plain_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "tensorcas_test_version.py"
    text = "from sklearn.linear_model import LinearRegression\n\n\nclass Own(LinearRegression):\n    version = {}\n"
    code.write_text(text.format(1))
    monkeypatch.syspath_prepend(tmp_path)
    own = __import__("tensorcas_test_version").Own().fit(X, X)
    info = mlflow.tensorcas.log_model(own, name="model", code_paths=[str(code)])
    code.write_text(text.format(2) + "\n")
    sys.modules.pop("tensorcas_test_version")

    loaded = getattr(mlflow, load).load_model(info.model_uri)

    sys.modules.pop("tensorcas_test_version")
    assert (loaded if load == "tensorcas" else loaded.get_raw_model()).version == 1


def test_code_that_has_the_name_of_an_installed_module_is_named_in_a_warning(
    plain_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "zstandard.py").write_text("raise AssertionError\n")
    info = mlflow.tensorcas.log_model(make_model(), name="model", code_paths=[str(tmp_path / "zstandard.py")])

    assert_same(make_model(), mlflow.tensorcas.load_model(info.model_uri))

    assert "Python imports the installed ones: zstandard." in caplog.text


@pytest.mark.parametrize("key", ["code", "data"])
@pytest.mark.parametrize("place", ["../elsewhere", "data/../../elsewhere", "/tmp"])
def test_an_mlmodel_that_leads_out_of_its_folder_is_refused(key: str, place: str, tmp_path: Path) -> None:
    mlflow.tensorcas.save_model(make_model(), tmp_path / "saved")
    file = tmp_path / "saved" / "MLmodel"
    model = yaml.safe_load(file.read_text())
    model["flavors"]["tensorcas"][key] = place
    file.write_text(yaml.safe_dump(model))

    for act in (
        mlflow.tensorcas.load_model,
        mlflow.tensorcas.open_checkpoint,
        lambda uri: mlflow.tensorcas.export_model(uri, tmp_path / "out"),
    ):
        with pytest.raises(MlflowException, match=f"MLmodel.*{key!r}"):
            act(tmp_path / "saved")
    assert sorted(each.name for each in tmp_path.iterdir() if each.name != "mlflow.db") == ["saved"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "- a list",
        "flavors: 3",
        "flavors: {tensorcas: 3}",
        "flavors: {tensorcas: {data: data}}",
        "flavors: {tensorcas: {adapter: [1], data: data}}",
        "flavors: {tensorcas: {adapter: pytorch, data: data, manifest: [1]}}",
    ],
)
def test_invalid_mlmodel_is_reported(text: str, tmp_path: Path) -> None:
    (tmp_path / "MLmodel").write_text(text)

    for act in (
        mlflow.tensorcas.load_model,
        mlflow.tensorcas.open_checkpoint,
        lambda uri: mlflow.tensorcas.export_model(uri, tmp_path.with_name("out")),
    ):
        with pytest.raises(MlflowException, match=r"MLmodel"):
            act(tmp_path)


def test_only_the_manifest_and_mlmodel_are_fetched(cas_experiment: str, tmp_path: Path) -> None:
    info = mlflow.tensorcas.log_model(make_model(), name="model")
    folder = Path(info.artifact_path.removeprefix("tensorcas:"))
    for name in ("requirements.txt", "conda.yaml", "python_env.yaml"):
        (folder / name).unlink()

    assert_same(make_model(), mlflow.tensorcas.load_model(info.model_uri))


# --- where the tensors are


@pytest.fixture
def moved(plain_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelInfo:
    """A model whose store was moved from ``first`` to ``second``."""
    monkeypatch.setenv("TENSORCAS_STORE", str(tmp_path / "first"))
    info: ModelInfo = mlflow.tensorcas.log_model(make_model(), name="model")
    monkeypatch.delenv("TENSORCAS_STORE")
    shutil.move(tmp_path / "first", tmp_path / "second")
    return info


def test_a_store_that_is_gone_is_said_to_be_gone_and_what_to_do(moved: ModelInfo) -> None:
    for load in (mlflow.tensorcas.load_model, mlflow.pyfunc.load_model):
        with pytest.raises(MlflowException, match=r"/first'.*TENSORCAS_STORE.*model_config") as refusal:
            load(moved.model_uri)
        assert refusal.value.error_code == "RESOURCE_DOES_NOT_EXIST"


def test_a_moved_store_is_named_by_the_environment(
    moved: ModelInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORCAS_STORE", str(tmp_path / "second"))

    assert_loads_anywhere(moved.model_uri, make_model())


def test_a_moved_store_is_named_by_the_model_configuration(moved: ModelInfo, tmp_path: Path) -> None:
    model = mlflow.pyfunc.load_model(moved.model_uri, model_config={"store": f"tensorcas://{tmp_path}/second"})

    np.testing.assert_array_equal(model.predict(X), make_model().predict(X))


@pytest.mark.long
def test_a_moved_store_is_named_by_mlflows_inference_configuration(
    moved: ModelInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_PYFUNC_INFERENCE_CONFIG", json.dumps({"store": str(tmp_path / "second")}))

    assert_loads_anywhere(moved.model_uri, make_model())


def test_the_model_configuration_goes_before_the_environment(
    moved: ModelInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORCAS_STORE", str(tmp_path / "nowhere"))
    model = mlflow.pyfunc.load_model(moved.model_uri, model_config={"store": str(tmp_path / "second")})

    np.testing.assert_array_equal(model.predict(X), make_model().predict(X))


def test_a_named_place_without_a_store_is_an_error(
    moved: ModelInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORCAS_STORE", str(tmp_path / "nowhere"))

    with pytest.raises(MlflowException, match=r"no store at .*/nowhere") as refusal:
        mlflow.tensorcas.load_model(moved.model_uri)
    assert refusal.value.error_code == "RESOURCE_DOES_NOT_EXIST"


def test_a_wrong_store_is_refused_with_both_ids(
    experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = mlflow.tensorcas.log_model(make_model(), name="model")
    right, wrong = Store.find(info.artifact_path)[0], Store.init(tmp_path / "wrong")
    monkeypatch.setenv("TENSORCAS_STORE", wrong.uri)

    for load in (mlflow.tensorcas.load_model, mlflow.pyfunc.load_model):
        with pytest.raises(MlflowException, match=f"{right.id}.*{wrong.id}") as refusal:
            load(info.model_uri)
        assert refusal.value.error_code == "INVALID_PARAMETER_VALUE"


def test_a_wrong_store_in_the_old_place_is_refused(moved: ModelInfo, tmp_path: Path) -> None:
    wrong = Store.init(tmp_path / "first")

    with pytest.raises(MlflowException, match=f"written to store .*{wrong.id}"):
        mlflow.tensorcas.load_model(moved.model_uri)


def test_an_experiments_folder_may_be_moved_as_a_whole(plain_experiment: str, tmp_path: Path) -> None:
    info = mlflow.tensorcas.log_model(make_model(), name="model")
    old = Path(location(plain_experiment))
    shutil.move(old, tmp_path / "moved")
    folder = tmp_path / "moved" / Path(info.artifact_path).relative_to(old)

    assert_loads_anywhere(str(folder), make_model())
    assert_same(make_model(), mlflow.tensorcas.load_model(f"tensorcas://{folder}"))


def test_a_moved_folder_is_found_though_another_store_took_its_old_place(plain_experiment: str, tmp_path: Path) -> None:
    info = mlflow.tensorcas.log_model(make_model(), name="model")
    old = Path(location(plain_experiment))
    shutil.move(old, tmp_path / "moved")
    Store.init(old)

    assert_loads_anywhere(str(tmp_path / "moved" / Path(info.artifact_path).relative_to(old)), make_model())


# --- into a live model


@pytest.mark.parametrize("door", ["load_model", "load_checkpoint"])
def test_large_net_is_checked_before_it_changes_unless_the_caller_omits_that(
    experiment: str, monkeypatch: pytest.MonkeyPatch, door: str
) -> None:
    monkeypatch.setattr("tensorcas_mlflow.reader._rebuild.STAGED_BYTES", 0)
    saved, live = make_net(0), make_net(1)
    with mlflow.start_run() as run:
        uri = mlflow.tensorcas.log_model(saved, name="net").model_uri
        mlflow.tensorcas.log_checkpoint(saved, step=1)
    source = uri if door == "load_model" else run.info.run_id
    load = getattr(mlflow.tensorcas, door)
    adapter = adapter_named("pytorch")
    checks: list[Any] = []
    fill = type(adapter).fill

    def noting(self: Any, *arguments: Any, check: Any, **options: Any) -> Any:
        checks.append(check)
        return fill(self, *arguments, check=check, **options)

    monkeypatch.setattr(type(adapter), "fill", noting)
    for options in ({}, {"precheck": False}, {"verify": False}):
        load(source, into=live, **options)

    assert_same_state(saved, live.state_dict())
    assert [check is not None for check in checks] == [True, False, False]
