"""Opening the store behind an ``mlflow-artifacts:`` URI: found, or created."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from mlflow.entities import FileInfo
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.tracking import MlflowClient, get_tracking_uri

from tensorcas_mlflow.backends import STORE_FOLDER
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.errors import BackendError, ConflictError, StoreNotFoundError, without_secrets
from tensorcas_mlflow.integration._artifact_uri import store_root_for
from tensorcas_mlflow.integration.server_store._backend import CarrierBackend
from tensorcas_mlflow.integration.server_store._shelf import ArtifactShelf, NoAnswerError, Shelf
from tensorcas_mlflow.integration.server_store._uri import SCHEME, is_carrier_uri
from tensorcas_mlflow.store import Store

SERVED_BY = "served-by-tensorcas"
"""Name of an empty file in a server's listing of any folder ``.tensorcas``. The file does not exist."""


def announcement(folder: str) -> FileInfo | None:
    """Return the entry for the listing of a folder named ``.tensorcas``; None for any other folder."""
    if posixpath.basename(folder) != STORE_FOLDER:
        return None
    return FileInfo(posixpath.join(folder, SERVED_BY), False, 0)


_FORMAT = "format"
_SERVER_ERROR = 500


@dataclass(slots=True, kw_only=True)
class _Root:
    """Result of one listing of a root's ``.tensorcas``."""

    uri: str
    shelf: ArtifactShelf
    is_ours: bool
    """True if the server keeps its artifacts in a store of its own."""
    has_store: bool
    has_cut_format: bool
    """True if a process died while creating a store: its ``format`` exists and is empty."""
    store: Store | None = None


_roots: dict[str, _Root] = {}
"""Roots already listed, by resolved URL: one listing per process and root."""
_roots_lock = Lock()


def shelf_at(artifact_uri: str, folder: str) -> Shelf:
    """Return the files in an artifact folder, by path below it; errors are translated like those of a store."""
    return ArtifactShelf(get_artifact_repository(artifact_uri), folder)


def is_served_by_us(uri: str) -> bool:
    """Tell whether the server at an artifact URI keeps its artifacts in a store of its own.

    Such a server gets files as they are, and takes them apart: no store lies within a store.

    Raises:
        BackendError: The server cannot be asked.
    """
    return _root_at(store_root_for(uri)).is_ours


def find_carrier(uri: str, *, create: bool = False) -> tuple[Store, str]:
    """Find the store of an artifact URI: at its experiment's root, or else above it.

    Args:
        uri: Artifact root of a run or model, or any other place.
        create: Whether to create a store at the experiment's root if there is none.

    Returns:
        The store, and the place relative to its root.

    Raises:
        StoreNotFoundError: There is none, and ``create`` is False.
        BackendError: The server refuses, or does not answer.
        ValueError: The server is reached through MLflow's tracking URI, and that URI is not a server's.
    """
    if not get_tracking_uri().startswith(("http:", "https:")):
        raise ValueError(
            f"{without_secrets(uri)!r} is behind an MLflow server: name it in MLFLOW_TRACKING_URI, such as "
            "http://mlflow:5000"
        )
    root = store_root_for(uri)
    for place in _with_parents(root):
        store = _opened(place, is_above=place != root)
        if store is not None:
            return store, _path_below(store.uri, uri)
    return open_carrier(root, create=create), _path_below(root, uri)


def open_carrier(root: str, *, create: bool = False) -> Store:
    """Open the store at exactly this root, or reuse the one open in this process; raises as `find_carrier` does.

    Raises:
        ConflictError: The server has a store of its own, so none can be created within it.
    """
    store = _opened(root)
    if store is not None:
        return store
    if not create:
        raise StoreNotFoundError(root)
    found = _root_at(root)
    if found.is_ours:
        raise ConflictError(
            f"the server at {without_secrets(root)!r} keeps its artifacts in a store of its own, "
            "and there is never a store within a store: leave TENSORCAS_STORE unset, and files go to it as they are"
        )
    backend = CarrierBackend(found.shelf, uri=root)
    if found.has_cut_format:
        # Another client recreates it with the same content, so deleting that one is harmless.
        backend.delete(_FORMAT)
    try:
        made = Store.init_backend(backend, store_id=_store_id(root))
    except ConflictError:
        made = Store.open_backend(backend)
    with _roots_lock:
        found.has_store = True
        found.store = found.store or made
        return found.store


def _opened(root: str, *, is_above: bool = False) -> Store | None:
    """Open the store at a root; None if there is none, or if this client may not list a root above."""
    try:
        found = _root_at(root)
    except NoAnswerError:
        raise
    except BackendError:
        if is_above:
            return None
        raise
    if not found.has_store:
        return None
    with _roots_lock:
        if found.store is None:
            # A store kept open has its index in memory.
            found.store = Store.open_backend(CarrierBackend(found.shelf, uri=root))
        return found.store


def _root_at(uri: str) -> _Root:
    if not is_carrier_uri(uri):
        raise ValueError(f"{without_secrets(uri)!r} is no {SCHEME}: URI")
    uri = uri.rstrip("/") if urlsplit(uri).path.strip("/") else uri
    repository = get_artifact_repository(uri)
    with _roots_lock:
        known = _roots.get(repository.artifact_uri)
        # Another client may create a store later, so a root without one is listed again.
        if known is not None and (known.is_ours or known.has_store):
            return known
    shelf = ArtifactShelf(repository, STORE_FOLDER)
    sizes = {entry.name: entry.size for entry in shelf.entries("")}
    found = _Root(
        uri=uri,
        shelf=shelf,
        is_ours=SERVED_BY in sizes,
        has_store=bool(sizes.get(_FORMAT)),
        has_cut_format=sizes.get(_FORMAT) == 0,
    )
    with _roots_lock:
        known = _roots.get(repository.artifact_uri)
        if known is None or not (known.is_ours or known.has_store):
            _roots[repository.artifact_uri] = found
        return _roots[repository.artifact_uri]


def _with_parents(root: str) -> Iterator[str]:
    """Yield a root and those above it on the same server, the nearest first."""
    yield root
    parts = urlsplit(root)
    path = parts.path
    while (path := posixpath.dirname(path)) not in ("", "/"):
        yield urlunsplit(parts._replace(path=path))
    if parts.path.strip("/"):
        yield urlunsplit(parts._replace(path="/"))


def _path_below(root: str, uri: str) -> str:
    """Return the place relative to a root at or above it. One of the two may name the server and the other not."""
    folder, place = (urlsplit(each).path.strip("/") for each in (root, uri))
    return place.removeprefix(folder).lstrip("/")


def _store_id(root: str) -> str:
    """Return the id of the store at a root. It is the same for every creator, since the later of two would stay.

    For an experiment's root, the experiment's time of creation distinguishes servers.
    """
    path = urlsplit(root).path
    created = None
    name = posixpath.basename(path)
    if name:
        try:
            experiment = MlflowClient().get_experiment(name)
        except MlflowException as error:
            # The root is no experiment's, and may have any name.
            if error.get_http_status_code() >= _SERVER_ERROR:
                raise NoAnswerError("look up", name, str(error)) from error
        else:
            if urlsplit(experiment.artifact_location).path.strip("/") == path.strip("/"):
                created = experiment.creation_time
    facts = json.dumps({"carrier": path.strip("/"), "created": created}, sort_keys=True)
    return digest(facts.encode()).hex()[:32]
