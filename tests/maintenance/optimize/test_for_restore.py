"""Optimization for restore: the latest and the pinned steps take one base a chunk at most."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.errors import CheckpointNotFoundError
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.maintenance import OptimizeReport, _optimize, plan_optimize, verify
from tensorcas_mlflow.maintenance._optimize import restored_fast
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import declare
from tests.faulty import FaultyBackend, SimulatedCrash
from tests.maintenance.optimize import test_beside_others
from tests.maintenance.optimize.test_beside_others import ACTS, CHANGES, When, act_between, copy_of, n_calls
from tests.maintenance.optimize.trainings import (
    CHUNK_BYTES,
    collect,
    drop,
    is_done,
    loads,
    new_store,
    optimize,
    state,
    tables,
    train,
)

LAST = 8


@pytest.fixture(scope="module")
def optimized() -> Store:
    """A training of which every step was optimized for size."""
    store = train(new_store(), range(LAST + 1))
    optimize(store)
    return store


def key(step: int) -> str:
    return RefTarget(run_id="run", step=step).key


def for_restore(backend: Backend, pins: Collection[str] = ()) -> OptimizeReport:
    return plan_optimize(Store.open_backend(backend), for_restore=True, pins=pins).execute()


def depths(store: Store, step: int) -> list[int]:
    """Return the depth of every copy of every chunk of a step, in any pack."""
    fresh = Store.open_backend(store.backend)
    ref = fresh.ref(key(step))
    assert ref is not None
    needed = {bytes(each) for each in fresh.manifest(ref).digests}
    return [int(e["depth"]) for rows in tables(store.backend).values() for e in rows if bytes(e["digest"]) in needed]


def test_latest_and_pinned_steps_of_an_optimized_store_take_one_base_at_most(optimized: Store) -> None:
    store = copy_of(optimized)
    pin = next(step for step in range(LAST) if max(depths(store, step)) > 1)
    latest = max(depths(store, LAST))

    for_restore(store.backend, [key(pin)])

    assert latest > 1
    assert max(depths(store, LAST)) <= 1
    assert max(depths(store, pin)) <= 1
    assert all(loads(store, step) for step in range(LAST + 1))
    assert is_done(store.backend)


@pytest.mark.long
def test_latest_and_pinned_steps_take_one_base_at_most_in_a_store_never_optimized() -> None:
    store = train(new_store(), range(LAST + 1))

    for_restore(store.backend, [key(3)])

    assert max(depths(store, LAST)) <= 1
    assert max(depths(store, 3)) <= 1
    assert max(max(depths(store, step)) for step in range(LAST)) > 1
    assert all(loads(store, step) for step in range(LAST + 1))


def test_optimization_for_restore_has_an_end_and_no_later_one_or_collection_undoes_it(optimized: Store) -> None:
    store = copy_of(optimized)
    for_restore(store.backend)

    for _ in range(2):
        assert plan_optimize(Store.open_backend(store.backend), for_restore=True).is_empty
        assert plan_optimize(Store.open_backend(store.backend)).is_empty
        collect(store)
        assert max(depths(store, LAST)) <= 1


@pytest.mark.long
def test_next_optimization_for_restore_takes_the_new_latest_step(optimized: Store) -> None:
    store = copy_of(optimized)
    for_restore(store.backend)
    train(store, range(LAST + 1, LAST + 3))

    for_restore(store.backend)

    assert max(depths(store, LAST + 2)) <= 1
    assert all(loads(store, step) for step in range(LAST + 3))


def test_after_the_deletion_of_the_latest_step_the_one_before_takes_one_base_at_most(optimized: Store) -> None:
    store = copy_of(optimized)
    latest = next(step for step in reversed(range(LAST)) if max(depths(store, step)) > 1)
    for step in range(latest + 1, LAST + 1):
        drop(store, step)

    for_restore(store.backend)

    assert max(depths(store, latest)) <= 1
    assert all(loads(store, step) for step in range(latest + 1))


def test_chunk_shared_with_a_deep_version_of_another_tensor_takes_one_base_at_most() -> None:
    store = new_store()
    n = 8
    # The latest step holds the first chunks of the tensors before it, and not the others.
    for step in range(n):
        weights = np.asarray(state(step)["layers.0.weight"])
        tensors = {"weights": weights}
        if step == n - 1:
            tensors = {f"old{at}": np.asarray(state(at)["layers.0.weight"])[:2048] for at in range(n - 1)}
        with store.write_checkpoint(tensors) as pending:
            pending.commit(RefTarget(run_id="run", step=step))

    for_restore(store.backend)

    assert max(depths(store, n - 1)) <= 1
    assert verify(Store.open_backend(store.backend), full=True).problems == ()


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
def test_death_at_any_change_of_an_optimization_for_restore_loses_nothing(optimized: Store, when: When) -> None:
    counting = FaultyBackend(copy_of(optimized).backend)
    for_restore(counting)
    n_changes = sum(call in CHANGES for call in counting.calls)
    assert n_changes > 5

    for nth in range(n_changes):
        store = copy_of(optimized)
        faulty = FaultyBackend(store.backend)
        faulty.crash(nth, operations=CHANGES, when=when)
        with pytest.raises(SimulatedCrash):
            for_restore(faulty)
        assert verify(Store.open_backend(store.backend), full=True).problems == ()

        collect(store)
        for_restore(store.backend)
        collect(store)

        assert max(depths(store, LAST)) <= 1
        assert verify(Store.open_backend(store.backend), full=True).problems == ()
        assert plan_optimize(Store.open_backend(store.backend), for_restore=True).is_empty


def test_plan_for_restore_names_its_steps_and_changes_nothing(optimized: Store) -> None:
    store = copy_of(optimized)
    before = {info.key for info in store.backend.list("packs")}

    plan = plan_optimize(store, for_restore=True, pins=[key(2)])

    assert list(plan.shallow_labels) == ["run run step 2", f"run run step {LAST}"]
    assert plan.n_chunks > 0
    assert {info.key for info in store.backend.list("packs")} == before


def test_pin_of_no_checkpoint_is_refused(optimized: Store) -> None:
    with pytest.raises(CheckpointNotFoundError, match="refs/runs/run/@99"):
        plan_optimize(copy_of(optimized), for_restore=True, pins=["refs/runs/run/@99"])


def test_pins_without_for_restore_are_refused(optimized: Store) -> None:
    with pytest.raises(ValueError, match="for_restore=True"):
        plan_optimize(copy_of(optimized), pins=[key(2)])


def refs() -> Iterator[Ref]:
    store = new_store()
    targets: list[dict[str, Any]] = [
        {"run_id": "a", "step": 2},
        {"run_id": "a", "step": 1},
        {"run_id": "a", "step": 1, "name": "ema"},
        {"run_id": "b", "step": 0},
    ]
    for target in targets:
        with store.write_checkpoint({"w": np.zeros(3)}) as pending:
            yield pending.commit(RefTarget(**target))


def test_latest_of_each_series_is_the_one_of_the_highest_step() -> None:
    found = restored_fast(list(refs()), [])

    assert [(ref.run_id, ref.name, ref.step) for ref in found] == [("a", None, 2), ("a", "ema", 1), ("b", None, 0)]


def test_model_is_pinned_by_its_id_and_a_file_by_its_path() -> None:
    base = next(refs())
    models = [replace(base, key_=f"refs/{n}", model_id=f"m-{n}", path=f"models/m-{n}", step=n) for n in range(3)]
    file = replace(base, key_="refs/file", kind="file", run_id=None, path="notes/a.bin")

    found = restored_fast([*models, file], ["m-0", "notes/a.bin"])

    assert [ref.key for ref in found] == ["refs/0", "refs/2", "refs/file"]


@pytest.mark.long
def test_deep_copies_that_a_save_under_way_keeps_go_with_the_next_optimization(
    optimized: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = copy_of(optimized)
    monkeypatch.setattr(_optimize, "TARGET_BYTES", 4 * CHUNK_BYTES)  # packs lighter than the one with the deep copies
    monkeypatch.setattr(_optimize, "BLOCK_BYTES", 8 * CHUNK_BYTES)
    packs = set(tables(store.backend))
    intent = declare(store.backend, f"{'0' * 64}.{'1' * 8}", np.empty((0, 32), np.uint8), packs)
    for_restore(store.backend)
    assert packs <= set(tables(store.backend))
    assert max(depths(store, LAST)) > 1
    store.backend.withdraw(*intent)

    plan = plan_optimize(Store.open_backend(store.backend), for_restore=True)
    plan.execute()

    assert set(plan.gc.packs) == packs
    assert max(depths(store, LAST)) <= 1
    assert all(loads(store, step) for step in range(LAST + 1))
    assert plan_optimize(Store.open_backend(store.backend), for_restore=True).is_empty


@pytest.fixture
def acted_on(optimized: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An optimized store of steps 0 to 3, for `act_between` with an optimization for restore."""
    monkeypatch.setattr(test_beside_others, "attempt", for_restore)
    store = copy_of(optimized)
    for step in range(4, LAST + 1):
        drop(store, step)
    assert max(depths(store, 3)) > 1
    return store


@pytest.mark.long
@pytest.mark.parametrize("act", ACTS)
def test_optimization_for_restore_loses_nothing_whatever_others_do_meanwhile(
    acted_on: Store, act: Callable[[Store], None]
) -> None:
    n = n_calls(acted_on)
    for nth in range(ACTS.index(act), n, n // 5):
        act_between(acted_on, nth, act)


@pytest.mark.long
@pytest.mark.parametrize("act", ACTS)
def test_work_of_others_between_any_two_calls_of_an_optimization_for_restore_loses_nothing(
    acted_on: Store, act: Callable[[Store], None]
) -> None:
    for nth in range(n_calls(acted_on)):
        act_between(acted_on, nth, act)
