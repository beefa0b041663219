"""Small trainings: checkpoints whose tensors are like those of the steps before and behind them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tensorcas_mlflow.adapter import SKELETON
from tensorcas_mlflow.backends import Backend, MemoryBackend
from tensorcas_mlflow.codecs import Effort
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout.packs import Entries, bases_of, is_delta
from tensorcas_mlflow.maintenance import OptimizeReport, plan_gc, plan_optimize, verify
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import list_packs, read_pack_table

CHUNK_BYTES = 4096
TEXT = b"what is left of a model without its tensors, said again and again. " * 40


def new_store(backend: Backend | None = None) -> Store:
    return Store.init_backend(backend or MemoryBackend(), chunk_bytes=CHUNK_BYTES)


def state(step: int, *, seed: int = 0, n: int = 5_000) -> dict[str, Any]:
    """Return the tensors of a training at a step: wandering weights, noise, and constants."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(0, 0.02, n)
    for _ in range(step):
        weights = weights + rng.normal(0, 1e-6, n)
    return {
        "layers.0.weight": weights.astype(np.float32),
        "layers.1.weight": (weights * 2).astype(np.float32),
        "moment": np.random.default_rng(1000 * seed + step).normal(0, 1, n // 4),
        "frozen": np.arange(n, dtype=np.int32),
        "bias": np.full(7, step, dtype=np.float32),
        SKELETON: np.frombuffer(TEXT + str(step).encode(), np.uint8),
    }


def save(store: Store, step: int, *, run_id: str = "run", seed: int = 0) -> None:
    with store.write_checkpoint(state(step, seed=seed)) as pending:
        pending.commit(RefTarget(run_id=run_id, step=step))


def train(store: Store, steps: Iterable[int], *, run_id: str = "run", seed: int = 0) -> Store:
    for step in steps:
        save(store, step, run_id=run_id, seed=seed)
    return store


def loads(store: Store, step: int, *, run_id: str = "run", seed: int = 0) -> bool:
    """Tell whether a step loads bit for bit for somebody who opens the store now."""
    fresh = Store.open_backend(store.backend)
    ref = fresh.ref(RefTarget(run_id=run_id, step=step).key)
    assert ref is not None
    return same(fresh.read_tensors(fresh.manifest(ref)), state(step, seed=seed))


def same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(
        np.asarray(found[name]).tobytes() == np.asarray(expected[name]).tobytes() for name in expected
    )


def optimize(store: Store, effort: Effort = Effort.SMALL) -> OptimizeReport:
    return plan_optimize(Store.open_backend(store.backend), effort=effort).execute()


def collect(store: Store) -> None:
    plan_gc(Store.open_backend(store.backend), grace_s=0, max_waste=0).execute()


def drop(store: Store, step: int, *, run_id: str = "run") -> None:
    fresh = Store.open_backend(store.backend)
    ref = fresh.ref(RefTarget(run_id=run_id, step=step).key)
    assert ref is not None
    fresh.drop(ref)


def blobs(backend: Backend) -> dict[str, bytes]:
    prefixes = ("refs", "manifests", "packs", "index", "intents", "condemned", "census")
    return {info.key: backend.get(info.key) for prefix in prefixes for info in backend.list(prefix)}


def tables(backend: Backend) -> dict[str, Entries]:
    return {name: read_pack_table(backend, name) for name, _ in list_packs(backend)}


def base_packs(backend: Backend) -> dict[str, set[str]]:
    """For each pack the packs in which the bases of its deltas lie."""
    return {name: {base.pack for base in bases_of(rows[is_delta(rows)])} for name, rows in tables(backend).items()}


def is_done(backend: Backend) -> bool:
    """Tell whether every copy of every chunk is optimized, and the store sound."""
    rows = tables(backend).values()
    found = verify(Store.open_backend(backend), full=True).problems
    return found == () and all((entries["effort"] > 0).all() for entries in rows)


def n_bytes_of(backend: Backend) -> int:
    return sum(info.size for info in backend.list("packs"))


def flip(backend: MemoryBackend, key: str, at: int) -> None:
    blob = bytearray(backend.get(key))
    blob[at] ^= 1
    backend.delete(key)
    backend.put_new(key, [bytes(blob)])
