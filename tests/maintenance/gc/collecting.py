"""A store for the tests of collection, and checks of what is left."""

from __future__ import annotations

from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.maintenance import GcPlan, plan_gc
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import condemned_bytes, list_packs

CHUNK_BYTES = 4096


def tensors(letters: str) -> dict[str, Any]:
    """One incompressible chunk a letter."""
    return {
        letter: np.random.default_rng(ord(letter)).integers(0, 256, CHUNK_BYTES, dtype=np.uint8) for letter in letters
    }


def target(step: int) -> RefTarget:
    return RefTarget(run_id="run", step=step)


def save(store: Store, letters: str, step: int) -> Ref:
    with store.write_checkpoint(tensors(letters)) as pending:
        return pending.commit(target(step))


def save_apart(store: Store, letters: str, step: int) -> Ref:
    """Save without sharing a chunk with what is there, as a writer does that finds all of it condemned."""
    everything = frozenset(name for name, _ in list_packs(store.backend))
    store.backend.put_new("condemned/" + "a" * 32, [condemned_bytes(everything, frozenset())])
    ref = save(store, letters, step)
    store.backend.delete("condemned/" + "a" * 32)
    return ref


def loads(store: Store, letters: str, step: int) -> bool:
    fresh = Store.open_backend(store.backend)
    ref = fresh.ref(target(step).key)
    assert ref is not None
    found = fresh.read_tensors(fresh.manifest(ref))
    expected = tensors(letters)
    return found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in expected)


def keys(store: Store, prefix: str) -> list[str]:
    return sorted(info.key for info in store.backend.list(prefix))


def everything(store: Store) -> dict[str, bytes]:
    prefixes = ("refs", "manifests", "packs", "index", "intents", "condemned")
    return {key: store.backend.get(key) for prefix in prefixes for key in keys(store, prefix)}


def plan_now(store: Store, **options: Any) -> GcPlan:
    return plan_gc(store, **{"grace_s": 0, **options})


def overwrite(backend: Backend, key: str, data: bytes) -> None:
    backend.delete(key)
    backend.put_new(key, [data])
