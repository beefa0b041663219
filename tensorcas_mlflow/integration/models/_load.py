"""Loading a model: natively, into a live one, as weights alone, or for ``mlflow.pyfunc``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import ErrorCode

from tensorcas_mlflow.adapter import Array, adapter_named
from tensorcas_mlflow.base import config
from tensorcas_mlflow.errors import BackendError, NotFoundError, StoreNotFoundError, WrongStoreError, without_secrets
from tensorcas_mlflow.integration._errors import translate_errors
from tensorcas_mlflow.integration._home import find_store, open_root
from tensorcas_mlflow.integration._mlflow_errors import to_mlflow
from tensorcas_mlflow.integration._policy import pickle_forbidden_by
from tensorcas_mlflow.integration.models._code import add_code, take_code
from tensorcas_mlflow.integration.models._folder import PyFuncWrapper
from tensorcas_mlflow.integration.models._saved import LocalFolder, SavedModel, open_folder
from tensorcas_mlflow.reader import ReadArrays, StoreReads, check_call, given, rebuild
from tensorcas_mlflow.store import PAYLOAD_FILE, Store, read_payload


def reader_for(saved: SavedModel, named_store: str | None) -> ReadArrays:
    """Find the reader for the tensors of a model; see `store_for`.

    Raises:
        CorruptError: The model's manifest is damaged.
    """
    store = store_for(saved, named_store)
    if store is None:
        return _payload_reader(saved)
    saved.check_manifest(store)
    return StoreReads(store, saved.manifest)


def store_for(saved: SavedModel, named_store: str | None) -> Store | None:
    """Find the store with the tensors of a model, or None if the model is self-contained.

    A store named by the user is the only candidate: the model configuration names it, else TENSORCAS_STORE. Otherwise
    the places are tried in turn: a payload beside the manifest, the store the model was logged to, the store around its
    folder, the store around its artifact root at the time of logging. The id in the manifest identifies the right
    store.

    Args:
        named_store: The store named by the model configuration, in place of the one in MLmodel.

    Raises:
        WrongStoreError: There is a store, but another one.
        StoreNotFoundError: The named place holds no store.
        NotFoundError: No store was named, and none was found, or its server cannot be reached.
    """
    manifest = saved.manifest
    if manifest.store_id is None:
        return None
    named = named_store or config.store_uri()
    if named is not None:
        return _open(named, manifest.store_id)
    if saved.is_local and saved.payload is not None:
        return None
    failed: WrongStoreError | BackendError | MlflowException | None = None
    for look in _looks(saved, manifest.store_id):
        try:
            return look()
        except StoreNotFoundError:
            continue
        except (WrongStoreError, BackendError, MlflowException) as error:
            failed = failed or error
    named = without_secrets(saved.store_uri or "")
    if saved.payload is not None:  # a remote store is the last resort, since all of its packs must be fetched
        return None
    if isinstance(failed, WrongStoreError):
        raise failed
    if failed is not None:
        told = to_mlflow(failed) if isinstance(failed, BackendError) else failed
        lost = NotFoundError(
            f"the tensors of this model are in store {manifest.store_id}, and its place {named!r} cannot be "
            f"read: {without_secrets(str(failed))}"
        )
        raise to_mlflow(lost, ErrorCode.Value(told.error_code)) from failed
    raise NotFoundError(
        f"the tensors of this model are in store {manifest.store_id}, no longer at {named!r}: name "
        "its new place in TENSORCAS_STORE, or to mlflow.pyfunc.load_model as model_config={'store': …}; "
        "or export the model with mlflow.tensorcas.export_model on a machine with access to the store"
    )


def _looks(saved: SavedModel, store_id: str) -> Iterator[Callable[[], Store]]:
    if saved.store_uri is not None:
        yield partial(_open, saved.store_uri, store_id)
    for uri in saved.places:
        yield partial(_find, uri, store_id)


def _open(uri: str, store_id: str) -> Store:
    return _checked(open_root(uri), store_id)


def _find(uri: str, store_id: str) -> Store:
    found = find_store(uri)
    if found is None:
        raise StoreNotFoundError(uri)
    return _checked(found[0], store_id)


def _checked(store: Store, store_id: str) -> Store:
    if store.id != store_id:
        raise WrongStoreError(store_id, store.id, store.uri)
    return store


def _payload_reader(saved: SavedModel) -> ReadArrays:
    def read(names: Iterable[str] | None = None, *, verify: bool = True) -> dict[str, Array]:
        saved.folder.file(saved.payload or f"{saved.data}/{PAYLOAD_FILE}")
        return read_payload(saved.manifest_file.parent, names=names, verify=verify)

    return read


@translate_errors()
def load_model(
    model_uri: str | os.PathLike[str],
    *,
    into: Any = None,
    weights_only: bool = False,
    verify: bool = True,
    precheck: bool = True,
    strict: bool | None = None,
    device: Any = None,
    dtype: Any = None,
) -> Any:
    """Load a model stored by `log_model` or `save_model`, bit for bit.

    TENSORCAS_STORE names the store; by default it is the store the model was logged to, else the store around the
    model's folder. Errors are also `mlflow.exceptions.MlflowException`.

    Args:
        model_uri: ``models:/…``, ``runs:/…``, an artifact URI or a local path.
        into: A live model of the same structure to fill in place, without unpickling. Everything is checked before it
            changes, as in `load_checkpoint`.
        weights_only: Return the tensors by name, as PyTorch tensors for a PyTorch model and else as arrays, without
            unpickling. Those of a module include non-persistent buffers: pass them to ``load_state_dict`` with
            ``strict=False``.
        verify: Check each chunk against its digest.
        precheck: With ``into``, check the stored bytes of all tensors before it changes, as in `load_checkpoint`.
        strict: For PyTorch with ``into``, as in ``load_state_dict``; by default True.
        device: For PyTorch, the device of a new model's tensors; by default the CPU.
        dtype: For PyTorch, the new dtype of floating point tensors of a new model.

    Returns:
        The model; ``into``, filled; or the tensors by name.

    Raises:
        NotFoundError: There is no such model, or its store is gone.
        FormatError: The model is damaged, or belongs to another store.
        AdapterError: ``into`` does not fit, or the model needs a pickle and MLFLOW_ALLOW_MODEL_CODE_EXECUTION or
            MLFLOW_ALLOW_PICKLE_DESERIALIZATION forbids it.
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
        is_new = into is None and not weights_only
        if is_new:
            folder.check_place()
        adapter = adapter_named(saved.adapter)
        # Only a pickle names code of the model.
        if is_new and saved.code is not None and pickle_forbidden_by() is None:
            add_code(os.fspath(folder.code(saved.code)))
        return rebuild(
            adapter,
            saved.manifest,
            read,
            into=into,
            weights_only=weights_only,
            verify=verify,
            precheck=precheck,
            options=options,
            forbidden_by=pickle_forbidden_by,
        )


@translate_errors()
def _load_pyfunc(path: str, model_config: Mapping[str, Any] | None = None) -> PyFuncWrapper:
    """Load a model for ``mlflow.pyfunc``, with the model's code already first on the path.

    Args:
        path: The data folder inside a local model folder.
        model_config: The declared configuration, with the user's overrides.
    """
    folder = Path(path).absolute().parent
    code = take_code(folder)
    saved = SavedModel(LocalFolder(folder))
    adapter = adapter_named(saved.adapter)
    read = reader_for(saved, saved.named_store(model_config))
    if pickle_forbidden_by() is None:
        for each in code:
            add_code(each)
    return PyFuncWrapper(rebuild(adapter, saved.manifest, read, forbidden_by=pickle_forbidden_by), adapter)
