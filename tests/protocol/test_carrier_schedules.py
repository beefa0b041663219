"""Saves through a carrier, which no collector can fence, under every schedule with few preemptions."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tensorcas_mlflow.backends import Token
from tensorcas_mlflow.integration.server_store import CarrierBackend, _backend
from tensorcas_mlflow.store import protocol
from tests.protocol.carriers import CarrierCast
from tests.protocol.casts import Cast
from tests.protocol.explored import MORE_PREEMPTIONS
from tests.protocol.interleave import Run
from tests.protocol.schedules import Exploration, Script, explore


def sharing_save() -> CarrierCast:
    """A save through a carrier that shares a chunk with a pack nothing needs any more."""
    cast = CarrierCast(before={0: "ab"})
    cast.drop(0)
    return cast.carrier_writer("writer", "ac", 1)


def replacing_save() -> CarrierCast:
    """A save through a carrier in the place of an earlier one."""
    return CarrierCast(before={0: "ab", 1: "ad"}).carrier_writer("writer", "ac", 1)


def explored(cast: Cast, max_preemptions: int, **options: object) -> Exploration:
    found = explore(cast.blobs(), cast.actors, cast.check, max_preemptions=max_preemptions, **options)  # type: ignore[arg-type]
    print(found)
    return found


@pytest.mark.parametrize("make", [sharing_save, replacing_save])
def test_no_schedule_of_a_carried_save_and_a_collection_loses_or_leaks(make: Callable[[], CarrierCast]) -> None:
    cast = make().collector("collector", max_waste=0)

    found = explored(cast, 1 + MORE_PREEMPTIONS)

    assert found.failure is None, str(found)
    assert found.is_exhausted


@pytest.mark.parametrize("make", [sharing_save, pytest.param(replacing_save, marks=pytest.mark.long)])
def test_no_schedule_through_a_carrier_with_a_death_loses_or_leaks(make: Callable[[], CarrierCast]) -> None:
    cast = make().collector("collector")

    found = explored(cast, 1 + MORE_PREEMPTIONS, deaths=["writer", "collector"])

    assert found.failure is None, str(found)
    assert found.is_exhausted


@pytest.mark.parametrize(("make", "max_preemptions"), [(sharing_save, 1), (replacing_save, 1)])
def test_no_schedule_in_which_a_carried_save_is_given_up_alive_loses_or_leaks(
    make: Callable[[], CarrierCast], max_preemptions: int
) -> None:
    cast = make().abandoning_collector("collector")

    found = explored(cast, max_preemptions + MORE_PREEMPTIONS)

    assert found.failure is None, str(found)
    assert found.is_exhausted


@pytest.mark.long
def test_no_schedule_of_a_carried_and_a_direct_save_loses_or_leaks() -> None:
    cast = sharing_save().writer("other", "bd", 2).collector("collector")

    found = explored(cast, 1 + MORE_PREEMPTIONS)

    assert found.failure is None, str(found)
    assert found.is_exhausted


@pytest.mark.long
def test_a_collection_refuses_while_a_save_through_a_carrier_is_under_way() -> None:
    cast = sharing_save().collector("collector")
    refused: list[str] = []

    def check(run: Run) -> str | None:
        refused.extend(f"{type(error).__name__}" for error in run.errors().values())
        pending = "withdraw intents" in " ".join(run.trace)
        return "a collector has withdrawn it" if pending else cast.check(run)

    found = explore(cast.blobs(), cast.actors, check, max_preemptions=1)

    assert found.failure is None, str(found)
    assert set(refused) == {"PendingSavesError"}


# --- rules switched off


def look_at_the_intent_once(patch: pytest.MonkeyPatch) -> None:
    check = CarrierBackend._check_intent
    looked: set[tuple[int, str]] = set()

    def first_time(self: CarrierBackend, key: str, token: Token) -> None:
        if (id(self), key) not in looked:
            looked.add((id(self), key))
            check(self, key, token)

    patch.setattr(CarrierBackend, "_check_intent", first_time)


def put_a_ref_over_another(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_backend, "_DRAWN", re.compile(".*"))


def give_it_up_by_its_age(patch: pytest.MonkeyPatch) -> None:
    parse = protocol.parse_intent

    def like_any_other(*args: object) -> protocol.Intent:
        return parse(*args)._replace(through_carrier=False)  # type: ignore[arg-type]

    patch.setattr(protocol, "parse_intent", like_any_other)


@pytest.mark.long
def test_carried_save_without_a_second_look_at_its_intent_loses_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    look_at_the_intent_once(monkeypatch)
    cast = sharing_save().abandoning_collector("collector")

    found = explored(cast, 2)

    assert found.failure is not None
    assert found.failure.startswith("LOSS after the run")


def given_up_while_it_replaces(ref: str) -> str:
    """A save is given up just before it puts a ref, notices, and dies."""
    cast = replacing_save().abandoning_collector("collector")
    script = Script(("writer", f"put {ref}"), ("collector", ""), ("writer", "put intents/"))
    return cast.check(Run(cast.blobs(), cast.actors, script)) or "nothing is lost"


def test_a_checkpoint_stays_when_the_save_that_replaces_it_is_given_up_and_dies() -> None:
    assert given_up_while_it_replaces("refs/replacing/") == "nothing is lost"


def test_carried_checkpoint_without_a_stand_in_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    put_a_ref_over_another(monkeypatch)

    assert given_up_while_it_replaces("refs/runs/").startswith("LOSS after the run: step 1 is gone")


def given_up_and_dead() -> str:
    """A collection comes while a save is about to put its ref; then the save dies before it has noticed."""
    cast = sharing_save().collector("collector")
    script = Script(("writer", "put refs/"), ("collector", ""), ("writer", "get refs/"))
    return cast.check(Run(cast.blobs(), cast.actors, script)) or "nothing is lost"


def test_giving_a_carried_save_up_by_its_age_would_leave_a_ref_without_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_it_up_by_its_age(monkeypatch)

    assert given_up_and_dead().startswith("LOSS after the run: step 1 does not load")
