"""Refs of models and runs that are gone from where MLflow kept them.

Under a root of MLflow's own nobody tells us of a deletion. A ref there says where MLflow keeps a copy of its manifest.
That of a model is an orphan once there is no copy any more, or that of a model which was logged over it. That of a
run's checkpoint is one when the run's folder ``artifacts`` is gone, which was there before the ref was: it is what
``mlflow gc`` removes, and it leaves the run's own folder, empty.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

from tensorcas_mlflow._store_root import store_root_for
from tensorcas_mlflow.backends import Root, is_ours
from tensorcas_mlflow.digest import digest
from tensorcas_mlflow.errors import CheckpointExistsError
from tensorcas_mlflow.store import Ref, RefTarget, Store

_OF_MLFLOW = re.compile(r"[0-9a-f]{32}|models|traces")


def orphaned_refs(store: Store, *, grace_s: float) -> list[Ref]:
    """Find refs of models and runs that are gone from where MLflow kept them, and of models that were logged over.

    A place below the store's root is looked for below the root as it is now, so a store may be moved or copied together
    with its models. Only local places are looked at, and only where something else of the experiment is there: a share
    that is not mounted shows nothing either, nor does a copy of the store alone. For the same reason nothing counts as
    gone behind a symbolic link that leads nowhere or to an empty folder.

    Args:
        store: Which.
        grace_s: Younger refs are left out: a model's ref is made before it is uploaded.

    Raises:
        OSError: One of the places cannot be looked at.
    """
    before = time.time() - grace_s
    return [ref for ref in store.checkpoints() if ref.created_s <= before and _is_orphan(store, ref)]


def drop_orphans(store: Store, refs: Iterable[Ref]) -> int:
    """Drop refs that are still orphans.

    A model's upload may end while its ref is dropped. So what the ref keeps alive is pinned by an intent first, and a
    ref is made again if the manifest has turned up; `log_model`, once its upload is done, looks for its ref too.

    Returns:
        How many were dropped.

    Raises:
        OSError: The place of one cannot be looked at; that one and the rest are as they were.
    """
    n_dropped = 0
    for ref in refs:
        info = store.backend.stat(ref.key)
        now = store.ref(ref.key)
        if info is None or now is None or now.write != ref.write or not _is_orphan(store, ref):
            continue
        with store.adopt(store.manifest(ref)) as pin:
            # Only the very blob that was looked at: a step of a run may have been saved anew meanwhile.
            if not store.backend.withdraw(ref.key, info.token):
                continue
            is_gone = False
            try:
                is_gone = _is_orphan(store, ref)
            finally:
                if is_gone:
                    n_dropped += 1
                else:
                    with suppress(CheckpointExistsError):  # a later one, saved in between
                        pin.commit(_target_of(ref), replace=False)
    return n_dropped


def remove_copy(store: Store, ref: Ref) -> None:
    """Remove the copy that MLflow shows of the manifest of a run's checkpoint, if it is a local file.

    That of a model stays: without it MLflow would take the model's folder for a damaged one.

    Args:
        store: Whose ref it was.
        ref: Already dropped.
    """
    place = None if ref.name is None else copy_of(store, ref)
    if place is not None:
        with suppress(OSError):
            if digest(place.read_bytes()).hex() == ref.manifest[:64]:
                place.unlink()


def _is_orphan(store: Store, ref: Ref) -> bool:
    place = copy_of(store, ref)
    if place is None:
        return False
    experiment = Path(store_root_for(str(place)))
    if experiment == place:
        return False
    parts = place.relative_to(experiment).parts
    if ref.name is not None:
        artifacts = experiment.joinpath(*parts[: parts.index("artifacts") + 1])
        # With nothing of MLflow's there, it is the experiment that is out of sight, and not the run that is gone.
        return _is_gone(artifacts) and _has_folders_of_mlflow(experiment)
    if not (experiment / parts[0]).is_dir():
        return False
    try:
        return digest(place.read_bytes()).hex() != ref.manifest[:64]
    except (FileNotFoundError, NotADirectoryError):
        return _is_gone(place)


def _is_gone(place: Path) -> bool:
    """Tell whether there is certainly nothing at a place: behind a link to nothing, a disk may be missing for a while.

    Raises:
        OSError: It cannot be told.
    """
    for part in (*reversed(place.parents), place):
        try:
            mode = part.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return True
        if stat.S_ISLNK(mode) and not _leads_to_something(part):
            return False
    return False


def _leads_to_something(link: Path) -> bool:
    # Where a disk is not mounted there is an empty folder.
    try:
        with os.scandir(link) as entries:
            return any(True for _ in entries)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _has_folders_of_mlflow(experiment: Path) -> bool:
    """Tell whether a folder holds one of a run, with or without anything in it, or those of models or traces."""
    try:
        return any(_OF_MLFLOW.fullmatch(entry.name) and entry.is_dir() for entry in experiment.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return False


def _target_of(ref: Ref) -> RefTarget:
    return RefTarget(**{field.name: getattr(ref, field.name) for field in fields(RefTarget)})


def copy_of(store: Store, ref: Ref) -> Path | None:
    """Say where MLflow keeps a copy of the ref's manifest; None if it keeps none, or none that can be looked at."""
    if ref.copy_path is not None:
        root = None if store.backend.is_carrier else Root.parse(store.uri)
        return root.folder / ref.copy_path if root is not None and root.is_local else None
    if ref.path is not None or ref.uri is None or is_ours(ref.uri):
        return None
    try:
        return Root.parse(ref.uri).folder
    except ValueError:
        return None
