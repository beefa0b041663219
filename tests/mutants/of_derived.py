"""Faults that derived tensors meet."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        fault="a function that gives other bytes than were saved",
        test="test_a_forged_function_is_refused_and_named[memory]",
        definition="DerivedRows._evaluate",
        before="np.flatnonzero((found != row.digests).any(axis=1))",
        after="np.empty(0, int)",
    ),
    Mutant(
        fault="a collection after the checkpoint that the inputs were saved with is gone",
        test="test_inputs_outlive_the_checkpoint_that_they_were_saved_with[memory]",
        definition="learn",
        before="manifest.stored_digests",
        after="manifest.digests",
    ),
    Mutant(
        fault="a collector beside a save with inputs",
        test="test_an_intent_protects_the_inputs_of_a_save_under_way[memory]",
        definition="PendingSave._take",
        before="unique_rows(manifest.stored_digests)",
        after="unique_rows(manifest.stored_digests[:0])",
    ),
    Mutant(
        fault="a derived row that is the input of another one",
        test="test_impossible_derived_rows_are_refused[derived2]",
        definition="check_derived",
        before="_is_number(row, 0, len(table)) and row not in rows",
        after="_is_number(row, 0, len(table))",
    ),
    Mutant(
        fault="an evaluation that takes all memory",
        test="test_an_evaluation_of_more_than_4_gib_is_refused",
        definition="check",
        before="sum(each.n_bytes for each in (*inputs, output)) > MOST_EVALUATED_BYTES",
        after="False",
    ),
)
