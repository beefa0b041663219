"""Explorations that several casts share: every schedule with few preemptions, and random walks of a crowd."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import pytest

from tests.protocol.casts import Cast
from tests.protocol.interleave import Run
from tests.protocol.schedules import RandomWalk, explore

MORE_PREEMPTIONS = int(os.environ.get("TENSORCAS_PREEMPTIONS", "0"))
"""Preemptions beside those of a test; `make stress` asks for more of these and of the next."""
N_RANDOM = int(os.environ.get("TENSORCAS_SCHEDULES", "240"))
"""Number of random schedules."""

MakeCast = Callable[[], Cast]


def name_of(make: MakeCast) -> str:
    """Return the name of a cast in the name of a test."""
    return make.__name__.replace("_", " ")


def long_but(quick: Collection[MakeCast], casts: Sequence[MakeCast]) -> list[Any]:
    """Return casts as parameters of a test; those that are not quick belong to the long tests."""
    return [each if each in quick else pytest.param(each, marks=pytest.mark.long) for each in casts]


def long_but_first(n_parts: int) -> list[Any]:
    """Return the numbers of the parts of a test; those after the first belong to the long tests."""
    return [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, n_parts))]


def assert_no_schedule_fails(cast: Cast, *, is_remote: bool = False, deaths: Collection[str] = ()) -> None:
    """Run every schedule with few preemptions, and check each end.

    Args:
        cast: The actors.
        is_remote: Whether the store lies in an object store.
        deaths: The actors that may die.
    """
    found = explore(
        cast.blobs(),
        cast.actors,
        cast.check,
        max_preemptions=1 + MORE_PREEMPTIONS,
        is_remote=is_remote,
        deaths=list(deaths),
    )

    print(found)
    assert found.failure is None, str(found)
    assert found.is_exhausted


def assert_no_walk_fails(everybody: Callable[[random.Random], Cast], seeds: Iterable[int], *, mortal: str) -> None:
    """Run one random schedule for each seed, and check its end.

    Args:
        everybody: Draws the actors.
        seeds: The seeds.
        mortal: First letters of the names of the actors that may die.
    """
    for seed in seeds:
        draw = random.Random(seed)
        cast = everybody(draw)
        walk = RandomWalk(seed, deaths=[name for name in cast.actors if name[0] in mortal])
        weak_lists = draw if draw.random() < 0.5 else None
        run = Run(cast.blobs(), cast.actors, walk, weak_lists=weak_lists, is_remote=draw.random() < 0.5)

        problem = cast.check(run)

        assert problem is None, "\n".join([f"seed {seed}: {problem}", *run.trace])
