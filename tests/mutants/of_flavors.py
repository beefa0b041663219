"""Faults of models that change between two saves."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        fault="two weights that come to share memory",
        test="test_weights_that_come_to_overlap_are_stored_as_views_of_one_memory",
        definition="PlainModule.of",
        before="len(set(places)) < len(places)",
        after="False",
    ),
    Mutant(
        fault="a number that becomes a truth value",
        test="test_zero_and_false_are_told_apart",
        definition="PlainModule.of",
        before="fact += name, kind",
        after="fact += name,",
    ),
    Mutant(
        fault="a class that gets a method for its own state",
        test="test_a_class_whose_code_changes_is_extracted_in_full[__getstate__]",
        definition="_is_plain",
        before="getattr(kind, name, None) is not getattr(module, name, None)",
        after="False",
    ),
    Mutant(
        fault="a weight that needs no gradient any more",
        test="test_every_change_of_a_module_is_noticed[requires no grad]",
        definition="_facts",
        before="kind, geometry(tensor)[1:], tensor.untyped_storage().nbytes(), tensor.requires_grad",
        after="kind, geometry(tensor)[1:], tensor.untyped_storage().nbytes()",
    ),
)
