"""Saves waiting for their manifest to arrive as an artifact, by process."""

from __future__ import annotations

from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store._save import PendingSave
from tensorcas_mlflow.store._store import Store

_lock = Lock()
_held: dict[tuple[str, str, str | None], tuple[PendingSave, RefTarget]] = {}


def hold_pending(store: Store, save: PendingSave, target: RefTarget) -> None:
    """Hold a save until `take_pending` or `abandon_pending`; its intent protects its chunks meanwhile.

    Args:
        store: The store of the save.
        save: An uncommitted save.
        target: Its future ref; the path in it identifies the save.
    """
    with _lock:
        _held[store.id, save.manifest.digest, target.path] = (save, target)


def take_pending(store: Store, digest: str, path: str) -> tuple[PendingSave, RefTarget] | None:
    """Return the save of a manifest that has arrived at an artifact path, for the caller to commit.

    Args:
        store: The store of the artifact path.
        digest: The manifest's digest.
        path: Its path, relative to the store's root.

    Returns:
        The save and its future ref; None if none is held.
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
