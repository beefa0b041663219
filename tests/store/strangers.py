"""Files that others leave in the folders of a store, and all that a store is asked to do beside them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend, MemoryBackend
from tensorcas_mlflow.layout import RefTarget, find_strangers
from tensorcas_mlflow.maintenance import (
    copy_refs,
    find_shares,
    plan_gc,
    plan_optimize,
    plan_repair,
    read_source,
    store_stats,
    verify,
)
from tensorcas_mlflow.store import Store

CHUNK_BYTES = 4096
FOLDERS = (
    "",
    "packs",
    "manifests",
    "index",
    "intents",
    "condemned",
    "census",
    "ref-tables",
    "quarantine",
    "refs",
    "refs/runs",
    "refs/runs/run",
    "refs/runs/run/ema",
    "refs/artifacts",
    "refs/artifacts/models",
    "refs/artifacts/models/m",
    "refs/copies",
    "refs/copies/" + "a" * 64,
    "refs/replacing",
)
KEYS = (
    ".DS_Store",
    "._.DS_Store",
    ".nfs00000000000c0ffee",
    "Thumbs.db",
    "desktop.ini",
    "x~",
    ".x.swp",
    "x.bak",
    "x.pack",
    "f" * 32 + ".pack.part",
    "f" * 32 + "~",
    "f" * 64 + ".sync-conflict-20260101-120000-ABCDEFG",
    "@eaDir/x@SynoEAStream",
    ".Trash-1000/files/x",
    "f" * 32 + ".pack/x",
)
"""Names that could stand in a key."""
OTHER_NAMES = (
    "x (conflicted copy)",
    ".~lock.x#",
    "Icon\r",
    "naïve",
    "two\nlines",
    "lost+found/#123",
    "@3 (1)",
    "100% sure",
)
"""Names that could not."""


def tensors(step: int) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    weights = draw.normal(size=3000).astype(np.float32)
    return {"w": weights + np.float32(step * 1e-4), "b": draw.normal(size=(7, 100))}


def save(store: Store, step: int, **said: Any) -> None:
    with store.write_checkpoint(tensors(step), series="run") as pending:
        pending.commit(RefTarget(**{"run_id": "run", "step": step, **said}))


def loads(store: Store) -> int:
    """Load all there is, and say how much that was."""
    refs = store.checkpoints()
    for ref in refs:
        found = store.read_tensors(store.manifest(ref))
        expected = tensors(ref.step or 0)
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
    return len(refs)


def fill(backend: Backend) -> Store:
    """Make a store with something in each of its folders that is written by a save."""
    store = Store.init_backend(backend, chunk_bytes=CHUNK_BYTES)
    save(store, 0)
    save(store, 1)
    save(store, 1, name="ema")
    save(store, 1, path="models/m/x.arrow")
    save(store, 1, copy_path="7/models/m")
    return store


def use(backend: Backend, strays: Iterable[str]) -> None:
    """Do all that can be done with a store that `fill` has made, beside files that are not of it."""
    strangers = tuple(sorted(strays))
    store = Store.open_backend(backend)
    for step in (2, 3):
        save(store, step)
        save(store, step, path=f"models/n/{step}.arrow")
    assert [name for _, names in [store.artifacts("models")] for name in names] == ["m", "n"]
    assert len(store.walk_artifacts()) == 3
    assert loads(store) == 9
    assert store_stats(store).checkpoints == 9
    assert find_shares(store, "steps").needed_bytes > 0
    copy = Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)
    refs, failed = read_source(store)
    assert failed == []
    assert copy_refs(store, copy, refs).failed == ()
    assert loads(copy) == 9
    plan_optimize(store).execute()
    store.drop_artifacts("models/n")
    store.drop(next(ref for ref in store.checkpoints() if ref.step == 2))
    plan = plan_gc(store, grace_s=0)
    plan.execute()
    assert plan.strangers == strangers
    assert f"{len(strangers)} files that are not of the store ({strangers[0]!r}" in str(plan)
    again = plan_gc(store, grace_s=0)
    assert (again.packs, again.manifests) == ({}, ())
    assert loads(Store.open_backend(backend)) == 6
    report = verify(store, full=True)
    assert (report.problems, report.strangers) == ((), strangers)
    assert f"note: {len(strangers)} files that are not of the store ({strangers[0]!r}" in str(report)
    repair = plan_repair(store)
    assert repair.findings == ()
    repair.execute()
    save(store, 4)
    assert loads(Store.open_backend(backend)) == 7
    assert find_strangers(backend) == strangers
