"""Checking the whole database of small blobs (``docs/design/database.md``, Damage)."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from tensorcas_mlflow.backends._records import key_of, short_digest
from tensorcas_mlflow.backends._rows import (
    MENDED,
    NAME,
    NO_DIGEST,
    REFS,
    WRITTEN,
    Commit,
    Row,
    Rows,
    checked,
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
    found: list[Row] = []
    for check in (_damages_of_rows, *(() if is_quick else (_damages_of_records,)), _damages_of_commits):
        try:
            yield from check(rows, found)
        except FAILURES as error:
            yield Damage(NAME, reason_of(error))
    for row in () if is_quick else found:
        try:
            data = rows.data(row)
            if row.key.startswith(f"{REFS}/"):
                rows.check_last(row.key, data)
        except FAILURES as error:
            yield Damage(row.key, reason_of(error))
    try:
        look = "quick_check" if is_quick else "integrity_check"
        lines = [bytes(line) for (line,) in rows.connection.execute(f"PRAGMA {look}(10)")]
    except FAILURES as error:
        lines = [reason_of(error).encode()]
    yield from (Damage(NAME, f"SQLite says: {line.decode(errors='replace')}") for line in lines if line != b"ok")


def _damages_of_rows(rows: Rows, found: list[Row]) -> Iterator[Damage]:
    """Check each row, and that none is missing; append the whole ones to a list."""
    folders: Counter[tuple[str, str]] = Counter()
    for packed, *facts in rows.connection.execute("SELECT * FROM blobs"):
        try:
            row = checked(packed, None, *facts)
        except CorruptError as error:
            yield Damage(NAME, reason_of(error))
            continue
        found.append(row)
        folder = row.key.partition("/")[0]
        folders[folder, "n"] += 1
        folders[folder, "total"] += row.check
    for name, n_rows, total in rows.connection.execute("SELECT * FROM folders"):
        folder = bytes(name).decode("ascii", "replace")
        if (folders.pop((folder, "n"), 0), folders.pop((folder, "total"), 0)) != (n_rows, total):
            yield Damage(NAME, f"blobs below {folder!r} are missing")
    for folder in {folder for folder, _ in folders}:
        yield Damage(NAME, f"it does not count the blobs below {folder!r}")


def _damages_of_records(rows: Rows, found: list[Row]) -> Iterator[Damage]:
    """Check that each record is whole, and that those which the rows and other records need are there."""
    numbers: set[int] = set()
    wanted = {row.record for row in found}
    for number, *facts in rows.connection.execute("SELECT * FROM records"):
        numbers.add(number)
        if not is_record(number, *facts):
            yield Damage(NAME, f"record {number} is damaged")
        elif facts[0] is not None:
            wanted.add(facts[0])
    for number in sorted(wanted - numbers):
        yield Damage(NAME, f"record {number} is missing")


def _damages_of_commits(rows: Rows, found: list[Row]) -> Iterator[Damage]:
    """Check that each commit follows from the one before, and that the last ones of the keys are what is there."""
    last: dict[bytes, int] = {}
    gaps, others = chain_of(rows, last)
    yield from (Damage(NAME, reason) for reason in (*gaps, *others))
    keys = {row.key for row in found}
    missing = (key_of(key) for key, what in last.items() if what == WRITTEN and key_of(key) not in keys)
    yield from (Damage(key, "it was committed and is missing") for key in missing)


def chain_of(rows: Rows, last: dict[bytes, int]) -> tuple[list[str], list[str]]:
    """Follow the commits; return what is missing, and what is damaged.

    What a repair has found among the commits before it is no damage any more.

    Args:
        rows: A connection, in a transaction.
        last: Takes what the last commit of each key has done.
    """
    state = rows.state()
    number, hash_, all_before = 0, NO_DIGEST, NO_DIGEST
    gaps: list[str] = []
    others: list[str] = []
    for commit in rows.commits():
        if commit.what == MENDED and commit.after == all_before:
            number, hash_, gaps, others = commit.number - 1, commit.before or NO_DIGEST, [], []
        if commit.number != number + 1:
            gaps.append(f"commits {number + 1} to {commit.number - 1} are missing")
        elif commit.hash != commit.hash_after(hash_):
            others.append(f"commit {commit.number} is not what was committed")
        number, hash_, all_before = commit.number, commit.hash, with_commit(all_before, commit)
        last[commit.key] = commit.what
    if number != state.commits:
        gaps.append(f"it ends with commit {number} and not {state.commits}")
    elif hash_ != state.hash:
        others.append(f"commit {number} is another one than the last")
    return gaps, others


def with_commit(all_before: bytes, commit: Commit) -> bytes:
    """Return the digest of commits, of which the last one is given with the digest of those before."""
    return short_digest(all_before + commit.hash_after(commit.hash))


def reason_of(error: Exception) -> str:
    """Return what an error of a damaged database says."""
    if isinstance(error, CorruptError):
        return getattr(error, "problem", error.reason)
    return f"SQLite says: {error}" if isinstance(error, sqlite3.Error) else f"{type(error).__name__}: {error}"
