"""The real code of writers, collectors, deletions and readers, under random schedules."""

from __future__ import annotations

import random
from functools import cache

import pytest

from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import condemned_bytes, list_packs
from tests.protocol.casts import Cast, key_of
from tests.protocol.explored import N_RANDOM, assert_no_walk_fails, long_but_first
from tests.protocol.interleave import Blobs, Run
from tests.protocol.schedules import RandomWalk

N_PARTS = 4
STEPS = {0: "ab", 1: "acd", 5: "e"}


def with_a_dead_collector(store: Store) -> None:
    """Leave the list of a collector that died before its first deletion; all packs are on it."""
    store.backend.delete(key_of(0))
    packs = frozenset(name for name, _ in list_packs(store.backend))
    store.backend.put_new("condemned/" + "d" * 32, [condemned_bytes(packs, frozenset())])


@cache
def start(is_after_a_death: bool) -> Blobs:
    return Cast(before=STEPS, prepare=with_a_dead_collector if is_after_a_death else None).blobs()


def everybody(draw: random.Random, kind: type[Cast] = Cast) -> Cast:
    """A crowd of two writers, two collectors, a deletion and two readers."""
    cast = kind(before=STEPS, may_hold={step: {letters} for step, letters in STEPS.items()})
    is_after_a_death = draw.random() < 0.5
    cast.start = start(is_after_a_death)
    if is_after_a_death:
        cast.dropped.add(0)
    waste = draw.choice([0.0, 0.0, 0.5])
    grace_s = draw.choice([0.0, 0.0, 0.0, 3600.0])
    cast.writer("w1", draw.choice(["ab", "af", "cdf"]), 2)
    cast.writer("w2", draw.choice(["ab", "bg", "acd"]), draw.choice([1, 2, 3]))
    if draw.random() < 0.5:
        cast.stream("ws", draw.choice(["abf", "gcd", "e"]), 4)
    if draw.random() < 0.5:
        cast.trainer("wt", draw.choice(["ab", "bf", "acd"]), 6, 7, 8)
    cast.collector("c1", max_waste=waste, rounds=draw.choice([1, 2]))
    cast.collector("c2", max_waste=waste, grace_s=grace_s, rounds=draw.choice([1, 2]))
    cast.deletion("deletion", *draw.sample([0, 1, 6, 7], draw.choice([1, 2, 3])))
    cast.reader("r1", draw.choice([1, 2]))
    cast.reader("r5", 5)
    return cast


@pytest.mark.long
@pytest.mark.parametrize("part", long_but_first(N_PARTS))
def test_random_schedules_of_a_crowd_lose_nothing(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorcas_mlflow.chunk_io._catalog._FOLD_AT", 2)
    assert_no_walk_fails(everybody, range(part, N_RANDOM, N_PARTS), mortal="wc")


def test_random_schedule_can_be_repeated() -> None:
    cast = everybody(random.Random(7))
    runs = [Run(cast.blobs(), cast.actors, RandomWalk(7)) for _ in range(2)]

    assert runs[0].trace == runs[1].trace
    assert runs[0].content == runs[1].content
