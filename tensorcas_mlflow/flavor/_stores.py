"""Readers and stores of the tensors of a logged model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import ErrorCode

from tensorcas_mlflow import config
from tensorcas_mlflow._home import find_store, open_root
from tensorcas_mlflow._mlflow_errors import to_mlflow
from tensorcas_mlflow._rebuild import Reader
from tensorcas_mlflow._texts import without_secrets
from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.errors import BackendError, NotFoundError, StoreNotFoundError, WrongStoreError
from tensorcas_mlflow.flavor._saved import SavedModel
from tensorcas_mlflow.store import PAYLOAD_FILE, Store, read_payload


def reader_for(saved: SavedModel, named_store: str | None) -> Reader:
    """Find what reads the tensors of a model; see `store_for`.

    Raises:
        CorruptError: The model's manifest is damaged.
    """
    store = store_for(saved, named_store)
    if store is None:
        return _payload_reader(saved)
    saved.check_manifest(store)
    return partial(store.read_tensors, saved.manifest)


def store_for(saved: SavedModel, named_store: str | None) -> Store | None:
    """Find the store that holds the tensors of a model, or None if the model brings them along.

    What somebody named counts alone: the model configuration, else TENSORCAS_STORE. Else the places are tried in turn:
    a payload beside the manifest, the store the model was logged to, the store its folder lies in, the one its artifact
    root lay in when it was logged. The id in the manifest decides which store is the right one.

    Args:
        named_store: The store that the model configuration names in place of the one in MLmodel.

    Raises:
        WrongStoreError: There is a store, but another one.
        StoreNotFoundError: The place that was named holds no store.
        NotFoundError: No store was named, and none was found, or the server of one cannot be reached.
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
    if saved.payload is not None:  # a remote one: the last resort, as all of it must be fetched
        return None
    if isinstance(failed, WrongStoreError):
        raise failed
    if failed is not None:
        told = to_mlflow(failed) if isinstance(failed, BackendError) else failed
        lost = NotFoundError(
            f"the tensors of this model are in store {manifest.store_id}, and its place {named!r} cannot be "
            f"looked at: {without_secrets(str(failed))}"
        )
        raise to_mlflow(lost, ErrorCode.Value(told.error_code)) from failed
    raise NotFoundError(
        f"the tensors of this model are in store {manifest.store_id}, which is not at {named!r} any more: "
        "name its new place in TENSORCAS_STORE, or to mlflow.pyfunc.load_model as model_config={'store': …}; or, where "
        "the store can be reached, write a folder that needs none with mlflow.tensorcas.export_model"
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


def _payload_reader(saved: SavedModel) -> Reader:
    def read(names: Iterable[str] | None = None, *, verify: bool = True) -> dict[str, Array]:
        saved.folder.file(saved.payload or f"{saved.data}/{PAYLOAD_FILE}")
        return read_payload(saved.manifest_file.parent, names=names, verify=verify)

    return read
