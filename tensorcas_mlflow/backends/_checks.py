"""Checking the whole database of small blobs (``docs/design/database.md``, Damage)."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import NamedTuple

from tensorcas_mlflow.backends._records import folder_of, key_of, short_digest
from tensorcas_mlflow.backends._rows import (
    MENDED,
    NAME,
    NO_DIGEST,
    WRITTEN,
    Commit,
    Row,
    Rows,
    is_record,
)
from tensorcas_mlflow.errors import CorruptError

FAILURES = (sqlite3.Error, CorruptError, TypeError, ValueError)
"""Errors of reads of a damaged database."""


class Damage(NamedTuple):
    """A damaged part of a database."""

    key: str
    """Key of the blob that it costs, or the name of the database."""
    reason: str


def damages_in(rows: Rows, *, is_quick: bool = False) -> Iterator[Damage]:
    """Look for damage in a database.

    Args:
        rows: A connection to it, in a transaction.
        is_quick: Whether to look at no record: what is found then tells whether all of it is one state. Damage of a
            record shows when that is read, and costs nothing else.
    """
    found: dict[str, Row] = {}
    whole = _damages_of_records, _damages_of_commits
    for check in (_damages_of_rows, *((_gaps,) if is_quick else whole)):
        try:
            yield from check(rows, found)
        except FAILURES as error:
            yield Damage(NAME, reason_of(error))
    for key, row in found.items():
        try:
            rows.data(key, row)
        except FAILURES as error:
            yield Damage(key, reason_of(error))
    try:
        look = "quick_check" if is_quick else "integrity_check"
        lines = [bytes(line) for (line,) in rows.connection.execute(f"PRAGMA {look}(10)")]
    except FAILURES as error:
        lines = [reason_of(error).encode()]
    yield from (Damage(NAME, f"SQLite says: {line.decode(errors='replace')}") for line in lines if line != b"ok")


def _damages_of_rows(rows: Rows, found: dict[str, Row]) -> Iterator[Damage]:
    """Check that no row is missing."""
    for folder in _folders(rows):
        if not folder:
            yield Damage(NAME, "it has a blob without a key")
            continue
        try:
            rows.known.checked.discard(folder)
            rows.check_folder(folder)
        except CorruptError as error:
            yield Damage(NAME, reason_of(error))


def _folders(rows: Rows) -> list[str]:
    """Return the first segments of all keys, and of those that are counted."""
    names = rows.connection.execute("SELECT name FROM state WHERE name != x''").fetchall()
    keys = rows.connection.execute("SELECT key FROM blobs").fetchall()
    return sorted({folder_of(bytes(name)) for (name,) in [*names, *keys]})


def _damages_of_records(rows: Rows, found: dict[str, Row]) -> Iterator[Damage]:
    """Check that each record is whole, and that those which others need are there; collect the rows by their keys."""
    numbers: set[int] = set()
    wanted: set[int] = set()
    for number, *facts in rows.connection.execute('SELECT number, base, size, "check", data FROM records'):
        numbers.add(number)
        if facts == [None] * 4 and number > 0:
            continue
        if not is_record(number, *facts):
            yield Damage(NAME, f"record {number} is damaged")
        elif facts[0]:
            wanted.add(facts[0])
    for number in sorted(wanted - numbers):
        yield Damage(NAME, f"record {number} is missing")
    for folder in _folders(rows):
        damages: list[CorruptError] = []
        found.update(rows.below(folder, damages))
        yield from (Damage(NAME, reason_of(error)) for error in damages)


def _damages_of_commits(rows: Rows, found: dict[str, Row]) -> Iterator[Damage]:
    """Check that each commit follows from the one before, and that the last ones of the keys are what is there.

    What a repair has found among the commits before it is no damage any more.
    """
    last: dict[bytes, Commit] = {}
    number, hash_, all_before = 0, NO_DIGEST, NO_DIGEST
    damages: list[Damage] = []
    for commit in rows.commits():
        if commit.what == MENDED and commit.after == all_before:
            number, hash_, damages = commit.number - 1, commit.before or NO_DIGEST, []
        if commit.number != number + 1:
            damages.append(Damage(NAME, f"commits {number + 1} to {commit.number - 1} are missing"))
        elif commit.hash != commit.hash_after(hash_):
            damages.append(Damage(NAME, f"commit {commit.number} is not what was committed"))
        number, hash_, all_before = commit.number, commit.hash, with_commit(all_before, commit)
        if commit.key:
            last[commit.key] = commit
    yield from damages
    rows.state()
    for packed, commit in last.items():
        key = key_of(packed)
        row = found.get(key)
        if (None if row is None else row.commit or row.record) != (commit.number if commit.what == WRITTEN else None):
            yield Damage(key, "its last commit is not what the database has there")


def _gaps(rows: Rows, found: dict[str, Row]) -> Iterator[Damage]:
    gap = gap_of(rows)
    if gap is not None:
        yield Damage(NAME, gap)


def gap_of(rows: Rows) -> str | None:
    """Say which commits are missing behind the last repair; None for none."""
    query = "SELECT coalesce(max(number), 1) FROM records WHERE number > 0 AND what = ?"
    [(first,)] = rows.connection.execute(query, (MENDED,))
    [(n_commits,)] = rows.connection.execute("SELECT count(*) FROM records WHERE number >= ?", (first,))
    last = rows.state().commits
    is_whole = n_commits == max(0, last - first + 1)
    return None if is_whole else f"of the commits {first} to {last} only {n_commits} are there"


def with_commit(all_before: bytes, commit: Commit) -> bytes:
    """Return the digest of commits, of which the last one is given with the digest of those before."""
    return short_digest(all_before + commit.hash_after(commit.hash))


def reason_of(error: Exception) -> str:
    """Return what an error of a damaged database says."""
    if isinstance(error, CorruptError):
        return getattr(error, "problem", error.reason)
    return f"SQLite says: {error}" if isinstance(error, sqlite3.Error) else f"{type(error).__name__}: {error}"
