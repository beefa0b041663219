"""Programs of processes that share one store in tests: one saves until it is killed, others save and drop."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Root, open_backend
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.store import Store, _save

GRACE_S = 5.0
"""Longer than a save takes here, even where the machine is busy."""
N_KEPT = 3

Model = dict[str, Any]


def shared_model(seed: int, step: int) -> Model:
    """A model of some tensors, most of which the steps before have, and other processes' models too."""
    seeds = {"frozen": 0, "shared": step // 4, "own": 1000 + 100 * seed + step, "slow": 500 + 10 * seed + step // 3}
    return {name: np.random.default_rng(n).integers(0, 256, 30_000, dtype=np.uint8) for name, n in seeds.items()}


def opened(uri: str) -> Store:
    return Store.open_backend(open_backend(Root.parse(uri)))


def save_in_packs(uri: str, model: Model, pack_bytes: int) -> None:
    """Save a model in small packs."""
    _save.TARGET_BYTES = pack_bytes  # type: ignore[misc, attr-defined]
    with opened(uri).write_checkpoint(model) as pending:
        pending.commit(RefTarget(run_id="run", step=0))


def save_and_drop(uri: str, seed: int, seconds: float, report: Connection) -> None:
    """Save step after step, drop what is old, load what is there; reports the steps that must be left."""
    store, kept = opened(uri), list[int]()
    give_up, step = time.monotonic() + seconds, 0
    while time.monotonic() < give_up:
        with store.write_checkpoint(shared_model(seed, step)) as pending:
            ref = pending.commit(RefTarget(run_id=f"run-{seed}", step=step))
        kept.append(step)
        found = store.read_tensors(store.manifest(ref))
        assert all(np.array_equal(found[name], data) for name, data in shared_model(seed, step).items())
        while len(kept) > N_KEPT:
            store.drop(_ref_of(store, seed, kept.pop(random.Random(step).randrange(len(kept) - 1))))
        step += 1
    report.send((seed, kept))


def collect(uri: str, seconds: float, report: Connection) -> None:
    """Collect again and again; reports how many packs were deleted."""
    store, n_packs = opened(uri), 0
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        n_packs += plan_gc(store, grace_s=GRACE_S, max_waste=0.1).execute().n_packs
    report.send((None, [n_packs]))


def lost(store: Store, kept: Mapping[int, Iterable[int]]) -> list[str]:
    """Say what is not as it must be."""
    refs = {(ref.run_id, ref.step): ref for ref in store.checkpoints()}
    wanted = {(f"run-{seed}", step): shared_model(seed, step) for seed, steps in kept.items() for step in steps}
    wrong = [f"{name} is there or not" for name in refs.keys() ^ wanted.keys()]
    for name in refs.keys() & wanted.keys():
        found = store.read_tensors(store.manifest(refs[name]))
        wrong += [f"{name} {key}" for key, data in wanted[name].items() if not np.array_equal(found[key], data)]
    return wrong


def _ref_of(store: Store, seed: int, step: int) -> Any:
    ref = store.ref(RefTarget(run_id=f"run-{seed}", step=step).key)
    assert ref is not None
    return ref
