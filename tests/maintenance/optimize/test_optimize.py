"""Optimized stores: smaller, and bit for bit what they were."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.base.progress import Progress
from tensorcas_mlflow.codecs import Effort
from tensorcas_mlflow.errors import DirectAccessError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout.packs import bases_of, is_delta, pack_key
from tensorcas_mlflow.maintenance import _optimize, disk_bytes, plan_optimize, plan_repair, verify
from tensorcas_mlflow.maintenance._optimize import in_order
from tensorcas_mlflow.store import Store
from tests.maintenance.optimize.trainings import (
    CHUNK_BYTES,
    base_packs,
    blobs,
    collect,
    drop,
    flip,
    is_done,
    loads,
    n_bytes_of,
    new_store,
    optimize,
    same,
    save,
    state,
    tables,
    train,
)


@pytest.mark.parametrize("is_remote", [False, True])
def test_every_step_loads_as_it_was_and_the_store_is_smaller(is_remote: bool) -> None:
    store = train(new_store(MemoryBackend(is_remote=is_remote)), range(6))
    before = disk_bytes(store.backend)

    report = optimize(store)

    assert all(loads(store, step) for step in range(6))
    assert is_done(store.backend)
    assert report.bytes_after == disk_bytes(store.backend) < before == report.bytes_before


def test_optimization_covers_files_of_a_local_store(tmp_path: Path) -> None:
    store = train(Store.init(tmp_path, chunk_bytes=CHUNK_BYTES, database=False), range(4))

    optimize(store)

    assert all(loads(store, step) for step in range(4))
    assert is_done(store.backend)


def test_store_whose_database_takes_less_than_new_packs_stays_as_it_is(tmp_path: Path) -> None:
    """A database compresses the tables of small packs, which are most of this store."""
    store = train(Store.init(tmp_path, chunk_bytes=CHUNK_BYTES, database=True), range(4))
    before = disk_bytes(store.backend)

    report = plan_optimize(Store.open(tmp_path)).execute()

    assert report.is_undone
    assert disk_bytes(store.backend) <= before + 2048  # two pages: the record of the work, and one that is not full
    assert all(loads(Store.open(tmp_path), step) for step in range(4))


def test_a_second_run_finds_nothing_and_writes_nothing(store: Store) -> None:
    optimize(train(store, range(4)))
    before = blobs(store.backend)

    plan = plan_optimize(Store.open_backend(store.backend))
    plan.execute()

    assert plan.is_empty
    assert plan.labels == ()
    assert blobs(store.backend) == before


def test_a_plan_says_what_is_to_be_done_and_does_nothing(store: Store) -> None:
    train(store, range(2))
    before = blobs(store.backend)

    plan = plan_optimize(store)

    assert plan.labels == ("run run step 0", "run run step 1")
    assert plan.n_chunks == sum(len(np.unique(rows["digest"], axis=0)) for rows in tables(store.backend).values())
    assert plan.n_bytes > plan.n_stored_bytes > 0
    assert blobs(store.backend) == before


def test_a_later_step_may_be_the_base_of_an_earlier_one(store: Store) -> None:
    steps = {np.asarray(state(step)["layers.0.weight"]).tobytes()[:CHUNK_BYTES]: step for step in range(5)}
    optimize(train(store, range(5)))
    by_digest: dict[bytes, int] = {}
    for step in range(5):
        ref = store.ref(RefTarget(run_id="run", step=step).key)
        assert ref is not None
        by_digest[store.manifest(ref).row("layers.0.weight").digests[0].tobytes()] = step

    pairs = [
        (by_digest[entry["digest"].tobytes()], by_digest[base.digest])
        for rows in tables(store.backend).values()
        for entry, base in zip(rows[is_delta(rows)], bases_of(rows[is_delta(rows)]), strict=True)
        if entry["digest"].tobytes() in by_digest
    ]

    assert len(steps) == 5
    assert any(base > step for step, base in pairs)
    assert any(base < step for step, base in pairs)


def test_no_chunk_takes_more_than_three_others_to_be_read(store: Store) -> None:
    optimize(train(store, range(9)))

    depths = np.concatenate([rows["depth"] for rows in tables(store.backend).values()])
    assert 1 <= depths.max() <= 3


def test_a_later_step_is_stored_against_optimized_chunks_that_stay(store: Store) -> None:
    optimize(train(store, range(3)))
    before = set(tables(store.backend))
    train(store, range(3, 5))

    optimize(store)

    assert all(loads(store, step) for step in range(5))
    assert is_done(store.backend)
    assert before < set(tables(store.backend))
    new = set(tables(store.backend)) - before
    assert any(base_packs(store.backend)[name] & before for name in new)


def test_a_run_is_stored_against_another_that_began_before(store: Store) -> None:
    train(store, range(1), run_id="parent")
    train(store, range(1, 3), run_id="child")

    optimize(store)

    assert loads(store, 0, run_id="parent")
    assert loads(store, 2, run_id="child")
    [rows] = tables(store.backend).values()
    assert is_delta(rows).sum() >= 2 * 2 * 4  # of two tensors and two of the three versions, nearly all chunks


def test_refs_are_ordered_by_the_beginning_of_their_runs(store: Store) -> None:
    for run_id, step in (("b", 0), ("a", 0), ("b", 1), ("a", 1)):
        save(store, step, run_id=run_id)
        time.sleep(0.002)  # refs tell milliseconds

    refs = in_order(store.checkpoints())

    assert [(ref.run_id, ref.step) for ref in refs] == [("b", 0), ("b", 1), ("a", 0), ("a", 1)]


def test_only_more_effort_optimizes_an_optimized_store_again(store: Store) -> None:
    optimize(train(store, range(3)), Effort.BALANCED)
    assert {int(each) for rows in tables(store.backend).values() for each in rows["effort"]} == {Effort.BALANCED}

    optimize(store, Effort.SMALL)

    assert {int(each) for rows in tables(store.backend).values() for each in rows["effort"]} == {Effort.SMALL}
    assert plan_optimize(store, effort=Effort.BALANCED).is_empty


def test_tensors_of_every_kind_load_as_they_were(store: Store) -> None:
    def odd(step: int) -> dict[str, Any]:
        rng = np.random.default_rng(step)
        return {
            "empty": np.empty((0, 3), np.float32),
            "scalar": np.array(step),
            "texts": np.array([f"token {step}", "other"] * 900),
            "records": np.array([(step, i / 7) for i in range(900)], dtype=[("a", "<i4"), ("b", "<f8")]),
            "big": rng.normal(0, 1, 2_000).astype(">f4"),
            "complex": rng.normal(0, 1, 1_500) + 1j * step,
            "halves": (np.linspace(0, 1, 5_000) + step * 1e-3).astype(np.float16),
            "bytes": rng.integers(0, 256, 9_000).astype(np.uint8),
            "bools": rng.random(9_000) < 0.1,
            "zeros": np.zeros(6_000),
            "trees": np.arange(4_000, dtype=np.int64) + step,
        }

    for step in range(3):
        with store.write_checkpoint(odd(step), cuts={"trees": [100, 1_100, 4_000]}) as pending:
            pending.commit(RefTarget(run_id="run", step=step))

    optimize(store)

    fresh = Store.open_backend(store.backend)
    for step in range(3):
        ref = fresh.ref(RefTarget(run_id="run", step=step).key)
        assert ref is not None
        assert same(fresh.read_tensors(fresh.manifest(ref)), odd(step))
    assert is_done(store.backend)


def test_one_array_under_two_names_is_stored_once(store: Store) -> None:
    for step in range(2):
        weights = state(step)["layers.0.weight"]
        with store.write_checkpoint({"tied": weights, "head": weights, "again": weights[:4_096]}) as pending:
            pending.commit(RefTarget(run_id="run", step=step))

    optimize(store)

    digests = np.concatenate([rows["digest"] for rows in tables(store.backend).values()])
    assert len(np.unique(digests, axis=0)) == len(digests)


def test_an_empty_store_is_optimized_already(store: Store) -> None:
    assert plan_optimize(store).is_empty


def test_steps_that_are_dropped_give_their_room_back_though_bases_lie_beside_them(store: Store) -> None:
    optimize(train(store, range(8)))
    for step in range(8):
        if step not in (2, 6):
            drop(store, step)
    collect(store)
    before = n_bytes_of(store.backend)

    optimize(store)

    assert loads(store, 2)
    assert loads(store, 6)
    assert n_bytes_of(store.backend) < 0.6 * before
    assert plan_optimize(Store.open_backend(store.backend)).is_empty


def test_a_collection_that_rewrites_keeps_what_was_spent(store: Store) -> None:
    optimize(train(store, range(1)))
    save(store, 1, seed=5)
    optimize(store)
    drop(store, 0)

    collect(store)

    assert is_done(store.backend)
    assert plan_optimize(Store.open_backend(store.backend)).is_empty


def test_a_damaged_chunk_stays_as_it_is_and_the_rest_is_optimized(store: Store) -> None:
    save(store, 0)
    save(store, 1)
    assert isinstance(store.backend, MemoryBackend)
    ref = store.ref(RefTarget(run_id="run", step=1).key)
    assert ref is not None
    digest = store.manifest(ref).row("moment").digests[0].tobytes()
    [(name, rows)] = [each for each in tables(store.backend).items() if digest in map(bytes, each[1]["digest"])]
    [entry] = [entry for entry in rows if entry["digest"].tobytes() == digest]
    flip(store.backend, pack_key(name), int(entry["offset"]) + 40)

    report = optimize(store)

    problems = verify(Store.open_backend(store.backend), full=True).problems
    assert report.n_left == 1
    assert "1 chunk left as before" in str(report)
    assert loads(store, 0)
    assert [(problem.checkpoint, problem.tensors) for problem in problems] == [("run run step 1", ("moment",))]
    assert plan_optimize(Store.open_backend(store.backend)).n_chunks == 1


@pytest.fixture
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Portions of which a small store has several, as a large one has of the usual ones."""
    monkeypatch.setattr(_optimize, "BLOCK_BYTES", 5 * CHUNK_BYTES)
    monkeypatch.setattr(_optimize, "WINDOW", 4)
    monkeypatch.setattr(_optimize, "UNIT_BYTES", 30 * CHUNK_BYTES)
    monkeypatch.setattr(_optimize, "COLLECT_BYTES", 20 * CHUNK_BYTES)
    monkeypatch.setattr(_optimize, "TARGET_BYTES", 12 * CHUNK_BYTES)


@pytest.mark.long
@pytest.mark.usefixtures("small_portions")
def test_a_store_of_many_packs_is_done_a_portion_at_a_time_and_never_takes_the_room_of_two(store: Store) -> None:
    train(store, range(10))
    sizes: list[int] = []

    before = n_bytes_of(store.backend)
    plan_optimize(store).execute(watch=lambda progress: sizes.append(n_bytes_of(store.backend)))

    assert all(loads(store, step) for step in range(10))
    assert is_done(store.backend)
    assert len(tables(store.backend)) > 4
    assert max(sizes) < before + 0.75 * n_bytes_of(store.backend)
    assert plan_optimize(Store.open_backend(store.backend)).is_empty


@pytest.mark.usefixtures("small_portions")
def test_a_window_goes_on_from_the_one_before(store: Store) -> None:
    optimize(train(store, range(8)))

    packs = base_packs(store.backend)
    assert any(bases - {name} for name, bases in packs.items())


def test_progress_ends_where_all_is_done(store: Store) -> None:
    seen: list[Progress] = []

    plan_optimize(train(store, range(3))).execute(watch=seen.append)

    assert [each.done_bytes for each in seen] == sorted(each.done_bytes for each in seen)
    assert seen[-1].done_bytes == seen[-1].n_bytes > 0


def test_an_optimization_through_a_server_is_refused() -> None:
    class Carrier(MemoryBackend):
        is_carrier = True

    with pytest.raises(DirectAccessError, match="optimizing"):
        plan_optimize(Store.open_backend(_carried(Carrier())))


def _carried(backend: MemoryBackend) -> MemoryBackend:
    Store.init_backend(backend, chunk_bytes=CHUNK_BYTES)
    return backend


def test_a_repair_of_an_optimized_store_finds_nothing_to_mend(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorcas_mlflow.chunk_io._catalog._FOLD_AT", 2)
    optimize(train(store, range(2)))
    train(Store.open_backend(store.backend), range(2, 5))
    segments = [info.key for info in store.backend.list("index") if info.key.endswith(".segment")]

    assert segments
    assert plan_repair(Store.open_backend(store.backend)).is_empty


@pytest.mark.long
def test_small_tensors_of_sparse_steps_stay_deltas(tmp_path: Path) -> None:
    store, draw = Store.init(tmp_path, database=False), np.random.default_rng(0)
    state = {"w": draw.standard_normal(1_200_000).astype(np.float32)}
    state |= {f"layers.{n}.bias": draw.standard_normal(900).astype(np.float32) for n in range(60)}
    states = []
    for step in range(4):
        with store.write_checkpoint(state, series="run") as pending:
            pending.commit(RefTarget(run_id="run", step=step))
        states.append(state)
        state = {name: array.copy() for name, array in state.items()}
        for array in state.values():
            array[draw.random(len(array)) < 0.005] += np.float32(1e-4)
    report = plan_optimize(store).execute()

    assert report.bytes_after < 1.02 * report.bytes_before
    for step, ref in enumerate(store.checkpoints()):
        found = store.read_tensors(store.manifest(ref))
        assert all(found[name].tobytes() == array.tobytes() for name, array in states[step].items())
