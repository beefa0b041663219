"""Where a model that is logged puts its tensors, and what keeps them alive until MLflow shows it."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from tensorcas_mlflow._home import home_of
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.flavor._folder import DATA
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
    """Find the store for a model, or make it; raises as `home_of` does.

    Args:
        destination: Artifact root of the model, as MLflow gave it.
    """
    home = home_of(destination, create=True)
    path = None if home.path is None else posixpath.join(home.path, DATA, MANIFEST_FILE)
    return Place(
        store=home.store,
        destination=destination,
        target=RefTarget(
            path=path if home.is_ours else None,
            copy_path=None if home.is_ours else path,
            uri=posixpath.join(destination, DATA, MANIFEST_FILE),
            run_id=run_id,
            step=step,
            model_id=model_id,
        ),
        is_committed_on_arrival=home.is_ours,
    )


def withdraw(place: Place, ref: Ref) -> None:
    """Drop the ref of a model whose upload failed, unless the manifest got there all the same.

    What failed may have come after the upload, such as registering a version.
    """
    shown = _shown_at(place.destination)
    if shown is None or shown.digest != place.store.manifest(ref).digest:
        place.store.drop(ref)


def _shown_at(destination: str) -> Manifest | None:
    """Read the manifest that a model's artifact root shows, if it shows one."""
    with TemporaryDirectory(prefix="tensorcas-") as scratch:
        try:
            file = get_artifact_repository(destination).download_artifacts(f"{DATA}/{MANIFEST_FILE}", scratch)
            return Manifest.from_bytes(Path(file).read_bytes())
        except (MlflowException, OSError, FormatError):
            return None
