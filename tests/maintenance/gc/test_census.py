"""Collections that remember what earlier ones have read."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import Backend, MemoryBackend
from tensorcas_mlflow.errors import BackendError
from tensorcas_mlflow.layout.packs import ENTRY
from tensorcas_mlflow.maintenance import Census, census_bytes, inventory_of_manifests, merge_inventories
from tensorcas_mlflow.maintenance._gc_survey import Survey, survey
from tensorcas_mlflow.store import Store
from tests.faulty import FaultyBackend
from tests.maintenance.gc.censuses import always_worth_it, census_of, inventory_in
from tests.maintenance.gc.collecting import CHUNK_BYTES, keys, loads, plan_now, save, tensors

__all__ = ["always_worth_it"]

LETTERS = "abcdefghij"


class CountingBackend(MemoryBackend):
    """Says what was read."""

    def __init__(self, *, is_remote: bool = False) -> None:
        super().__init__(is_remote=is_remote)
        self.read: Counter[str] = Counter()

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        self.read[key.partition("/")[0]] += 1
        return super().get(key, max_bytes=max_bytes)


def seen_by(state: Survey) -> dict[str, Any]:
    """Return the content of a survey, whatever the numbers of its chunks."""
    digests = state.inventory.digests
    live = {digests[chunk].tobytes() for chunk in np.flatnonzero(state.live)}
    rows = zip(state.rows.pack.tolist(), state.rows.chunk.tolist(), state.rows.stored_bytes.tolist(), strict=True)
    return {
        "live": live,
        "n_live": state.n_live,
        "rows": sorted((state.rows.packs[pack], digests[chunk].tobytes(), size) for pack, chunk, size in rows),
        "manifests": (state.manifests, state.live_manifests),
        "sizes": dict(state.sizes),
        "n_refs": state.n_refs,
        "unreadable": list(state.unreadable),
    }


def survey_both_ways(backend: Backend) -> tuple[dict[str, Any], dict[str, Any]]:
    census = Census(backend)
    census.load()
    with_it = survey(backend, 0, count_stale=True, census=census)
    return seen_by(with_it), seen_by(survey(backend, 0, count_stale=True))


# --- what is spared


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_collection_reads_what_has_come_since_the_last_one(is_remote: bool) -> None:
    backend = CountingBackend(is_remote=is_remote)
    store = Store.init_backend(backend, chunk_bytes=CHUNK_BYTES)
    refs = [save(store, letter, step) for step, letter in enumerate(LETTERS)]
    plan_now(store).execute()
    store.drop(refs[3])
    save(store, "az", 20)
    backend.read.clear()
    report = plan_now(store).execute()

    assert (report.n_packs, report.n_manifests) == (1, 1)
    # Refs in files are read at each of the three surveys.
    assert {kind: backend.read[kind] for kind in ("manifests", "packs", "refs", "census")} == {
        "manifests": 1,
        "packs": 1,
        "refs": 1 if is_remote else 30,
        "census": 1,
    }


def test_within_one_collection_nothing_is_read_twice() -> None:
    backend = CountingBackend()
    store = Store.init_backend(backend, chunk_bytes=CHUNK_BYTES)
    save(store, "ab", 0)
    store.drop(save(store, "cd", 1))
    backend.read.clear()
    plan_now(store).execute()

    # Two, of which the dropped one says why its pack goes.
    assert (backend.read["manifests"], backend.read["packs"]) == (2, 2)


def test_a_census_that_is_removed_costs_time_and_nothing_else(store: Store) -> None:
    save(store, "ab", 0)
    ref = save(store, "cd", 1)
    plan_now(store).execute()
    store.backend.delete(census_of(store))
    store.drop(ref)

    assert plan_now(store).execute().n_packs == 1
    assert loads(store, "ab", 0)


def test_a_small_change_is_not_worth_a_census(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorcas_mlflow.maintenance._census.LEAST_NEW", 64)
    store.drop(save(store, "ab", 0))
    plan_now(store).execute()

    assert keys(store, "census") == []


def test_a_plan_leaves_no_census(store: Store) -> None:
    save(store, "ab", 0)
    plan_now(store)

    assert keys(store, "census") == []


def test_collection_merges_the_censuses_of_two_collectors(store: Store) -> None:
    save(store, "ab", 0)
    plans = [plan_now(store), plan_now(store)]
    for plan in plans:
        plan.execute()
    assert len(keys(store, "census")) == 2
    save(store, "bc", 1)
    plan_now(store).execute()

    assert len(keys(store, "census")) == 1
    assert len(inventory_in(store).manifests) == len(inventory_in(store).packs) == 2


def test_a_disk_that_takes_no_census_does_not_fail_the_collection(store: Store) -> None:
    class Full(FaultyBackend):
        def put_new(self, key: str, pieces: Any, *, durable: bool = True) -> str:
            if key.startswith("census/"):
                raise BackendError("write", key, "it was told to fail")
            return super().put_new(key, pieces, durable=durable)

    store.drop(save(store, "ab", 0))

    assert plan_now(Store.open_backend(Full(store.backend))).execute().n_packs == 1


# --- what it says is what is there


@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_survey_with_a_census_sees_what_one_without_sees(seed: int, is_remote: bool) -> None:
    draw = random.Random(seed)
    store = Store.init_backend(MemoryBackend(is_remote=is_remote), chunk_bytes=CHUNK_BYTES)
    kept: dict[int, tuple[Any, str]] = {}
    for step in range(25):
        what = draw.choice(["save", "save", "replace", "drop", "collect", "collect twice", "die"])
        letters = "".join(sorted(draw.sample(LETTERS, draw.randrange(1, 6))))
        if what == "save" or not kept:
            kept[step] = save(store, letters, step), letters
        elif what == "replace":
            again = draw.choice(list(kept))
            kept[again] = save(store, letters, again), letters
        elif what == "drop":
            store.drop(kept.pop(draw.choice(list(kept)))[0])
        elif what == "die":
            store.write_checkpoint(tensors(letters)).write()
        else:
            plans = [plan_now(store, max_waste=draw.choice([0, 0.5])) for _ in range(1 + (what == "collect twice"))]
            for plan in plans:
                plan.execute()
        with_it, without = survey_both_ways(store.backend)
        assert with_it == without

    assert all(loads(store, letters, step) for step, (_, letters) in kept.items())


def test_spans_say_what_the_manifests_said() -> None:
    draw = np.random.default_rng(0)
    universe = draw.integers(0, 256, (50, 32), dtype=np.uint8)
    named = [(f"{n:064x}.00000000", n, universe[draw.integers(0, 50, draw.integers(0, 40))]) for n in range(60)]
    inventory = merge_inventories(
        [inventory_of_manifests(named[:20]), inventory_of_manifests(named[10:45]), inventory_of_manifests(named[45:])]
    )
    kept = {name for name, n_bytes, _ in named if n_bytes % 3}

    for some in (inventory, inventory.only(manifests=kept, packs={})):
        assert some.is_consistent
        for name, _, digests in named:
            found = {row.tobytes() for row in some.digests[some.chunks_of([name])]}
            assert found == ({row.tobytes() for row in digests} if name in some.position else set())


def test_a_history_of_steps_that_differ_little_has_few_spans() -> None:
    universe = np.random.default_rng(0).integers(0, 256, (300, 32), dtype=np.uint8)
    inventory = inventory_of_manifests([(f"{n:064x}.00000000", 1, universe[n : n + 200]) for n in range(100)])

    assert len(inventory.span_chunk) == 299


def test_digests_that_begin_alike_are_told_apart() -> None:
    alike = np.zeros((4, 32), np.uint8)
    alike[:, 31] = [3, 1, 2, 1]
    inventory = inventory_of_manifests([("0" * 64 + ".00000000", 1, alike)])

    assert inventory.digests[:, 31].tolist() == [1, 2, 3]
    assert inventory.find(np.concatenate([alike, alike + np.uint8(1)])).tolist() == [2, 0, 1, 0, -1, -1, -1, -1]


@pytest.mark.long
def test_learned_manifests_take_little_more_memory_than_the_census() -> None:
    universe = np.random.default_rng(0).integers(0, 256, (30_000, 32), dtype=np.uint8)
    census = Census(MemoryBackend())
    tables = np.zeros(30_000, ENTRY)
    tables["digest"] = universe
    census.learn_packs({"0" * 32: tables}, {"0" * 32: 1 << 30})
    tracemalloc.start()
    for n in range(60):
        census.learn_manifest(f"{n:064x}.00000000", universe[n : n + 20_000].copy(), n_bytes=640_000)
    inventory = census.inventory
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    # Of 38 MB of manifests no more are held than fit a bounded buffer.
    assert sum(map(len, census_bytes(inventory))) < 2_000_000
    assert most < 70_000_000
