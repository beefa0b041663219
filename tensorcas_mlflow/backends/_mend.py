"""Checking and rebuilding the database of small blobs (``docs/design/database.md``, Damage)."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeVar

from tensorcas_mlflow.backends._contract import Backend
from tensorcas_mlflow.backends._database import Database, connect_new
from tensorcas_mlflow.backends._folder import FolderBackend
from tensorcas_mlflow.backends._local import LocalBackend
from tensorcas_mlflow.backends._records import NewBlob, key_of, packed_key, parts_of
from tensorcas_mlflow.backends._rows import (
    MENDED,
    NAME,
    REFS,
    WRITTEN,
    Change,
    Commit,
    Contents,
    DamagedError,
    Row,
    Rows,
    checked,
)
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.base.files import new_name
from tensorcas_mlflow.errors import BlobExistsError, CorruptError

T = TypeVar("T")

_MOST_NAMED = 100
_MOST = 1 << 20
"""Bound of the numbers that are believed of a damaged state."""
_FAILURES = (sqlite3.Error, CorruptError, KeyError, TypeError, ValueError)
QUARANTINE = "quarantine"
_STAND_INS = frozenset({REFS, "condemned"})
"""First segments of the keys whose loss must not pass for a deletion."""


class Damage(NamedTuple):
    """A damaged part of a database."""

    key: str
    """Key of the blob that it costs, or the name of the database."""
    reason: str


def damages_of(backend: Backend) -> list[Damage]:
    """Look for damage in the whole database of a backend; nothing for one without a database.

    Raises:
        BackendError: The disk fails.
    """
    found = getattr(backend, "inner", backend)
    if not isinstance(found, FolderBackend) or not found.has_database:
        return []
    try:
        return found.check_database(_damages)
    except DamagedError as error:
        return [Damage(NAME, error.reason)]


def _damages(rows: Rows, database: Database) -> list[Damage]:
    damages = list(_damages_in(rows))
    if not damages:
        try:
            database.check_head(rows, again=True)
        except DamagedError as error:
            damages.append(Damage(NAME, error.reason))
    return damages[:_MOST_NAMED]


def problems_of(rows: Rows) -> list[Damage]:
    """Look for damage in a database, through one connection, until the first."""
    for damage in _damages_in(rows):
        return [damage]
    return []


def _damages_in(rows: Rows) -> Iterator[Damage]:
    is_listed = False
    try:
        if rows.state().mark != rows.mark():
            yield Damage(NAME, "its write-ahead log belongs to another state of it")
        folders: dict[str, list[int]] = {}
        found, is_listed = rows.below(""), True
        for row in found:
            counted = folders.setdefault(row.key.partition("/")[0], [0, 0])
            counted[0] += 1
        for folder in folders.keys() | set(rows.folders()):
            rows.check_folder(folder)
    except _FAILURES as error:
        yield Damage(NAME, _reason(error))
        found = []
    for row in found:
        try:
            data = rows.data(row)
            if row.key.partition("/")[0] == REFS:
                rows.check_ref(row.key, data)
        except _FAILURES as error:
            yield Damage(row.key, _reason(error))
    try:
        yield from _damages_of_commits(rows)
        last = {commit.key: commit.what for commit in rows.commits()}
        keys = {row.key for row in found}
        missing = (key_of(key) for key, what in last.items() if what == WRITTEN and key_of(key) not in keys)
        yield from (Damage(key, "it was committed and is missing") for key in missing if is_listed)
        lines = [line for (line,) in rows.connection.execute("PRAGMA integrity_check(10)") if line not in (b"ok", "ok")]
    except _FAILURES as error:
        yield Damage(NAME, _reason(error))
        return
    yield from (Damage(NAME, f"SQLite says: {bytes(line).decode(errors='replace')}") for line in lines)


def _damages_of_commits(rows: Rows) -> list[Damage]:
    """Check that each commit follows from the one before. Those before a repair are what that has found."""
    state = rows.state()
    number, hash_ = 0, bytes(32)
    all_before = bytes(32)
    found: list[Damage] = []
    for commit in rows.commits():
        if commit.what == MENDED and commit.after == all_before:
            number, hash_, found = commit.number - 1, commit.before or bytes(32), []
        if commit.number != number + 1:
            found.append(Damage(NAME, f"commits {number + 1} to {commit.number - 1} are missing"))
        elif commit.hash != commit.hash_after(hash_):
            found.append(Damage(NAME, f"commit {commit.number} is not what was committed"))
        number, hash_ = commit.number, commit.hash
        all_before = _with(all_before, commit)
    if (number, hash_) != (state.commits, state.hash):
        found.append(Damage(NAME, f"it ends with commit {number} and not {state.commits}"))
    return found


def _with(all_before: bytes, commit: Commit) -> bytes:
    """Return the digest of commits, of which the last one is given with the digest of those before."""
    return digest(all_before + commit.hash_after(commit.hash))


def _reason(error: Exception) -> str:
    if isinstance(error, CorruptError):
        return error.reason
    return f"SQLite says: {error}" if isinstance(error, sqlite3.Error) else f"{type(error).__name__}: {error}"


class Rebuilt(NamedTuple):
    """The result of `rebuild`."""

    n_blobs: int
    lost: list[Damage]
    """Blobs that the old database names and whose bytes are damaged."""


def rebuild(backend: Backend, *, only_plans: bool = False) -> Rebuilt:
    """Write every whole blob of a damaged database into a new one, and put the old one aside, below ``quarantine``.

    A ref or condemned list that is lost leaves a damaged one in its place: collections keep what it may have needed
    until somebody restores it or gives it up.

    Args:
        backend: Backend with the database.
        only_plans: Whether to change nothing.

    Raises:
        BackendError: The disk fails; the old database is still there.
    """
    found = getattr(backend, "inner", backend)
    assert isinstance(found, FolderBackend)
    return found.replace_database(partial(_rebuild, found, only_plans=only_plans))


def _rebuild(backend: FolderBackend, database: Database, folder: str, *, only_plans: bool) -> Rebuilt:
    """Build the new database, and put it into the place of the old one; nobody else writes."""
    new = "" if only_plans else database.new_path()  # "" is a temporary file
    old = _Old(database.path)
    connection = connect_new(new)
    try:
        connection.execute("BEGIN IMMEDIATE")
        change = Change(connection, Contents())
        n_blobs, lost = _fill(change, old)
        lost += filter(None, [old.is_older(database)])
        if only_plans:
            return Rebuilt(n_blobs, lost)
        change.set(inode=os.stat(new).st_ino)
        change.save()
        connection.execute("COMMIT")
    finally:
        connection.close()
        old.close()
    for each in lost:
        if each.key.partition("/")[0] in _STAND_INS:
            with contextlib.suppress(BlobExistsError):
                LocalBackend.put_new(backend, each.key, [f"lost: {each.reason}\n".encode()])
    aside = f"{new_name()}-0-{os.stat(database.path).st_size:x}.{new_name()[:8]}"
    database.put_in_place(new, aside=f"{folder}{os.sep}{QUARANTINE}{os.sep}{aside}")
    return Rebuilt(n_blobs, lost)


def _fill(change: Change, old: _Old) -> tuple[int, list[Damage]]:
    """Write what is whole of an old database into a new one; return the number of blobs, and what is lost."""
    rows = old.rows()
    is_whole = {folder: old.is_whole(folder) for folder in {key.partition("/")[0] for key in rows} | {REFS}}
    last: dict[bytes, Commit] = {}
    gap, all_before = 0, bytes(32)
    for number in range(1, old.n_commits + 1):
        commit = old.ask(lambda known, number=number: known.commit(number))  # type: ignore[misc]
        if commit is None:
            gap = number
            continue
        change.copy_commit(commit)
        all_before = _with(all_before, commit)
        if commit.what != MENDED:
            last[commit.key] = commit
    change.set(commits=old.n_commits)
    change.log_repair(all_before)
    found: dict[str, tuple[int, bytes]] = {}
    for number in range(1, old.n_records + 1):
        for key, data in old.blobs(number):
            row = rows.get(key)
            if row is not None and row.record == number:
                found[key] = row.born, data
            elif row is None and not is_whole.get(key.partition("/")[0], False) and _is_wanted(key, data, last, gap):
                found[key] = found.get(key, (0, b""))[0] or number, data
    lost = [Damage(key, "its bytes are damaged") for key in sorted(rows.keys() - found.keys())]
    for commit in last.values():
        key = key_of(commit.key)
        if commit.what == WRITTEN and key not in found and key not in rows and not is_whole[REFS]:
            lost.append(Damage(key, "it was committed, and is in no whole page"))
    if gap and not is_whole[REFS]:
        lost.append(Damage(NAME, f"commits up to {gap} are damaged: nobody knows all that they wrote and deleted"))
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
    for commit in last.values():
        if commit.what == WRITTEN and key_of(commit.key) not in found:
            change.log(key_of(commit.key), None)
    return len(found), lost


def _is_wanted(key: str, data: bytes, last: dict[bytes, Commit], gap: int) -> bool:
    """Tell whether a blob whose row is missing was there, as far as others tell; garbage is collected later.

    Args:
        key: Its key.
        data: What it may have held last.
        last: The last known commits, by packed key.
        gap: Number of the last commit that is damaged: it may have replaced or deleted any ref.
    """
    if key.partition("/")[0] == REFS:
        commit = last.get(packed_key(key))
        return commit is not None and commit.number > gap and commit.after == digest(data)
    return key.partition("/")[0] != "intents"


class _Old:
    """Reads of a damaged database, row by row: a damaged page costs what lies in it."""

    def __init__(self, path: str) -> None:
        self._rows: Rows | None = None
        with contextlib.suppress(*_FAILURES):
            self._rows = Rows(sqlite3.connect(path, isolation_level=None), Contents())
            self._rows.connection.text_factory = bytes
        self._has_bad_rows = False
        state = self.ask(lambda rows: rows.state())
        self.n_records = self._last("records") or min(_MOST, 0 if state is None else state.records)
        self.n_commits = self._last("commits")
        self.n_commits += min(_MOST, max(0, 0 if state is None else state.commits - self.n_commits))

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
        except _FAILURES:
            return None

    def _last(self, table: str) -> int:
        found = self.ask(lambda rows: rows.connection.execute(f"SELECT max(number) FROM {table}").fetchall())
        return found[0][0] if found and isinstance(found[0][0], int) else 0

    def rows(self) -> dict[str, Row]:
        """Return the rows of blobs that can be read, from both ends of the table."""
        found: dict[str, Row] = {}
        for order in ("", " DESC"):
            with contextlib.suppress(*_FAILURES):
                for row in self._each(order):
                    found[row.key] = row
        return found

    def _each(self, order: str) -> Iterator[Row]:
        if self._rows is None:
            return
        for key, *facts in self._rows.connection.execute(f"SELECT * FROM blobs ORDER BY key{order}"):
            try:
                yield checked(key, None, *facts)
            except _FAILURES:
                self._has_bad_rows = True

    def is_older(self, database: Database) -> Damage | None:
        """Return damage if the database lacks commits that it had once, or if nobody can tell."""
        try:
            if self._rows is None:
                return Damage(NAME, "its last commits are unknown")
            database.check_head(self._rows, again=True)
        except _FAILURES as error:
            return Damage(NAME, _reason(error))
        return None

    def is_whole(self, folder: str) -> bool:
        """Tell whether `rows` has found all with a first segment."""

        def check(rows: Rows) -> bool:
            rows.check_folder(folder)
            return True

        return not self._has_bad_rows and bool(self.ask(check))

    def blobs(self, number: int) -> list[tuple[str, bytes]]:
        """Return the blobs in a record, deleted ones too; none if it is damaged."""

        def read(rows: Rows) -> list[tuple[str, bytes]]:
            content = rows.content(number)
            return [(part.key, part.data_in(content)) for part in parts_of(content)]

        return self.ask(read) or []
