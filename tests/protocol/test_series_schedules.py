"""Saves that find bases and store deltas by themselves, beside collections: every schedule with few preemptions."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tensorcas_mlflow.layout.packs import is_delta
from tensorcas_mlflow.store import _save, protocol
from tensorcas_mlflow.store._base_plans import BasePlan
from tensorcas_mlflow.store.protocol import list_packs, read_pack_table
from tests.protocol.explored import MORE_PREEMPTIONS
from tests.protocol.interleave import memory_of
from tests.protocol.schedules import explore
from tests.protocol.series_casts import EachItsOwn, Series


@pytest.fixture(autouse=True)
def _stores_small_tensors_as_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("_recent.LEAST", "_bases.LEAST", "_encode.LEAST"):
        monkeypatch.setattr(f"tensorcas_mlflow.store.{module}_ROW_BYTES", 1024)
    for module in ("_bases", "_store"):
        monkeypatch.setattr(f"tensorcas_mlflow.store.{module}.RECENT", EachItsOwn())


def next_step() -> Series:
    """A step is saved while the one that it is stored against is dropped and collected."""
    cast = Series().begin({0: "a"}).saver("writer", "b", 1)
    cast.collector("collector").deletion("deletion", 0)
    return cast


def step_after_next() -> Series:
    """The same, where that is a delta itself, against what nothing else needs."""
    cast = Series().begin({0: "a", 1: "b"})
    cast.drop(0)
    cast.saver("writer", "c", 2).collector("collector").deletion("deletion", 1)
    return cast


def two_savers() -> Series:
    """Two save the same state, and somebody collects."""
    cast = Series().begin({0: "a"}).saver("first", "b", 1).saver("second", "b", 2)
    cast.collector("collector").deletion("deletion", 0)
    return cast


def training() -> Series:
    """A process stores its second step against its first, which is dropped and collected meanwhile."""
    cast = Series().begin({}).trainer("trainer", "ab", 1, 2)
    cast.deletion("deletion", 1).collector("collector")
    return cast


CASTS = [next_step, step_after_next, two_savers, training]


def test_the_states_of_a_series_are_stored_as_deltas() -> None:
    cast = Series().begin({0: "a", 1: "b", 2: "c"})
    memory = memory_of(cast.blobs())
    tables = [read_pack_table(memory, name) for name, _ in list_packs(memory)]

    assert sum(int(is_delta(table).sum()) for table in tables) == 2


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_saver_stores_its_state_as_a_delta_against_that_of_another_one(*, is_remote: bool) -> None:
    cast = next_step()
    memory = memory_of(cast.blobs(), is_remote=is_remote)
    saver = threading.Thread(target=cast.actors["writer"], args=(memory,))
    saver.start()
    saver.join()
    tables = [read_pack_table(memory, name) for name, _ in list_packs(memory)]

    assert sum(int(is_delta(table).sum()) for table in tables) == 1


@pytest.mark.parametrize("make", [next_step, *(pytest.param(each, marks=pytest.mark.long) for each in CASTS[1:])])
@pytest.mark.parametrize("is_remote", [False, True])
def test_no_schedule_of_a_series_loses_a_state(make: Callable[[], Series], *, is_remote: bool) -> None:
    cast = make()
    deaths = [name for name in cast.actors if name in ("writer", "collector") and make is not next_step]

    found = explore(
        cast.blobs(),
        cast.actors,
        cast.check,
        max_preemptions=1 + MORE_PREEMPTIONS,
        deaths=deaths,
        is_remote=is_remote,
    )

    print(found)
    assert found.failure is None, str(found)
    assert found.is_exhausted


@pytest.mark.long
@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("rule", ["it is named", "it is looked at"])
def test_series_without_a_rule_of_the_saver_loses_a_state(
    rule: str, monkeypatch: pytest.MonkeyPatch, *, is_remote: bool
) -> None:
    cast = next_step()
    if rule == "it is named":
        declare = _save.declare
        monkeypatch.setattr(_save, "declare", lambda backend, name, digests, bases: declare(backend, name, digests))
    else:
        monkeypatch.setattr(BasePlan, "leave_out", lambda self, backend, condemned: None)

    found = explore(cast.blobs(), cast.actors, cast.check, max_preemptions=2, is_remote=is_remote)

    assert found.failure is not None
    assert found.failure.startswith("LOSS")


@pytest.mark.long
def test_training_in_an_object_store_without_generations_loses_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    cast = training()
    monkeypatch.setattr(protocol, "begin_generation", lambda backend: None)

    found = explore(cast.blobs(), cast.actors, cast.check, max_preemptions=2, is_remote=True)

    print(found)
    assert found.failure is not None
    assert found.failure.startswith("LOSS")
