"""Repairs beside those who save, collect and delete, under every schedule with few preemptions.

One chunk of the store is damaged from the start. Nothing else may ever be lost, whoever dies; and a save that comes
after the repair is whole.
"""

from __future__ import annotations

from contextlib import suppress

import pytest

from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.errors import ChunkNotFoundError, ConflictError, CorruptChunkError
from tensorcas_mlflow.maintenance import plan_gc, plan_repair
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import list_packs, read_pack_table
from tests.protocol.casts import WITNESS, Cast, chunk, key_of, open_store, save
from tests.protocol.explored import MORE_PREEMPTIONS
from tests.protocol.interleave import Blobs, Run, memory_of
from tests.protocol.schedules import Exploration, Script, explore

BAD = "b"


def damaged(cast: Cast) -> Blobs:
    """Return a cast's blobs at the start, with every copy of one chunk damaged."""
    blobs = dict(cast.blobs())
    memory = memory_of(blobs)
    for name, _ in list_packs(memory):
        for entry in read_pack_table(memory, name):
            if entry["digest"].tobytes() == digest(chunk(BAD)):
                data = bytearray(blobs[f"packs/{name}.pack"])
                data[int(entry["offset"])] ^= 1
                blobs[f"packs/{name}.pack"] = bytes(data)
    return blobs


def lost_only_what_was(cast: Cast, run: Run) -> str | None:
    """Say what is wrong after a run: something that was good is lost, or somebody failed."""
    try:
        for name, error in run.errors().items():
            assert isinstance(error, ConflictError), f"{name} raised {error!r}"
        _check_later_saves(cast, run)
        for _ in range(2):
            _check(cast, open_store(run.memory), "after the run")
            plan_repair(open_store(run.memory)).execute()
            _check(cast, open_store(run.memory), "after another repair")
            plan_gc(open_store(run.memory), grace_s=0, max_waste=0).execute()
        store = open_store(run.memory)
        save(store, BAD, 99)
        for ref in store.checkpoints():
            assert set(store.read_tensors(store.manifest(ref))), f"{ref.label} does not load after the next save"
    except AssertionError as error:
        return str(error)
    return None


def _check(cast: Cast, store: Store, when: str) -> None:
    refs = {ref.step: ref for ref in store.checkpoints()}
    for step in cast.before:
        assert step in refs or step in cast.dropped, f"LOSS {when}: step {step} is gone"
    for ref in refs.values():
        manifest = store.manifest(ref)
        for letter in manifest.names():
            with suppress(CorruptChunkError, ChunkNotFoundError):
                found = store.read_tensors(manifest, [letter])[letter]
                assert found.tobytes() == chunk(letter).tobytes(), f"step {ref.step} is not what was saved"
                continue
            assert letter == BAD, f"LOSS {when}: {letter} of step {ref.step} does not load"


def _check_later_saves(cast: Cast, run: Run) -> None:
    """See that what was committed after a repair has deleted packs is whole, the damaged chunk included."""
    store = open_store(run.memory)
    early = [run.memory.get(info.key).decode().split("\n") for info in run.memory.list(WITNESS)]
    for ref in store.checkpoints():
        if ref.step not in cast.before and early and not any(ref.key in keys for keys in early):
            try:
                store.read_tensors(store.manifest(ref))
            except (CorruptChunkError, ChunkNotFoundError) as error:
                raise AssertionError(f"{ref.label} was committed after a repair, and does not load: {error}") from error


def explored(cast: Cast, *, max_preemptions: int, deaths: tuple[str, ...] = ()) -> Exploration:
    found = explore(
        damaged(cast),
        cast.actors,
        lambda run: lost_only_what_was(cast, run),
        max_preemptions=max_preemptions + MORE_PREEMPTIONS,
        deaths=deaths,
    )
    print(found)
    return found


def repair_and_save() -> Cast:
    """A repair beside a save that shares a good chunk and the damaged one with a pack whose ref is dropped."""
    return Cast(before={0: "ab"}).repairer("repairer").writer("writer", "abc", 1).deletion("deletion", 0)


def test_no_schedule_of_a_repair_and_a_save_loses_what_was_good() -> None:
    cast = Cast(before={0: "ab"}).repairer("repairer").writer("writer", "abc", 1)

    found = explored(cast, max_preemptions=1)

    assert found.failure is None, str(found)
    assert found.is_exhausted


@pytest.mark.long
@pytest.mark.parametrize("max_preemptions", [1, 2])
def test_no_schedule_of_a_repair_a_save_and_a_drop_loses_what_was_good(max_preemptions: int) -> None:
    found = explored(repair_and_save(), max_preemptions=max_preemptions)

    assert found.failure is None, str(found)
    assert found.is_exhausted


@pytest.mark.long
def test_no_schedule_of_a_repair_with_a_death_loses_what_was_good() -> None:
    found = explored(repair_and_save(), max_preemptions=1, deaths=("repairer", "writer"))

    assert found.failure is None, str(found)
    assert found.is_exhausted


@pytest.mark.long
def test_no_schedule_of_a_repair_and_a_rewriting_collection_loses_what_was_good() -> None:
    cast = Cast(before={0: "ab", 1: "ac"}).repairer("repairer").collector("collector", max_waste=0)

    found = explored(cast.writer("writer", "ab", 2).deletion("deletion", 0), max_preemptions=1)

    assert found.failure is None, str(found)
    assert found.is_exhausted


@pytest.mark.long
def test_no_schedule_of_two_repairs_and_a_collection_loses_what_was_good() -> None:
    cast = Cast(before={0: "ab"}).repairer("repairer").repairer("other").collector("collector", max_waste=0)

    found = explored(cast.writer("writer", "a", 1), max_preemptions=1, deaths=("repairer",))

    assert found.failure is None, str(found)
    assert found.is_exhausted


@pytest.mark.parametrize(
    "schedule",
    [
        [("writer", "promote"), ("repairer", ""), ("writer", "")],
        [("repairer", "delete packs"), ("writer", "promote"), ("repairer", ""), ("writer", "")],
        [("repairer", "delete condemned"), ("writer", "promote"), ("repairer", ""), ("writer", "")],
        [
            ("writer", "list condemned"),
            ("repairer", "delete packs"),
            ("writer", "promote"),
            ("repairer", ""),
            ("writer", ""),
        ],
    ],
)
def test_a_save_that_commits_after_the_repair_is_whole(schedule: list[tuple[str, str]]) -> None:
    cast = Cast(before={0: "ab"}).repairer("repairer").writer("writer", "abc", 1)
    run = Run(damaged(cast), cast.actors, Script(*schedule))
    store = open_store(run.memory)
    ref = store.ref(key_of(1))
    assert ref is not None

    assert set(store.read_tensors(store.manifest(ref))) == {"a", "b", "c"}
    assert set(store.read_tensors(store.manifest(store.checkpoints()[0]))) == {"a", "b"}
