"""The real code of writers, collectors and deletions, under every schedule with few preemptions, and with deaths."""

from __future__ import annotations

from typing import Any

import pytest

from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import list_packs
from tests.protocol.casts import Cast, collect, save
from tests.protocol.explored import MORE_PREEMPTIONS
from tests.protocol.interleave import Run
from tests.protocol.schedules import Script, explore


def old_pack() -> Cast:
    """A pack with two chunks that nothing needs any more."""
    return Cast(before={0: "ab"}).drop(0)


def save_against_collection(**collector: Any) -> Cast:
    """A save that shares a chunk with an old pack whose only ref is dropped meanwhile."""
    return Cast(before={0: "ab"}).writer("writer", "ac", 1).collector("collector", **collector).deletion("deletion", 0)


# --- every schedule


@pytest.mark.long
def test_no_schedule_at_all_of_a_save_a_collection_and_a_deletion_loses_or_leaks() -> None:
    cast = save_against_collection()

    found = explore(cast.blobs(), cast.actors, cast.check, max_preemptions=None)

    print(found)
    assert found.failure is None, str(found)
    assert found.is_exhausted


# --- every schedule within a bound


@pytest.mark.long
def test_no_schedule_of_a_save_a_collection_and_a_deletion_loses_or_leaks() -> None:
    cast = save_against_collection()

    found = explore(cast.blobs(), cast.actors, cast.check, max_preemptions=1 + MORE_PREEMPTIONS)

    print(found)
    assert found.failure is None, str(found)
    assert found.is_exhausted


@pytest.mark.long
def test_no_schedule_with_a_death_loses_or_leaks() -> None:
    cast = save_against_collection()

    found = explore(
        cast.blobs(), cast.actors, cast.check, max_preemptions=1 + MORE_PREEMPTIONS, deaths=["writer", "collector"]
    )

    print(found)
    assert found.failure is None, str(found)
    assert found.is_exhausted


@pytest.mark.parametrize("is_remote", [False, pytest.param(True, marks=pytest.mark.long)])
def test_no_schedule_of_a_collector_with_a_census_loses_or_leaks(
    is_remote: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorcas_mlflow.maintenance._census.LEAST_NEW", 1)
    monkeypatch.setattr("tensorcas_mlflow.maintenance._census._NEW_PART", 1 << 40)
    cast = Cast(before={0: "ab", 2: "bd"}, prepare=collect)
    cast.writer("writer", "ac", 1).collector("collector", max_waste=0).deletion("deletion", 0)
    assert any(key.startswith("census/") for key in cast.blobs())

    found = explore(
        cast.blobs(),
        cast.actors,
        cast.check,
        max_preemptions=1 + MORE_PREEMPTIONS,
        deaths=["collector"],
        is_remote=is_remote,
    )

    print(found)
    assert found.failure is None, str(found)
    assert found.is_exhausted


@pytest.mark.long
def test_no_schedule_of_two_collectors_with_censuses_loses_or_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorcas_mlflow.maintenance._census.LEAST_NEW", 1)
    monkeypatch.setattr("tensorcas_mlflow.maintenance._census._NEW_PART", 1 << 40)
    cast = Cast(before={0: "ab", 2: "bd"}, prepare=collect).drop(0)
    cast.writer("writer", "ab", 1).collector("first").collector("second", max_waste=0)

    found = explore(
        cast.blobs(), cast.actors, cast.check, max_preemptions=1 + MORE_PREEMPTIONS, deaths=["first", "second"]
    )

    print(found)
    assert found.failure is None, str(found)
    assert found.is_exhausted


@pytest.mark.long
def test_no_schedule_of_a_rewrite_of_packs_loses_or_leaks() -> None:
    cast = save_against_collection(max_waste=0).writer("other", "b", 2)

    found = explore(cast.blobs(), cast.actors, cast.check, max_preemptions=1 + MORE_PREEMPTIONS)

    print(found)
    assert found.failure is None, str(found)
    assert found.is_exhausted


def stream_against_collection(**collector: Any) -> Cast:
    """A stream of three batches, the first of which is stored already under a ref that is dropped meanwhile."""
    return Cast(before={0: "ab"}).stream("stream", "acd", 1).collector("collector", **collector).deletion("deletion", 0)


@pytest.mark.long
def test_no_schedule_of_a_stream_loses_or_leaks() -> None:
    cast = stream_against_collection()

    found = explore(
        cast.blobs(), cast.actors, cast.check, max_preemptions=1 + MORE_PREEMPTIONS, deaths=["stream", "collector"]
    )

    print(found)
    assert found.failure is None, str(found)
    assert found.is_exhausted


@pytest.mark.long
def test_no_schedule_of_two_collectors_loses_or_leaks() -> None:
    cast = old_pack().writer("writer", "ab", 1).collector("first").collector("second")

    found = explore(
        cast.blobs(), cast.actors, cast.check, max_preemptions=1 + MORE_PREEMPTIONS, deaths=["first", "second"]
    )

    print(found)
    assert found.failure is None, str(found)
    assert found.is_exhausted


@pytest.mark.long
def test_no_schedule_of_two_collectors_that_choose_different_copies_loses_or_leaks() -> None:
    cast = two_copies()

    found = explore(cast.blobs(), cast.actors, cast.check, max_preemptions=2 + MORE_PREEMPTIONS)

    print(found)
    assert found.failure is None, str(found)
    assert found.is_exhausted


def two_copies() -> Cast:
    """Two copies of a chunk, and two collectors that each keep another one: between their plans a ref was dropped."""
    cast = Cast(before={0: "ab", 1: "acd"})
    earlier = cast.blobs()
    later = cast.drop(1).blobs()
    return cast.executor("first", earlier, max_waste=0).executor("second", later, max_waste=0)


@pytest.mark.long
def test_no_schedule_loses_or_leaks_in_a_remote_store() -> None:
    cast = save_against_collection(max_waste=0)

    found = explore(
        cast.blobs(),
        cast.actors,
        cast.check,
        max_preemptions=1 + MORE_PREEMPTIONS,
        deaths=["writer", "collector"],
        is_remote=True,
    )

    print(found)
    assert found.failure is None, str(found)
    assert found.is_exhausted


def trained_and_dropped() -> Cast:
    """A training saves one state twice, while the first save is dropped and collected."""
    return Cast().trainer("trainer", "ab", 1, 2).deletion("deletion", 1).collector("collector")


@pytest.mark.long
def test_no_schedule_of_a_training_that_relies_on_earlier_chunks_loses_or_leaks() -> None:
    cast = trained_and_dropped()

    found = explore(cast.blobs(), cast.actors, cast.check, max_preemptions=1 + MORE_PREEMPTIONS, is_remote=True)

    print(found)
    assert found.failure is None, str(found)
    assert found.is_exhausted


@pytest.mark.long
def test_a_save_under_way_is_left_alone_within_the_grace() -> None:
    cast = save_against_collection(grace_s=3600)

    def check(run: Run) -> str | None:
        if sum(call.startswith("writer: put intents/") for call in run.trace) != 1:
            return "the save had to start again"
        return cast.check(run)

    found = explore(cast.blobs(), cast.actors, check, max_preemptions=1 + MORE_PREEMPTIONS)

    print(found)
    assert found.failure is None, str(found)


@pytest.mark.long
def test_a_stream_under_way_is_left_alone_within_the_grace() -> None:
    cast = stream_against_collection(grace_s=3600)

    def check(run: Run) -> str | None:
        return f"the stream failed: {run.errors()}" if run.errors() else cast.check(run)

    found = explore(cast.blobs(), cast.actors, check, max_preemptions=1 + MORE_PREEMPTIONS)

    print(found)
    assert found.failure is None, str(found)


# --- schedules that once lost something


def play(cast: Cast, *steps: tuple[str, str]) -> str | None:
    return cast.check(Run(cast.blobs(), cast.actors, Script(*steps)))


def test_a_slow_collector_does_not_delete_a_manifest_that_was_written_after_its_list_was_finished() -> None:
    cast = old_pack().writer("writer", "ab", 1).collector("slow").collector("other")

    assert play(cast, ("slow", "delete manifests/"), ("other", ""), ("writer", ""), ("slow", "")) is None


def test_finisher_of_a_list_spares_the_packs_that_its_owner_unlisted() -> None:
    cast = old_pack().writer("writer", "ac", 1).collector("owner").collector("other")

    problem = play(
        cast,
        ("owner", "put condemned/"),
        ("writer", "promote"),
        ("owner", "delete condemned/"),
        ("other", "delete packs/"),
        ("owner", ""),
        ("writer", ""),
        ("other", ""),
    )

    assert problem is None


def test_a_list_stays_while_its_slow_owner_may_delete_what_was_spared_on_it() -> None:
    assert play(*spared_by_another()) is None


def spared_by_another() -> tuple[Cast, *tuple[tuple[str, str], ...]]:
    """A collector that has decided to delete a pack is overtaken by another one, which finds it needed."""
    cast = old_pack().writer("early", "ac", 1).writer("late", "ad", 2)
    cast.collector("owner").collector("other")
    return (
        cast,
        ("owner", "delete packs/"),
        ("other", "put condemned/"),
        ("early", "put packs/"),
        ("other", ""),
        ("late", ""),
        ("owner", ""),
    )


def test_a_ref_that_is_dropped_while_a_collector_looks_is_no_damage() -> None:
    cast = Cast(before={0: "ab"}).deletion("deletion", 0).collector("other").collector("collector")

    assert play(cast, ("collector", "get manifests/"), ("deletion", ""), ("other", ""), ("collector", "")) is None


def test_a_pack_that_was_deleted_before_its_writer_marked_it_does_not_stay_in_the_index() -> None:
    cast = old_pack().writer("writer", "ac", 1).collector("collector")

    assert play(cast, ("writer", "put index/"), ("collector", ""), ("writer", "")) is None


# --- the checks themselves


def test_check_of_schedules_sees_a_loss() -> None:
    cast = Cast(before={0: "ab"})

    def destroy(store: Store) -> None:
        for name, _ in list_packs(store.backend):
            store.backend.delete(f"packs/{name}.pack")

    cast.prepare = destroy
    problem = cast.check(Run(cast.blobs(), {"nobody": lambda backend: None}, Script()))

    assert problem is not None
    assert problem.startswith("LOSS")


def test_saves_one_after_the_other_share_what_is_equal() -> None:
    cast = Cast(before={0: "ab"})

    def twice(store: Store) -> None:
        save(store, "ab", 1)
        save(store, "ab", 2)

    cast.prepare = twice
    cast.may_hold = {1: {"ab"}, 2: {"ab"}}
    blobs = cast.blobs()

    assert sum(key.startswith("packs/") for key in blobs) == 1
    assert sum(key.startswith("manifests/") for key in blobs) == 2
