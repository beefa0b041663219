"""Every state of the protocol's rules for recipes, and what is lost without each of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.protocol.abstract import Machine, useless
from tests.protocol.abstract_world import (
    Actor,
    Collector,
    Deletion,
    Deriver,
    Entry,
    Listed,
    Recipe,
    Rules,
    State,
    World,
)
from tests.protocol.test_abstract import IS_STRESS, N_PARTS, N_WALKS, WITHOUT, world, writer

Cast = Callable[[], State]

X_FROM_I = Recipe(1, "x", ("i",))


def recipe(number: int, product: str, inputs: str) -> Recipe:
    return Recipe(number, product, tuple(inputs))


def deriver(number: int, product: str, inputs: str) -> Actor:
    return Deriver(50 + number, recipe(number, product, inputs))


def collector(number: int, *wanted: int | Recipe) -> Actor:
    """Return a collector that plans to delete these packs and recipes."""
    return Collector(number, wanted=frozenset(wanted))


def derived(*refs: tuple[int, str], packs: dict[int, str], recipes: tuple[Recipe, ...] = (X_FROM_I,)) -> World:
    return world(*refs, packs=packs)._replace(recipes=frozenset(recipes))


def machine(**rules: bool) -> Machine:
    return Machine(Rules(**rules), has_recipes=True, is_coarse=True, max_attempts=1)


SETTLED = Machine(max_attempts=1, has_recipes=True)
"""Leads actors to the state in which a visit starts."""


def whatever(actor: Any) -> bool:
    return True


# --- casts


def dropped_input() -> State:
    """The checkpoint of the input is dropped, and the product is needed."""
    return world((8, "x"), (9, "i"), packs={1: "x", 2: "i"}), (deriver(1, "x", "i"), Collector(0), Deletion(9))


def saved_product() -> State:
    return world((9, "i"), packs={1: "x", 2: "i"}), (deriver(1, "x", "i"), Collector(0), writer(0, "x"))


def each_other() -> State:
    """Two recipes make two chunks of each other."""
    before = world((8, "a"), (9, "b"), packs={1: "a", 2: "b"})
    return before, (deriver(1, "a", "b"), deriver(2, "b", "a"), Collector(0))


def two_inputs() -> State:
    before = world((8, "x"), (9, "i"), packs={1: "x", 2: "i", 3: "j"})
    return before, (deriver(1, "x", "ij"), Collector(0), Deletion(9))


def pack_and_recipe() -> State:
    """A chunk in a pack and as a product."""
    return derived((9, "x"), packs={1: "x", 2: "i"}), (Collector(0), Collector(1))


def input_of_another_recipe() -> State:
    """A product whose input is in a pack, and is a product of another recipe."""
    recipes = (recipe(1, "a", "b"), recipe(2, "b", "c"))
    return derived((8, "a"), packs={2: "b", 3: "c"}, recipes=recipes), (Collector(0),)


def delta_as_input() -> State:
    """The input is a delta against a base in another pack."""
    before = world((8, "x"), (9, "i"), packs={1: "x", 2: "", 3: "b"})
    before = before._replace(entries=before.entries | {Entry(2, "i", 3)})
    return before, (deriver(1, "x", "i"), Collector(0), Deletion(9))


def delta_as_input_and_two_plans() -> State:
    """One collector has planned to delete the product, and another one the base of the input."""
    before = derived(packs={1: "x", 2: "", 3: "b"})
    before = before._replace(entries=before.entries | {Entry(2, "i", 3)})
    return before, (writer(0, "x"), collector(0, 1), collector(1, 3))


def input_and_product_planned() -> State:
    """A save needs the product; one collector has planned to delete it, and another one the input."""
    before = derived(packs={1: "x", 2: "i"}), (writer(0, "x"), collector(0, 1), collector(1, 2))
    return SETTLED.lead(before, (1, "condemn", whatever), (2, "condemn", whatever))


def recipe_and_product_planned() -> State:
    """A save needs the product; one collector has planned to delete it, and another one the recipe."""
    before = derived(packs={1: "x", 2: "i"}), (writer(0, "x"), collector(0, 1), collector(1, X_FROM_I))
    return SETTLED.lead(before, (1, "condemn", whatever), (2, "condemn", whatever))


def recipe_on_a_dead_list() -> State:
    """A recipe is the only copy of a needed chunk, and on the list of a dead collector."""
    before = derived((9, "x"), packs={2: "i"})
    dead = Listed(7, frozenset({2}), frozenset(), frozenset({X_FROM_I}))
    return before._replace(lists=frozenset({dead})), (Collector(0), writer(0, "x"))


def recipe_on_a_dead_list_and_two_collectors() -> State:
    before, actors = recipe_on_a_dead_list()
    return before, (*actors, Collector(1))


def recipe_on_a_slow_list() -> State:
    """A collector is about to delete a recipe; a save comes to need the product, and others finish that list."""
    slow = Collector(7, at="delete", recipes=frozenset({X_FROM_I}))
    return SETTLED.lead(_slow(slow), (3, "condemn", whatever), (1, "commit", whatever))


def recipe_that_a_slow_collector_spares() -> State:
    """A collector looks again after a save has come to need the product; others finish its list."""
    order = ("intents", "refs", "lists", "packs", "recipes")
    slow = Collector(7, at="see again", recipes=frozenset({X_FROM_I}), to_see=order)
    return SETTLED.lead(_slow(slow), (3, "condemn", whatever), (2, "condemn", lambda actor: len(actor.dead) == 1))


def _slow(slow: Collector) -> State:
    listed = Listed(slow.number, frozenset(), frozenset(), slow.recipes)
    before = derived(packs={1: "x", 2: "i"})._replace(lists=frozenset({listed}))
    return before, (slow, writer(0, "x"), collector(0), collector(1, 1))


def stalled_deriver() -> State:
    """A save needs the product; two collectors plan as before, and a deriver without an intent puts the recipe late."""
    late = Deriver(51, X_FROM_I, at="put")
    return derived(packs={1: "x", 2: "i"}, recipes=()), (late, writer(0, "x"), collector(0, 1), collector(1, 2))


def recipe_during_a_survey() -> State:
    """A collector has read the lists for the second time; a deriver is about to put the recipe."""
    before = world(packs={1: "x", 2: "i"}), (deriver(1, "x", "i"), writer(0, "x"), collector(0, 1), collector(1, 2))
    return SETTLED.lead(
        before,
        (2, "condemn", whatever),
        (1, "done", whatever),
        (2, "see again", whatever),
        (0, "put", whatever),
        (2, "see again", lambda actor: actor.to_see == ("packs", "recipes")),
    )


CASTS = [
    dropped_input,
    saved_product,
    each_other,
    two_inputs,
    pack_and_recipe,
    input_of_another_recipe,
    delta_as_input,
    recipe_on_a_dead_list,
    input_and_product_planned,
    recipe_and_product_planned,
    recipe_during_a_survey,
]
LARGER = [
    delta_as_input_and_two_plans,
    recipe_on_a_slow_list,
]
STRESS = [recipe_on_a_dead_list_and_two_collectors, recipe_that_a_slow_collector_spares, stalled_deriver]


# --- nothing is lost


@pytest.mark.parametrize("cast", CASTS, ids=lambda cast: cast.__name__)
def test_no_state_of_the_abstract_protocol_with_recipes_has_lost_anything(cast: Cast) -> None:
    found = machine().visit(cast())

    print(f"{found.n_states} states")
    assert found.loss is None, "\n".join([found.loss, *found.path])


@pytest.mark.long
@pytest.mark.parametrize("recipes_first", [False, True])
@pytest.mark.parametrize("needs_pack", [False, True])
@pytest.mark.parametrize("cast", [*CASTS, *LARGER], ids=lambda cast: cast.__name__)
def test_neither_the_order_of_packs_and_recipes_nor_the_packs_of_declared_chunks_save_a_ref(
    cast: Cast, recipes_first: bool, needs_pack: bool
) -> None:
    found = Machine(
        has_recipes=True,
        is_coarse=True,
        max_attempts=1,
        recipes_before_packs=recipes_first,
        declared_chunk_needs_pack=needs_pack,
    ).visit(cast())

    print(f"{found.n_states} states")
    assert found.loss is None, "\n".join([found.loss, *found.path])


@pytest.mark.skipif(not IS_STRESS, reason="hundreds of thousands of states each; make stress visits them")
@pytest.mark.parametrize("cast", STRESS, ids=lambda cast: cast.__name__)
def test_no_state_with_recipes_and_more_actors_has_lost_anything(cast: Cast) -> None:
    found = machine().visit(cast())

    print(f"{found.n_states} states")
    assert found.loss is None, "\n".join([found.loss, *found.path])


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, N_PARTS))])
def test_no_random_walk_of_a_crowd_with_recipes_loses_anything(part: int) -> None:
    for seed in range(part, N_WALKS, N_PARTS):
        crowded = Machine(max_attempts=3, has_recipes=True)
        loss = crowded.walk(crowd(random.Random(seed)), random.Random(seed))

        assert loss is None, f"seed {seed}: {loss}"


def test_random_walks_without_a_rule_for_recipes_see_a_loss() -> None:
    crowded = Machine(Rules(inputs_are_kept=False), has_recipes=True)
    losses = [crowded.walk(crowd(random.Random(seed)), random.Random(seed)) for seed in range(300)]

    assert any(losses)


def crowd(draw: random.Random) -> State:
    """Two saves, three derivers, three collections and two deletions."""
    saves = [writer(0, draw.choice(["ab", "bc", "bd"]), draw.choice([None, ("b", "d")])), writer(1, "c", ("c", "b"))]
    derivers = [
        deriver(1, "a", draw.choice(["b", "bc", "d"])),
        deriver(2, "b", draw.choice(["a", "d"])),
        deriver(3, "c", draw.choice(["ab", "d"])),
    ]
    before = derived((8, "ab"), (9, "bd"), packs={1: "b", 2: "bd", 3: "c"}, recipes=(recipe(4, "a", "d"),))
    collectors = [Collector(number) for number in range(3)]
    return before, (*saves, *derivers, *collectors, Deletion(9), Deletion(0))


def test_collector_writes_the_product_of_a_recipe_on_a_dead_list() -> None:
    before, (finisher, *_) = recipe_on_a_dead_list()

    world, _ = machine().lead((before, (finisher,)), (0, "condemn", lambda actor: len(actor.dead) == 1))

    assert Entry(100, "x") in world.entries


# --- something is lost

WITHOUT_RECIPES = {
    "inputs_are_kept": pack_and_recipe,
    "inputs_of_a_condemned_recipe_are_kept": pack_and_recipe,
    "inputs_need_packs": input_of_another_recipe,
    "condemned_input_is_no_input": input_and_product_planned,
    "condemned_recipe_stands_for_nothing": recipe_and_product_planned,
    "needed_recipe_is_spared": pack_and_recipe,
    "lists_before_recipes_at_surveys": recipe_and_product_planned,
    "new_recipe_stands_for_nothing": recipe_during_a_survey,
}
"""By rule, a cast that loses something without it."""

WITHOUT_LISTS = {
    "dead_list_is_finished": recipe_on_a_slow_list,
    "old_list_stays": recipe_on_a_slow_list,
    "finisher_lists_too": recipe_that_a_slow_collector_spares,
}
"""By rule that concerns packs too, a cast with a recipe on a list."""


def test_every_rule_of_the_abstract_protocol_can_be_switched_off() -> None:
    assert sorted([*WITHOUT, *WITHOUT_RECIPES]) == sorted(Rules.__slots__)


@pytest.mark.parametrize(("rule", "cast"), WITHOUT_RECIPES.items(), ids=WITHOUT_RECIPES)
def test_abstract_protocol_without_a_rule_for_recipes_loses_something(rule: str, cast: Cast) -> None:
    found = machine(**{rule: False}).visit(cast())

    print(f"{found.n_states} states", *found.path, sep="\n")
    assert found.loss is not None


@pytest.mark.long
@pytest.mark.parametrize(("rule", "cast"), WITHOUT_LISTS.items(), ids=WITHOUT_LISTS)
def test_abstract_protocol_without_a_rule_for_dead_lists_loses_a_recipe(rule: str, cast: Cast) -> None:
    found = machine(**{rule: False}).visit(cast())

    print(f"{found.n_states} states", *found.path, sep="\n")
    assert found.loss is not None


# --- a recipe is of use


@pytest.mark.parametrize("names_packs", [True, False])
@pytest.mark.parametrize("needs_pack", [True, False])
@pytest.mark.parametrize("cast", [dropped_input, each_other], ids=lambda cast: cast.__name__)
def test_inputs_of_a_new_recipe_stay_if_the_intent_protects_packs_or_chunks(
    cast: Cast, names_packs: bool, needs_pack: bool
) -> None:
    tried = Machine(has_recipes=True, derivers_name_packs=names_packs, declared_chunk_needs_pack=needs_pack)
    found = tried.visit(cast(), check=useless)

    print(f"{found.n_states} states")
    is_needed = cast is each_other and not names_packs and not needs_pack
    assert (found.loss is not None) == is_needed, "\n".join([str(found.loss), *found.path])


@pytest.mark.parametrize(
    "careless",
    [Machine(has_recipes=True, derivers_declare=False), Machine(has_recipes=True, derivers_read_lists=False)],
    ids=["no intent", "no lists"],
)
def test_new_recipe_may_be_useless_if_its_deriver_skips_a_step(careless: Machine) -> None:
    found = careless.visit(dropped_input(), check=useless)

    print(f"{found.n_states} states", *found.path, sep="\n")
    assert found.loss is not None
