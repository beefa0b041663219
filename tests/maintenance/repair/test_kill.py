"""A repair that dies or fails at any call: the next one ends where it would have, and nothing is lost on the way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Literal

import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.errors import BackendError
from tensorcas_mlflow.layout.packs import pack_key
from tensorcas_mlflow.maintenance import open_damaged_backend, plan_gc, plan_repair, verify
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import list_packs
from tests.faulty import FaultyBackend, SimulatedCrash
from tests.maintenance.repair.damaging import (
    flip,
    flip_chunk,
    keys,
    loads,
    new_store,
    overwrite,
    pack_of,
    repair,
    save,
    target,
)

When = Literal["before", "after"]
CHANGES = ("put_new", "promote", "withdraw", "delete")
STEPS = {0: "ab", 1: "bc", 2: "d", 3: "ef", 4: "g"}


def healthy(backend: MemoryBackend | None = None) -> Store:
    store = new_store(backend)
    for step, letters in STEPS.items():
        save(store, letters, step)
    return store


def wrecked(*, is_remote: bool = False) -> Store:
    """A store with damage of every kind that another store can heal."""
    store = healthy(MemoryBackend(is_remote=is_remote))
    backend = store.backend
    flip_chunk(backend, "b")
    backend.delete(pack_key(pack_of(backend, "g")))
    cut = pack_key(pack_of(backend, "f"))
    overwrite(backend, cut, backend.get(cut)[:-200])
    ref = store.ref(target(1).key)
    assert ref is not None
    flip(backend, f"manifests/{ref.manifest}", 30)
    overwrite(backend, target(2).key, b"{")
    backend.put_new("index/" + "f" * 32 + ".segment", [b"no segment"])
    overwrite(backend, "format", b"?")
    return store


def copy_of(store: Store) -> Store:
    """The same blobs in a backend of their own."""
    memory = MemoryBackend(is_remote=store.backend.is_remote)
    memory._blobs = dict(store.backend._blobs)  # type: ignore[attr-defined]
    memory._versions = store.backend._versions  # type: ignore[attr-defined]
    return Store(memory, store_id=store.id, chunk_bytes=store.chunk_bytes)


def attempt(backup: Store, faulty: FaultyBackend) -> None:
    opened, format_fix = open_damaged_backend(faulty)
    plan_repair(opened, sources=[backup], format_fix=format_fix).execute()


def check(store: Store, backup: Store) -> None:
    report = repair(store, backup)

    assert report.is_whole, str(report)
    assert all(loads(store, letters, step) for step, letters in STEPS.items())
    assert verify(Store.open_backend(store.backend), full=True).problems == ()
    assert [key for key in keys(store.backend, "condemned") if "@" not in key] == []
    assert [key for key in keys(store.backend, "quarantine") if "@" in key] == []


def deaths(*, is_remote: bool = False) -> Iterator[tuple[int, When]]:
    """Every call of a repair that changes something, and whether it dies before it or after."""
    faulty = FaultyBackend(wrecked(is_remote=is_remote).backend)
    attempt(healthy(), faulty)
    n_changes = sum(call in CHANGES for call in faulty.calls)
    assert n_changes > 15
    for nth in range(n_changes):
        yield nth, "before"
    yield n_changes - 1, "after"


@pytest.mark.long
def test_repair_after_a_dead_repair_ends_in_the_same_store() -> None:
    wreck, backup = wrecked(), healthy()
    for nth, when in list(deaths())[::2]:
        die_and_repair(wreck, backup, nth, when)


@pytest.mark.long
@pytest.mark.parametrize("is_remote", [False, True])
def test_the_next_repair_ends_the_same_after_a_death_before_or_after_every_change(is_remote: bool) -> None:
    wreck, backup = wrecked(is_remote=is_remote), healthy()
    for nth, when in deaths(is_remote=is_remote):
        die_and_repair(wreck, backup, nth, when)


def die_and_repair(wreck: Store, backup: Store, nth: int, when: When) -> None:
    store = copy_of(wreck)
    faulty = FaultyBackend(store.backend)
    faulty.crash(nth, operations=CHANGES, when=when)
    with pytest.raises(SimulatedCrash):
        attempt(backup, faulty)
    check(store, backup)


@pytest.mark.long
def test_good_steps_load_after_a_repair_dies_at_any_call() -> None:
    wreck, backup = wrecked(), healthy()
    for nth, _ in deaths():
        store = copy_of(wreck)
        faulty = FaultyBackend(store.backend)
        faulty.crash(nth, operations=CHANGES)
        with pytest.raises(SimulatedCrash):
            attempt(backup, faulty)
        left = Store(store.backend, store_id=store.id, chunk_bytes=store.chunk_bytes)
        ref = left.ref(target(0).key)
        assert ref is not None

        assert set(left.read_tensors(left.manifest(ref), ["a"])) == {"a"}


def test_a_repair_that_dies_between_a_damaged_ref_and_its_replacement_is_finished() -> None:
    store, backup = healthy(), healthy()
    overwrite(store.backend, target(2).key, b"{")
    faulty = FaultyBackend(store.backend)
    faulty.crash(0, operations=["promote"])
    with pytest.raises(SimulatedCrash):
        attempt(backup, faulty)
    assert store.backend.stat(target(2).key) is None

    check(store, backup)


@pytest.mark.long
@pytest.mark.parametrize("is_remote", [False, True])
def test_the_next_repair_ends_the_same_after_a_death_or_failure_at_every_call(is_remote: bool) -> None:
    wreck, backup = wrecked(is_remote=is_remote), healthy()
    counting = FaultyBackend(copy_of(wreck).backend)
    attempt(backup, counting)
    for nth in range(len(counting.calls)):
        store = copy_of(wreck)
        faulty = FaultyBackend(store.backend)
        if nth % 2:
            faulty.crash(nth)
            with pytest.raises(SimulatedCrash):
                attempt(backup, faulty)
        else:
            faulty.fail(nth)
            # What fails while it is looked at is left alone, and what fails while it is changed ends the repair.
            with suppress(BackendError):
                attempt(backup, faulty)
        check(store, backup)


def test_a_collection_finishes_what_a_dead_repair_has_condemned() -> None:
    store, backup = wrecked(), healthy()
    faulty = FaultyBackend(store.backend)
    opened, format_fix = open_damaged_backend(faulty, [backup])
    plan = plan_repair(opened, sources=[backup], format_fix=format_fix)
    faulty.crash(0, operations=["delete"])
    with pytest.raises(SimulatedCrash):
        plan.execute()
    assert repair(store, backup).is_whole
    for _ in range(2):
        plan_gc(Store.open_backend(store.backend), grace_s=0, max_waste=0).execute()

    assert all(loads(store, letters, step) for step, letters in STEPS.items())
    assert keys(store.backend, "condemned") == []
    assert keys(store.backend, "intents") == []
    assert len(list(list_packs(store.backend))) > 0
