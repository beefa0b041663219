"""Faults of many processes and threads at once, of forks and interrupts, and of what a later release has written."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        fault="two processes that fold the same packs",
        test="test_packs_that_another_process_has_folded_are_not_folded_again",
        definition="Catalog._fold",
        before="self._read_index(0)",
        after="pass",
    ),
    Mutant(
        fault="two threads take up one pack",
        test="test_segment_names_a_pack_once_that_two_threads_took_up",
        definition="Catalog.add",
        before="""
            if name in self._packs:
                return
        """,
        after="",
    ),
    Mutant(
        fault="a condemned pack that hints name twice",
        test="test_save_relies_on_no_condemned_pack_that_hints_name_twice",
        definition="Table.__post_init__",
        before="""
            if len(names) == len(self.packs):
                return
        """,
        after="return",
    ),
    Mutant(
        fault="a fork while another thread holds a lock",
        test="test_a_lock_that_another_thread_holds_is_open_in_a_forked_child",
        definition="_begin_anew",
        before="Lock.open_all()",
        after="",
    ),
    Mutant(
        fault="a fork of a process with a pool of threads",
        test="test_a_forked_child_gets_a_pool_of_its_own",
        definition="_begin_anew",
        before="_pools.clear()",
        after="",
    ),
    Mutant(
        fault="a fork while a folder is locked",
        test="test_child_without_fork_hooks_does_not_keep_a_folder_locked",
        definition="LockedFile",
        before="fcntl.flock(descriptor, fcntl.LOCK_UN)",
        after="",
    ),
    Mutant(
        fault="a kill of a process that has locked a folder and forked",
        test="test_a_parent_killed_while_it_has_locked_a_folder_leaves_no_lock_in_its_child",
        definition="LockedFile",
        before="os.close(cls._held.pop())",
        after="cls._held.pop()",
    ),
    Mutant(
        fault="an interrupt while a lock is taken",
        test="test_an_interrupt_leaves_no_lock_taken",
        definition="Lock",
        before="""
            def __init__(self) -> None:
                super().__init__()
                Lock._all.add(self)
        """,
        after="""
            def __init__(self) -> None:
                super().__init__()
                Lock._all.add(self)

            def __enter__(self) -> bool:
                self.acquire()
                return True
        """,
    ),
    Mutant(
        fault="an interrupt while another thread fails",
        test="test_an_interrupt_is_not_lost_behind_the_failure_of_an_earlier_item",
        definition="run_all",
        before="(isinstance(each[1], Exception), each[0])",
        after="each[0]",
    ),
    Mutant(
        fault="an interrupt while a save is given to the background",
        test="test_a_job_whose_giver_was_interrupted_is_done_when_somebody_waits",
        definition="Background.result",
        before="self._see_to_it()",
        after="",
    ),
    Mutant(
        fault="a save in its caller while another thread gives one to the background",
        test="test_jobs_do_not_overlap_if_one_runs_in_its_giver",
        definition="Background._run",
        before="self._turn",
        after="contextlib.nullcontext()",
    ),
    Mutant(
        fault="a step given to the background twice",
        test="test_step_still_on_its_way_is_refused_without_overwrite",
        definition="log_checkpoint",
        before="""
            saves.wait()
            refuse_existing()
        """,
        after="saves.wait()",
    ),
    Mutant(
        fault="figures of every step of a fast training",
        test="test_calls_for_figures_take_a_small_share_of_the_time",
        definition="_log_waiting",
        before="_PAUSE * (ended - began)",
        after="0",
    ),
    Mutant(
        fault="an interpreter that ends while a thread saves",
        test="test_an_interpreter_that_ends_saves_first",
        definition="_submit",
        before="""
            future: Future[R] = Future()
            try:
                ...
            except Exception as error:
                ...
            return future
        """,
        after="raise",
    ),
    Mutant(
        fault="a ref that is replaced while another process withdraws the old one",
        test="test_a_ref_is_not_withdrawn_in_place_of_the_one_that_was_looked_at",
        definition="_alone_in",
        before="is_alone = LockedFile.lock(descriptor, waits=waits)",
        after="pass",
    ),
    Mutant(
        fault="a collection in a store with an intent of a later release",
        test="test_blob_of_a_later_release_is_refused_before_any_change[intent-collect]",
        definition="_read_intents",
        before="NewerFormatError",
        after="()",
    ),
    Mutant(
        fault="a collection in a store with an index segment of a later release",
        test="test_blob_of_a_later_release_is_refused_before_any_change[segment-collect]",
        definition="plan_gc",
        before="p.check_index(store.backend)",
        after="",
    ),
    Mutant(
        fault="a collection in a store with a pack of a later release",
        test="test_blob_of_a_later_release_is_refused_before_any_change[pack-collect]",
        definition="read_table",
        before="raise NewerFormatError(...)",
        after="",
    ),
    Mutant(
        fault="a collection in a store with a ref of a later release",
        test="test_blob_of_a_later_release_is_refused_before_any_change[ref-collect]",
        definition="load_record",
        before="""
            if record["format"] > newest:
                raise NewerFormatError(...)
        """,
        after="",
    ),
    Mutant(
        fault="a load from a store with a manifest of a later release",
        test="test_blob_of_a_later_release_is_refused_before_any_change[manifest-load]",
        definition="read_stream",
        before="version > DERIVED_VERSION",
        after="False",
    ),
    Mutant(
        fault="a copy to a store with a condemned list of a later release",
        test="test_blob_of_a_later_release_is_refused_before_any_change[condemned list-copy to]",
        definition="copy_all",
        before="read_condemned(destination.store.backend)",
        after="",
    ),
    Mutant(
        fault="a collection that condemns what a batch of a stream would be stored against",
        test="test_no_batch_is_stored_against_a_condemned_pack",
        definition="Ingest._store_batch",
        before="tuple if plan is None else ...",
        after="tuple",
    ),
    Mutant(
        fault="a collection of what the batches of a stream are stored against",
        test="test_the_intent_of_a_batch_names_the_packs_of_its_bases",
        definition="Ingest._store_batch",
        before="plan.packs if plan is not None else ()",
        after="()",
    ),
    Mutant(
        fault="a collection during a stream, of the packs of its later batches",
        test="test_a_collection_during_a_stream_takes_nothing_of_it",
        definition="Ingest._declare",
        before="packs.update(names)",
        after="",
    ),
    Mutant(
        fault="a file that is committed between the writing of a text and the drop of the ref it replaces",
        test="test_a_commit_between_the_writing_of_a_text_and_its_drop_is_not_dropped",
        definition="TensorCasArtifactRepository._write",
        before="store.drop_artifact(in_store, replaced)",
        after="store.drop_artifact(in_store, store.artifact_token(in_store))",
    ),
    Mutant(
        fault="a file that is committed while a text is about to drop the ref it replaces",
        test="test_a_commit_between_the_writing_of_a_text_and_its_drop_is_not_dropped",
        definition="Refs.drop_artifact",
        before="token is not None and self.backend.withdraw(artifact_key(path), token)",
        after="bool(self.drop_artifacts(path))",
    ),
    Mutant(
        fault="a skipped record that has consumed an intent",
        test="test_intent_consumed_by_a_skipped_record_is_withdrawn_by_nobody",
        definition="LogView.has_consumed",
        before="self._read_wanted(...)",
        after="pass",
    ),
    Mutant(
        fault="a tombstone in a skipped record",
        test="test_deletion_of_a_skipped_ref_is_known_before_another_takes_its_place",
        definition="LogView.undurable_deletions",
        before="self._read_wanted(...)",
        after="pass",
    ),
    Mutant(
        fault="an index of a log with skipped records",
        test="test_index_of_a_log_that_was_taken_over_names_the_skipped_blobs",
        definition="LogView.write_index",
        before="self._read_skipped(...)",
        after="pass",
    ),
    Mutant(
        fault="a chunk in a skipped pack",
        test="test_chunks_of_a_skipped_pack_are_found",
        definition="LogView.find_packs",
        before="self._skipped.with_words(words)",
        after="[]",
    ),
    Mutant(
        fault="a listing with skipped records",
        test="test_records_are_skipped_until_one_of_their_blobs_is_wanted",
        definition="LogView._read_below",
        before="self._read_skipped(...)",
        after="pass",
    ),
    Mutant(
        fault="a skipped blob outside of the folders that listings wait for",
        test="test_blob_outside_of_the_usual_folders_is_listed_at_once",
        definition="Front",
        before="self.flags & (_SUMMARIZED | _OTHER_KEYS) == _SUMMARIZED",
        after="self.flags & _SUMMARIZED",
    ),
    Mutant(
        fault="a folder of artifacts with deleted files alone",
        test="test_file_takes_the_place_of_a_folder_whose_files_are_deleted",
        definition="_list_around",
        before="any(listing.blobs.values())",
        after="listing.blobs",
    ),
    Mutant(
        fault="a rewriting of a skipped record into a log with an index",
        test="test_skipped_blob_is_found_in_the_index_of_the_log_that_took_the_place_of_its_own",
        definition="LogView._read_wanted",
        before="self._list_anew()",
        after="""
            self._list_anew()
            self._read_skipped(skipped())
            return
        """,
    ),
    Mutant(
        fault="a skipped record that the disk has lost",
        test="test_process_that_skipped_a_record_which_the_disk_lost_says_so_and_goes_on",
        definition="LogView._read_skipped",
        before="name not in self.failed or at < log.durable",
        after="True",
    ),
    Mutant(
        fault="a folder that another client makes in the place of a file of an upload",
        test="test_what_another_client_wrote_during_an_upload_is_seen[folder]",
        definition="Checked.listed",
        before="time.monotonic() - found[0] < _LISTING_S",
        after="True",
    ),
    Mutant(
        fault="damage of a durable record in a log with a failed sync",
        test="test_damage_of_a_durable_record_is_no_loss_of_a_failed_sync",
        definition="LogView._read_skipped",
        before="name not in self.failed or ...",
        after="name not in self.failed",
    ),
    Mutant(
        fault="damage in a log whose index is to be written",
        test="test_damage_in_a_log_that_was_taken_over_refuses_no_commit_for_the_index",
        definition="LogView.write_index",
        before="(OSError, CorruptError)",
        after="OSError",
    ),
    Mutant(
        fault="a listing that is older than it says",
        test="test_folder_in_a_new_folder_is_known_for_as_long_as_that_one",
        definition="_list_around",
        before="checked.note(store, folder, _NOTHING, listed_s)",
        after="checked.note(store, folder, _NOTHING, time.monotonic())",
    ),
)
