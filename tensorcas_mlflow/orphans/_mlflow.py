"""A tracking store of MLflow, asked about ids."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tensorcas_mlflow.errors import BackendError
from tensorcas_mlflow.orphans._holdings import Kind
from tensorcas_mlflow.orphans._tracker import Experiment, Tracker

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

_ID = re.compile(r"(?:m-)?[0-9a-f]{32}")
_PASSWORD = re.compile(r"(//[^/\s:@]*):[^/\s@]*@")
_PAGE = 1000


def open_tracker(uri: str) -> Tracker:
    """Give the tracking store at a URI, and the model registry that goes with it.

    It must be asked as a user who may see everything, and it must not keep workspaces, of which it answers for one at
    a time.

    Raises:
        ValueError: There is none, or it keeps workspaces.
        BackendError: It cannot be reached.
    """
    return _MlflowTracker(uri)


class _MlflowTracker:
    def __init__(self, uri: str) -> None:
        self.name = _without_password(uri)
        self._client = self._open(uri)

    def artifact_root(self, kind: Kind, of: str) -> str | None:
        with self._asked(f"about {kind} {of}"):
            return self._find(_QUESTIONS[kind], of)

    def experiments(self) -> Sequence[Experiment]:
        return self._experiments

    def registered_ids(self) -> set[str]:
        with self._asked("about registered models"):
            versions = _all_pages(self._client.search_model_versions)
            return {each for version in versions for each in self._ids_of(version)}

    @cached_property
    def _experiments(self) -> list[Experiment]:
        from mlflow.entities import ViewType

        with self._asked("about experiments"):
            found = _all_pages(self._client.search_experiments, view_type=ViewType.ALL)
        return [
            Experiment(location=each.artifact_location or "", made_s=(each.creation_time or 0) / 1000) for each in found
        ]

    def _ids_of(self, version: ModelVersion) -> list[str]:
        ids = _ID.findall(version.source or "")
        # A copy of a version names the version it was copied from, which may be gone since.
        return ids or _ID.findall(self._client.get_model_version_download_uri(version.name, version.version))

    def _open(self, uri: str) -> MlflowClient:
        from mlflow import MlflowClient

        _check_database(uri)
        with self._asked("anything"):
            client = MlflowClient(tracking_uri=uri)
            keeps_workspaces = bool(getattr(self._store_of(client), "supports_workspaces", False))
        if keeps_workspaces:
            raise ValueError(
                f"the tracking store at {self.name!r} keeps workspaces and answers for one at a time, so it cannot be "
                "asked what is gone"
            )
        return client

    @staticmethod
    def _store_of(client: MlflowClient) -> Any:
        # The public client cannot be asked for a logged model that was deleted and is still there.
        return client._tracking_client.store

    def _find(self, question: Callable[[Any, str], str], of: str) -> str | None:
        """Ask for the artifact root of an id; None only for the store's own clear word that there is none."""
        from mlflow.exceptions import MlflowException, RestException
        from mlflow.store.tracking.rest_store import RestStore

        store = self._store_of(self._client)
        try:
            return question(store, of)
        except MlflowException as error:
            # A proxy's 404 for a path it does not serve gets the same code, but is no RestException of this wording.
            is_from_store = isinstance(error, RestException) or not isinstance(store, RestStore)
            if error.error_code == "RESOURCE_DOES_NOT_EXIST" and is_from_store and of in str(error):
                return None
            raise

    @contextmanager
    def _asked(self, what: str) -> Iterator[None]:
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except (MlflowException, SQLAlchemyError, ImportError, OSError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise BackendError(f"ask {what} of", self.name, _without_password(reason)) from error


def _run(store: Any, of: str) -> str:
    return store.get_run(of).info.artifact_uri or ""


def _model(store: Any, of: str) -> str:
    return store.get_logged_model(of, allow_deleted=True).artifact_location or ""


def _trace(store: Any, of: str) -> str:
    return store.get_trace_info(of).tags.get("mlflow.artifactLocation") or ""


_QUESTIONS: dict[Kind, Callable[[Any, str], str]] = {"run": _run, "model": _model, "trace": _trace}


def _all_pages(search: Callable[..., Any], **options: Any) -> list[Any]:
    found: list[Any] = []
    token = None
    while True:
        page = search(max_results=_PAGE, page_token=token, **options)
        found += page
        token = page.token
        if not token:
            return found


def _check_database(uri: str) -> None:
    """Refuse a database that is not there: MLflow would make it."""
    parts = urlsplit(uri)
    if parts.scheme.startswith("sqlite") and not parts.path.startswith("/:") and parts.path not in ("", "/"):
        file = Path(parts.path[1:])
        if not file.is_file():
            raise ValueError(f"there is no tracking database {str(file)!r}")


def _without_password(text: str) -> str:
    """Leave the passwords out of the URIs in a text."""
    return _PASSWORD.sub(r"\1@", text)
