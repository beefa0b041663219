"""Recipes beside saves, collections and deletions, under every schedule with few preemptions."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from tests.protocol.casts import Cast
from tests.protocol.delta_casts import stored
from tests.protocol.interleave import Run
from tests.protocol.recipe_casts import deriver, with_recipes
from tests.protocol.schedules import RandomWalk, explore

MORE_PREEMPTIONS = int(os.environ.get("TENSORCAS_PREEMPTIONS", "0"))
N_RANDOM = int(os.environ.get("TENSORCAS_SCHEDULES", "240"))
N_PARTS = 12


def new_recipe() -> Cast:
    """A recipe is written while the checkpoint of its input is dropped."""
    cast = stored({0: "a", 1: "A"}, "a", "A")
    return deriver(cast, "deriver", "A").collector("collector").deletion("deletion", 0)


def new_recipe_of_garbage() -> Cast:
    """Two collectors are about to delete the input."""
    cast = stored({0: "a", 1: "A"}, "a", "A", drop=[0])
    return deriver(cast, "deriver", "A").collector("first").collector("second")


def new_recipe_of_a_delta() -> Cast:
    """The input is a delta, and its base is needed for nothing else."""
    cast = stored({0: "b", 1: "B"}, "a", "b<a", "B")
    return deriver(cast, "deriver", "B").collector("collector").deletion("deletion", 0)


def each_of_the_other() -> Cast:
    """Two optimizations make two tensors of each other."""
    cast = stored({0: "a", 1: "A"}, "a", "A")
    return deriver(deriver(cast, "one", "A"), "other", "a").collector("collector")


def pack_or_recipe() -> Cast:
    """A chunk lies in a pack, a recipe makes it too, and two collectors may each keep another one."""
    cast = with_recipes(stored({0: "a", 1: "A"}, "a", "A"), "A")
    return cast.collector("first").collector("second").writer("writer", "A", 2)


def made_chunk_is_saved() -> Cast:
    """Somebody saves what only a recipe makes, while its last checkpoint is dropped."""
    cast = with_recipes(stored({0: "a", 1: "A"}, "a"), "A")
    return cast.writer("writer", "Ab", 2).collector("collector").deletion("deletion", 1, 0)


def made_chunk_is_read() -> Cast:
    """The pack of a chunk goes, since a recipe makes it, while somebody reads."""
    cast = with_recipes(stored({0: "a", 1: "A"}, "a", "A"), "A")
    return cast.reader("reader", 1).collector("collector").deletion("deletion", 0)


CASTS = [new_recipe, new_recipe_of_garbage, new_recipe_of_a_delta, each_of_the_other, pack_or_recipe]
CASTS += [made_chunk_is_saved, made_chunk_is_read]
QUICK = {new_recipe, made_chunk_is_read}


def _named(cast: Callable[[], Cast]) -> str:
    return cast.__name__.replace("_", " ")


@pytest.mark.parametrize(
    "make", [each if each in QUICK else pytest.param(each, marks=pytest.mark.long) for each in CASTS], ids=_named
)
@pytest.mark.parametrize("is_remote", [False, pytest.param(True, marks=pytest.mark.long)])
def test_no_schedule_of_recipes_loses_a_chunk_or_leaks(make: Callable[[], Cast], *, is_remote: bool) -> None:
    cast = make()

    found = explore(cast.blobs(), cast.actors, cast.check, max_preemptions=1 + MORE_PREEMPTIONS, is_remote=is_remote)

    print(found)
    assert found.failure is None, str(found)
    assert found.is_exhausted


@pytest.mark.long
@pytest.mark.parametrize("make", CASTS, ids=_named)
def test_no_schedule_of_recipes_with_a_death_loses_a_chunk(make: Callable[[], Cast]) -> None:
    cast = make()
    deaths = [name for name in cast.actors if name not in ("deletion", "second")]

    found = explore(cast.blobs(), cast.actors, cast.check, max_preemptions=1 + MORE_PREEMPTIONS, deaths=deaths)

    print(found)
    assert found.failure is None, str(found)
    assert found.is_exhausted


def everybody(draw: random.Random) -> Cast:
    """A crowd: optimizations, writers, collectors, deletions and readers."""
    cast = stored({0: "a", 1: "Ab", 2: "Bd", 5: "D"}, "a", "A b", "B d<a", "D g")
    with_recipes(cast, *draw.sample(["A", "B", "D", "DB"], draw.choice([0, 1, 2])), drop=draw.sample([0, 1, 2], 1))
    waste, grace_s = draw.choice([0.0, 0.0, 0.5]), draw.choice([0.0, 0.0, 3600.0])
    deriver(cast, "d1", *draw.choice(["A", "BD", "b"]))
    deriver(cast, "d2", *draw.choice(["D", "a", "B"]))
    cast.writer("w1", draw.choice(["AB", "aD", "ce"]), 6)
    cast.writer("w2", draw.choice(["A", "b", "Dd"]), draw.choice([1, 7]))
    cast.collector("c1", max_waste=waste, rounds=draw.choice([1, 2]))
    cast.collector("c2", max_waste=waste, grace_s=grace_s, rounds=draw.choice([1, 2]))
    cast.deletion("deletion", *draw.sample([0, 1, 2, 6], draw.choice([1, 2, 3])))
    cast.reader("r5", 5)
    return cast


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, N_PARTS))])
def test_random_schedules_of_a_crowd_with_recipes_lose_nothing(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorcas_mlflow.chunk_io._catalog._FOLD_AT", 3)
    for seed in range(part, N_RANDOM, N_PARTS):
        draw = random.Random(seed)
        cast = everybody(draw)
        walk = RandomWalk(seed, deaths=[name for name in cast.actors if name[0] in "wcd"])
        weak_lists = draw if draw.random() < 0.5 else None
        run = Run(cast.blobs(), cast.actors, walk, weak_lists=weak_lists, is_remote=draw.random() < 0.5)

        problem = cast.check(run)

        assert problem is None, "\n".join([f"seed {seed}: {problem}", *run.trace])
