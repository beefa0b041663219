"""Refs of models that are gone from where MLflow kept them.

Under a ``tensorcas:`` root the artifact repository drops refs when artifacts are deleted. Under a root of MLflow's own
nobody tells us. A ref there says where MLflow keeps a copy of its manifest, and is an orphan once there is none any
more, or that of a model which was logged over it. Such a ref is never replaced, so dropping it drops nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from tensorcas_mlflow._store_root import store_root_for
from tensorcas_mlflow.backends import SCHEME, local_path
from tensorcas_mlflow.digest import digest
from tensorcas_mlflow.store import Ref, RefTarget, Store


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
        if not _is_orphan(store, ref) or store.ref(ref.key) is None:
            continue
        with store.adopt(store.manifest(ref)) as pin:
            store.drop(ref)
            if _is_orphan(store, ref):
                n_dropped += 1
            else:
                pin.commit(
                    RefTarget(
                        copy_path=ref.copy_path, uri=ref.uri, run_id=ref.run_id, step=ref.step, model_id=ref.model_id
                    )
                )
    return n_dropped


def _is_orphan(store: Store, ref: Ref) -> bool:
    place = _copy_of(store, ref)
    if place is None:
        return False
    experiment = Path(store_root_for(str(place)))
    if experiment == place or not (experiment / place.relative_to(experiment).parts[0]).is_dir():
        return False
    try:
        return digest(place.read_bytes()).hex() != ref.manifest[:64]
    except (FileNotFoundError, NotADirectoryError):
        return True


def _copy_of(store: Store, ref: Ref) -> Path | None:
    """Where MLflow keeps a copy of the ref's manifest; None if it keeps none, or none that can be looked at."""
    if ref.copy_path is not None:
        return local_path(store.uri) / ref.copy_path
    if ref.path is not None or ref.uri is None or ref.uri.startswith(f"{SCHEME}:"):
        return None
    try:
        return local_path(ref.uri)
    except ValueError:
        return None
