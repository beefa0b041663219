"""Writers, collectors and deletions over objects: a step is a request to a bucket, and answers get lost."""

from __future__ import annotations

import random

import pytest

from tensorcas_mlflow.layout import _ref_table
from tensorcas_mlflow.layout._ref_table import read_ref_table
from tests.protocol.buckets import Keeps, Kept, ObjectCast, deletions, objects, use_memory
from tests.protocol.casts import Cast
from tests.protocol.explored import N_RANDOM
from tests.protocol.interleave import Run
from tests.protocol.schedules import Exploration, RandomWalk, Script, explore
from tests.protocol.test_random_schedules import N_PARTS, everybody

N_OVER_OBJECTS = N_RANDOM // 4
N_ON_EVERY_CHANGE = 25


@pytest.fixture(autouse=True)
def _bucket_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    use_memory(monkeypatch)


def save_against_collection() -> Cast:
    """A save that shares a chunk with an old pack whose only ref is dropped meanwhile."""
    cast = ObjectCast(before={0: "ab"}).writer("writer", "ac", 1)
    return cast.collector("collector", max_waste=0).deletion("deletion", 0)


def saves_of_one_step() -> Cast:
    """Two saves of one step, while a collector takes both for dead and the step is deleted."""
    cast = ObjectCast(before={1: "ab"}).writer("first", "a", 1).writer("second", "b", 1)
    return cast.collector("collector").deletion("deletion", 1)


def trained_and_dropped() -> Cast:
    """A training saves one state twice, while the first save is dropped and collected."""
    return ObjectCast().trainer("trainer", "ab", 1, 2).deletion("deletion", 1).collector("collector")


def two_collectors() -> Cast:
    """Somebody saves again what two collectors have planned to delete."""
    cast = ObjectCast(before={0: "ab"}).drop(0).writer("writer", "ab", 1)
    return cast.collector("first").collector("second")


def deleted_and_saved_again() -> Cast:
    """A step is deleted and saved again, while a collector works and requests to delete are carried out twice."""
    cast = ObjectCast(before={0: "ab", 1: "ac"}).network()
    return cast.saver_again("again", "ab", 0).collector("collector", max_waste=0)


def listed_with_tables() -> Cast:
    """Somebody lists a store while a step is deleted and saved again, and while a collector writes a table of refs."""
    cast = ObjectCast(before={0: "ab", 1: "ac"})
    return cast.lister("lister").saver_again("again", "ad", 0).collector("collector", max_waste=0)


def assert_safe(cast: Cast, *, max_preemptions: int, deaths: list[str]) -> None:
    found: Exploration = explore(
        cast.blobs(),
        cast.actors,
        cast.check,
        max_preemptions=max_preemptions,
        deaths=deaths,
        view=objects(),
        is_remote=True,
    )

    print(found)
    assert found.failure is None, str(found)
    assert found.is_exhausted


# --- every schedule within a bound


def test_no_schedule_of_a_training_a_deletion_and_a_collection_loses_or_leaks() -> None:
    assert_safe(trained_and_dropped(), max_preemptions=1, deaths=[])


@pytest.mark.long
def test_no_schedule_over_objects_of_a_save_a_collection_and_a_deletion_loses_or_leaks() -> None:
    assert_safe(save_against_collection(), max_preemptions=1, deaths=[])


@pytest.mark.long
def test_no_schedule_with_late_repeated_deletions_loses_or_leaks() -> None:
    assert_safe(deleted_and_saved_again(), max_preemptions=1, deaths=[])


@pytest.mark.long
@pytest.mark.parametrize("deaths", [[], ["collector"]])
def test_no_schedule_of_a_listing_with_tables_of_refs_shows_what_was_not_there(
    deaths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, number in {"LEAST_NEW": 1, "LEAST_LISTED": 1, "_REFS_PER_TABLE": 0}.items():
        monkeypatch.setattr(f"tensorcas_mlflow.layout._ref_table.{name}", number)
    read: list[str] = []
    monkeypatch.setattr(_ref_table, "read_ref_table", lambda key, blob: read.append(key) or read_ref_table(key, blob))

    assert_safe(listed_with_tables(), max_preemptions=1, deaths=deaths)
    assert read


@pytest.mark.long
def test_no_schedule_with_late_repeated_deletions_and_a_dead_collector_loses_or_leaks() -> None:
    assert_safe(deleted_and_saved_again(), max_preemptions=1, deaths=["collector"])


@pytest.mark.long
def test_no_schedule_over_objects_with_a_death_loses_or_leaks() -> None:
    assert_safe(save_against_collection(), max_preemptions=1, deaths=["writer", "collector"])


@pytest.mark.long
def test_no_schedule_over_objects_of_two_collectors_loses_or_leaks() -> None:
    assert_safe(two_collectors(), max_preemptions=1, deaths=["first"])


@pytest.mark.long
def test_no_schedule_over_objects_of_two_saves_of_one_step_loses_or_leaks() -> None:
    assert_safe(saves_of_one_step(), max_preemptions=1, deaths=["first"])


# --- random schedules


def keep_some(draw: random.Random, share: float) -> Keeps:
    """Keep all deletions, and this share of the other requests."""

    def keeps(action: str, path: str, number: int) -> Kept | None:
        if draw.random() < share:
            return draw.choice(list(Kept))
        return deletions(action, path, number)

    return keeps


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, N_PARTS))])
def test_random_schedules_of_a_crowd_whose_answers_get_lost_lose_nothing(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorcas_mlflow.chunk_io._catalog._FOLD_AT", 2)
    for seed in range(part, N_OVER_OBJECTS if part else N_PARTS * N_ON_EVERY_CHANGE, N_PARTS):
        draw = random.Random(seed)
        cast = everybody(draw, ObjectCast)
        walk = RandomWalk(seed, deaths=[name for name in cast.actors if name[0] in "wc"])
        share = draw.choice([0.0, 0.05, 0.3])
        assert isinstance(cast, ObjectCast)
        keeps = None
        if part % 2 == 0:
            cast.network()
            keeps = dict.fromkeys(cast.actors, keep_some(draw, draw.choice([0.0, 0.1, 0.5])))
        loses = dict.fromkeys(cast.actors, lambda *write, draw=draw, share=share: draw.random() < share)
        view = objects(loses=loses, keeps=keeps)
        run = Run(cast.blobs(), cast.actors, walk, view=view, is_remote=True)

        problem = cast.check(run)

        assert problem is None, "\n".join([f"seed {seed}: {problem}", *run.trace])


# --- schedules that once broke something


@pytest.mark.parametrize("dies", [True, False])
def test_a_collection_that_begins_a_generation_or_dies_over_it_keeps_nobody_from_collecting(dies: bool) -> None:
    cast = ObjectCast(before={0: "ab"}).drop(0).collector("first", grace_s=3600).collector("second", grace_s=3600)
    steps = [("first", "put if absent condemned/@generation"), ("second", "")]
    script = Script(*steps) if dies else Script(*steps, ("first", ""))

    run = Run(cast.blobs(), cast.actors, script, view=objects(), is_remote=True)

    assert cast.check(run) is None
