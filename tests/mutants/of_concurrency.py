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
        fault="a folder of artifacts with deleted files alone",
        test="test_file_takes_the_place_of_a_folder_whose_files_are_deleted",
        definition="_list_around",
        before="any(listing.blobs.values())",
        after="listing.blobs",
    ),
    Mutant(
        fault="a folder that another client makes in the place of a file of an upload",
        test="test_what_another_client_wrote_during_an_upload_is_seen[folder]",
        definition="Checked.listed",
        before="time.monotonic() - found[0] < _LISTING_S",
        after="True",
    ),
    Mutant(
        fault="a listing that is older than it says",
        test="test_folder_in_a_new_folder_is_known_for_as_long_as_that_one",
        definition="_list_around",
        before="checked.note(store, folder, _NOTHING, listed_s)",
        after="checked.note(store, folder, _NOTHING, time.monotonic())",
    ),
    Mutant(
        fault="two processes that write to a database at once",
        test="test_no_schedule_of_processes_that_share_a_database_breaks_the_contract[two blobs at one key]",
        definition="Database._writing",
        before="LockedFile.lock(descriptor)",
        after="pass",
    ),
    Mutant(
        fault="two processes that take one key of a database",
        test="test_no_schedule_of_processes_that_share_a_database_breaks_the_contract[two blobs at one key]",
        definition="FolderBackend.put_new",
        before="change.taken([key])",
        after="False",
    ),
    Mutant(
        fault="a withdrawal of an intent after its commit to a database",
        test="test_no_schedule_of_processes_that_share_a_database_breaks_the_contract[a save and its withdrawal]",
        definition="FolderBackend.promote",
        before="change.remove(intent)",
        after="",
    ),
    Mutant(
        fault="a repair that replaces a database between two looks of a reader at its files",
        test="test_no_schedule_of_processes_that_share_a_database_breaks_the_contract[a repair and a reader]",
        definition="Database._take",
        before="""
            if _file_of(os.lstat(self.path)) != file:
                return self._take(is_locked=is_locked)
        """,
        after="",
    ),
)
