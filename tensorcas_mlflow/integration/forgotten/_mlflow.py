"""Trackers and registries over MLflow: a tracking store knows ids, a model registry its versions' sources."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tensorcas_mlflow.base.threads import Lazy
from tensorcas_mlflow.errors import BackendError, without_secrets
from tensorcas_mlflow.integration.forgotten._holdings import Holding, Kind

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.store.artifact.artifact_repo import ArtifactRepository

_ID = re.compile(r"(?:m-)?[0-9a-f]{32}")
_BY_ID = re.compile(r"models:/m-[0-9a-f]{32}")
_PAGE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """An experiment known to a tracking store, deleted or not."""

    location: str
    """Its artifact location."""
    made_s: float
    """Its creation, in seconds of Unix time; 0 if unknown."""


class Tracker:
    """A tracking store, as far as collection asks it.

    The caller must have access to everything. The tracking store must not keep workspaces, since it then answers for
    one workspace at a time.

    Raises:
        ValueError: There is none, or it keeps workspaces.
        BackendError: It cannot be reached. All methods raise this if it does not answer, or not clearly.
    """

    def __init__(self, uri: str) -> None:
        from mlflow import MlflowClient

        self.name = without_secrets(uri)
        """The URI, without a password."""
        self._uri = uri
        _check_database(uri)
        with _asked("anything", self.name):
            self._client = MlflowClient(uri)
            # The public client cannot find a deleted logged model that still exists.
            self._store = self._client._tracking_client.store
            _check_workspaces("tracking store", self.name, self._store)

    def artifact_root(self, kind: Kind, of: str) -> str | None:
        """Return the artifact root of a run, logged model or trace.

        Returns:
            The URI, "" if not recorded; None if this id certainly does not exist, not even as a restorable deleted one.
        """
        with _asked(f"about {kind} {of}", self.name):
            return self._find(_QUESTIONS[kind], of)

    @Lazy
    def experiments(self) -> list[Experiment]:
        """All experiments, deleted ones too."""
        from mlflow.entities import ViewType

        with _asked("about experiments", self.name):
            found = _all_pages(self._client.search_experiments, view_type=ViewType.ALL)
        return [
            Experiment(location=each.artifact_location or "", made_s=(each.creation_time or 0) / 1000) for each in found
        ]

    def artifacts(self) -> Iterator[tuple[Kind, str, Artifacts]]:
        """Yield kind, id and artifacts of each existing run and logged model."""
        with _asked("about experiments", self.name):
            experiments = [each.experiment_id for each in _all_pages(self._client.search_experiments)]
        for experiment in experiments:
            with _asked("about runs", self.name):
                runs = _all_pages(self._client.search_runs, experiment_ids=[experiment])
                models = _all_pages(self._client.search_logged_models, experiment_ids=[experiment])
            for run in runs:
                yield "run", run.info.run_id, Artifacts(run.info.artifact_uri or "", self._uri)
            for model in models:
                yield "model", model.model_id, Artifacts(model.artifact_location or "", self._uri)

    def _find(self, question: Callable[[Any, str], str], of: str) -> str | None:
        """Ask for the artifact root of an id; return None only if the store itself clearly says there is none."""
        from mlflow.exceptions import MlflowException, RestException
        from mlflow.store.tracking.rest_store import RestStore

        try:
            return question(self._store, of)
        except MlflowException as error:
            # A proxy's 404 for an unserved path has the same code, but is no RestException of this wording.
            is_from_store = isinstance(error, RestException) or not isinstance(self._store, RestStore)
            if error.error_code == "RESOURCE_DOES_NOT_EXIST" and is_from_store and of in str(error):
                return None
            raise


class Artifacts:
    """The artifacts of one run or logged model. Both methods raise `BackendError` if they do not answer."""

    def __init__(self, uri: str, tracking_uri: str) -> None:
        self.uri = uri
        self._tracking_uri = tracking_uri

    @Lazy
    def _repository(self) -> ArtifactRepository:
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        return get_artifact_repository(self.uri, tracking_uri=self._tracking_uri)

    def paths(self) -> Iterator[str]:
        """List all files below the root."""
        folders: list[str | None] = [None] if self.uri else []
        while folders:
            with _asked("about artifacts", self.uri):
                infos = self._repository.list_artifacts(folders.pop())
            for info in infos:
                if info.is_dir:
                    folders.append(info.path)
                else:
                    yield info.path

    def read(self, path: str) -> bytes:
        """Read one file."""
        with _asked("about artifacts", self.uri), TemporaryDirectory(prefix="tensorcas-") as scratch:
            out = Path(scratch, "artifact")
            self._repository._download_file(path, str(out))
            return out.read_bytes()


class Registry:
    """A model registry, possibly a tracking store's, as far as collection asks it; otherwise as `Tracker`."""

    def __init__(self, uri: str) -> None:
        from mlflow import MlflowClient

        self.name = without_secrets(uri)
        _check_database(uri)
        with _asked("anything", self.name):
            # Both URIs are passed, so no environment variable can replace this one.
            self._client = MlflowClient(uri, uri)
            _check_workspaces("model registry", self.name, self._client._get_registry_client().store)

    def registered_ids(self) -> set[str]:
        """Return the ids of runs and logged models with artifacts used by a registered model version."""
        with _asked("about registered models", self.name):
            versions = _all_pages(self._client.search_model_versions)
            return {each for version in versions for each in self._ids_of(version)}

    def _ids_of(self, version: ModelVersion) -> list[str]:
        source = version.source or ""
        ids = _ID.findall(source)
        if ids and (_BY_ID.fullmatch(source) or not source.startswith("models:")):
            return ids
        # A copy of a model version names its original. The original may be deleted since, and its name may look like an
        # id.
        return ids + _ID.findall(self._client.get_model_version_download_uri(version.name, version.version))


def _check_workspaces(what: str, name: str, store: Any) -> None:
    if getattr(store, "supports_workspaces", False):
        raise ValueError(
            f"the {what} at {name!r} keeps workspaces and answers for one at a time, so it cannot tell live ids from "
            "deleted ones"
        )


@contextmanager
def _asked(what: str, of: str) -> Iterator[None]:
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, ImportError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise BackendError(f"ask {what} of", of, without_secrets(reason)) from error


def _run(store: Any, of: str) -> str:
    return store.get_run(of).info.artifact_uri or ""


def _model(store: Any, of: str) -> str:
    return store.get_logged_model(of, allow_deleted=True).artifact_location or ""


def _trace(store: Any, of: str) -> str:
    return store.get_trace_info(of).tags.get("mlflow.artifactLocation") or ""


_QUESTIONS: dict[Kind, Callable[[Any, str], str]] = {"run": _run, "model": _model, "trace": _trace}


def _all_pages(search: Callable[..., Any], **options: Any) -> list[Any]:
    from mlflow.utils import get_results_from_paginated_fn

    found: list[Any] = get_results_from_paginated_fn(
        lambda n, token: search(max_results=n, page_token=token, **options), _PAGE
    )
    return found


def _check_database(uri: str) -> None:
    """Refuse a missing database, because MLflow would create it."""
    parts = urlsplit(uri)
    if parts.scheme.startswith("sqlite") and not parts.path.startswith("/:") and parts.path not in ("", "/"):
        file = Path(parts.path[1:])
        if not file.is_file():
            raise ValueError(f"there is no database {str(file)!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A holding, with the tracking stores' answers."""

    holding: Holding
    roots: tuple[str, ...]
    """Its artifact root in each tracking store that knows it; empty if none does."""


def ask(trackers: Sequence[Tracker], holding: Holding) -> Asked:
    """Ask all tracking stores about a holding; raises as `Tracker`."""
    roots = (tracker.artifact_root(holding.kind, holding.id) for tracker in trackers)
    return Asked(holding=holding, roots=tuple(root for root in roots if root is not None))
