"""Each rule about deltas, switched off: the explorer must find a schedule that loses a committed checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.chunk_io import _catalog, _places
from tensorcas_mlflow.maintenance._gc_survey import Survey
from tensorcas_mlflow.store.protocol import Condemnation
from tests.protocol.casts import Cast
from tests.protocol.delta_casts import DeltaSave, delta_writer, stored
from tests.protocol.interleave import Run
from tests.protocol.schedules import explore

Patch = Callable[[pytest.MonkeyPatch], None]


def name_no_bases_in_the_intent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeltaSave, "declared", lambda self, bases: ())


def write_deltas_against_what_is_condemned(patch: pytest.MonkeyPatch) -> None:
    is_usable = DeltaSave.is_usable
    nothing = Condemnation(lists=(), generation=None)
    patch.setattr(DeltaSave, "is_usable", lambda self, base, condemned: is_usable(self, base, nothing))


def do_not_look_whether_bases_are_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeltaSave, "is_usable", lambda self, base, condemned: not base[1] & condemned.packs)


def rely_on_deltas_without_their_bases(patch: pytest.MonkeyPatch) -> None:
    def all_whole(tables: Any, places: Any, without: Any = ()) -> Any:
        return places.found.copy(), set()

    patch.setattr(_catalog, "find_chains", all_whole)
    patch.setattr(_places, "find_chains", all_whole)


def spare_no_bases(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Survey, "bases_of", lambda self, rows: np.zeros(len(self.rows.links.base), dtype=bool))


def spare_no_bases_of_what_is_pinned(patch: pytest.MonkeyPatch) -> None:
    rows_in = Survey.rows_in
    patch.setattr(Survey, "rows_in", lambda self, packs: rows_in(self, frozenset() if packs == self.pinned else packs))


def count_deltas_whose_bases_are_condemned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Survey, "copies", lambda self, *, but=frozenset(), **_: ~self.rows_in(but))


def condemned_bases() -> Cast:
    """A save finds a delta in a pack that stays, and a collector had planned to delete that of the base."""
    cast = stored({0: "b", 1: "e"}, "a", "b<a e", drop=[0])
    return cast.executor("collector", cast.blobs(), max_waste=1).writer("writer", "b", 2)


def planned_bases(*, chain: bool = False) -> Cast:
    """A save that stores a delta, and a collector that had planned to delete the base."""
    cast = stored({0: "b"}, "a", "b<a", drop=[0]) if chain else stored({0: "a"}, "a", drop=[0])
    cast.executor("collector", cast.blobs())
    return delta_writer(cast, "writer", "c", 1, against={"c": "b" if chain else "a"})


def planned_chains() -> Cast:
    return planned_bases(chain=True)


def dropped_bases() -> Cast:
    """A delta that is needed, and a base that is not."""
    return stored({0: "a", 1: "b"}, "a", "b<a").collector("collector").deletion("deletion", 0)


def two_copies() -> Cast:
    """A chunk in full and as a delta: one collector would delete the base of the one, another the other."""
    cast = stored({0: "be", 1: "fg"}, "a", "b<a e", "b f g")
    cast.executor("first", cast.blobs(), max_waste=1).drop(1)
    return cast.collector("second", max_waste=1)


@dataclass(frozen=True)
class RuleOff:
    name: str
    cast: Callable[[], Cast]
    patch: Patch
    max_preemptions: int = 1


RULES = [
    RuleOff("an intent names the packs of bases", planned_bases, name_no_bases_in_the_intent),
    RuleOff("what is condemned is no base", planned_bases, write_deltas_against_what_is_condemned),
    RuleOff("what is gone is no base", planned_bases, do_not_look_whether_bases_are_there),
    RuleOff(
        "a delta whose base is condemned is no copy for a save", condemned_bases, rely_on_deltas_without_their_bases
    ),
    RuleOff("who spares a pack spares those of its bases", dropped_bases, spare_no_bases),
    RuleOff("a pinned pack keeps what it takes", planned_chains, spare_no_bases_of_what_is_pinned),
    RuleOff(
        "a delta whose base is condemned is no copy for a collector", two_copies, count_deltas_whose_bases_are_condemned
    ),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_protocol_without_a_rule_for_deltas_loses_a_base(rule: RuleOff, monkeypatch: pytest.MonkeyPatch) -> None:
    cast = rule.cast()
    blobs = cast.blobs()
    rule.patch(monkeypatch)

    def check(run: Run) -> str | None:
        broken = [error for error in run.errors().values() if isinstance(error, TypeError | AttributeError)]
        if broken:
            raise broken[0]
        problem = cast.check(run)
        return problem if problem is not None and problem.startswith("LOSS after the run") else None

    found = explore(blobs, cast.actors, check, max_preemptions=rule.max_preemptions, max_schedules=20_000)

    print(f"{rule.name}: lost after {found.n_schedules} schedules")
    assert found.failure is not None, str(found)


@pytest.mark.long
@pytest.mark.parametrize("make", sorted({rule.cast for rule in RULES}, key=lambda cast: cast.__name__))
def test_plays_of_deltas_with_all_rules_lose_nothing(make: Callable[[], Cast]) -> None:
    cast = make()

    found = explore(cast.blobs(), cast.actors, cast.check, max_preemptions=1)

    assert found.failure is None, str(found)
