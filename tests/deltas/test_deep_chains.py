"""Chains of sparse deltas, as deep as saves make them, in all work on a whole store."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import FolderBackend, LocalBackend, MemoryBackend
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.layout.packs import MAX_DEPTH, Entries
from tensorcas_mlflow.maintenance import plan_gc, plan_optimize, plan_repair, verify
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store._choose import MAX_PASSES, MAX_SAVED_DEPTH, passes_of
from tensorcas_mlflow.store.protocol import read_pack_table
from tests.deltas.made import flip, lose, packs_of
from tests.maintenance.copy.copying import copy

N = 60_000
STEPS = range(MAX_SAVED_DEPTH + 1)


@cache
def state(step: int) -> dict[str, Any]:
    """Return two tensors of which each step changes one word in a thousand."""
    rng = np.random.default_rng(3)
    state = {name: rng.normal(0, 0.02, n).astype(np.float32) for name, n in (("up", N), ("down", N // 2))}
    for _ in range(step):
        for array in state.values():
            array[rng.random(len(array)) < 0.001] += np.float32(1e-4)
    return state


def train(store: Store) -> list[Ref]:
    refs = []
    for step in STEPS:
        with store.write_checkpoint(state(step), series="run") as pending:
            refs.append(pending.commit(RefTarget(run_id="run", step=step)))
    return refs


def fresh(store: Store) -> Store:
    return Store.open_backend(store.backend)


def entries_of(store: Store) -> Entries:
    return np.concatenate([read_pack_table(store.backend, name) for name in packs_of(store.backend)])


def check_whole(store: Store, refs: list[Ref], steps: Any = STEPS) -> None:
    """Check that the steps load bit for bit, and that every byte of the store is sound."""
    assert verify(fresh(store), full=True).problems == ()
    for step in steps:
        ref = fresh(store).ref(refs[step].key)
        assert ref is not None
        found = fresh(store).read_tensors(fresh(store).manifest(ref))
        assert all(found[name].tobytes() == array.tobytes() for name, array in state(step).items())


def pack_of(store: Store, step: int) -> tuple[str, bytes]:
    """Return the pack with the first chunk of a step, and the chunk."""
    chunk = state(step)["up"].tobytes()[: store.chunk_bytes]
    store.catalog.refresh()
    place = store.catalog.find(np.frombuffer(digest(chunk), np.uint8).reshape(1, -1))
    return place.packs[int(place.pack[0])], chunk


# A database is the dearest place with the most of its own; what a place is to an optimization has a test with two.
PLACES = [*(pytest.param(each, marks=pytest.mark.long) for each in ("in memory", "of files")), "with a database"]


@pytest.fixture(params=PLACES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "with a database":
        return Store.init(tmp_path / "store", database=True)
    is_in_memory = request.param == "in memory"
    return Store.init_backend(MemoryBackend() if is_in_memory else LocalBackend(tmp_path / "store"))


def copied(store: Store) -> Store:
    other = Store.init_backend(MemoryBackend(), store_id=store.id)
    copy(fresh(store), other)
    return other


@pytest.mark.long
def test_saves_make_chains_as_deep_as_their_bound(store: Store) -> None:
    refs = train(store)

    assert entries_of(store)["depth"].max() == MAX_SAVED_DEPTH < MAX_DEPTH
    check_whole(store, refs)


def test_a_copy_keeps_deep_chains(store: Store) -> None:
    refs = train(store)
    other = copied(store)

    assert entries_of(other)["depth"].max() == MAX_SAVED_DEPTH
    check_whole(other, refs)


@pytest.mark.long
@pytest.mark.parametrize("kept", [[32], [0, 32], [5, 6], [2, 20]], ids=str)
def test_a_collection_keeps_the_chains_of_the_steps_that_are_left(store: Store, kept: list[int]) -> None:
    refs = train(store)
    for step in set(STEPS) - set(kept):
        store.drop(refs[step])
    plan_gc(fresh(store), grace_s=0, max_waste=0).execute()

    check_whole(store, refs, kept)


@pytest.mark.long
@pytest.mark.parametrize("store", ["of files", "with a database"], indirect=True)
def test_an_optimization_encodes_deep_chains_anew(store: Store) -> None:
    refs = train(store)
    report = plan_optimize(fresh(store)).execute()
    plan_gc(fresh(store), grace_s=0, max_waste=0).execute()

    assert entries_of(store)["depth"].max() <= MAX_DEPTH
    # In a database, where tables are compressed, the saved copies take less room than new packs would.
    assert report.is_undone == isinstance(store.backend, FolderBackend)
    assert (plan_optimize(fresh(store)).n_chunks == 0) != report.is_undone
    check_whole(store, refs)


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "step"),
    [
        pytest.param(how, step, marks=() if (nth + mth) % 2 == 0 else pytest.mark.long)
        for nth, how in enumerate(("flipped", "lost"))
        for mth, step in enumerate((0, 1, 16, 32))
    ],
)
def test_repair_restores_a_deep_chain_from_a_backup(step: int, how: str) -> None:
    store = Store.init_backend(MemoryBackend())
    refs = train(store)
    backup = copied(store)
    pack, chunk = pack_of(store, step)
    if how == "flipped":
        flip(store, pack, chunk)
    else:
        lose(store, pack)
    affected = {problem.checkpoint for problem in verify(fresh(store), full=True).problems}
    report = plan_repair(fresh(store), sources=[backup]).execute()

    assert {refs[later].label for later in STEPS if later >= step} <= affected
    assert not {refs[earlier].label for earlier in STEPS if earlier < step} & affected
    assert report.is_whole
    check_whole(store, refs)


def test_kept_choices_leave_every_chain_within_its_bound() -> None:
    """The cost of a base is measured, so only the last delta of a chain may cost more than a kept choice assumes."""
    store = Store.init_backend(MemoryBackend())
    rng = np.random.default_rng(0)
    array = state(0)
    for step, share in enumerate([0, 0.002, 0.002, 0.002, 0.5, 0.002, 0.03, 0.03, 1, 0.002, 0.01, 0.1, 0.01, 0.01]):
        array = {
            name: (old + np.float32(1e-5) * (rng.random(len(old)) < share) * rng.normal(0, 1, len(old))).astype("<f4")
            for name, old in array.items()
        }
        with store.write_checkpoint(array, series="run") as pending:
            pending.commit(RefTarget(run_id="run", step=step))
    entries = {entry["digest"].tobytes(): entry for entry in entries_of(store)}

    def passes(digest: bytes) -> float:
        entry = entries[digest]
        if entry["depth"] == 0:
            return 0.0
        own = float(passes_of(entry["stored_bytes"] / entry["raw_bytes"]))
        before = passes(entry["base_digest"].tobytes())
        assert before <= MAX_PASSES
        return before + own

    assert max(map(passes, entries)) <= MAX_PASSES + 1
    assert max(entry["depth"] for entry in entries.values()) <= MAX_SAVED_DEPTH
