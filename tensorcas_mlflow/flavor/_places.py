"""The place of a logged model's tensors, and the ref that keeps them until MLflow shows the model."""

from __future__ import annotations

import logging
import posixpath
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from tensorcas_mlflow._durable import sync_tree
from tensorcas_mlflow._home import as_lookup, home_of
from tensorcas_mlflow._texts import without_secrets
from tensorcas_mlflow.backends import is_ours
from tensorcas_mlflow.errors import BackendError
from tensorcas_mlflow.flavor._folder import DATA
from tensorcas_mlflow.manifest import Manifest
from tensorcas_mlflow.store import MANIFEST_FILE, Ref, RefTarget, Store

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The store for one logged model, and what its ref will say."""

    store: Store
    destination: str
    """Artifact root of the model."""
    target: RefTarget
    is_committed_on_arrival: bool
    """Our artifact repository serves the destination from this very store, and commits when the manifest arrives."""

    def settle(self) -> None:
        """Make durable what MLflow has uploaded, where that is a local folder.

        The ref is, and a manifest that is lost in a crash of the machine would be taken for that of a deleted model.

        Raises:
            BackendError: It cannot be.
        """
        folder = as_lookup(self.destination)
        if folder is not None and not is_ours(self.destination):
            try:
                sync_tree(folder)
            except OSError as error:
                raise BackendError("sync", folder, f"{type(error).__name__}: {error}") from error


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
    """Drop the ref of a model whose upload failed, if its manifest is certain not to be where MLflow would show it.

    What failed may have come after the upload, such as registering a version. And what made it fail may hide what is
    there, so where there is any doubt the ref stays: it costs space until ``tensorcas gc --orphans`` drops it, while a
    model that is there without its ref is lost.
    """
    try:
        shown = _shown_at(place.destination)
    except Exception as error:  # noqa: BLE001 -- MLflow's repositories fail in their own ways
        _logger.warning(
            "the tensors of a model stay, as it cannot be seen whether it is at %r: %s",
            ref.uri,
            without_secrets(str(error)),
        )
        return
    if shown is None or shown.digest != place.store.manifest(ref).digest:
        place.store.drop(ref)


def _shown_at(destination: str) -> Manifest | None:
    """Read the manifest that a model's artifact root shows; None if it is certain to show none.

    Raises:
        FormatError: There is something else.
        Exception: It cannot be seen what is there.
    """
    repository = get_artifact_repository(destination)
    try:
        names = {posixpath.basename(info.path) for info in repository.list_artifacts(DATA)}
    except MlflowException as error:
        if error.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
            return None
        raise
    if MANIFEST_FILE not in names:
        return None
    with TemporaryDirectory(prefix="tensorcas-") as scratch:
        file = repository.download_artifacts(f"{DATA}/{MANIFEST_FILE}", scratch)
        return Manifest.from_bytes(Path(file).read_bytes())
