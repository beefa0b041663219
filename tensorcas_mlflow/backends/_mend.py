"""Checking and rebuilding the database of small blobs (``docs/design/database.md``, Damage)."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from itertools import islice
from typing import NamedTuple

from tensorcas_mlflow.backends._checks import Damage, damages_in, with_commit
from tensorcas_mlflow.backends._contract import Backend
from tensorcas_mlflow.backends._database import Database, connect_new
from tensorcas_mlflow.backends._folder import FolderBackend
from tensorcas_mlflow.backends._local import LocalBackend
from tensorcas_mlflow.backends._records import NewBlob, folder_of, key_of, packed_key, short_digest
from tensorcas_mlflow.backends._rows import (
    MENDED,
    NAME,
    NO_DIGEST,
    REFS,
    WRITTEN,
    Change,
    Commit,
    DamagedError,
    Known,
    Rows,
)
from tensorcas_mlflow.backends._salvage import Salvage
from tensorcas_mlflow.base.files import new_name
from tensorcas_mlflow.errors import BlobExistsError

_MOST_NAMED = 100
_MOST = 1 << 20
"""Bound of the number of lost commits that is believed."""
QUARANTINE = "quarantine"
_STAND_INS = frozenset({REFS, "condemned"})
"""First segments of the keys whose loss must not pass for a deletion."""


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
        return [Damage(NAME, error.problem)]


def _damages(rows: Rows) -> list[Damage]:
    known = rows.known
    damages = list(islice(damages_in(rows), _MOST_NAMED))
    if known.problem is not None and not damages:
        damages.append(Damage(NAME, known.problem))
    return [*damages, *(Damage(NAME, f"commit {number} is lost") for number in sorted(known.lost.values()))]


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
    with contextlib.nullcontext("") if only_plans else database.building() as new:  # "" is a temporary file
        old = database.salvage()
        connection = connect_new(new)
        try:
            connection.execute("BEGIN IMMEDIATE")
            change = Change(connection, Known())
            n_blobs, lost = _fill(change, old, database.last_commit())
            if only_plans:
                return Rebuilt(n_blobs, lost)
            change.save()
            connection.execute("COMMIT")
        finally:
            connection.close()
        for each in lost:
            if each.key.partition("/")[0] in _STAND_INS:
                with contextlib.suppress(BlobExistsError):
                    LocalBackend.put_new(backend, each.key, [f"lost: {each.reason}\n".encode()])
        database.put_in_place(new, aside=f"{folder}{os.sep}{QUARANTINE}{os.sep}{new_name()}.db")
    return Rebuilt(n_blobs, lost)


def _fill(change: Change, old: Salvage, n_commits: int) -> tuple[int, list[Damage]]:
    """Write what is whole of an old database into a new one; return the number of blobs, and what is lost."""
    last, gap, n_known, all_before = _copy_commits(change, old)
    n_commits = max(n_known, min(n_commits, n_known + _MOST))
    change.log_repair(n_commits, all_before)
    keys = old.keys()
    is_whole = {folder: old.is_whole(folder) for folder in {*map(folder_of, keys), REFS}}
    found: dict[str, tuple[int, bytes]] = {}
    for number in old.records:
        for position, (key, data) in enumerate(old.blobs(number)):
            row = old.row(key)
            if row is None:
                is_there = not is_whole.get(key.partition("/")[0], False) and _is_wanted(key, data, last, gap)
            else:
                is_there = (row.record, row.position) == (number, position) and not _is_older(key, data, last)
            if is_there:
                found[key] = old.time_of(number), data
    lost = [Damage(key, "its bytes are damaged") for key in sorted(set(keys.values()) - found.keys())]
    for packed, commit in last.items():
        key = key_of(packed)
        if commit.what == WRITTEN and key not in found and old.row(key) is None and not is_whole[REFS]:
            lost.append(Damage(key, "it was committed, and is in no whole page"))
    if n_commits > n_known:
        lost.append(Damage(NAME, f"commits {n_known + 1} to {n_commits} are lost"))
    if gap and not is_whole[REFS]:
        lost.append(Damage(NAME, f"commits up to {gap} are damaged: nobody knows all that they wrote and deleted"))
    moved: dict[str, tuple[int, int | None]] = {}
    for key, (at, data) in found.items():
        is_ref = key.partition("/")[0] == REFS
        commit_of_it = last.get(packed_key(key)) if is_ref else None
        moved[key] = at, change.log_written(key, data) if is_ref and commit_of_it is None else _number(commit_of_it)
    change.add([NewBlob(key, data) for key, (_, data) in found.items()], is_series=True, moved=moved)
    for packed, commit in last.items():
        if commit.what == WRITTEN and key_of(packed) not in found:
            change.log_deletion(key_of(packed), commit.after)
    return len(found), lost


def _number(commit: Commit | None) -> int | None:
    return None if commit is None else commit.number


def _copy_commits(change: Change, old: Salvage) -> tuple[dict[bytes, Commit], int, int, bytes]:
    """Copy the commits whose hashes are right.

    Returns:
        The last commit of each key, by packed key; the number of the last one that is damaged; the highest number that
        is known; and the digest of those that are left.
    """
    last: dict[bytes, Commit] = {}
    n_known = max(min(old.n_commits, max(old.commits, default=0) + _MOST), max(old.commits, default=0))
    gap, before, all_before = 0, NO_DIGEST, NO_DIGEST
    for number in range(1, n_known + 1):
        may_be = old.commits.get(number, [])
        can_tell = gap != number - 1 or number == 1
        right = (each for each in may_be if each.hash == each.hash_after(_hash_before(each, before)) or not can_tell)
        commit = next(right, None)
        if commit is None:
            gap = number
            continue
        if commit.what == MENDED:
            gap = 0
        change.copy_commit(commit)
        before, all_before = commit.hash, with_commit(all_before, commit)
        if commit.what != MENDED:
            last[commit.key] = commit
    return last, gap, n_known, all_before


def _hash_before(commit: Commit, last: bytes) -> bytes:
    """Return the hash on which a commit builds; a repair names its own."""
    return last if commit.what != MENDED or commit.before is None else commit.before


def _is_older(key: str, data: bytes, last: dict[bytes, Commit]) -> bool:
    """Tell whether a ref is not what was committed last."""
    said = last.get(packed_key(key)) if key.partition("/")[0] == REFS else None
    return said is not None and said.after != short_digest(data)


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
        return commit is not None and commit.number > gap and commit.after == short_digest(data)
    return key.partition("/")[0] != "intents"
