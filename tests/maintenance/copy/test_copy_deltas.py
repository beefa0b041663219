"""Deltas are copied as they are stored: a copy takes the room that its source takes, and optimizing it has an end."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import Backend, LocalBackend, MemoryBackend
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout.packs import MAX_DEPTH, bases_of, is_delta
from tensorcas_mlflow.maintenance import _copy_refs, copy_refs, plan_gc, plan_optimize, read_source, verify
from tensorcas_mlflow.store import Store, _batch, _save
from tensorcas_mlflow.store.protocol import condemned_bytes, list_packs, parse_intent, read_pack_table
from tests.faulty import FaultyBackend
from tests.maintenance.copy.copying import CHUNK_BYTES, copy

N = 30_000


def state(step: int, *, seed: int = 0) -> dict[str, Any]:
    """Weights that wander, and noise that is another each time."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(0, 0.02, N)
    for _ in range(step):
        weights = weights + rng.normal(0, 1e-6, N)
    return {
        "weight": weights.astype(np.float32),
        "moment": np.random.default_rng(1000 * seed + step).normal(0, 1, N // 8).astype(np.float32),
        "bias": np.full(7, step, dtype=np.float32),
    }


def new_store(backend: Backend | None = None, *, like: Store | None = None) -> Store:
    backend = backend or MemoryBackend()
    return Store.init_backend(backend, chunk_bytes=CHUNK_BYTES, store_id=None if like is None else like.id)


def train(store: Store, steps: Iterable[int], *, run_id: str = "run", seed: int = 0) -> Store:
    for step in steps:
        with store.write_checkpoint(state(step, seed=seed), series=run_id) as pending:
            pending.commit(RefTarget(run_id=run_id, step=step))
    return store


def fresh(store: Store) -> Store:
    return Store.open_backend(store.backend)


def optimize(store: Store) -> None:
    plan_optimize(fresh(store)).execute()


def collect(store: Store, *, max_waste: float = 0.3) -> None:
    plan_gc(fresh(store), grace_s=0, max_waste=max_waste).execute()


def n_bytes(store: Store) -> int:
    return sum(size for _, size in list_packs(store.backend))


def n_deltas(store: Store) -> int:
    return sum(int(is_delta(read_pack_table(store.backend, name)).sum()) for name, _ in list_packs(store.backend))


def base_packs(store: Store) -> dict[str, set[str]]:
    """For each pack the packs in which the bases of its deltas lie."""
    tables = {name: read_pack_table(store.backend, name) for name, _ in list_packs(store.backend)}
    return {name: {base.pack for base in bases_of(rows[is_delta(rows)])} for name, rows in tables.items()}


def assert_holds(store: Store, steps: Iterable[int], *, run_id: str = "run", seed: int = 0) -> None:
    opened = fresh(store)
    for step in steps:
        ref = opened.ref(RefTarget(run_id=run_id, step=step).key)
        assert ref is not None
        found = opened.read_tensors(opened.manifest(ref))
        assert all(found[name].tobytes() == array.tobytes() for name, array in state(step, seed=seed).items())
    assert verify(opened, full=True).problems == ()


def assert_is_optimized(store: Store) -> None:
    """Nothing is left to do, and an ordinary collection takes nothing of it away."""
    before = n_bytes(store)
    assert plan_optimize(fresh(store)).is_empty, str(plan_optimize(fresh(store)))
    for max_waste in (0.3, 0):
        collect(store, max_waste=max_waste)
        assert n_bytes(store) == before
        assert plan_optimize(fresh(store)).is_empty


@pytest.fixture(params=["memory", "remote", "local"])
def destination_backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    if request.param == "local":
        return LocalBackend(tmp_path / "copy")
    return MemoryBackend(is_remote=request.param == "remote")


def test_a_copy_of_an_optimized_store_takes_the_room_of_its_source(destination_backend: Backend) -> None:
    source = train(new_store(), range(8))
    optimize(source)
    destination = new_store(destination_backend, like=source)
    copy(source, destination)

    assert n_deltas(source) > 100
    assert n_bytes(destination) <= 1.02 * n_bytes(source)
    assert_holds(destination, range(8))
    assert_is_optimized(destination)


@pytest.mark.long
def test_a_copy_of_a_store_that_was_not_optimized_takes_the_room_of_its_source(destination_backend: Backend) -> None:
    source = train(new_store(), range(8))
    destination = new_store(destination_backend)
    copy(source, destination)

    assert n_deltas(source) > 100
    assert n_bytes(destination) <= 1.02 * n_bytes(source)
    assert_holds(destination, range(8))
    optimize(destination)
    assert_holds(destination, range(8))
    assert_is_optimized(destination)


@pytest.mark.long
def test_a_second_copy_of_later_steps_takes_the_room_of_its_source(destination_backend: Backend) -> None:
    source = train(new_store(), range(4))
    optimize(source)
    destination = new_store(destination_backend, like=source)
    copy(source, destination)
    train(source, range(4, 8))
    optimize(source)
    before = set(base_packs(destination))
    copy(source, destination)

    assert n_bytes(destination) <= 1.02 * n_bytes(source)
    new = set(base_packs(destination)) - before
    assert any(base_packs(destination)[name] & before for name in new)
    assert_holds(destination, range(8))
    assert_is_optimized(destination)


@pytest.mark.long
def test_a_copy_in_small_batches_of_many_packs_takes_the_room_of_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_copy_refs, "MAX_BATCH_BYTES", 60_000)
    for module in (_save, _batch):
        monkeypatch.setattr(module, "TARGET_BYTES", 30_000)
    source = train(new_store(), range(12))
    optimize(source)
    destination = new_store(like=source)
    copy(source, destination)

    assert len(base_packs(destination)) > 3
    assert n_bytes(destination) <= 1.02 * n_bytes(source) + 1000 * len(base_packs(destination))
    assert_holds(destination, range(12))
    assert_is_optimized(destination)


@pytest.mark.long
def test_a_base_that_no_copied_ref_needs_goes_along_where_several_deltas_take_it() -> None:
    source = train(new_store(), range(8))
    optimize(source)
    whole = n_bytes(source)
    refs, _ = read_source(source)
    destination = new_store(like=source)
    copy_refs(source, destination, [ref for ref in refs if ref.step in (1, 2, 5, 6, 7)])

    assert n_deltas(destination) > 50
    assert n_bytes(destination) < whole
    assert_holds(destination, (1, 2, 5, 6, 7))


@pytest.mark.long
@pytest.mark.parametrize("step", range(6))
def test_a_single_step_is_whole_without_what_it_was_stored_against(step: int) -> None:
    source = train(new_store(), range(6))
    optimize(source)
    refs, _ = read_source(source)
    destination = new_store(like=source)
    copy_refs(source, destination, [ref for ref in refs if ref.step == step])
    alone = train(new_store(), [step])

    assert_holds(destination, [step])
    assert n_bytes(destination) <= 1.05 * n_bytes(alone)


def test_a_chunk_that_the_destination_has_from_elsewhere_is_a_base() -> None:
    source = train(new_store(), range(4))
    destination = train(new_store(), range(1))
    before = n_bytes(destination)
    copy(source, destination)

    assert n_bytes(destination) - before < 0.8 * (n_bytes(train(new_store(), [1])) * 3)
    assert n_deltas(destination) > 50
    assert_holds(destination, range(4))


def test_copy_uses_no_base_that_has_rotted_in_the_destination() -> None:
    source = train(new_store(), range(2))
    destination = train(new_store(), range(1))
    [(name, _)] = list_packs(destination.backend)
    ref = destination.ref(RefTarget(run_id="run", step=0).key)
    assert ref is not None
    wanted = destination.manifest(ref).row("weight").digests[0].tobytes()
    [row] = [row for row in read_pack_table(destination.backend, name) if row["digest"].tobytes() == wanted]
    blob = bytearray(destination.backend.get(f"packs/{name}.pack"))
    blob[int(row["offset"]) + int(row["stored_bytes"]) // 2] ^= 1
    destination.backend.delete(f"packs/{name}.pack")
    destination.backend.put_new(f"packs/{name}.pack", [bytes(blob)])
    refs, _ = read_source(source)
    copy_refs(source, fresh(destination), [ref for ref in refs if ref.step == 1])

    for other in base_packs(destination).keys() - {name}:
        rows = read_pack_table(destination.backend, other)
        deltas = rows[is_delta(rows)]
        assert len(deltas) > 0
        assert all(base.digest != wanted for base in bases_of(deltas))


def test_copy_uses_no_base_condemned_at_the_last_moment() -> None:
    source = train(new_store(), range(2))
    destination = train(new_store(), range(1))
    names = frozenset(name for name, _ in list_packs(destination.backend))
    opened = fresh(destination)
    opened.catalog.refresh()
    destination.backend.put_new("condemned/" + "1" * 32, [condemned_bytes(names, frozenset())])
    refs, _ = read_source(source)
    copy_refs(source, opened, [ref for ref in refs if ref.step == 1])

    assert not any(bases & names for bases in base_packs(destination).values())
    assert_holds(destination, [1])


def test_intents_name_the_packs_in_which_bases_lie_or_will() -> None:
    source = train(new_store(), range(4))
    memory = MemoryBackend()
    train(new_store(memory), range(1))
    there = {name for name, _ in list_packs(memory)}
    named: list[set[str]] = []

    class Watching(FaultyBackend):
        def promote(self, *args: Any, **options: Any) -> None:
            info = self.inner.stat(args[0])
            assert info is not None
            named.append(set(parse_intent(info, self.inner.get(args[0])).bases))
            super().promote(*args, **options)

    destination = Store.open_backend(Watching(memory))
    copy(source, destination)

    taken = set().union(*base_packs(destination).values())
    assert named
    assert all(taken <= each for each in named)
    assert there <= named[0]


@pytest.mark.long
def test_a_chain_grows_no_longer_from_copy_to_copy() -> None:
    source = train(new_store(), range(6))
    optimize(source)
    for _ in range(3):
        destination = train(new_store(), [0, 5])
        copy(source, destination)
        depths = [
            int(read_pack_table(destination.backend, name)["depth"].max())
            for name, _ in list_packs(destination.backend)
        ]
        assert max(depths) <= 3 < MAX_DEPTH
        assert_holds(destination, range(6))
        source = destination
