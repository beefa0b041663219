"""Places: the artifact locations that URIs of MLflow stand for."""

from __future__ import annotations

import posixpath
from pathlib import Path

from tensorcas_mlflow.errors import NotFoundError, StoreNotFoundError, without_secrets
from tensorcas_mlflow.integration._artifact_uri import owner_of
from tensorcas_mlflow.integration.directory._directory import check_database
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.store import Store

_SCHEMES = ("runs:", "models:")


def is_uri_of_mlflow(text: str) -> bool:
    """Tell whether a text is a URI that only MLflow can resolve: ``runs:/…`` or ``models:/…``."""
    return text.startswith(_SCHEMES)


def artifact_location(uri: str, *, tracking_uri: str) -> str:
    """Resolve a URI of MLflow: of a run, of an artifact of a run, or of a model by version, alias or id.

    Args:
        uri: Such as ``runs:/<id>/<path>``, ``models:/<name>/<version>`` or ``models:/<name>@<alias>``.
        tracking_uri: The tracking store to ask; the model registry is that of MLflow's own settings.

    Returns:
        The artifact URI or local path of the run, model or artifact.

    Raises:
        NotFoundError: MLflow knows no such run or model.
        BackendError: The database does not exist.
        MlflowException: It does not answer.
    """
    check_database(tracking_uri)
    import mlflow
    from mlflow.exceptions import MlflowException

    from tensorcas_mlflow.integration.models import resolve

    mlflow.set_tracking_uri(tracking_uri)
    scheme, _, rest = uri.partition(":")
    rest = rest.strip("/")
    try:
        if scheme == "runs" and "/" not in rest:
            return str(mlflow.MlflowClient().get_run(rest).info.artifact_uri)
        repository, path = resolve(f"{scheme}:/{rest}")
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise NotFoundError(f"{uri!r}: {error.message} (asked of {without_secrets(tracking_uri)!r})") from error
        raise
    return posixpath.join(repository.artifact_uri, path) if path else str(repository.artifact_uri)


def local_folder_of(location: str) -> str | None:
    """Return the local folder of an artifact location; None for one on another machine."""
    from tensorcas_mlflow.integration._home import local_folder

    return local_folder(location)


def store_at_artifacts(location: str) -> tuple[Store, str | None]:
    """Open the store for the artifacts at a location.

    Returns:
        The store, and the location relative to its root; None if it lies elsewhere, as with TENSORCAS_STORE.

    Raises:
        StoreNotFoundError: There is none.
        ValueError: None can be there.
    """
    from tensorcas_mlflow.integration._home import home_of

    home = home_of(location, create=False)
    return home.store, home.path


def refs_at(store: Store, location: str) -> list[Ref]:
    """Find the refs of an artifact: at its location or below it, or of the logged model whose folder it is.

    Returns:
        The refs in the order of their creation; those at the location itself alone, if there are any. For a copy of a
        manifest at another place, the refs that keep this manifest.
    """
    found = _found_by(location)
    path = found[1] if found is not None and found[0].uri == store.uri else None
    refs = store.checkpoints()
    exact = [ref for ref in refs if (path and path in (ref.path, ref.copy_path)) or ref.uri == location]
    if exact:
        return exact
    from tensorcas_mlflow.integration.models import manifest_in

    copied = manifest_in(Path(location))
    if copied is not None:
        return [ref for ref in refs if ref.manifest.startswith(copied.digest)]
    model_id = owner_of(location).model_id
    return [
        ref
        for ref in refs
        if (model_id is not None and ref.model_id == model_id)
        or (path and _is_below(ref.path or ref.copy_path, path))
        or _is_below(ref.uri, location)
    ]


def _found_by(location: str) -> tuple[Store, str] | None:
    from tensorcas_mlflow.integration._home import find_store

    try:
        return find_store(location)
    except (StoreNotFoundError, ValueError):
        return None


def _is_below(path: str | None, folder: str) -> bool:
    return path is not None and path.startswith(f"{folder.rstrip('/')}/")
