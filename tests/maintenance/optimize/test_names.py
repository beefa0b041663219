"""Optimization of tensors that are versions of one tensor under different names."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import plan_gc, plan_optimize, verify
from tensorcas_mlflow.maintenance._optimize_done import DoneChunks
from tensorcas_mlflow.maintenance._optimize_relatives import Relatives
from tensorcas_mlflow.maintenance._optimize_tracks import places_of
from tensorcas_mlflow.store import Store, _bases, _save
from tests.faulty import FaultyBackend, SimulatedCrash, When
from tests.maintenance.optimize.hooks import Interrupted
from tests.maintenance.optimize.test_beside_others import CHANGES, copy_of
from tests.maintenance.optimize.trainings import CHUNK_BYTES, collect, flip, n_bytes_of, optimize, same
from tests.python_calls import calls_of

Tensors = dict[str, Any]


def weights(step: int, *, names: str = "layers.#.weight") -> Tensors:
    """Return the weights of six layers, moved a little at each step."""
    draw = np.random.default_rng(0)
    layers = [draw.normal(0, 0.02, (80, 100)) for _ in range(6)]
    for _ in range(step):
        layers = [layer + draw.normal(0, 1e-6, layer.shape) for layer in layers]
    return {names.replace("#", str(at)): layer.astype(np.float32) for at, layer in enumerate(layers)}


def save(store: Store, tensors: Tensors, run_id: str, step: int = 0) -> None:
    with store.write_checkpoint(tensors) as pending:
        pending.commit(RefTarget(run_id=run_id, step=step))


def loads(store: Store, tensors: Tensors, run_id: str, step: int = 0) -> bool:
    fresh = Store.open_backend(store.backend)
    ref = fresh.ref(RefTarget(run_id=run_id, step=step).key)
    return ref is not None and same(fresh.read_tensors(fresh.manifest(ref)), tensors)


@pytest.fixture(params=["with sketches", "without sketches"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Return a store whose saves do not search for bases under other names."""
    monkeypatch.setattr(_bases, "find_relative", lambda *_: (None, set()))
    if request.param == "without sketches":
        monkeypatch.setattr(_save, "FIRST_BYTES", 1 << 60)
    return Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)


def with_fine_tune(names: str) -> Store:
    made = Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)
    save(made, weights(0), "base")
    for step in (1, 2):
        save(made, weights(step, names=names), "tuned", step)
    return made


@pytest.mark.long
def test_fine_tune_under_other_names_takes_as_much_as_under_the_same(store: Store) -> None:
    other = with_fine_tune("base_model.model.layers.#.weight")
    before = n_bytes_of(other.backend)
    optimize(other)
    same_names = with_fine_tune("layers.#.weight")
    optimize(same_names)

    assert n_bytes_of(other.backend) < 0.9 * before
    assert n_bytes_of(other.backend) == pytest.approx(n_bytes_of(same_names.backend), rel=0.01)
    assert loads(other, weights(0), "base")
    assert loads(other, weights(2, names="base_model.model.layers.#.weight"), "tuned", 2)
    assert verify(Store.open_backend(other.backend), full=True).problems == ()


def test_second_run_after_new_names_writes_nothing_and_takes_a_later_step_as_a_delta(store: Store) -> None:
    made = with_fine_tune("model.#")
    optimize(made)
    packs = set(made.backend.list_dir("packs").blobs)
    second = optimize(made)
    left, before = set(made.backend.list_dir("packs").blobs), n_bytes_of(made.backend)
    save(made, weights(3, names="third.#"), "third")
    optimize(made)

    assert second.written_bytes == 0
    assert left == packs
    assert n_bytes_of(made.backend) - before < 0.6 * 6 * 32_000
    assert loads(made, weights(3, names="third.#"), "third")


def test_damaged_chunk_of_a_relative_costs_only_bytes(store: Store) -> None:
    save(store, weights(0), "base")
    [pack] = store.backend.list_dir("packs").blobs
    save(store, weights(1, names="model.#"), "tuned")
    assert isinstance(store.backend, MemoryBackend)
    flip(store.backend, f"packs/{pack}", 1000)
    optimize(store)

    assert loads(store, weights(1, names="model.#"), "tuned")


def test_copy_beside_its_original_stays_a_tensor_of_its_own(store: Store) -> None:
    save(store, weights(0), "base")
    save(store, weights(1) | weights(2, names="average.#"), "tuned")
    base, tuned = sorted(store.checkpoints(), key=lambda ref: ref.run_id or "")
    manifests, relatives = [store.manifest(base), store.manifest(tuned)], Relatives(store)
    relatives.note(base, manifests[0])
    relation = relatives.nearest(manifests[1], {})
    assert relation is not None

    places = list(places_of(manifests, [], DoneChunks(store.backend, 1), {manifests[1].digest: relation}))

    n_of_base = len(manifests[0].digests)
    assert sorted(len(place.digests) for place in places) == [1] * n_of_base + [2] * n_of_base


def unrelated(seed: int) -> Tensors:
    """Return weights of another model with the same names."""
    draw = np.random.default_rng(seed)
    return {f"layers.{at}.weight": draw.normal(0, 0.02, (80, 100)).astype(np.float32) for at in range(6)}


def test_relative_is_found_though_an_unrelated_model_has_its_names(store: Store) -> None:
    save(store, weights(0), "base")
    save(store, unrelated(1), "unrelated")
    optimize(store)
    before = n_bytes_of(store.backend)
    save(store, weights(1, names="model.layers.#"), "tuned")
    optimize(store)

    assert n_bytes_of(store.backend) - before < 0.6 * 6 * 32_000
    assert loads(store, weights(0), "base")
    assert loads(store, weights(1, names="model.layers.#"), "tuned")
    assert optimize(store).written_bytes == 0


@pytest.mark.long
@pytest.mark.parametrize("names", ["layers.#.weight", "model.layers.#"])
def test_relative_is_found_behind_many_other_checkpoints(
    store: Store, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorcas_mlflow.maintenance._optimize.WINDOW", 3)
    monkeypatch.setattr("tensorcas_mlflow.maintenance._optimize._N_BEFORE", 2)
    save(store, weights(0), "base")
    for seed in range(1, 10):
        save(store, unrelated(seed), f"unrelated {seed}")
    without = n_bytes_of(store.backend)
    save(store, weights(1, names=names), "tuned")
    optimize(store)

    assert n_bytes_of(store.backend) - without < 0.6 * 6 * 32_000
    assert loads(store, weights(0), "base")
    assert loads(store, weights(1, names=names), "tuned")
    assert optimize(store).written_bytes == 0
    assert verify(Store.open_backend(store.backend), full=True).problems == ()


@pytest.mark.long
def test_damaged_relative_behind_many_others_costs_only_bytes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorcas_mlflow.maintenance._optimize.WINDOW", 2)
    monkeypatch.setattr("tensorcas_mlflow.maintenance._optimize._N_BEFORE", 1)
    save(store, weights(0), "base")
    [pack] = store.backend.list_dir("packs").blobs
    for seed in range(1, 6):
        save(store, unrelated(seed), f"unrelated {seed}")
    save(store, weights(1, names="model.#"), "tuned")
    assert isinstance(store.backend, MemoryBackend)
    flip(store.backend, f"packs/{pack}", 1000)
    optimize(store)

    assert loads(store, weights(1, names="model.#"), "tuned")


def with_far_relative(monkeypatch: pytest.MonkeyPatch) -> Store:
    """Return an optimized store, with a fine-tune of its first model that is not optimized."""
    monkeypatch.setattr("tensorcas_mlflow.maintenance._optimize.WINDOW", 2)
    monkeypatch.setattr("tensorcas_mlflow.maintenance._optimize._N_BEFORE", 1)
    made = Store.init_backend(MemoryBackend(), chunk_bytes=4 * CHUNK_BYTES)
    save(made, weights(0), "base")
    for seed in range(1, 5):
        save(made, unrelated(seed), f"unrelated {seed}")
    optimize(made)
    save(made, weights(1, names="model.#"), "tuned")
    return made


def n_calls_of(store: Store) -> int:
    """Return the number of calls that an optimization of a store makes to its backend."""
    counting = FaultyBackend(copy_of(store).backend)
    plan_optimize(Store.open_backend(counting)).execute()
    return len(counting.calls)


def all_load(store: Store, *, has_base: bool) -> bool:
    is_there = all(loads(store, unrelated(seed), f"unrelated {seed}") for seed in range(1, 5))
    return (
        is_there
        and loads(store, weights(1, names="model.#"), "tuned")
        and (not has_base or loads(store, weights(0), "base"))
        and verify(Store.open_backend(store.backend), full=True).problems == ()
    )


@pytest.mark.long
def test_relative_far_back_that_is_deleted_and_collected_at_any_call_loses_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = with_far_relative(monkeypatch)
    n_acted = 0
    for nth in range(0, n_calls_of(made), 3):
        each = copy_of(made)

        def delete_base(each: Store = each) -> None:
            fresh = Store.open_backend(each.backend)
            ref = fresh.ref(RefTarget(run_id="base", step=0).key)
            assert ref is not None
            fresh.drop(ref)
            plan_gc(fresh, grace_s=0, max_waste=0).execute()

        interrupted = Interrupted(each.backend, nth, delete_base)
        plan_optimize(Store.open_backend(interrupted)).execute()
        n_acted += interrupted.has_acted()

        assert all_load(each, has_base=not interrupted.has_acted())
    assert n_acted > 10


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
def test_optimization_with_a_relative_far_back_resumes_after_a_death_at_any_change(
    store: Store, when: When, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = with_far_relative(monkeypatch)
    whole = copy_of(made)
    optimize(whole)
    collect(whole)
    nth, is_dead = 0, True
    while is_dead:
        each = copy_of(made)
        faulty = FaultyBackend(each.backend)
        faulty.crash(nth, operations=CHANGES, when=when)
        with suppress(SimulatedCrash):
            plan_optimize(Store.open_backend(faulty)).execute()
        nth, is_dead = nth + 1, faulty.has_met()

        assert all_load(each, has_base=True)
        optimize(each)
        collect(each)  # the intent of the dead process keeps what it names, as this process lives
        assert all_load(each, has_base=True)
        assert n_bytes_of(each.backend) == pytest.approx(n_bytes_of(whole.backend), rel=0.02)
        assert optimize(each).written_bytes == 0
    assert nth > 4


def test_search_reads_chunks_of_a_bounded_number_of_checkpoints_without_sketches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tensorcas_mlflow.maintenance._optimize_relatives.MOST_UNREAD", 2)
    monkeypatch.setattr(_bases, "find_relative", lambda *_: (None, set()))
    monkeypatch.setattr(_save, "FIRST_BYTES", 1 << 60)
    made = Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)
    relatives = Relatives(made)
    for seed in range(1, 6):
        save(made, unrelated(seed), f"unrelated {seed}")
    for ref in sorted(made.checkpoints(), key=lambda ref: ref.run_id or ""):
        relatives.note(ref, made.manifest(ref))
    save(made, weights(0), "tuned")
    tuned = made.ref(RefTarget(run_id="tuned", step=0).key)
    assert tuned is not None
    with calls_of("compute_sketches") as calls:
        found = relatives.nearest(made.manifest(tuned), {})

    assert found is None
    assert len(calls) == 1 + 2
