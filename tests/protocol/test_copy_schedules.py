"""Copies between stores, under every schedule with few preemptions of those who collect at either end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.chunk_io import Places
from tensorcas_mlflow.maintenance import copy_refs, read_source
from tensorcas_mlflow.store import PendingBatch
from tests.protocol.casts import Cast, load, open_store
from tests.protocol.delta_casts import stored
from tests.protocol.explored import MORE_PREEMPTIONS
from tests.protocol.interleave import Run, memory_of
from tests.protocol.schedules import explore


def copy_against_collection() -> Cast:
    """A copy of two steps that share chunks with an old pack whose only ref is dropped meanwhile."""
    return Cast(before={0: "ab"}).copier("copier", {1: "ac", 2: "b"}).collector("collector").deletion("deletion", 0)


def deltas_against_what_is_there() -> Cast:
    """A copy of deltas whose base is at the destination, where the only ref that needs it is dropped meanwhile."""
    source = stored({1: "b", 2: "bc"}, "a", "b<a c<a").blobs()
    cast = stored({0: "a"}, "a").copier("copier", {1: "b", 2: "bc"}, blobs=source)
    return cast.collector("collector").deletion("deletion", 0)


def deltas_whose_base_goes_along() -> Cast:
    """A copy of deltas whose base no ref needs that is copied, while the destination is collected."""
    source = stored({1: "b", 2: "bc"}, "a", "b<a c<a").blobs()
    cast = stored({0: "d"}, "d").copier("copier", {1: "b", 2: "bc"}, blobs=source)
    return cast.writer("writer", "a", 3).collector("collector").deletion("deletion", 3)


DELTAS = pytest.mark.parametrize(
    "make", [deltas_against_what_is_there, pytest.param(deltas_whose_base_goes_along, marks=pytest.mark.long)]
)


def copied_all(cast: Cast, run: Run) -> str | None:
    """Say what is wrong after a run: besides all else, a copy that has ended must have copied everything."""
    problem = cast.check(run)
    [copier] = [actor for actor in run.actors if actor.name == "copier"]
    there = {ref.step for ref in open_store(run.memory).checkpoints()}
    if problem is None and copier.done and not copier.killed and copier.error is None and not {1, 2} <= there:
        return f"the copy has ended, and there are only {there}"
    return problem


@pytest.mark.parametrize("max_preemptions", [1, pytest.param(2, marks=pytest.mark.long)])
def test_no_schedule_of_a_copy_and_a_collection_at_its_destination_loses_or_leaks(max_preemptions: int) -> None:
    cast = copy_against_collection()

    found = explore(
        cast.blobs(), cast.actors, lambda run: copied_all(cast, run), max_preemptions=max_preemptions + MORE_PREEMPTIONS
    )

    print(found)
    assert found.failure is None, str(found)
    assert found.is_exhausted


@pytest.mark.long
def test_no_schedule_of_a_copy_with_a_death_loses_or_leaks() -> None:
    cast = copy_against_collection()

    found = explore(
        cast.blobs(),
        cast.actors,
        lambda run: copied_all(cast, run),
        max_preemptions=1 + MORE_PREEMPTIONS,
        deaths=["copier", "collector"],
    )

    print(found)
    assert found.failure is None, str(found)
    assert found.is_exhausted


@pytest.mark.long
def test_no_schedule_of_a_copy_and_a_save_of_the_same_chunks_loses_or_leaks() -> None:
    cast = copy_against_collection().writer("writer", "ac", 3)

    found = explore(cast.blobs(), cast.actors, lambda run: copied_all(cast, run), max_preemptions=1 + MORE_PREEMPTIONS)

    print(found)
    assert found.failure is None, str(found)


@pytest.mark.long
def test_a_collection_at_the_source_leaves_a_dropped_step_out_and_never_copies_a_half() -> None:
    cast = Cast(before={0: "ab", 1: "bc", 2: "ad"}).collector("collector", max_waste=0).deletion("deletion", 0)

    def copier(backend: Backend) -> None:
        source, destination = open_store(backend), open_store(memory_of(Cast(before={}).blobs()))
        refs, _ = read_source(source)
        report = copy_refs(source, destination, refs)
        # Here, where every run is looked at: what the others see does not depend on it.
        copied = open_store(destination.backend)
        steps = {ref.step for ref in copied.checkpoints()}
        for ref in copied.checkpoints():
            assert ref.step is not None
            cast.check_tensors(ref.step, load(copied, ref))
        assert report.failed == ()
        assert {1, 2} <= steps

    cast.actors["copier"] = copier

    found = explore(cast.blobs(), cast.actors, cast.check, max_preemptions=1 + MORE_PREEMPTIONS)

    print(found)
    assert found.failure is None, str(found)
    assert found.is_exhausted


@DELTAS
@pytest.mark.parametrize("is_remote", [False, pytest.param(True, marks=pytest.mark.long)])
def test_no_schedule_of_a_copy_of_deltas_loses_a_base(make: Callable[[], Cast], *, is_remote: bool) -> None:
    cast = make()

    found = explore(
        cast.blobs(),
        cast.actors,
        lambda run: copied_all(cast, run),
        max_preemptions=1 + MORE_PREEMPTIONS,
        is_remote=is_remote,
    )

    print(found)
    assert found.failure is None, str(found)
    assert found.is_exhausted


@pytest.mark.long
@DELTAS
def test_no_schedule_of_a_copy_of_deltas_with_a_death_loses_a_base(make: Callable[[], Cast]) -> None:
    cast = make()

    found = explore(
        cast.blobs(),
        cast.actors,
        lambda run: copied_all(cast, run),
        max_preemptions=1 + MORE_PREEMPTIONS,
        deaths=["copier", "collector"],
    )

    print(found)
    assert found.failure is None, str(found)
    assert found.is_exhausted


class NamesNoPacks(PendingBatch):
    """A batch whose intents do not name the packs of bases."""

    def _declare(self, number: int) -> None:
        self._pinned = frozenset()
        super()._declare(number)


class TrustsWhatItKnew(PendingBatch):
    """A batch that does not look which of the packs that it knew are condemned or gone."""

    def _find_bases(self, places: Places, packs: set[str]) -> None:
        super()._find_bases(places, set())


@pytest.mark.parametrize("kind", [pytest.param(NamesNoPacks, marks=pytest.mark.long), TrustsWhatItKnew])
def test_copy_without_one_of_its_rules_loses_a_base(kind: type[PendingBatch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorcas_mlflow.maintenance._copy_refs.PendingBatch", kind)
    cast = deltas_against_what_is_there()

    def check(run: Run) -> str | None:
        problem = cast.check(run)
        return problem if problem is not None and problem.startswith("LOSS") else None

    found = explore(cast.blobs(), cast.actors, check, max_preemptions=2)

    print(f"{kind.__name__}: lost after {found.n_schedules} schedules")
    assert found.failure is not None, str(found)
