"""Refs of models that are gone from where MLflow kept them.

Under a root of MLflow's own nobody tells us of a deletion. A ref there says where MLflow keeps a copy of its manifest.
That of a model is an orphan once there is no copy any more, or that of a model which was logged over it. That of a
run's checkpoint is one when the run's whole folder is gone, which was there before the ref was.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields
from datetime import datetime
from pathlib import Path

from tensorcas_mlflow._store_root import store_root_for
from tensorcas_mlflow.backends import SCHEME, local_path
from tensorcas_mlflow.digest import digest
from tensorcas_mlflow.errors import CheckpointExistsError
from tensorcas_mlflow.store import Ref, RefTarget, Store

_OF_MLFLOW = re.compile(r"[0-9a-f]{32}|models|traces")


def orphaned_refs(store: Store, *, grace_s: float) -> list[Ref]:
    """Find refs whose manifest is not what the place shows where MLflow kept a copy of it.

    A place below the store's root is looked for below the root as it is now, so a store may be moved or copied together
    with its models. Only local places are looked at, and only where the folder of the experiment's models is there: a
    share that is not mounted shows nothing either, nor does a copy of the store alone.

    Args:
        store: Which.
        grace_s: Younger refs are left out: a model's ref is made before it is uploaded.
    """
    before = time.time() - grace_s
    return [
        ref
        for ref in store.checkpoints()
        if datetime.fromisoformat(ref.created).timestamp() <= before and _is_orphan(store, ref)
    ]


def drop_orphans(store: Store, refs: Iterable[Ref]) -> int:
    """Drop refs that are still orphans.

    A model's upload may end while its ref is dropped. So what the ref keeps alive is pinned by an intent first, and a
    ref is made again if the manifest has turned up; `log_model`, once its upload is done, looks for its ref too.

    Returns:
        How many were dropped.
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
            if _is_orphan(store, ref):
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
    below = experiment / place.relative_to(experiment).parts[0]
    if ref.name is not None:
        # With nothing else there, it is the experiment that is out of sight, and not the run that is gone.
        return not os.path.lexists(below) and _has_other_folders(experiment)
    if not below.is_dir():
        return False
    try:
        return digest(place.read_bytes()).hex() != ref.manifest[:64]
    except (FileNotFoundError, NotADirectoryError):
        return True


def _has_other_folders(experiment: Path) -> bool:
    """Tell whether a folder holds what MLflow keeps of other runs, of models or traces."""
    try:
        return any(_OF_MLFLOW.fullmatch(entry.name) and entry.is_dir() for entry in experiment.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return False


def _target_of(ref: Ref) -> RefTarget:
    return RefTarget(**{field.name: getattr(ref, field.name) for field in fields(RefTarget)})


def copy_of(store: Store, ref: Ref) -> Path | None:
    """Say where MLflow keeps a copy of the ref's manifest; None if it keeps none, or none that can be looked at."""
    if ref.copy_path is not None:
        return None if store.backend.is_carrier else local_path(store.uri) / ref.copy_path
    if ref.path is not None or ref.uri is None or ref.uri.startswith(f"{SCHEME}:"):
        return None
    try:
        return local_path(ref.uri)
    except ValueError:
        return None
