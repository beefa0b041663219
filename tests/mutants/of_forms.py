"""Faults that forms meet: their manifests or inputs go, saves come, or they lie."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        fault="the checkpoint of a form's inputs is deleted, and that of the form is not",
        test="test_inputs_of_a_form_outlive_the_checkpoint_that_they_were_saved_with[memory]",
        definition="survey",
        before="needed.union(held.values())",
        after="needed",
    ),
    Mutant(
        fault="a form that takes inputs in another order than its tensors",
        test="test_form_that_lies_costs_no_copy[memory]",
        definition="_fault_of_form",
        before="store.chunks.check(form, np.array(sorted(rows), dtype=np.int64), by_form=False)",
        after="pass",
    ),
    Mutant(
        fault="a form of a checkpoint of the same names",
        test="test_form_of_another_content_costs_no_copy",
        definition="_fault_of_form",
        before="not has_content_of(form, manifest)",
        after="False",
    ),
    Mutant(
        fault="a reader that meets a form of other content",
        test="test_form_of_another_content_is_not_believed[memory]",
        definition="forms_of",
        before="form is not None and form.digest != manifest.digest and has_content_of(form, manifest)",
        after="form is not None and form.digest != manifest.digest",
    ),
    Mutant(
        fault="a form that an optimization writes between a plan and its collection",
        test="test_form_that_appears_after_the_plan_stands_for_no_chunk",
        definition="_execute",
        before="plan.forms.__contains__",
        after="(lambda form: True)",
    ),
    Mutant(
        fault="a checkpoint that is deleted with its form",
        test="test_form_and_its_inputs_go_with_the_last_checkpoint_that_needs_it[memory]",
        definition="survey",
        before="may_go = refs.forms.keys() - needed",
        after="may_go = set()",
    ),
    Mutant(
        fault="a checkpoint with a form that is deleted between a list and the survey after it",
        test="test_form_stays_until_its_manifest_is_on_a_list",
        definition="survey",
        before="may_go -= manifests.keys() - frozenset(going)",
        after="pass",
    ),
    Mutant(
        fault="an optimization for restore behind an open reader of a form",
        test="test_open_reader_finds_what_a_form_made_in_packs_again",
        definition="ChunkReader._manifests_of",
        before="yield self._forms[manifest.digest]",
        after="yield self._forms[manifest.digest]; return",
    ),
    Mutant(
        fault="a tensor in packs whose form lacks an input",
        test="test_each_tensor_is_read_from_packs_or_by_the_form[memory-read]",
        definition="ChunkReader._by_form",
        before="n_parts < 2",
        after="True",
    ),
    Mutant(
        fault="a form that keeps more room than it saves",
        test="test_optimization_replaces_a_form_whose_inputs_nothing_else_needs[memory]",
        definition="forms_to_replace",
        before="kept_bytes > _bytes_in_packs(form, done_chunks, inventory.digests[own & ~kept])",
        after="False",
    ),
    Mutant(
        fault="copies that are optimized before the model that they are made of",
        test="test_fine_tunes_are_bases_of_each_other_though_a_copy_of_their_model_comes_first",
        definition="_Key.of",
        before="bool(name)",
        after="True",
    ),
)
