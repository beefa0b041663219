"""Faults that recipes meet: somebody condemns them, their inputs go, or they lie."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        fault="a recipe that somebody has condemned",
        test="test_condemned_recipe_stands_for_nothing[memory]",
        definition="Survey.made",
        before="going = self.condemned_recipes() | {*without}",
        after="going = {*without}",
    ),
    Mutant(
        fault="the checkpoint of a recipe's inputs is dropped, and that of its products is not",
        test="test_inputs_of_a_recipe_outlive_the_checkpoint_that_they_were_saved_with[memory]",
        definition="_add_inputs",
        before="live[inputs] = needs_pack[inputs] = True",
        after="needs_pack[inputs] = True",
    ),
    Mutant(
        fault="two recipes that make two chunks of each other",
        test="test_cycle_of_recipes_keeps_every_chunk_in_a_pack[of each other in two recipes-collect]",
        definition="_add_inputs",
        before="live[inputs] = needs_pack[inputs] = True",
        after="live[inputs] = True",
    ),
    Mutant(
        fault="a recipe that a stalled optimization writes when a collector has made its list",
        test="test_recipe_that_appears_after_the_list_stands_for_nothing",
        definition="Survey.made",
        before="usable &= rows.of(known.recipes)",
        after="pass",
    ),
    Mutant(
        fault="another collector is about to delete an input of a recipe",
        test="test_recipe_stands_for_nothing_when_another_collector_has_condemned_its_input",
        definition="Survey.made",
        before="usable &= rows.complete(values_at(has_copy, rows.inputs))",
        after="pass",
    ),
    Mutant(
        fault="a dead collector's list of a recipe that has come to be needed",
        test="test_finished_list_of_a_needed_recipe_leaves_its_chunks_in_packs[memory]",
        definition="copy_out",
        before="_copy_made(store, state, lacking, without | state.condemned_recipes())",
        after="0",
    ),
    Mutant(
        fault="a condemned recipe that is needed and cannot be evaluated",
        test="test_list_of_a_recipe_that_cannot_be_evaluated_stays[memory]",
        definition="recipes_still_needed",
        before="values_at(at_risk, rows.products)",
        after="values_at(at_risk, rows.products) & False",
    ),
    Mutant(
        fault="a pack that holds the inputs of a recipe beside its products",
        test="test_pack_that_holds_inputs_and_products_is_rewritten_without_the_products[False]",
        definition="copy_out",
        before="state.made(but=going - sources, without=without)",
        after="state.made(but=going, without=without)",
    ),
    Mutant(
        fault="a recipe whose function gives other bytes than were saved",
        test="test_recipe_that_makes_other_bytes_is_refused[memory]",
        definition="DerivedRows._evaluate",
        before="np.flatnonzero((found != row.digests).any(axis=1))",
        after="np.empty(0, int)",
    ),
    Mutant(
        fault="a recipe that says it makes a chunk, and makes another one",
        test="test_recipe_that_lies_deletes_no_copy[collect-input in use]",
        definition="evaluate_recipes",
        before="wrong.add(name)",
        after="wrong.discard(name)",
    ),
    Mutant(
        fault="a recipe that lies about a chunk which a save has come to need since it was evaluated",
        test="test_recipe_that_lies_stands_for_no_chunk_that_comes_to_be_needed_after_the_plan",
        definition="Survey.made",
        before="found if known is None else found & self.inventory.marked(self.inventory.find(known.evaluated))",
        after="found",
    ),
    Mutant(
        fault="a recipe under the digest of another one",
        test="test_recipe_under_the_digest_of_another_one_is_damaged",
        definition="read_recipe",
        before="Manifest.from_blob(blob, name, is_recipe=True)",
        after="Manifest.from_blob(blob, is_recipe=True)",
    ),
    Mutant(
        fault="a power cut that takes the recipe of a killed optimization, whose products are collected",
        test="test_recipe_whose_writer_was_killed_is_durable_before_the_packs_of_its_products_go",
        definition="_execute",
        before='("intents", "refs", "packs", RECIPES)',
        after='("intents", "refs", "packs")',
    ),
)
