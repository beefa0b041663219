"""Faults of saves and commits."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        fault="a disk that is full in the middle of a pack",
        test="test_a_full_disk_in_the_middle_of_a_pack_leaves_no_pack",
        definition="NewFile.close",
        before="""
            with contextlib.suppress(OSError):
                os.unlink(self._staging)
        """,
        after="",
    ),
    Mutant(
        fault="requests to delete that an object store carries out a second time",
        test="test_a_step_that_is_saved_again_outlives_a_deletion_that_is_carried_out_again",
        definition="_comes_never_again",
        before='folder in _NEVER_AGAIN and not name.startswith("@")',
        after="True",
    ),
    Mutant(
        fault="another store that is made in the place of the one a training has open",
        test="test_nothing_is_committed_to_a_store_that_was_made_anew",
        definition="look",
        before="catalog.identity.check(condemned.generation)",
        after="",
    ),
    Mutant(
        fault="a store whose folder is deleted between the steps of a save",
        test="test_commit_into_a_deleted_store_is_refused",
        definition="LocalBackend._make_folder",
        before="self._is_known",
        after="False",
    ),
    Mutant(
        fault="another store far away, where neither says a generation",
        test="test_a_store_far_away_that_says_no_generation_is_asked_each_time",
        definition="Identity.check",
        before="generation == self._generation and any(key == GENERATION for key, _ in generation)",
        after="generation == self._generation",
    ),
)
