"""The places in MLflow's databases that name artifact folders, and their change in one transaction."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from tensorcas_mlflow.backends import SCHEME, Root, is_ours
from tensorcas_mlflow.errors import BackendError, ConflictError, without_secrets

if TYPE_CHECKING:
    from sqlalchemy import Table
    from sqlalchemy.engine import Engine

_COLUMNS = {
    "experiments": ("artifact_location",),
    "runs": ("artifact_uri",),
    "logged_models": ("artifact_location",),
    "model_versions": ("source", "storage_location"),
}
"""The columns with artifact locations, by table."""
UNITS = ("runs", "logged_models")
"""The tables whose rows own an artifact folder."""
_PENDING = 1
"""MLflow's number for a logged model under way."""


def local_folder(location: str) -> Path | None:
    """Return the real folder of this machine that an artifact location names; None if it names none."""
    try:
        parts = urlsplit(location)
    except ValueError:
        return None
    if parts.scheme == "":
        named = location
    elif parts.scheme == SCHEME:
        try:
            named = Root.parse(location).path
        except ValueError:
            return None
    elif parts.scheme == "file" and parts.netloc in ("", "localhost") and not parts.query + parts.fragment:
        named = unquote(parts.path)  # as MLflow decodes it
    else:
        return None
    return None if named == "" or "\0" in named else Path(os.path.realpath(named))


def new_location(folder: Path) -> str:
    """Return the location of a folder in a store."""
    return Root(SCHEME, "", folder.as_posix()).uri


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One field of a database that names an artifact folder."""

    table: str
    key: tuple[str, ...]
    """The primary key of its row, as texts."""
    column: str
    location: str
    folder: Path
    """The real folder."""
    is_open: bool = False
    """True for a run that is running, and for what belongs to one."""

    @property
    def is_switched(self) -> bool:
        """True if it names a store already."""
        return is_ours(self.location)

    @property
    def id(self) -> tuple[str, ...]:
        """Table, key and column."""
        return (self.table, *self.key, self.column)


class Database:
    """A database of MLflow: a tracking store, a model registry, or both.

    Args:
        uri: Its URI, such as ``sqlite:////data/mlflow.db``.

    Raises:
        ValueError: The URI names no database, a missing one, or one without MLflow's tables.
        BackendError: It cannot be reached.
    """

    def __init__(self, uri: str) -> None:
        self.name = without_secrets(uri)
        scheme = urlsplit(uri).scheme.partition("+")[0]
        if scheme not in ("sqlite", "postgresql", "mysql", "mssql"):
            raise ValueError(
                f"{self.name!r} is no database: pass the database itself, such as sqlite:////data/mlflow.db, not the "
                "server before it. Move a tracking folder into a database first, with `mlflow migrate-filestore`"
            )
        if scheme == "sqlite" and not Path(urlsplit(uri).path[1:]).is_file():
            raise ValueError(f"there is no database {urlsplit(uri).path[1:]!r}")
        from sqlalchemy import create_engine, inspect
        from sqlalchemy.pool import NullPool

        with self._asked():
            self._engine: Engine = create_engine(uri, poolclass=NullPool)
            there = set(inspect(self._engine).get_table_names())
        self._tables: dict[str, Table] = {name: table for name, table in _tables().items() if name in there}
        if not self._tables:
            raise ValueError(f"the database {self.name!r} has none of MLflow's tables")

    def places(self, root: Path) -> list[Place]:
        """List the fields that name a folder at or below a real folder."""
        with self._asked(), self._engine.connect() as connection:
            running = {
                run for run, status in self._rows(connection, "runs", "run_uuid", "status") if status == "RUNNING"
            }
            opened = {("runs", run) for run in running}
            for model, run, status in self._rows(connection, "logged_models", "model_id", "source_run_id", "status"):
                if run in running or status == _PENDING:
                    opened.add(("logged_models", model))
            found = []
            for name, columns in _COLUMNS.items():
                keys = [column.name for column in self._tables[name].primary_key] if name in self._tables else []
                for row in self._rows(connection, name, *keys, *columns):
                    key = tuple(map(str, row[: len(keys)]))
                    for column, location in zip(columns, row[len(keys) :], strict=True):
                        folder = local_folder(location) if isinstance(location, str) else None
                        if folder is not None and folder.is_relative_to(root):
                            is_open = (name, key[0]) in opened
                            found.append(
                                Place(
                                    table=name,
                                    key=key,
                                    column=column,
                                    location=location,
                                    folder=folder,
                                    is_open=is_open,
                                )
                            )
        return found

    def n_served(self) -> int:
        """Count the runs and logged models whose files are reached through a server alone."""
        with self._asked(), self._engine.connect() as connection:
            locations = [row[0] for name in UNITS for row in self._rows(connection, name, *_COLUMNS[name])]
        return sum(isinstance(each, str) and each.startswith("mlflow-artifacts:") for each in locations)

    def too_long(self, place: Place, location: str) -> bool:
        """Tell whether a location does not fit into a field."""
        limit = getattr(self._tables[place.table].c[place.column].type, "length", None)
        return limit is not None and len(location) > limit

    def switch(self, changes: Sequence[tuple[Place, str]]) -> None:
        """Change fields to new locations, all or none.

        Raises:
            ConflictError: A field has changed since it was read; no field is changed.
            BackendError: The database failed.
        """
        if not changes:
            return
        from sqlalchemy import String, cast, update

        with self._asked(), self._engine.begin() as connection:
            for place, location in changes:
                table = self._tables[place.table]
                change = update(table).where(table.c[place.column] == place.location)
                for column, value in zip(table.primary_key, place.key, strict=True):
                    # Experiments and versions have numbers as keys.
                    same = column == value if isinstance(column.type, String) else cast(column, String(32)) == value
                    change = change.where(same)
                if connection.execute(change.values({place.column: location})).rowcount != 1:
                    raise ConflictError(
                        f"{place.column} of {'/'.join(place.key)} in {place.table} has changed meanwhile"
                    )

    def _rows(self, connection: Any, name: str, *columns: str) -> list[Any]:
        from sqlalchemy import select

        table = self._tables.get(name)
        return [] if table is None else connection.execute(select(*(table.c[each] for each in columns))).all()

    @contextmanager
    def _asked(self) -> Iterator[None]:
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except (SQLAlchemyError, ImportError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise BackendError("use", self.name, without_secrets(reason)) from error


def _tables() -> dict[str, Table]:
    from mlflow.store.model_registry.dbmodels.models import SqlModelVersion
    from mlflow.store.tracking.dbmodels.models import SqlExperiment, SqlLoggedModel, SqlRun

    return {made.__tablename__: made.__table__ for made in (SqlExperiment, SqlRun, SqlLoggedModel, SqlModelVersion)}
