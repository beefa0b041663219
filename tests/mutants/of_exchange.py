"""Faults that files of other formats meet, when they are written and when they become checkpoints."""

from __future__ import annotations

from mutant import Mutant

CUTS = "tests/crash/test_written_files.py::test_a_cut_leaves_all_of_what_was_written_or_what_was_there"
PLACES = "tests/formats/test_write_places.py::"
IMPORT = "tests/exchange/test_import.py::"
PLACE = "tensorcas_mlflow/formats/_write_place.py"

MUTANTS = (
    Mutant(
        fault="a written file whose bytes are not durable when it gets its name",
        test=CUTS,
        path="tensorcas_mlflow/formats/_write.py",
        before="                    os.fsync(file.fileno())\n",
        after="",
    ),
    Mutant(
        fault="a written folder whose names are not durable when it gets its own",
        test=CUTS,
        path=PLACE,
        before="            sync_folder(staging)\n",
        after="",
    ),
    Mutant(
        fault="a written file that is lost after it was said to be there",
        test=CUTS,
        path=PLACE,
        before="            Settled().settle(os.fspath(out.parent))\n",
        after="",
    ),
    Mutant(
        fault="a folder that holds more than such a write makes",
        test=PLACES + "test_a_folder_that_holds_anything_else_is_never_replaced",
        path=PLACE,
        before="if overwrite is not None and not overwrite.fullmatch(name):",
        after="if False:",
    ),
    Mutant(
        fault="a writer that is taken for dead",
        test=PLACES + "test_what_a_living_writer_has_under_way_is_left_alone",
        path=PLACE,
        before="                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)\n                shutil",
        after="                shutil",
    ),
    Mutant(
        fault="a tensor of which fewer bytes come than its header says",
        test=PLACES + "test_tensors_that_are_not_given_whole_are_told",
        path="tensorcas_mlflow/formats/_write_layout.py",
        before="if name != spec.name or not 0 < piece.nbytes <= n_left:",
        after="if name != spec.name:\n                break\n            if piece.nbytes > n_left:",
    ),
    Mutant(
        fault="a pickle in a tensor that is named as a skeleton",
        test=IMPORT + "test_a_file_cannot_bring_a_pickle_in_under_the_name_of_a_skeleton",
        path="tensorcas_mlflow/exchange/_import.py",
        before="if SKELETON in source.places:",
        after="if False:",
    ),
    Mutant(
        fault="an import in the place of a checkpoint",
        test=IMPORT + "test_a_checkpoint_that_is_there_is_replaced_only_if_that_was_said",
        path="tensorcas_mlflow/exchange/_import.py",
        before="if not overwrite and store.ref(target.key) is not None:",
        after="overwrite = True\n    if False:",
    ),
    Mutant(
        fault="an export that loses what cannot be read",
        test="tests/exchange/test_export.py::"
        "test_what_an_export_of_a_file_would_leave_out_is_named_unless_that_is_allowed",
        path="tensorcas_mlflow/exchange/_export.py",
        before="    check_left_out(chosen, allow_left_out=allow_left_out)\n",
        after="",
    ),
    Mutant(
        fault="a closed checkpoint that is read on",
        test="tests/reader/test_safe_open.py::test_once_it_is_closed_only_what_was_taken_before_can_be_read",
        path="tensorcas_mlflow/reader/_safe_open.py",
        before="            self._reader = None\n",
        after="",
    ),
)
