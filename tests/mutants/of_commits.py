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
)
