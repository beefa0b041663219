"""Store of an artifact root: found, or created."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from tensorcas_mlflow.backends import Root, is_ours
from tensorcas_mlflow.base import config
from tensorcas_mlflow.errors import StoreNotFoundError, without_secrets
from tensorcas_mlflow.integration._artifact_uri import store_root_for
from tensorcas_mlflow.integration.server_store import is_carrier_uri
from tensorcas_mlflow.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """The store for the artifacts of one root."""

    store: Store
    path: str | None
    """The root relative to the store's, or None if it lies elsewhere."""
    is_ours: bool
    """True if our artifact repository serves the root from this very store."""


def home_of(artifact_uri: str, *, create: bool) -> Home:
    """Find the store for the artifacts of a root.

    If TENSORCAS_STORE is set, its store serves every root. Otherwise it is the store around the root, or a new one at
    the experiment's artifact location. Behind an MLflow server clients carry it in the artifact root. Ask `sends_files`
    first, since a server may keep a store of its own.

    Args:
        artifact_uri: Artifact root of a run or model, as given by MLflow.
        create: Whether to create a missing store.

    Raises:
        ValueError: MLflow keeps these artifacts in a place unsuitable for a store.
        StoreNotFoundError: There is none and ``create`` is False, or this process is a server. A server creates no
            store at a client's request.
    """
    named, place = config.store_uri(), artifact_place(artifact_uri)
    if named is not None:
        store = open_root(named, create=create and not config.in_mlflow_server())
        path = _path_in(store, artifact_uri)
    elif place is not None:
        store, path = _find_or_make(place.root, create=create)
    elif is_carrier_uri(artifact_uri):
        from tensorcas_mlflow.integration.server_store import find_carrier

        store, path = find_carrier(artifact_uri, create=create and not config.in_mlflow_server())
    else:
        raise ValueError(
            "no store can be kept beside the artifacts of this experiment, at "
            f"{without_secrets(artifact_uri)!r}: set TENSORCAS_STORE to a store (a folder, "
            "or a URI like tensorcas-s3://bucket/path), or use an experiment with its artifacts at "
            "a tensorcas URI, in a local folder, or behind an MLflow server (mlflow-artifacts:)"
        )
    return Home(store=store, path=path, is_ours=path is not None and place is not None and place.is_ours)


def sends_files(artifact_uri: str) -> bool:
    """Tell whether the artifacts of a root go as files to a server with a store of its own.

    Raises:
        BackendError: The server cannot be asked.
    """
    if artifact_place(artifact_uri) is not None or config.store_uri() is not None or not is_carrier_uri(artifact_uri):
        return False
    from tensorcas_mlflow.integration.server_store import is_served_by_us

    return is_served_by_us(artifact_uri)


def find_store(uri: str) -> tuple[Store, str] | None:
    """Find the store around an artifact URI or path.

    Returns:
        The store and the place relative to its root; None if no store of ours can be there.

    Raises:
        StoreNotFoundError: There is none.
    """
    if is_carrier_uri(uri):
        from tensorcas_mlflow.integration.server_store import find_carrier

        return find_carrier(uri)
    place = artifact_place(uri)
    return None if place is None else Store.find(place.root)


class ArtifactPlace(NamedTuple):
    """A place that this process reaches without a server."""

    root: Root
    is_ours: bool
    """True if it was named by a URI of ours; False for MLflow's names of local folders."""


def artifact_place(uri: str) -> ArtifactPlace | None:
    """Return the place at a local path or a URI of ours; None for other URIs.

    Raises:
        ValueError: The place cannot hold a store.
    """
    found = _fixed_place(uri)
    return ArtifactPlace(Root.parse(Path(found)), is_ours=False) if isinstance(found, str) else found


def local_folder(uri: str) -> str | None:
    """Return the absolute local folder of an artifact URI; None for one on another machine."""
    place = artifact_place(uri)
    return None if place is None or place.root.container else place.root.path


# Every checkpoint of a series asks about the URI of its run.
@lru_cache(maxsize=1024)
def _fixed_place(uri: str) -> ArtifactPlace | str | None:
    """Return the place of a URI like `artifact_place`; a path that names another place in each folder comes back."""
    if is_ours(uri):
        return ArtifactPlace(Root.parse(uri), is_ours=True)
    path = uri
    if not is_plain_path(uri):
        from mlflow.utils.file_utils import local_file_uri_to_path
        from mlflow.utils.uri import is_local_uri

        if not is_local_uri(uri, is_tracking_or_registry_uri=False):
            return None
        path = str(Path(local_file_uri_to_path(uri)))
    return ArtifactPlace(Root.parse(Path(path)), is_ours=False) if os.path.isabs(path) else path


def is_plain_path(text: str) -> bool:
    """Tell whether a text is a path of this machine, as MLflow reads it, and holds nothing that MLflow would decode."""
    return text not in ("", "databricks") and not any(mark in text for mark in ":%\\?#")


def open_root(uri: str, *, create: bool = False) -> Store:
    """Open the store at exactly this root, or reuse the one this process has open.

    Raises:
        StoreNotFoundError: There is none, and ``create`` is False.
    """
    if is_carrier_uri(uri):
        from tensorcas_mlflow.integration.server_store import open_carrier

        return open_carrier(uri, create=create)
    try:
        store, below = Store.find(uri)
        if below == "":
            return store
    except StoreNotFoundError:
        pass
    # An open store has its index in memory, so the lookup returns the one just created.
    return Store.find(Store.open(uri, create=create).uri)[0]


def _find_or_make(place: Root, *, create: bool) -> tuple[Store, str]:
    try:
        return Store.find(place)
    except StoreNotFoundError:
        if not create or config.in_mlflow_server():
            raise
    # All runs of an experiment share one store, and so do all steps; each step has an artifact root of its own.
    open_root(store_root_for(place.uri), create=True)
    return Store.find(place)


def _path_in(store: Store, uri: str) -> str | None:
    """Return a place relative to a store's root, or None if it lies outside."""
    if is_carrier_uri(uri) and not is_carrier_uri(store.uri):
        return None
    try:
        found = find_store(uri)
    except StoreNotFoundError:
        return None
    # The id does not decide: a copy of a store has the same id.
    return found[1] if found is not None and found[0].uri == store.uri else None
