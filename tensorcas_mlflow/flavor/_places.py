"""Where a model that is logged puts its tensors, and what keeps them alive until MLflow shows it."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from tensorcas_mlflow import config
from tensorcas_mlflow._store_root import store_root_for
from tensorcas_mlflow.errors import FormatError, StoreNotFoundError
from tensorcas_mlflow.flavor._folder import DATA
from tensorcas_mlflow.flavor._roots import as_lookup, is_ours, open_root
from tensorcas_mlflow.manifest import Manifest
from tensorcas_mlflow.store import MANIFEST_FILE, Ref, RefTarget, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The store for one logged model, and what its ref will say."""

    store: Store
    destination: str
    """Artifact root of the model."""
    target: RefTarget
    is_committed_on_arrival: bool
    """Our artifact repository serves the destination from this very store, and commits when the manifest arrives."""


def place_for(destination: str, *, run_id: str | None, model_id: str | None, step: int | None) -> Place:
    """Find the store for a model, or make it.

    The store that TENSORCAS_STORE names is taken whatever the destination. Otherwise it is the one that the
    destination lies in, or a new one at the experiment's artifact location.

    Args:
        destination: Artifact root of the model, as MLflow gave it.

    Raises:
        MlflowException: MLflow keeps these artifacts where no store can be.
        StoreNotFoundError: There is none, and this is a server, which makes none at a client's word.
    """
    lookup = as_lookup(destination)
    named = config.store_uri()
    if named is not None:
        store = open_root(named, create=not config.in_mlflow_server())
    elif lookup is not None:
        store = _find_or_make(lookup)
    else:
        raise MlflowException.invalid_parameter_value(
            f"tensors cannot be put beside the artifacts of this experiment, at {destination!r}: name a store in "
            "TENSORCAS_STORE (a folder or a tensorcas: URI), or use an experiment whose artifact location is a "
            "tensorcas: URI or a local folder"
        )
    path = _path_in(store, lookup)
    ours = path is not None and is_ours(destination)
    return Place(
        store=store,
        destination=destination,
        target=RefTarget(
            path=path if ours else None,
            copy_path=None if ours else path,
            uri=posixpath.join(destination, DATA, MANIFEST_FILE),
            run_id=run_id,
            step=step,
            model_id=model_id,
        ),
        is_committed_on_arrival=ours,
    )


def withdraw(place: Place, ref: Ref) -> None:
    """Drop the ref of a model whose upload failed, unless the manifest got there all the same.

    What failed may have come after the upload, such as registering a version.
    """
    shown = _shown_at(place.destination)
    if shown is None or shown.digest != place.store.manifest(ref).digest:
        place.store.drop(ref)


def _find_or_make(lookup: str) -> Store:
    try:
        return Store.find(lookup)[0]
    except StoreNotFoundError:
        if config.in_mlflow_server():
            raise
    # All runs of an experiment share one store, and so do all steps, each of which has an artifact root of its own.
    return open_root(store_root_for(lookup), create=True)


def _path_in(store: Store, lookup: str | None) -> str | None:
    """Give the artifact path of the manifest in a store, or None if the destination does not lie in it."""
    if lookup is None:
        return None
    try:
        found, path = Store.find(lookup)
    except StoreNotFoundError:
        return None
    return posixpath.join(path, DATA, MANIFEST_FILE) if found.id == store.id else None


def _shown_at(destination: str) -> Manifest | None:
    """Read the manifest that a model's artifact root shows, if it shows one."""
    with TemporaryDirectory(prefix="tensorcas-") as scratch:
        try:
            file = get_artifact_repository(destination).download_artifacts(f"{DATA}/{MANIFEST_FILE}", scratch)
            return Manifest.from_bytes(Path(file).read_bytes())
        except (MlflowException, OSError, FormatError):
            return None
