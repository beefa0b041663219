"""Refs of models that are gone from where MLflow kept them.

Under a ``tensorcas:`` root the artifact repository drops refs when artifacts are deleted. Under a root of MLflow's own
nobody tells us: a ref there names the artifact URI of its manifest, and is an orphan once that shows no manifest any
more, or the one of a model that was logged over it. Such a ref is never replaced, so dropping it drops nothing else.
"""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

from tensorcas_mlflow._store_root import store_root_for
from tensorcas_mlflow.backends import SCHEME, local_path
from tensorcas_mlflow.digest import digest
from tensorcas_mlflow.store import Ref, Store


def orphaned_refs(store: Store, *, grace_s: float) -> list[Ref]:
    """Find refs whose manifest is not what the artifact URI they name shows.

    Only local artifact folders are looked at, and only below an experiment's folder that is there: a share that is not
    mounted shows nothing either.

    Args:
        store: Which.
        grace_s: Younger refs are left out, since a ref is made before its model is uploaded.
    """
    before = time.time() - grace_s
    return [ref for ref in store.checkpoints() if _age_at(ref) <= before and _is_orphan(ref)]


def _age_at(ref: Ref) -> float:
    return datetime.fromisoformat(ref.created).timestamp()


def _is_orphan(ref: Ref) -> bool:
    if ref.path is not None or ref.uri is None or ref.uri.startswith(f"{SCHEME}:"):
        return False
    try:
        manifest, experiment = local_path(ref.uri), local_path(store_root_for(ref.uri))
    except ValueError:
        return False
    return experiment != manifest and experiment.is_dir() and _digest_shown(manifest) != ref.manifest[:64]


def _digest_shown(manifest: Path) -> str | None:
    try:
        return digest(manifest.read_bytes()).hex()
    except (FileNotFoundError, NotADirectoryError):
        return None
