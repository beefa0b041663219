"""Saves, collections and deletions where chunks are stored as deltas, under every schedule with few preemptions."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tensorcas_mlflow.maintenance._gc_survey import Survey
from tests.protocol.casts import Cast
from tests.protocol.delta_casts import delta_writer, stored
from tests.protocol.explored import (
    N_RANDOM,
    MakeCast,
    assert_no_schedule_fails,
    assert_no_walk_fails,
    long_but,
    long_but_first,
    name_of,
)
from tests.protocol.interleave import Run
from tests.protocol.schedules import Script

N_PARTS = 24


def found_deltas() -> Cast:
    """Somebody saves what is stored as a delta already; the checkpoints of it and of its base are dropped meanwhile."""
    return (
        stored({0: "a", 1: "b"}, "a", "b<a").writer("writer", "bc", 2).collector("collector").deletion("deletion", 0, 1)
    )


def found_chains() -> Cast:
    """The same with a chain of three, the last of which alone is needed."""
    cast = stored({0: "b", 1: "c"}, "a", "b<a", "c<b", drop=[0])
    return cast.writer("writer", "c", 2).collector("collector").deletion("deletion", 1)


def new_deltas() -> Cast:
    """Somebody stores a delta against what nothing but a dropped checkpoint needs."""
    cast = stored({0: "a"}, "a")
    return delta_writer(cast, "writer", "b", 1, against={"b": "a"}).collector("collector").deletion("deletion", 0)


def new_deltas_of_chains() -> Cast:
    """The base is a delta itself."""
    cast = stored({0: "b"}, "a", "b<a")
    return delta_writer(cast, "writer", "c", 1, against={"c": "b"}).collector("collector").deletion("deletion", 0)


def two_copies_of_a_base() -> Cast:
    """Two collectors, and a delta whose base lies in two packs."""
    cast = stored({0: "a"}, "a", "a", drop=[0])
    return delta_writer(cast, "writer", "b", 1, against={"b": "a"}).collector("first").collector("second")


def in_full_and_as_a_delta() -> Cast:
    """A chunk lies in full in one pack, as a delta in another, and two collectors may each keep another one."""
    cast = stored({0: "b", 1: "c"}, "a", "b<a c", "b", drop=[1])
    return cast.collector("first", max_waste=0).collector("second", max_waste=0).writer("writer", "b", 2)


def rewritten() -> Cast:
    """Packs of deltas are rewritten while a save relies on them and the base is dropped."""
    cast = stored({0: "a", 1: "b", 2: "d"}, "a", "b<a d<a", drop=[2])
    return cast.writer("writer", "bd", 3).collector("collector", max_waste=0).deletion("deletion", 0)


CASTS = [found_deltas, found_chains, new_deltas, new_deltas_of_chains, two_copies_of_a_base, in_full_and_as_a_delta]
CASTS += [rewritten]
QUICK = {new_deltas_of_chains}


@pytest.mark.long
@pytest.mark.parametrize("make", long_but(QUICK, CASTS), ids=name_of)
@pytest.mark.parametrize("is_remote", [False, pytest.param(True, marks=pytest.mark.long)])
def test_no_schedule_of_deltas_loses_a_base_or_leaks(make: MakeCast, *, is_remote: bool) -> None:
    assert_no_schedule_fails(make(), is_remote=is_remote)


@pytest.mark.long
@pytest.mark.parametrize("make", CASTS, ids=name_of)
def test_no_schedule_of_deltas_with_a_death_loses_a_base(make: MakeCast) -> None:
    cast = make()

    assert_no_schedule_fails(cast, deaths=[name for name in cast.actors if name not in ("deletion", "second")])


def everybody(draw: random.Random) -> Cast:
    """A crowd: writers who find deltas and who write them, collectors, deletions and readers."""
    steps = {0: "a", 1: "b", 2: "ce", 5: "dc"}
    cast = stored(steps, "a", "b<a e", "c<b", "d<c", "a g", drop=draw.sample([0, 1, 2], draw.choice([0, 1, 2])))
    waste, grace_s = draw.choice([0.0, 0.0, 0.5]), draw.choice([0.0, 0.0, 3600.0])
    cast.writer("w1", draw.choice(["bc", "ad", "cf"]), 6)
    delta_writer(cast, "w2", draw.choice(["fg", "f", "bf"]), 7, against={"f": draw.choice("abcd"), "g": "e", "b": "a"})
    delta_writer(cast, "w3", draw.choice(["f", "ag"]), draw.choice([1, 8]), against={"f": "c", "g": "f", "a": "b"})
    cast.collector("c1", max_waste=waste, rounds=draw.choice([1, 2]))
    cast.collector("c2", max_waste=waste, grace_s=grace_s, rounds=draw.choice([1, 2]))
    cast.deletion("deletion", *draw.sample([0, 1, 2, 6], draw.choice([1, 2, 3])))
    cast.reader("r5", 5)
    return cast


@pytest.mark.long
@pytest.mark.parametrize("part", long_but_first(N_PARTS))
def test_random_schedules_of_a_crowd_lose_no_base(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorcas_mlflow.chunk_io._catalog._FOLD_AT", 3)
    assert_no_walk_fails(everybody, range(part, N_RANDOM, N_PARTS), mortal="wc")


def run_of_a_save_that_finds_a_late_delta() -> tuple[Cast, Run]:
    """A collector has withdrawn the save that writes a delta, and has not seen the delta."""
    cast = stored({0: "a"}, "a", drop=[0])
    delta_writer(cast, "stalled", "b", 1, against={"b": "a"}).writer("saver", "b", 2).collector("collector")
    script = Script(
        ("stalled", "put packs/"),
        ("collector", "put condemned/"),
        ("saver", "list index"),
        ("collector", "delete packs/"),
        ("stalled", "promote"),
        ("saver", ""),
        ("collector", ""),
    )
    return cast, Run(cast.blobs(), cast.actors, script)


def run_of_a_collection_that_finds_a_late_delta() -> tuple[Cast, Run]:
    """The base is on the list of a second collector, which has not seen the delta; a third has withdrawn the save."""
    cast = stored({0: "b", 1: "a"}, "a", "b", drop=[0])
    delta_writer(cast, "stalled", "b", 3, against={"b": "a"}).writer("saver", "b", 2).deletion("deletion", 1)
    cast.collector("first", grace_s=3600).collector("second", grace_s=3600).collector("third")
    script = Script(
        ("first", "put condemned/"),
        ("saver", ""),
        ("first", "list intents"),
        ("deletion", ""),
        ("stalled", "put packs/"),
        ("third", "withdraw"),
        ("third", "list intents"),
        ("first", "list manifests"),
        ("second", "delete manifests/"),
        ("stalled", "promote"),
        ("first", ""),
        ("second", ""),
    )
    return cast, Run(cast.blobs(), cast.actors, script)


LATE = [run_of_a_save_that_finds_a_late_delta, run_of_a_collection_that_finds_a_late_delta]


@pytest.mark.parametrize("act", LATE, ids=["save", "collection"])
def test_late_delta_of_a_withdrawn_save_is_not_trusted(act: Callable[[], tuple[Cast, Run]]) -> None:
    cast, run = act()

    assert cast.check(run) is None


def test_save_that_trusts_a_late_delta_loses_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorcas_mlflow.store._save._has_new_deltas", lambda *_: False)
    cast, run = run_of_a_save_that_finds_a_late_delta()

    assert "LOSS" in str(cast.check(run))


def test_collection_that_trusts_a_late_delta_loses_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Survey.copies
    monkeypatch.setattr(Survey, "copies", lambda self, *, but=frozenset(), **_: copies(self, but=but))
    cast, run = run_of_a_collection_that_finds_a_late_delta()

    assert "LOSS" in str(cast.check(run))
