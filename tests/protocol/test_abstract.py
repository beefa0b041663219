"""Every state of the protocol's rules, and what is lost without each of them.

Other tests beside this one explore the code itself, which has more states than can be visited where many act.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.protocol.abstract import Machine
from tests.protocol.abstract_world import Actor, Collector, Deletion, Entry, Ref, Rules, State, World, Writer

Cast = Callable[[], State]

N_WALKS = int(os.environ.get("TENSORCAS_SCHEDULES", "400"))
N_PARTS = 4

IS_STRESS = os.environ.get("TENSORCAS_ALL_STATES") == "1"
"""True to visit casts of tens of millions of states; `make stress` sets it."""


def world(*refs: tuple[int, str], packs: dict[int, str]) -> World:
    """Return the world at the start.

    Args:
        refs: Steps and their chunks.
        packs: By number, and the chunks in each.
    """
    return World(
        packs=frozenset(packs),
        entries=frozenset(Entry(pack, chunk) for pack, chunks in packs.items() for chunk in chunks),
        manifests=frozenset((step, 0) for step, _ in refs),
        intents=frozenset(),
        refs=frozenset(Ref(step, (step, 0), frozenset(chunks)) for step, chunks in refs),
        lists=frozenset(),
    )


def writer(number: int, chunks: str = "a", delta: tuple[str, str] | None = None) -> Actor:
    return Writer(number, frozenset(chunks), delta)


def kept() -> World:
    """One chunk, under a ref."""
    return world((9, "a"), packs={1: "a"})


def garbage() -> World:
    """One chunk that nothing needs."""
    return world(packs={1: "a"})


def one_of_each() -> State:
    return kept(), (writer(0), Collector(0), Deletion(9))


def delta() -> State:
    """A save that may write a delta against a chunk whose only ref is dropped."""
    return world((9, "b"), packs={1: "b"}), (writer(0, delta=("a", "b")), Collector(0), Deletion(9))


def delta_of_one_of_two() -> State:
    """A save that may write a delta against either of two copies, one of which is garbage."""
    return world((9, "b"), packs={1: "b", 2: "b"}), (writer(0, delta=("a", "b")), Collector(0))


def delta_of_another() -> State:
    """A save may find the delta of another save, whose base a collector has planned to delete."""
    before = world(packs={1: "b"}), (writer(0), writer(1, delta=("a", "b")), Collector(0, wanted=frozenset({1})))
    return Machine().lead(
        before,
        (1, "write", lambda actor: actor.base == 1),
        (2, "abort", lambda actor: True),
        (2, "condemn", lambda actor: True),
        (0, "index", lambda actor: True),
    )


def delta_during_a_survey() -> State:
    """A collector has read the lists for the second time; a save is about to write a chunk on its list as a delta."""
    collectors = Collector(0, wanted=frozenset({1})), Collector(1, wanted=frozenset({2}))
    before = world(packs={1: "a", 2: "b"}), (writer(0), writer(1, delta=("a", "b")), *collectors)

    def whatever(actor: Any) -> bool:
        return True

    return Machine(max_attempts=1).lead(
        before,
        (2, "condemn", whatever),
        (0, "commit", whatever),
        (2, "see again", whatever),
        (1, "write", lambda actor: actor.base == 2),
        (2, "see again", lambda actor: actor.to_see == ("packs",)),
    )


def two_copies() -> State:
    return world((9, "a"), packs={1: "a", 2: "a"}), (Collector(0), Collector(1))


def two_collectors() -> State:
    return garbage(), (writer(0), Collector(0), Collector(1))


def two_saves() -> State:
    return kept(), (writer(0), writer(1), Collector(0), Deletion(9), Deletion(0))


def two_of_each() -> State:
    greedy = Collector(0, is_greedy=True), Collector(1, is_greedy=True)
    return kept(), (writer(0), writer(1), *greedy, Deletion(9), Deletion(0))


@pytest.mark.long
@pytest.mark.parametrize("cast", [one_of_each, delta, two_copies, delta_of_another], ids=lambda cast: cast.__name__)
def test_no_state_of_the_abstract_protocol_has_lost_anything(cast: Cast) -> None:
    found = Machine().visit(cast())

    print(f"{found.n_states} states")
    assert found.loss is None, "\n".join([found.loss, *found.path])


@pytest.mark.long
@pytest.mark.parametrize("cast", [two_saves, two_collectors, delta_of_one_of_two], ids=lambda cast: cast.__name__)
def test_no_state_with_more_actors_has_lost_anything(cast: Cast) -> None:
    found = Machine().visit(cast())

    print(f"{found.n_states} states")
    assert found.loss is None, "\n".join([found.loss, *found.path])


@pytest.mark.long
def test_no_state_with_a_delta_that_appears_during_a_survey_has_lost_anything() -> None:
    found = Machine(max_attempts=1).visit(delta_during_a_survey())

    print(f"{found.n_states} states")
    assert found.loss is None, "\n".join([found.loss, *found.path])


@pytest.mark.skipif(not IS_STRESS, reason="tens of millions of states; make stress visits them")
def test_no_state_with_two_actors_of_each_kind_has_lost_anything() -> None:
    found = Machine(is_coarse=True, max_attempts=1).visit(two_of_each())

    print(f"{found.n_states} states")
    assert found.loss is None, "\n".join([found.loss, *found.path])


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, N_PARTS))])
def test_no_random_walk_of_a_crowd_with_deltas_loses_anything(part: int) -> None:
    for seed in range(part, N_WALKS, N_PARTS):
        loss = Machine(max_attempts=3).walk(crowd(random.Random(seed)), random.Random(seed))

        assert loss is None, f"seed {seed}: {loss}"


@pytest.mark.long
def test_random_walks_without_a_rule_see_a_loss() -> None:
    machine = Machine(Rules(bases_are_kept=False))
    losses = [machine.walk(crowd(random.Random(seed)), random.Random(seed)) for seed in range(300)]

    assert any(losses)


def crowd(draw: random.Random) -> State:
    """Three saves of several chunks, some as deltas, three collections and three deletions."""
    saves = [
        writer(0, draw.choice(["ab", "ac"]), draw.choice([None, ("a", "b"), ("c", "b")])),
        writer(1, draw.choice(["b", "abc"]), draw.choice([None, ("c", "a"), ("c", "b")])),
        writer(2, "c", ("c", "a")),
    ]
    before = world((8, "ab"), (9, "b"), packs={1: "ab", 2: "b", 3: "a"})
    return before, (*saves, *(Collector(number) for number in range(3)), Deletion(8), Deletion(9), Deletion(0))


WITHOUT = {
    "intent_comes_first": one_of_each,
    "lists_before_packs_at_saves": one_of_each,
    "condemned_is_not_relied_on": one_of_each,
    "packs_are_looked_at": one_of_each,
    "commit_is_fenced": one_of_each,
    "intent_names_chunks": one_of_each,
    "intent_names_bases": delta,
    "collector_looks_again": one_of_each,
    "intents_count": one_of_each,
    "dead_intents_are_withdrawn": one_of_each,
    "intents_before_refs": one_of_each,
    "lists_before_packs_at_surveys": two_copies,
    "condemned_copy_is_no_copy": two_copies,
    "bases_are_kept": delta,
    "new_delta_is_not_relied_on": delta_of_another,
    "new_delta_is_no_copy": delta_during_a_survey,
    "list_goes_last": one_of_each,
    "dead_list_is_finished": two_copies,
    "finisher_lists_too": two_collectors,
    "old_list_stays": two_collectors,
}
"""By rule, a cast that loses something without it."""


@pytest.mark.parametrize("rule", [name for name, cast in WITHOUT.items() if cast is not two_collectors])
def test_abstract_protocol_without_one_of_its_rules_loses_something(rule: str) -> None:
    found = Machine(Rules(**{rule: False})).visit(WITHOUT[rule]())

    print(f"{found.n_states} states", *found.path, sep="\n")
    assert found.loss is not None


@pytest.mark.long
@pytest.mark.parametrize("rule", [name for name, cast in WITHOUT.items() if cast is two_collectors])
def test_abstract_protocol_without_a_rule_for_two_collectors_loses_something(rule: str) -> None:
    found = Machine(Rules(**{rule: False})).visit(WITHOUT[rule]())

    print(f"{found.n_states} states", *found.path, sep="\n")
    assert found.loss is not None
