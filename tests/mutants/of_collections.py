"""Faults that collections meet, and what they remember."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        fault="a census with flipped bits",
        test="test_a_census_with_a_flipped_bit_is_not_believed",
        definition="read_census",
        before='digest(b"".join([body, blob[:32]])) != wanted',
        after="not wanted",
    ),
    Mutant(
        fault="a census whose spans are not what the manifests said",
        test="test_a_census_whose_spans_are_not_what_the_manifests_said_is_refused",
        definition="read_census",
        before="not _is_possible(inventory) or not inventory.is_consistent",
        after="not _is_possible(inventory)",
    ),
    Mutant(
        fault="a needed manifest that went after it was counted",
        test="test_a_needed_manifest_that_is_gone_stops_a_collection_that_knows_what_it_said",
        definition="survey",
        before="_check_there(backend, census, refs, manifests)",
        after="",
    ),
    Mutant(
        fault="a manifest that is cut after it was counted",
        test="test_a_needed_manifest_that_was_cut_short_stops_a_collection",
        definition="_check_there",
        before="census.manifests.get(name) != manifests[name]",
        after="name not in census.manifests",
    ),
    Mutant(
        fault="a pack that is cut after it was counted",
        test="test_a_pack_that_was_cut_short_since_it_was_counted_holds_nothing",
        definition="_read_packs",
        before="census.packs.get(name) != size",
        after="name not in census.packs",
    ),
    Mutant(
        fault="a ref's file in the place of another of its number, size and time",
        test="test_a_ref_in_a_file_is_read_though_its_file_looks_as_it_did",
        definition="_read_refs",
        before="backend.is_remote",
        after="True",
    ),
    Mutant(
        fault="a save that is silent for less than the grace",
        test="test_a_save_is_waited_for_as_long_as_the_grace_and_no_longer",
        definition="_read_intents",
        before="is_given_up or info.modified_s <= before",
        after="True",
    ),
    Mutant(
        fault="a save that goes through between a collector's look and its list",
        test="test_collection_spares_chunks_a_save_relied_on_before_the_condemned_list",
        definition="_execute",
        before="spared = still_needed(state, doomed, known=known)",
        after="",
    ),
    Mutant(
        fault="a collector that dies between its deletions",
        test="test_a_collection_that_dies_at_any_deletion_is_finished_by_the_next[2]",
        definition="_execute",
        before="p.begin_generation(backend)",
        after="""
            p.begin_generation(backend)
            backend.delete(key)
        """,
    ),
    Mutant(
        fault="a later release that takes over the store while a plan waits",
        test="test_a_store_that_is_not_what_was_opened_any_more_is_not_collected",
        definition="_check_understood",
        before="Store.open_backend(store.backend)",
        after="store",
    ),
    Mutant(
        fault="a save of a step whose damaged ref a collector is about to give up",
        test="test_a_step_that_is_saved_anew_while_its_damaged_ref_is_given_up_stays",
        definition="_drop_damaged_ref",
        before="backend.withdraw(key, info.token)",
        after="backend.delete(key)",
    ),
    Mutant(
        fault="a collector's list that has come since a plan was made",
        test="test_a_list_that_has_come_since_the_plan_was_made_is_left_to_its_collector",
        definition="_execute",
        before="[condemned for condemned in state.dead_lists if condemned.key in plan.dead_lists]",
        after="[condemned for condemned in state.dead_lists]",
    ),
)
