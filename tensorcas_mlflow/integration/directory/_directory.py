"""Directories: runs and experiments of a tracking store, by name, id, or the beginning of an id."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import quote, urlsplit

from tensorcas_mlflow.base.text import is_unicode
from tensorcas_mlflow.errors import BackendError, without_secrets

if TYPE_CHECKING:
    import sqlite3

DATABASE = "mlflow.db"
"""Name of the database that MLflow makes if nobody names a tracking store."""

_BEGINNING = re.compile(r"[0-9a-f]{6,32}")
"""The id of a run, or a beginning long enough to stand for it."""
_EXPERIMENT_ID = re.compile(r"[0-9]{1,19}")
_PAGE = 1000
_LATEST = f"ORDER BY start_time DESC LIMIT {_PAGE}"
_MOST_IDS = 100
"""Most ids in one question: SQLite and URLs have limits."""


class NamedExperiment(NamedTuple):
    """An experiment, as MLflow knows it."""

    experiment_id: str
    name: str
    location: str
    """Its artifact location."""


class NamedRun(NamedTuple):
    """A run, as MLflow knows it."""

    run_id: str
    name: str
    """Its name; "" if it has none."""
    experiment: str
    """The name of its experiment."""
    location: str
    """Its artifact root."""
    started_s: float
    """Its start, in seconds of Unix time; 0 if unknown."""


class NamedModel(NamedTuple):
    """A logged model, as MLflow or its own MLmodel knows it."""

    model_id: str
    name: str
    """Its name; "" if unknown."""
    run_id: str | None
    """The run that logged it."""


class Directory(Protocol):
    """A tracking store, as far as names are asked for. It forgets deleted runs and experiments, except by full id.

    Every method raises `BackendError` if the tracking store does not answer.
    """

    name: str
    """Its URI, without a password."""

    def experiments(self, word: str) -> list[NamedExperiment]:
        """Find experiments by id or by name."""

    def runs(self, word: str) -> list[NamedRun]:
        """Find runs by name, by id, or by the first six or more characters of an id; the latest first."""

    def runs_of(self, run_ids: Iterable[str]) -> dict[str, NamedRun]:
        """Find runs by their full ids, deleted ones too; ids of no run are left out."""

    def models_of(self, model_ids: Iterable[str]) -> dict[str, NamedModel]:
        """Find logged models by their ids; unknown and deleted ones are left out."""

    def names(self) -> list[str]:
        """List names of experiments and of some of the latest runs, to suggest one of them."""


def database_beside(*folders: Path) -> str | None:
    """Return the URI of MLflow's default database in the first of some folders that has one; None if none has."""
    for folder in folders:
        if (folder / DATABASE).is_file():
            return f"sqlite:///{folder / DATABASE}"
    return None


def open_directory(uri: str) -> Directory:
    """Open the directory of the tracking store at a URI.

    Raises:
        BackendError: It is the file of a database that does not exist. MLflow would make it.
    """
    check_database(uri)
    if urlsplit(uri).scheme == "sqlite":
        quick = _SqliteDirectory(uri)
        if quick.is_readable():
            return quick
    return _MlflowDirectory(uri)


def check_database(uri: str) -> None:
    """Check that the URI of a tracking store does not name the file of a database that does not exist.

    Raises:
        BackendError: It does. MLflow would make it.
    """
    if urlsplit(uri).scheme == "sqlite" and not _SqliteDirectory(uri).exists():
        raise BackendError("read", without_secrets(uri), "there is no such database")


class _SqliteDirectory:
    """Directory of a tracking store in SQLite. It reads the tables themselves, read-only, without MLflow."""

    def __init__(self, uri: str) -> None:
        self.name = without_secrets(uri)
        self._path = Path(urlsplit(uri).path[1:])

    def exists(self) -> bool:
        """Tell whether there is a file at the path, or no path: SQLite then keeps the database in memory."""
        return os.path.exists(self._path)

    def is_readable(self) -> bool:
        """Tell whether there are tables with the columns that this class reads."""
        try:
            self._runs("0")
            self._experiments("0")
        except BackendError:
            return False
        return True

    def experiments(self, word: str) -> list[NamedExperiment]:
        if not is_unicode(word):
            return []
        named = self._experiments("lifecycle_stage = 'active' AND name = ?", word)
        if not named and _EXPERIMENT_ID.fullmatch(word):
            named = self._experiments("lifecycle_stage = 'active' AND experiment_id = ?", int(word))
        return named

    def runs(self, word: str) -> list[NamedRun]:
        if not is_unicode(word):
            return []
        is_active = "r.lifecycle_stage = 'active'"
        if not _BEGINNING.fullmatch(word):
            return self._runs(f"{is_active} AND r.name = ?", word)
        by_id = "r.run_uuid >= ? AND r.run_uuid < ?"
        return self._runs(f"{is_active} AND (r.name = ? OR {by_id})", word, word, f"{word}g")

    def runs_of(self, run_ids: Iterable[str]) -> dict[str, NamedRun]:
        found: dict[str, NamedRun] = {}
        for some in _batches(filter(is_unicode, run_ids)):
            places = ", ".join("?" * len(some))
            found.update({run.run_id: run for run in self._runs(f"r.run_uuid IN ({places})", *some)})
        return found

    def models_of(self, model_ids: Iterable[str]) -> dict[str, NamedModel]:
        found: dict[str, NamedModel] = {}
        for some in _batches(filter(is_unicode, model_ids)):
            places = ", ".join("?" * len(some))
            query = f"SELECT model_id, name, source_run_id FROM logged_models WHERE model_id IN ({places})"
            found.update({id: NamedModel(id, name or "", run or None) for id, name, run in self._rows(query, some)})
        return found

    def names(self) -> list[str]:
        runs = self._runs(f"r.lifecycle_stage = 'active' AND r.run_uuid IN (SELECT run_uuid FROM runs {_LATEST})")
        experiments = self._experiments("lifecycle_stage = 'active'")
        return sorted(({run.name for run in runs} | {each.name for each in experiments}) - {""})

    def _runs(self, condition: str, *values: Any) -> list[NamedRun]:
        rows = self._rows(
            "SELECT r.run_uuid, r.name, e.name, r.artifact_uri, r.start_time "
            "FROM runs r JOIN experiments e ON e.experiment_id = r.experiment_id "
            f"WHERE {condition} ORDER BY r.start_time DESC, r.run_uuid",
            values,
        )
        return [NamedRun(run, name or "", of, place or "", (at or 0) / 1000) for run, name, of, place, at in rows]

    def _experiments(self, condition: str, *values: Any) -> list[NamedExperiment]:
        columns = "experiment_id, name, artifact_location"
        rows = self._rows(f"SELECT {columns} FROM experiments WHERE {condition} ORDER BY experiment_id", values)
        return [NamedExperiment(str(of), name, place or "") for of, name, place in rows]

    def _rows(self, query: str, values: Sequence[Any]) -> list[Any]:
        import sqlite3

        try:
            connection: sqlite3.Connection = sqlite3.connect(f"file:{quote(str(self._path))}?mode=ro", uri=True)
            try:
                return connection.execute(query, values).fetchall()
            finally:
                connection.close()
        except sqlite3.Error as error:
            raise BackendError("read", self.name, str(error)) from error


class _MlflowDirectory:
    """Directory of any tracking store, by MLflow's own client."""

    def __init__(self, uri: str) -> None:
        from mlflow import MlflowClient

        self.name = without_secrets(uri)
        with self._asked():
            self._client = MlflowClient(uri)

    def experiments(self, word: str) -> list[NamedExperiment]:
        if not is_unicode(word):
            return []
        with self._asked():
            named = self._client.get_experiment_by_name(word)
            found = [] if named is None else [named]
            if not found and _EXPERIMENT_ID.fullmatch(word):
                found = [each for each in self._all() if each.experiment_id == word]
        return [
            NamedExperiment(each.experiment_id, each.name, each.artifact_location)
            for each in found
            if each.lifecycle_stage == "active"
        ]

    def runs(self, word: str) -> list[NamedRun]:
        found = self._search(f"attributes.run_name = {_quoted(word)}") if _quoted(word) and is_unicode(word) else []
        if _BEGINNING.fullmatch(word):
            found += self._search(f"attributes.run_id LIKE '{word}%'")
        return sorted(set(found), key=lambda run: (-run.started_s, run.run_id))

    def runs_of(self, run_ids: Iterable[str]) -> dict[str, NamedRun]:
        found: dict[str, NamedRun] = {}
        for some in _batches(each for each in run_ids if _BEGINNING.fullmatch(each)):
            listed = ", ".join(f"'{each}'" for each in some)
            found.update({run.run_id: run for run in self._search(f"attributes.run_id IN ({listed})", deleted=True)})
        return found

    def models_of(self, model_ids: Iterable[str]) -> dict[str, NamedModel]:
        found: dict[str, NamedModel] = {}
        for model_id in dict.fromkeys(model_ids):
            with suppress(BackendError), self._asked():  # it is deleted, or this server is older than logged models
                model = self._client.get_logged_model(model_id)
                found[model_id] = NamedModel(model_id, model.name or "", model.source_run_id or None)
        return found

    def names(self) -> list[str]:
        with self._asked():
            experiments = self._all()
            runs = self._client.search_runs([each.experiment_id for each in experiments], max_results=_PAGE)
            return sorted(({run.info.run_name or "" for run in runs} | {each.name for each in experiments}) - {""})

    def _all(self, *, deleted: bool = False) -> list[Any]:
        from mlflow.entities import ViewType
        from mlflow.utils import get_results_from_paginated_fn

        view = ViewType.ALL if deleted else ViewType.ACTIVE_ONLY
        search = self._client.search_experiments
        found: list[Any] = get_results_from_paginated_fn(lambda n, token: search(view, n, page_token=token), _PAGE)
        return found

    def _search(self, condition: str, *, deleted: bool = False) -> list[NamedRun]:
        from mlflow.entities import ViewType
        from mlflow.utils import get_results_from_paginated_fn

        view = ViewType.ALL if deleted else ViewType.ACTIVE_ONLY
        with self._asked():
            names = {each.experiment_id: each.name for each in self._all(deleted=deleted)}
            search = self._client.search_runs
            runs = get_results_from_paginated_fn(
                lambda n, token: search(list(names), condition, view, n, page_token=token), _PAGE
            )
            return [
                NamedRun(
                    run.info.run_id,
                    run.info.run_name or "",
                    names.get(run.info.experiment_id, run.info.experiment_id),
                    run.info.artifact_uri or "",
                    (run.info.start_time or 0) / 1000,
                )
                for run in runs
            ]

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """Translate MLflow's errors, and wait seconds rather than minutes for a server that does not answer."""
        from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_MAX_RETRIES, MLFLOW_HTTP_REQUEST_TIMEOUT

        set_here = [
            (variable, value)
            for variable, value in ((MLFLOW_HTTP_REQUEST_MAX_RETRIES, 1), (MLFLOW_HTTP_REQUEST_TIMEOUT, 20))
            if not variable.is_set()
        ]
        for variable, value in set_here:
            variable.set(value)
        try:
            yield
        except Exception as error:  # MLflow raises its own, those of its drivers, and of its plugins
            raise BackendError("ask", self.name, " ".join(str(error).split()) or type(error).__name__) from error
        finally:
            for variable, _ in set_here:
                variable.unset()


def _quoted(word: str) -> str:
    """Quote a word for a filter of MLflow; "" for a word with quotes of both kinds, which no filter can hold."""
    return next((f"{mark}{word}{mark}" for mark in "'\"" if mark not in word), "")


def _batches(ids: Iterable[str]) -> Iterator[list[str]]:
    every = list(dict.fromkeys(ids))
    for start in range(0, len(every), _MOST_IDS):
        yield every[start : start + _MOST_IDS]
