"""``mlflow.tensorcas`` looks and behaves like a module of MLflow's own; import orders are in test_import_cost."""

from __future__ import annotations

import importlib.util
import inspect
import pickle
import pydoc
import sys

import cloudpickle
import mlflow
import mlflow.tensorcas
import pytest

import tensorcas_mlflow
from tensorcas_mlflow import plugin
from tensorcas_mlflow.integration import models


@pytest.mark.long
def test_it_has_the_names_of_the_package_and_the_same_objects() -> None:
    names = [name for name in tensorcas_mlflow.__all__ if name != "__version__"]

    assert mlflow.tensorcas.__all__ == names
    assert set(names) <= set(dir(mlflow.tensorcas))
    assert [name for name in names if getattr(mlflow.tensorcas, name) is not getattr(tensorcas_mlflow, name)] == []
    assert mlflow.tensorcas.log_model is models.log_model


def test_facade_is_one_plain_module_under_one_name() -> None:
    assert sys.modules["mlflow.tensorcas"] is mlflow.tensorcas
    assert inspect.ismodule(mlflow.tensorcas)
    assert repr(mlflow.tensorcas) == "<module 'mlflow.tensorcas'>"
    assert importlib.util.find_spec("mlflow.tensorcas") is not None


def test_functions_of_the_facade_are_pickled_by_reference() -> None:
    assert pickle.loads(pickle.dumps(mlflow.tensorcas.log_model)) is models.log_model
    assert cloudpickle.loads(cloudpickle.dumps(mlflow.tensorcas)) is mlflow.tensorcas


def test_help_of_the_facade_shows_its_functions() -> None:
    text = pydoc.plain(pydoc.render_doc(mlflow.tensorcas))

    assert "weights_only" in text
    assert "registered_model_name" in text


def test_facade_raises_attribute_error_for_an_unknown_name() -> None:
    assert not hasattr(mlflow.tensorcas, "nothing")
    assert not hasattr(plugin, "nothing")
    assert not hasattr(tensorcas_mlflow, "nothing")


def test_a_second_look_up_finds_the_same_facade() -> None:
    before = mlflow.tensorcas
    assert callable(plugin.artifact_repository)

    assert mlflow.tensorcas is before


def test_a_broken_dependency_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorcas_mlflow.integration.artifacts", None)

    with pytest.raises(ImportError):
        plugin.artifact_repository("tensorcas:///tmp/x")


def test_facade_has_a_version() -> None:
    assert tensorcas_mlflow.__version__[0].isdigit()
