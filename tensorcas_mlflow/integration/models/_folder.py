"""The model folder: everything but the tensors, as MLflow's own flavors write it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlflow import pyfunc
from mlflow.environment_variables import MLFLOW_LOCK_MODEL_DEPENDENCIES
from mlflow.models import Model, ModelSignature
from mlflow.models.model import MLMODEL_FILE_NAME
from mlflow.models.signature import _infer_signature_from_input_example
from mlflow.models.utils import _save_example
from mlflow.utils.environment import (
    _CONDA_ENV_FILE_NAME,
    _CONSTRAINTS_FILE_NAME,
    _PYTHON_ENV_FILE_NAME,
    _REQUIREMENTS_FILE_NAME,
    _process_conda_env,
    _process_pip_requirements,
    _PythonEnv,
    _validate_env_arguments,
)
from mlflow.utils.model_utils import _validate_and_copy_code_paths, _validate_and_prepare_target_save_path
from mlflow.utils.yaml_utils import write_yaml

from tensorcas_mlflow.adapter import Adapter, Array
from tensorcas_mlflow.errors import TensorCasError, release, without_secrets
from tensorcas_mlflow.integration._mlflow_errors import to_mlflow
from tensorcas_mlflow.layout import as_step
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.store import Store


class PyFuncWrapper:
    """A native model with the interface of ``mlflow.pyfunc``."""

    def __init__(self, model: Any, adapter: Adapter) -> None:
        self._model = model
        self._adapter = adapter

    def get_raw_model(self) -> Any:
        """Return the native model."""
        return self._model

    def predict(self, data: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Return the native model's own predictions; see `Adapter.predict`."""
        try:
            return self._adapter.predict(self._model, data, params)
        except TensorCasError as error:  # not ValueError: frameworks raise that for bad input
            raise to_mlflow(error) from error


FLAVOR = "tensorcas"
"""Name of our section in an MLmodel: on-disk format."""
LOADER = "tensorcas_mlflow.pyfunc"
"""Module that ``mlflow.pyfunc`` imports to load a model: on-disk format."""
DATA = "data"
"""Folder of the manifest inside a model folder. Each MLmodel names it, so it may change."""
STORE_KEY = "store"
"""Key in the model configuration for the new place of a moved store: on-disk format."""

_Environment = tuple[dict[str, Any], list[str], list[str]]
"""A conda environment, pip requirements and pip constraints, as determined by MLflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """Manifest of a model's tensors, and the store with their chunks."""

    manifest: Manifest
    store: Store | None
    """None if they are in the folder itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """Options of a logged model, with MLflow's meanings."""

    step: int | None
    signature: ModelSignature | bool | None
    input_example: Any
    pip_requirements: Sequence[str] | str | None
    extra_pip_requirements: Sequence[str] | str | None
    conda_env: Mapping[str, Any] | str | None
    code_paths: Sequence[str] | None
    metadata: Mapping[str, Any] | None

    def __post_init__(self) -> None:
        if self.step is not None:
            object.__setattr__(self, "step", as_step(self.step))
        _validate_env_arguments(self.conda_env, self.pip_requirements, self.extra_pip_requirements)


def write_folder(
    path: str | os.PathLike[str],
    *,
    adapter: Adapter,
    tensors: Mapping[str, Array],
    mlflow_model: Model | None,
    extras: Extras,
    write_tensors: Callable[[Path], StoredModel],
) -> None:
    """Write a model folder.

    Args:
        path: A new or empty folder.
        tensors: The adapter's output: the tensors and the rest of the model.
        mlflow_model: A partly filled description of the model; this call completes it.
        write_tensors: Stores the tensors, and writes the manifest into the given, existing data folder.
    """
    folder = Path(path).absolute()
    _validate_and_prepare_target_save_path(os.fspath(folder))
    code = _validate_and_copy_code_paths(extras.code_paths, os.fspath(folder))
    mlflow_model = Model() if mlflow_model is None else mlflow_model
    _describe(mlflow_model, tensors, folder, adapter, extras)

    data = folder / DATA
    data.mkdir()
    stored = write_tensors(data)

    pyfunc.add_to_model(
        mlflow_model,
        loader_module=LOADER,
        data=DATA,
        code=code,
        conda_env=_CONDA_ENV_FILE_NAME,
        python_env=_PYTHON_ENV_FILE_NAME,
        # MLflow passes on only keys declared here. A self-contained folder needs no store.
        model_config={STORE_KEY: without_secrets(stored.store.uri)} if stored.store else None,
    )
    mlflow_model.add_flavor(
        FLAVOR,
        adapter=adapter.name,
        step=extras.step,
        data=DATA,
        code=code,
        store=without_secrets(stored.store.uri) if stored.store else None,
        store_id=stored.manifest.store_id,
        manifest=stored.manifest.digest,
        version=release(),
    )
    mlflow_model.model_size_bytes = stored.manifest.n_bytes
    mlflow_model.save(os.fspath(folder / MLMODEL_FILE_NAME))
    _write_environment(folder, extras, _default_requirements(adapter, tensors))


def _describe(
    mlflow_model: Model, tensors: Mapping[str, Array], folder: Path, adapter: Adapter, extras: Extras
) -> None:
    """Add example, signature and metadata."""
    example = _save_example(mlflow_model, extras.input_example, os.fspath(folder))
    signature = extras.signature
    if signature is None and example is not None:
        # The example goes to a copy. A prediction may change a model: a PyTorch model leaves the training mode.
        copy = adapter.reconstruct({name: array.copy() for name, array in tensors.items()})
        signature = _infer_signature_from_input_example(example, PyFuncWrapper(copy, adapter))
    if signature:
        mlflow_model.signature = signature
    if extras.metadata is not None:
        mlflow_model.metadata = dict(extras.metadata)


def _write_environment(folder: Path, extras: Extras, default: tuple[str, ...]) -> None:
    """Write the user's requirements, or the default ones. None are inferred, because that loads the model."""
    given = (extras.pip_requirements, extras.extra_pip_requirements)
    if extras.conda_env is not None:
        files = _environment_files(_process_conda_env(extras.conda_env))
    elif all(map(_is_fixed, given)):
        lists = (None if each is None else tuple(each) for each in given)
        files = _fixed_files(default, *lists, is_locked=MLFLOW_LOCK_MODEL_DEPENDENCIES.get())
    else:
        files = _environment_files(_process_pip_requirements(list(default), *given))
    for name, data in files.items():
        (folder / name).write_bytes(data)


def _is_fixed(requirements: Sequence[str] | str | None) -> bool:
    """Tell whether requirements name no file: a list of them is then always the same environment."""
    if requirements is None:
        return True
    return not isinstance(requirements, str) and all(_PACKAGE.match(each) is not None for each in requirements)


_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\s*(\[|[<>=!~;]|$)")
"""Beginning of a requirement for a package from an index."""


# Installed versions are read once: reading them takes longer than storing a small model, and a run may log a model
# every step.
@lru_cache(maxsize=64)
def _fixed_files(
    default: tuple[str, ...],
    pip_requirements: tuple[str, ...] | None,
    extra: tuple[str, ...] | None,
    *,
    is_locked: bool,  # as MLflow reads it again
) -> dict[str, bytes]:
    lists = (None if each is None else list(each) for each in (pip_requirements, extra))
    return _environment_files(_process_pip_requirements(list(default), *lists))


def _environment_files(environment: _Environment) -> dict[str, bytes]:
    """Return the content of the files that describe an environment, as MLflow writes them, by name."""
    conda_env, requirements, constraints = environment
    with TemporaryDirectory(prefix="tensorcas-") as scratch:
        folder = Path(scratch)
        write_yaml(scratch, _CONDA_ENV_FILE_NAME, conda_env)
        if constraints:
            (folder / _CONSTRAINTS_FILE_NAME).write_text("\n".join(constraints))
        (folder / _REQUIREMENTS_FILE_NAME).write_text("\n".join(requirements))
        _python_env().to_yaml(os.fspath(folder / _PYTHON_ENV_FILE_NAME))
        return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@cache
def _python_env() -> _PythonEnv:
    current: _PythonEnv = _PythonEnv.current()
    return current


def _default_requirements(adapter: Adapter, tensors: Mapping[str, Array]) -> tuple[str, ...]:
    """Return a model's default requirements: those of its adapter, and this package."""
    return tuple(sorted({*adapter.requirements(tensors), _own_requirement()}))


def _own_requirement() -> str:
    version = release()
    # No index has an uninstalled checkout, or a local build.
    return "tensorcas-mlflow" if "+" in version else f"tensorcas-mlflow=={version}"
