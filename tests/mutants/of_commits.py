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
)
