"""Saves that wait for their manifest to arrive as an artifact, by process."""

from __future__ import annotations

from tensorcas_mlflow.store._records import RefTarget
from tensorcas_mlflow.store._save import PendingSave
from tensorcas_mlflow.store._store import Store
from tensorcas_mlflow.threads import Lock

_lock = Lock()
_held: dict[tuple[str, str, str | None], tuple[PendingSave, RefTarget]] = {}


def hold_pending(store: Store, save: PendingSave, target: RefTarget) -> None:
    """Keep a save until `take_pending` or `abandon_pending`; its intent keeps its chunks alive meanwhile.

    Args:
        store: Where it was saved.
        save: Not yet committed.
        target: What its ref is to say; the save is taken by the path in it.
    """
    with _lock:
        _held[store.id, save.manifest.digest, target.path] = (save, target)


def take_pending(store: Store, digest: str, path: str) -> tuple[PendingSave, RefTarget] | None:
    """Hand over the save of a manifest that has arrived at an artifact path, for the caller to commit.

    Args:
        store: Whose artifact path it is.
        digest: The manifest's.
        path: Where it has arrived, relative to the store's root.

    Returns:
        The save and what its ref is to say; None if none is held.
    """
    with _lock:
        return _held.pop((store.id, digest, path), None)


def has_pending(store: Store) -> bool:
    """Tell whether this process holds any save of a store."""
    with _lock:
        return any(store_id == store.id for store_id, _, _ in _held)


def abandon_pending(save: PendingSave) -> None:
    """Give a save up if it is still held."""
    with _lock:
        keys = [key for key, (held, _) in _held.items() if held is save]
        for key in keys:
            del _held[key]
    if keys:
        save.abandon()
