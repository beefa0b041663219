"""The function that saves a model to a folder that needs no store."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow.models import Model, ModelSignature

from tensorcas_mlflow._mlflow_errors import translate_errors
from tensorcas_mlflow._texts import check_path
from tensorcas_mlflow.adapters import adapter_for, take_apart
from tensorcas_mlflow.flavor._folder import Extras, Stored, write_folder
from tensorcas_mlflow.store import write_payload


@translate_errors()
def save_model(
    model: Any,
    path: str | os.PathLike[str],
    *,
    mlflow_model: Model | None = None,
    step: int | None = None,
    signature: ModelSignature | bool | None = None,
    input_example: Any = None,
    pip_requirements: Sequence[str] | str | None = None,
    extra_pip_requirements: Sequence[str] | str | None = None,
    conda_env: Mapping[str, Any] | str | None = None,
    code_paths: Sequence[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Save a model to a self-contained folder, which can be moved and loaded without any store.

    Errors are also `mlflow.exceptions.MlflowException`.

    Args:
        model: A model of a framework that has an adapter.
        path: A folder that does not exist yet, or is empty.
        mlflow_model: The `mlflow.models.Model` to add this flavor to.
        step: The training step to record with the model.
        signature: The signature; None infers it from ``input_example``, False records none.
        input_example: An input of the model, to save with it.
        pip_requirements: All requirements of the model, or a requirements file. By default the framework and this
            package, in the installed versions; nothing is inferred.
        extra_pip_requirements: Requirements besides the default ones.
        conda_env: A conda environment, or a file with one, instead of requirements.
        code_paths: Files and folders of code to save with the model.
        metadata: Values for MLmodel, as they are.

    Raises:
        AdapterError: No adapter takes the model, or it cannot be stored exactly.
        BackendError: The folder cannot be written.
        ValueError: An argument is wrong.
        mlflow.exceptions.MlflowException: The folder holds something, or MLflow refuses an argument.
    """
    adapter = adapter_for(model)
    extras = Extras(
        step=step,
        signature=signature,
        input_example=input_example,
        pip_requirements=pip_requirements,
        extra_pip_requirements=extra_pip_requirements,
        conda_env=conda_env,
        code_paths=code_paths,
        metadata=metadata,
    )
    check_path(os.fspath(path))
    tensors = take_apart(adapter, model)

    def write_tensors(data: Path) -> Stored:
        cuts, left_out = adapter.cuts(tensors), adapter.left_out(tensors)
        manifest = write_payload(data, tensors, flavor=adapter.name, cuts=cuts, left_out=left_out)
        return Stored(manifest=manifest, store=None)

    write_folder(
        path,
        adapter=adapter,
        tensors=tensors,
        mlflow_model=mlflow_model,
        extras=extras,
        write_tensors=write_tensors,
    )
