"""Optimizing has an end: what one run has written no collection takes away, and the next run finds nothing to do."""

from __future__ import annotations

import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.codecs import Effort
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import _copy_refs, copy_refs, plan_gc, plan_optimize, read_source
from tensorcas_mlflow.store import Store
from tests.maintenance.optimize.trainings import CHUNK_BYTES, loads, new_store, save, tables, train


def n_bytes(store: Store) -> int:
    return sum(info.size for info in store.backend.list("packs"))


def collect(store: Store, max_waste: float) -> None:
    plan_gc(Store.open_backend(store.backend), grace_s=0, max_waste=max_waste).execute()


def optimize(store: Store, effort: Effort = Effort.SMALL) -> None:
    plan_optimize(Store.open_backend(store.backend), effort=effort).execute()


def assert_is_done(store: Store, effort: Effort = Effort.SMALL) -> None:
    before = n_bytes(store)
    assert plan_optimize(Store.open_backend(store.backend), effort=effort).is_empty
    for max_waste in (0.3, 0.1, 0):
        collect(store, max_waste)
        assert plan_optimize(Store.open_backend(store.backend), effort=effort).is_empty
        assert n_bytes(store) <= before
    optimize(store, effort)
    assert plan_optimize(Store.open_backend(store.backend), effort=effort).is_empty


def in_full(source: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A copy in which every delta was encoded in full, beside chunks that are optimized."""
    monkeypatch.setattr(_copy_refs, "plan_deltas", lambda *arguments: None)
    destination = new_store()
    copy_refs(source, destination, read_source(source)[0])
    return destination


def needed_by(store: Store) -> set[bytes]:
    return {bytes(each) for ref in store.checkpoints() for each in store.manifest(ref).digests}


@pytest.mark.parametrize("effort", list(Effort))
def test_a_pack_that_is_optimized_in_part_is_optimized_to_an_end(
    effort: Effort, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = train(new_store(), range(8))
    optimize(source, effort)
    store = in_full(source, monkeypatch)
    before = n_bytes(store)
    assert {int(each) for rows in tables(store.backend).values() for each in rows["effort"]} == {0, int(effort)}

    optimize(store, effort)

    assert_is_done(store, effort)
    assert n_bytes(store) < before
    assert n_bytes(store) <= 1.1 * n_bytes(source)
    assert all(loads(store, step) for step in range(8))


def test_a_collection_keeps_the_copies_that_were_optimized_though_the_run_died_before_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = train(new_store(), range(8))
    optimize(source)
    store = in_full(source, monkeypatch)
    before = n_bytes(store)
    with monkeypatch.context() as patch:
        patch.setattr("tensorcas_mlflow.maintenance._optimize.collect", lambda *arguments, **options: None)
        optimize(store)
    assert n_bytes(store) > before

    for max_waste in (0.3, 0):
        collect(store, max_waste)
        done = [rows["digest"][rows["effort"] > 0] for rows in tables(store.backend).values()]
        assert {bytes(each) for rows in done for each in rows} == needed_by(store)
    optimize(store)

    assert_is_done(store)
    assert all(loads(store, step) for step in range(8))


def test_chunk_that_takes_more_room_optimized_is_not_offered_again() -> None:
    # Bytes that shrink by a little: a save stores them encoded, an optimization raw, so that they can be mapped.
    store = new_store()
    drawn = np.random.default_rng(0).integers(0, 246, 40 * CHUNK_BYTES, dtype=np.uint8)
    with store.write_checkpoint({"w": drawn}, policy="small") as pending:
        pending.commit(RefTarget(run_id="run", step=0))

    optimize(store)

    assert_is_done(store)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_optimizations_end_whatever_is_saved_dropped_collected_and_copied_in_between(seed: int) -> None:
    draw = np.random.default_rng(seed)
    store = new_store()
    kept: set[int] = set()
    for turn in range(8):
        step = int(draw.integers(0, 40))
        save(store, step)
        kept.add(step)
        choice = int(draw.integers(0, 5))
        if choice == 0:
            optimize(store, Effort.BALANCED if draw.random() < 0.3 else Effort.SMALL)
        elif choice == 1:
            collect(store, float(draw.random()))
        elif choice == 2 and len(kept) > 2:
            gone = sorted(kept)[int(draw.integers(0, len(kept)))]
            store.backend.delete(RefTarget(run_id="run", step=gone).key)
            kept.discard(gone)
        elif choice == 3:
            store = Store.open_backend(store.backend)
            copied = Store.init_backend(MemoryBackend(is_remote=bool(turn % 2)), chunk_bytes=CHUNK_BYTES)
            copy_refs(store, copied, read_source(store)[0])
            store = copied

    optimize(store)

    assert_is_done(store)
    assert all(loads(store, step) for step in kept)
