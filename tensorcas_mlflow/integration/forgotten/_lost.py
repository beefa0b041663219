"""Artifacts that MLflow lists without a ref in the store: a deleted ref leaves no trace in the store itself."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import yaml  # type: ignore[import-untyped]

from tensorcas_mlflow.backends import is_ours
from tensorcas_mlflow.errors import FormatError, StoreNotFoundError
from tensorcas_mlflow.integration.forgotten._holdings import Kind
from tensorcas_mlflow.integration.forgotten._mlflow import Artifacts, Tracker
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.store import PAYLOAD_FILE, Store

_FLAVOR = "tensorcas"
_MLMODEL = "MLmodel"
_MANIFEST_ENDING = ".arrow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A manifest named by an artifact, without a ref."""

    kind: Kind
    id: str
    """Of the run or logged model."""
    path: str
    """Path of the artifact, below the run's or model's artifact root."""
    manifest: str
    """The manifest's digest."""

    @property
    def label(self) -> str:
        """A name of the lost item, for messages."""
        return f"{self.kind} {self.id}, {self.path}"

    @property
    def reason(self) -> str:
        """A description of the problem."""
        return f"it names manifest {self.manifest}, and no ref of this store keeps that"


def find_lost(store: Store, trackers: Sequence[Tracker]) -> list[Lost]:
    """Compare the refs of a store with MLflow's artifacts of all runs and logged models.

    Two kinds of artifacts point to a ref: copies of manifests in folders of MLflow's own, and MLmodel files of the
    tensorcas flavor. An artifact shown by a ref alone vanishes with it, so its loss goes unnoticed.

    Args:
        store: The store to check.
        trackers: Tracking stores with artifacts in it, or beside it.

    Raises:
        BackendError: A tracking store or its artifacts did not answer.
    """
    kept = {ref.manifest.partition(".")[0] for ref in store.checkpoints()}
    found: list[Lost] = []
    for tracker in trackers:
        for kind, of, artifacts in tracker.artifacts():
            for path, manifest in _named(store, artifacts):
                if manifest not in kept:
                    found.append(Lost(kind=kind, id=of, path=path, manifest=manifest))
    return found


def _named(store: Store, artifacts: Artifacts) -> Iterator[tuple[str, str]]:
    """Yield the path of each artifact that names a manifest of a store, with the manifest's digest."""
    is_here = _is_in(store, artifacts.uri)
    paths = list(artifacts.paths())
    for path in paths:
        if path.endswith(_MANIFEST_ENDING) and not is_here:  # here, each artifact is shown by a ref
            manifest = _manifest_in(artifacts.read(path))
            if manifest is not None and manifest.store_id == store.id:
                yield path, manifest.digest
        elif posixpath.basename(path) == _MLMODEL:
            said = _said_by_mlmodel(artifacts.read(path))
            if said is None:
                continue
            data, digest = said
            brought = posixpath.join(posixpath.dirname(path), data, PAYLOAD_FILE)
            # Elsewhere the copy of the manifest tells. A self-contained model needs no store.
            if is_here and brought not in paths:
                yield path, digest


def _is_in(store: Store, uri: str) -> bool:
    """Tell whether a store itself keeps the artifacts."""
    if not is_ours(uri):
        return False
    try:
        return Store.find(uri)[0].id == store.id
    except (StoreNotFoundError, FormatError, ValueError):
        return False


def _manifest_in(data: bytes) -> Manifest | None:
    if not Manifest.looks_like(data[: 64 << 10]):
        return None
    try:
        return Manifest.from_bytes(data)
    except FormatError:
        return None


def _said_by_mlmodel(data: bytes) -> tuple[str, str] | None:
    """Return the data folder and the manifest's digest from an MLmodel file of the tensorcas flavor."""
    try:
        section = yaml.safe_load(data)["flavors"][_FLAVOR]
        return str(section["data"]), str(section["manifest"])
    except (yaml.YAMLError, KeyError, TypeError, ValueError):
        return None
