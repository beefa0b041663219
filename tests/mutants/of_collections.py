"""Faults that collections meet, and what they remember."""

from __future__ import annotations

from mutant import Mutant

CENSUS = "tests/gc/test_census_damage.py::"
RULES = "tests/gc/test_gc_rules.py::"

MUTANTS = (
    Mutant(
        fault="a census with flipped bits",
        test=CENSUS + "test_a_census_with_a_flipped_bit_is_not_believed",
        path="tensorcas_mlflow/census/_blob.py",
        before='if digest(b"".join([body, blob[:32]])) != wanted:',
        after="if not wanted:",
    ),
    Mutant(
        fault="a census whose spans are not what the manifests said",
        test=CENSUS + "test_a_census_whose_spans_are_not_what_the_manifests_said_is_refused",
        path="tensorcas_mlflow/census/_blob.py",
        before="if not _is_possible(facts) or not facts.is_consistent:",
        after="if not _is_possible(facts):",
    ),
    Mutant(
        fault="a needed manifest that went after it was counted",
        test=CENSUS + "test_a_needed_manifest_that_is_gone_stops_a_collection_that_knows_what_it_said",
        path="tensorcas_mlflow/gc/_survey.py",
        before="    check_there(backend, census, refs, manifests)\n",
        after="",
    ),
    Mutant(
        fault="a manifest that is cut after it was counted",
        test=CENSUS + "test_a_needed_manifest_that_was_cut_short_does_too",
        path="tensorcas_mlflow/gc/_needed.py",
        before="elif census.manifests.get(name) != manifests[name]:",
        after="elif name not in census.manifests:",
    ),
    Mutant(
        fault="a pack that is cut after it was counted",
        test=CENSUS + "test_a_pack_that_was_cut_short_since_it_was_counted_holds_nothing",
        path="tensorcas_mlflow/gc/_survey.py",
        before="if census.packs.get(name) != size]",
        after="if name not in census.packs]",
    ),
    Mutant(
        fault="a ref's file in the place of another of its number, size and time",
        test=CENSUS + "test_a_ref_in_a_file_is_read_though_its_file_looks_as_it_did",
        path="tensorcas_mlflow/gc/_needed.py",
        before="for info in infos] if backend.is_remote else []",
        after="for info in infos]",
    ),
    Mutant(
        fault="a save that is silent for less than the grace",
        test=RULES + "test_a_save_is_waited_for_as_long_as_the_grace_and_no_longer",
        path="tensorcas_mlflow/gc/_survey.py",
        before="silent = is_given_up or info.modified_s <= before",
        after="silent = True",
    ),
    Mutant(
        fault="a save that goes through between a collector's look and its list",
        test=RULES + "test_what_a_save_has_come_to_rely_on_before_the_list_was_there_is_spared",
        path="tensorcas_mlflow/gc/_plan.py",
        before="        spared = still_needed(state, doomed)\n",
        after="",
    ),
    Mutant(
        fault="a collector that dies between its deletions",
        test=RULES + "test_a_collection_that_dies_at_any_deletion_is_finished_by_the_next[2]",
        path="tensorcas_mlflow/gc/_plan.py",
        before="        p.begin_generation(backend)\n",
        after="        p.begin_generation(backend)\n        backend.delete(key)\n",
    ),
    Mutant(
        fault="a later release that takes over the store while a plan waits",
        test=RULES + "test_a_store_that_is_not_what_was_opened_any_more_is_not_collected",
        path="tensorcas_mlflow/gc/_plan.py",
        before="    now = Store.open_backend(store.backend)\n",
        after="    now = store\n",
    ),
    Mutant(
        fault="a save of a step whose damaged ref a collector is about to give up",
        test="tests/gc/test_gc_damage.py::test_a_step_that_is_saved_anew_while_its_damaged_ref_is_given_up_stays",
        path="tensorcas_mlflow/gc/_plan.py",
        before="            backend.withdraw(key, info.token)\n",
        after="            backend.delete(key)\n",
    ),
    Mutant(
        fault="a collector's list that has come since a plan was made",
        test=RULES + "test_a_list_that_has_come_since_the_plan_was_made_is_left_to_its_collector",
        path="tensorcas_mlflow/gc/_plan.py",
        before=" for condemned in state.dead_lists if condemned.key in plan.dead_lists]",
        after=" for condemned in state.dead_lists]",
    ),
)
