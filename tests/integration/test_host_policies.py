"""MLflow decides what may run and where artifacts go; a new switch or a new duty of it does not pass unseen."""

from __future__ import annotations

import inspect
import os
import re
from contextlib import ExitStack
from pathlib import Path

import mlflow
import pytest
import torch
from mlflow import environment_variables
from mlflow.environment_variables import _EnvironmentVariable
from mlflow.exceptions import MlflowException
from mlflow.store.artifact import artifact_repo
from mlflow.utils import model_utils

from tensorcas_mlflow.base import config
from tensorcas_mlflow.integration.artifacts import TensorCasArtifactRepository
from tensorcas_mlflow.integration.checkpoints import pickle_forbidden_by

ROOT = Path(__file__).parents[2]
SWITCHES = ("MLFLOW_ALLOW_MODEL_CODE_EXECUTION", "MLFLOW_ALLOW_PICKLE_DESERIALIZATION")
DUTIES = {
    "MultipartUploadMixin": None,  # the store takes an upload apart as it passes by, in one stream
    "MultipartDownloadMixin": None,  # the bytes of a file are in no file that a URL could name
    "PresignedUploadMixin": None,  # a client without this package would write past the store
    "StreamUploadMixin": {"log_artifact_from_stream", "log_artifact_from_async_stream"},
}
"""Abstract methods of MLflow's mixins that we have; None for a mixin that we leave out."""
BASE = {"log_artifact", "log_artifacts", "list_artifacts", "_download_file"}


def page() -> set[str]:
    """Return the variables of MLflow in the tables of the environment page."""
    rows = re.findall(r"^\| (`_?MLFLOW_.*?) \|", (ROOT / "docs/environment.md").read_text("utf-8"), flags=re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_environment_page_has_every_switch_of_mlflow() -> None:
    variables = {
        value.name for value in vars(environment_variables).values() if isinstance(value, _EnvironmentVariable)
    }
    switches = {name for name in variables if re.match("_?MLFLOW_(ALLOW|ARTIFACT)", name)}

    assert "MLFLOW_ALLOW_PICKLE_DESERIALIZATION" in switches or "MLFLOW_ALLOW_MODEL_CODE_EXECUTION" in switches
    assert switches - page() == set()


def test_environment_page_has_every_variable_of_mlflow_that_the_package_names() -> None:
    sources = [path for room in ("tensorcas_mlflow", "flavors") for path in (ROOT / room).rglob("*.py")]
    named = {name for path in sources for name in re.findall(r"\b_?MLFLOW_\w+", path.read_text("utf-8"))}

    assert named - {"MLFLOW_AUTOLOGGING"} - page() == set()  # MLFLOW_AUTOLOGGING is a tag


def test_every_abstract_method_of_artifact_repositories_is_known() -> None:
    classes = {
        name: value.__abstractmethods__
        for name, value in inspect.getmembers(artifact_repo, inspect.isclass)
        if value.__module__ == artifact_repo.__name__ and inspect.isabstract(value)
    }
    base = {
        name
        for name, value in vars(artifact_repo.ArtifactRepository).items()
        if getattr(value, "__isabstractmethod__", False)
    }

    assert base == BASE
    assert {name for name in classes if name != "ArtifactRepository"} == set(DUTIES)
    for name, duties in DUTIES.items():
        if duties is None:
            assert not issubclass(TensorCasArtifactRepository, getattr(artifact_repo, name))
        else:
            assert classes[name] == duties
    assert not getattr(TensorCasArtifactRepository, "__abstractmethods__", None)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("code", ["true", "1", "false", "0", "FALSE", None])
@pytest.mark.parametrize("pickles", ["true", "False", None])
def test_both_switches_must_allow_a_pickle(
    code: str | None, pickles: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip(SWITCHES, (code, pickles), strict=True):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)

    forbidden = "false" in (str(code).lower(), str(pickles).lower()) or code == "0"
    assert (pickle_forbidden_by() is not None) == forbidden
    assert (config.pickle_forbidden_by() is not None) == forbidden


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("value", ["on", "off", "no", ""])
def test_value_that_mlflow_does_not_know_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)

    with pytest.raises(ValueError, match=name):
        config.pickle_forbidden_by()


def test_model_on_the_search_path_is_refused_as_by_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    mlflow.tensorcas.save_model({"w": torch.arange(9.0)}, folder)
    monkeypatch.setenv("MLFLOW_ALLOW_MODEL_CODE_EXECUTION", "false")
    monkeypatch.syspath_prepend(os.fspath(tmp_path))

    with ExitStack() as refused:
        try:
            model_utils._add_code_from_conf_to_system_path(os.fspath(folder), {})
        except MlflowException:
            refused.enter_context(pytest.raises(MlflowException, match="Python path"))
        mlflow.tensorcas.load_model(folder)
    assert set(mlflow.tensorcas.load_model(folder, weights_only=True)) == {"w"}
