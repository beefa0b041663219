"""Faults that files of other formats meet, when they are written and when they become checkpoints."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        fault="a written file whose bytes are not durable when it gets its name",
        test="test_a_cut_leaves_all_of_what_was_written_or_what_was_there",
        definition="WritePlan.execute",
        before="os.fsync(file.fileno())",
        after="",
    ),
    Mutant(
        fault="a written folder whose names are not durable when it gets its own",
        test="test_a_cut_leaves_all_of_what_was_written_or_what_was_there",
        definition="appearing_at",
        before="sync_folder(staging)",
        after="",
    ),
    Mutant(
        fault="a written file that is lost after it was said to be there",
        test="test_a_cut_leaves_all_of_what_was_written_or_what_was_there",
        definition="appearing_at",
        before="Settled().settle(os.fspath(out.parent))",
        after="",
    ),
    Mutant(
        fault="a folder that holds more than such a write makes",
        test="test_a_folder_that_holds_anything_else_is_never_replaced",
        definition="_check_free",
        before="overwrite is not None and not overwrite.fullmatch(name)",
        after="False",
    ),
    Mutant(
        fault="a writer that is taken for dead",
        test="test_temporary_file_of_a_living_writer_is_left_alone",
        definition="_remove_abandoned",
        before="fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        after="",
    ),
    Mutant(
        fault="a tensor of which fewer bytes come than its header says",
        test="test_tensors_that_are_not_given_whole_are_told",
        definition="Feed.pieces",
        before="""
            if name != spec.name or not 0 < piece.nbytes <= n_left:
                raise CorruptError(...)
        """,
        after="""
            if name != spec.name:
                break
            if piece.nbytes > n_left:
                raise CorruptError(spec.name, f"{n_left} of its {spec.n_bytes} bytes were not given")
        """,
    ),
    Mutant(
        fault="a pickle in a tensor that is named as a skeleton",
        test="test_a_file_cannot_bring_a_pickle_in_under_the_name_of_a_skeleton",
        definition="prepare_import",
        before="SKELETON in source.locations",
        after="False",
    ),
    Mutant(
        fault="an import in the place of a checkpoint",
        test="test_a_checkpoint_that_is_there_is_replaced_only_if_that_was_said",
        definition="import_checkpoint",
        before="""
            if not overwrite and store.ref(target.key) is not None:
                raise CheckpointExistsError(...)
        """,
        after="overwrite = True",
    ),
    Mutant(
        fault="an export that loses what cannot be read",
        test="test_export_names_the_parts_it_would_leave_out_unless_allowed",
        definition="plan_export",
        before="check_left_out(chosen, allow_left_out=allow_left_out)",
        after="",
    ),
    Mutant(
        fault="a closed checkpoint that is read on",
        test="test_closed_safe_open_reads_only_slices_taken_before",
        definition="SafeOpen.__exit__",
        before="self._reader = None",
        after="",
    ),
)
