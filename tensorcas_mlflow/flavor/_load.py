"""Loading a model: natively, into a live one, as weights alone, or for ``mlflow.pyfunc``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorcas_mlflow import config
from tensorcas_mlflow._mlflow_errors import translate_errors
from tensorcas_mlflow._rebuild import check_call, given, rebuild
from tensorcas_mlflow.adapters import adapter_named
from tensorcas_mlflow.flavor._code import add_code, take_code
from tensorcas_mlflow.flavor._fetch import LocalFolder, open_folder
from tensorcas_mlflow.flavor._pyfunc import PyFuncWrapper
from tensorcas_mlflow.flavor._saved import SavedModel
from tensorcas_mlflow.flavor._stores import reader_for


@translate_errors()
def load_model(
    model_uri: str | os.PathLike[str],
    *,
    into: Any = None,
    weights_only: bool = False,
    verify: bool = True,
    strict: bool | None = None,
    device: Any = None,
    dtype: Any = None,
) -> Any:
    """Load a model that `log_model` or `save_model` stored, bit for bit.

    TENSORCAS_STORE names the store; by default it is the store that the model was logged to, else the one that the
    model's folder lies in. Errors are also `mlflow.exceptions.MlflowException`.

    Args:
        model_uri: ``models:/…``, ``runs:/…``, an artifact URI or a local path.
        into: A live model of the same structure to fill in place, without unpickling. If it does not fit, it may be
            filled in part.
        weights_only: Return the tensors by name, as PyTorch tensors for a PyTorch model and else as arrays, without
            unpickling. Those of a module include non-persistent buffers: pass them to ``load_state_dict`` with
            ``strict=False``.
        verify: Check each chunk against its digest.
        strict: For PyTorch with ``into``, as in ``load_state_dict``; by default True.
        device: For PyTorch, the device of a new model's tensors; by default the CPU.
        dtype: For PyTorch, the dtype that floating point tensors of a new model are converted to.

    Returns:
        The model; ``into``, filled; or the tensors by name.

    Raises:
        NotFoundError: There is no such model, or its store is gone.
        FormatError: The model is damaged, or belongs to another store.
        AdapterError: ``into`` does not fit, or the model needs a pickle and MLFLOW_ALLOW_PICKLE_DESERIALIZATION forbids
            it.
        BackendError: The storage failed.
        ValueError: The call asks for two things at once, or the framework has no such option.
    """
    check_call(into=into, weights_only=weights_only)
    if not isinstance(model_uri, str | os.PathLike):
        raise TypeError(f"a model is named by its URI, such as models:/<id>, or a path, and not by {model_uri!r:.200}")
    options = given(strict=strict, device=device, dtype=dtype)
    with open_folder(os.fspath(model_uri)) as folder:
        saved = SavedModel(folder)
        read = reader_for(saved, saved.configured_store())
        adapter = adapter_named(saved.adapter)
        # Nothing but a pickle names code of the model.
        if saved.code is not None and into is None and not weights_only and config.allows_pickle():
            add_code(os.fspath(folder.code(saved.code)))
        return rebuild(
            adapter, saved.manifest, read, into=into, weights_only=weights_only, verify=verify, options=options
        )


@translate_errors()
def _load_pyfunc(path: str, model_config: Mapping[str, Any] | None = None) -> PyFuncWrapper:
    """Load a model for ``mlflow.pyfunc``, which has put the model's code before all else on the path already.

    Args:
        path: The data folder inside a local model folder.
        model_config: The declared configuration with what the user has overridden.
    """
    folder = Path(path).absolute().parent
    code = take_code(folder)
    saved = SavedModel(LocalFolder(folder))
    adapter = adapter_named(saved.adapter)
    read = reader_for(saved, saved.named_store(model_config))
    if config.allows_pickle():
        for each in code:
            add_code(each)
    return PyFuncWrapper(rebuild(adapter, saved.manifest, read), adapter)
