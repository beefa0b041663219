"""Checking and rebuilding the database of small blobs (``docs/design/database.md``, Damage)."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple, TypeVar

from tensorcas_mlflow.backends._checks import FAILURES, Damage, damages_in
from tensorcas_mlflow.backends._contract import Backend
from tensorcas_mlflow.backends._database import Database, connect_new
from tensorcas_mlflow.backends._folder import FolderBackend
from tensorcas_mlflow.backends._records import NewBlob, key_of, packed_key, parts_of
from tensorcas_mlflow.backends._rows import (
    NAME,
    REFS,
    WRITTEN,
    Change,
    Commit,
    Row,
    Rows,
    checked,
)
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.base.files import new_name

T = TypeVar("T")

_MOST_NAMED = 100
QUARANTINE = "quarantine"


def damages_of(backend: Backend) -> list[Damage]:
    """Look for damage in the whole database of a backend; nothing for one without a database.

    Raises:
        BackendError: The disk fails.
    """
    found = getattr(backend, "inner", backend)
    if not isinstance(found, FolderBackend) or not found.has_database:
        return []
    return found.check_database(_damages)


def _damages(rows: Rows) -> list[Damage]:
    damages = list(islice(damages_in(rows), _MOST_NAMED))
    known = rows.known
    if known.problem is not None:
        damages.append(Damage(NAME, known.problem))
    return [*damages, *(Damage(NAME, f"commit {number} is lost") for number in sorted(known.lost.values()))]


class Rebuilt(NamedTuple):
    """The result of `rebuild`."""

    n_blobs: int
    lost: list[Damage]
    """Blobs that the old database names and whose bytes are damaged."""


def rebuild(backend: Backend) -> Rebuilt:
    """Write every whole blob of a damaged database into a new one, and put the old one aside, below ``quarantine``.

    Raises:
        BackendError: The disk fails; the old database is still there.
    """
    found = getattr(backend, "inner", backend)
    assert isinstance(found, FolderBackend)
    return found.replace_database(_rebuild)


def _rebuild(database: Database, folder: str) -> Rebuilt:
    """Build the new database, and put it into the place of the old one; nobody else writes."""
    new = database.new_path()
    old = _Old(database.path)
    connection = connect_new(new)
    try:
        connection.execute("BEGIN IMMEDIATE")
        change = Change(connection, Known())
        n_blobs, lost = _fill(change, old)
        change.save()
        connection.execute("COMMIT")
    finally:
        connection.close()
        old.close()
    database.put_in_place(new, aside=f"{folder}{os.sep}{QUARANTINE}{os.sep}{new_name()}.db")
    return Rebuilt(n_blobs, lost)


def _fill(change: Change, old: _Old) -> tuple[int, list[Damage]]:
    """Write what is whole of an old database into a new one; return the number of blobs, and what is lost."""
    rows = old.rows()
    is_whole = {folder: old.is_whole(folder) for folder in {key.partition("/")[0] for key in rows} | {REFS}}
    last: dict[bytes, Commit] = {}
    for number in range(1, old.n_commits + 1):
        commit = old.ask(lambda known, number=number: known.commit(number))  # type: ignore[misc]
        if commit is not None:
            last[commit.key] = commit
            change.copy_commit(commit)
    change.log_repair()
    found: dict[str, tuple[int, bytes]] = {}
    for number in range(1, old.n_records + 1):
        for key, data in old.blobs(number):
            row = rows.get(key)
            if row is not None and row.record == number:
                found[key] = row.born, data
            elif row is None and not is_whole.get(key.partition("/")[0], False) and _is_wanted(key, data, last):
                found[key] = found.get(key, (0, b""))[0] or number, data
    lost = [Damage(key, "its bytes are damaged") for key in sorted(rows.keys() - found.keys())]
    for commit in last.values():
        key = key_of(commit.key)
        if commit.what == WRITTEN and key not in found and key not in rows:
            lost.append(Damage(key, "it was committed, and is in no whole page"))
    change.add(
        [NewBlob(key, data) for key, (_, data) in found.items()],
        is_series=True,
        born={key: born for key, (born, _) in found.items()},
    )
    for key, (_, data) in found.items():
        if key.partition("/")[0] == REFS and (
            (said := last.get(packed_key(key))) is None or said.after != digest(data)
        ):
            change.log(key, data)
    for each in lost:
        if each.key.partition("/")[0] == REFS:
            change.log(each.key, None)
    return len(found), lost


def _is_wanted(key: str, data: bytes, last: dict[bytes, Commit]) -> bool:
    """Tell whether a blob whose row is missing was there, as far as others tell; garbage is collected later."""
    if key.partition("/")[0] == REFS:
        commit = last.get(packed_key(key))
        return commit is not None and commit.after == digest(data)
    return key.partition("/")[0] != "intents"


class _Old:
    """Reads of a damaged database, row by row: a damaged page costs what lies in it."""

    def __init__(self, path: str) -> None:
        self._rows: Rows | None = None
        with contextlib.suppress(*FAILURES):
            self._rows = Rows(sqlite3.connect(path, isolation_level=None), Known())
            self._rows.connection.text_factory = bytes
        self.n_records = self._last("records")
        self.n_commits = self._last("commits")
        state = self.ask(lambda rows: rows.state())
        if state is not None:
            self.n_records = max(self.n_records, state.records)
            self.n_commits = max(self.n_commits, state.commits)

    def close(self) -> None:
        """Close it."""
        if self._rows is not None:
            self._rows.connection.close()

    def ask(self, act: Callable[[Rows], T]) -> T | None:
        """Read something; None if it is damaged."""
        if self._rows is None:
            return None
        try:
            return act(self._rows)
        except FAILURES:
            return None

    def _last(self, table: str) -> int:
        found = self.ask(lambda rows: rows.connection.execute(f"SELECT max(number) FROM {table}").fetchall())
        return found[0][0] if found and isinstance(found[0][0], int) else 0

    def rows(self) -> dict[str, Row]:
        """Return the rows of blobs that can be read, from both ends of the table."""
        found: dict[str, Row] = {}
        for order in ("", " DESC"):
            with contextlib.suppress(*FAILURES):
                for row in self._each(order):
                    found[row.key] = row
        return found

    def _each(self, order: str) -> Iterator[Row]:
        if self._rows is None:
            return
        for key, *facts in self._rows.connection.execute(f"SELECT * FROM blobs ORDER BY key{order}"):
            with contextlib.suppress(*FAILURES):
                yield checked(key, None, *facts)

    def is_whole(self, folder: str) -> bool:
        """Tell whether no row is missing among those with a first segment."""

        def check(rows: Rows) -> bool:
            rows.check_folder(folder)
            return True

        return self.ask(check) or False

    def blobs(self, number: int) -> list[tuple[str, bytes]]:
        """Return the blobs in a record, deleted ones too; none if it is damaged."""

        def read(rows: Rows) -> list[tuple[str, bytes]]:
            content = rows.content(number)
            return [(part.key, part.data_in(content)) for part in parts_of(content)]

        return self.ask(read) or []
