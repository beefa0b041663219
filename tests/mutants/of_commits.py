"""Faults of saves and commits."""

from __future__ import annotations

from mutant import Mutant

MUTANTS = (
    Mutant(
        fault="a disk that is full in the middle of a pack",
        test="tests/store/test_kill.py::test_a_full_disk_in_the_middle_of_a_pack_leaves_no_pack",
        path="tensorcas_mlflow/backends/_new_file.py",
        before="""            with contextlib.suppress(OSError):
                os.unlink(self._staging)
""",
        after="            pass\n",
    ),
    Mutant(
        fault="requests to delete that an object store carries out a second time",
        test="tests/objects/test_late_deletions.py::"
        "test_a_step_that_is_saved_again_outlives_a_deletion_that_is_carried_out_again",
        path="tensorcas_mlflow/backends/_objects.py",
        before='    return folder in _NEVER_AGAIN and not name.startswith("@")',
        after="    return True",
    ),
    Mutant(
        fault="another store that is made in the place of the one a training has open",
        test="tests/store/test_another_store.py::test_nothing_is_committed_to_a_store_that_was_made_anew",
        path="tensorcas_mlflow/store/_claim.py",
        before="    catalog.identity.check(condemned.generation)\n",
        after="",
    ),
    Mutant(
        fault="a store whose folder is deleted between the steps of a save",
        test="tests/store/test_another_store.py::test_a_deletion_is_found_out_at_the_commit_too",
        path="tensorcas_mlflow/backends/_local.py",
        before="            if self._is_known:\n",
        after="            if False:\n",
    ),
    Mutant(
        fault="another store far away, where neither says a generation",
        test="tests/store/test_another_store.py::test_a_store_far_away_that_says_no_generation_is_asked_each_time",
        path="tensorcas_mlflow/store/_identity.py",
        before=" and any(key == GENERATION for key, _ in generation):",
        after=":",
    ),
)
