"""Faults of machines that go down and of disks that fail."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        fault="a power cut that takes the bytes of packs and manifests that were not synced",
        test="test_a_commit_that_has_returned_is_there_after_a_cut",
        definition="LocalBackend._finish",
        before="threads.run_all(sync, list(files), waits=True)",
        after="",
    ),
    Mutant(
        fault="a power cut that takes the bytes of a ref that were not synced",
        test="test_a_commit_that_has_returned_is_there_after_a_cut",
        definition="LocalBackend._sync",
        before="[partial(os.fsync, descriptor)]",
        after="[]",
    ),
    Mutant(
        fault="a power cut that takes the names of packs and manifests that were not synced",
        test="test_a_commit_that_has_returned_is_there_after_a_cut",
        definition="LocalBackend._sync",
        before="set(unsettled.values())",
        after="()",
    ),
    Mutant(
        fault="a power cut that takes the name of a ref that was not synced",
        test="test_a_commit_that_has_returned_is_there_after_a_cut",
        definition="LocalBackend.promote",
        before="self._settled.settle(folder)",
        after="",
    ),
    Mutant(
        fault="a power cut that takes the folder of a store that was not synced",
        test="test_a_folder_is_durable_that_a_process_made_which_was_then_killed",
        definition="Settled.settle",
        before="sorted({*parents.values()}.difference(folders))",
        after="()",
    ),
    Mutant(
        fault="a power cut that takes a pack whose writer was killed, after somebody relied on it",
        test="test_a_pack_is_durable_that_a_process_put_which_was_then_killed",
        definition="LocalBackend.missing",
        before="new = there - self._durable",
        after="new: set[str] = set()",
    ),
    Mutant(
        fault="a power cut that brings a replaced ref back, whose packs are collected",
        test="test_a_ref_that_a_process_was_killed_over_is_durable_before_what_it_replaced_goes",
        definition="_execute",
        before="backend.settle(prefix)",
        after="",
    ),
    Mutant(
        fault="a power cut that brings a dropped ref back, whose packs are collected",
        test="test_a_dropped_ref_comes_back_whole_or_not_at_all",
        definition="_execute",
        before='("intents", "refs", "packs")',
        after='("intents", "packs")',
    ),
    Mutant(
        fault="a power cut that takes the copy by which a repair went, whose writer was killed",
        test="test_a_damaged_pack_goes_only_when_the_other_copy_is_durable_and_never_comes_back",
        definition="_delete_packs",
        before="""
            p.begin_generation(backend)
            backend.settle("packs")
        """,
        after="p.begin_generation(backend)",
    ),
    Mutant(
        fault="a power cut that brings a damaged pack back, after a repair",
        test="test_a_damaged_pack_goes_only_when_the_other_copy_is_durable_and_never_comes_back",
        definition="_delete_packs",
        before="""
            backend.settle("packs")
            store.catalog.forget(packs)
        """,
        after="store.catalog.forget(packs)",
    ),
    Mutant(
        fault="a power cut that takes the copy a collection has kept, whose writer was killed",
        test="test_a_copy_whose_writer_was_killed_is_durable_before_the_other_copy_goes",
        definition="_execute",
        before='("intents", "refs", "packs")',
        after='("intents", "refs")',
    ),
    Mutant(
        fault="a power cut that takes what a compaction has copied and not synced",
        test="test_copies_of_a_compaction_are_durable_before_the_old_pack_goes",
        definition="copy_out",
        before="store.backend.put_new(pack_key(name), writer.pieces(...))",
        after="""
            pieces = writer.pieces(_payloads(store, table, rows, going=going))
            store.backend.put_new(pack_key(name), pieces, durable=False)
        """,
    ),
    Mutant(
        fault="a power cut that takes the bytes of a text that was not synced",
        test="test_a_text_is_durable_before_the_file_it_replaces_goes",
        definition="_Staged.sync",
        before="os.fsync(self._file.fileno())",
        after="pass",
    ),
    Mutant(
        fault="a power cut that takes the names of texts written together",
        test="test_a_cut_at_any_moment_loses_nothing_that_was_committed[folders of texts and files]",
        definition="LocalPlainFiles.write_all",
        before="[partial(_sync_names, folder) for folder in folders]",
        after="[]",
    ),
    Mutant(
        fault="a power cut that takes the bytes of texts written together",
        test="test_a_cut_at_any_moment_loses_nothing_that_was_committed[folders of texts and files]",
        definition="LocalPlainFiles.write_all",
        before="[file.sync for file in staged]",
        after="[]",
    ),
    Mutant(
        fault="a power cut that brings the file back that a text has replaced",
        test="test_a_text_is_durable_before_the_file_it_replaces_goes",
        definition="LocalBackend.withdraw",
        before="sync_folder(os.path.dirname(path))",
        after="",
    ),
    Mutant(
        fault="a power cut that leaves an intent without bytes",
        test="test_an_intent_that_lost_its_bytes_in_a_cut_does_not_keep_collections_waiting",
        definition="_read_intents",
        before="silent or _is_blank(backend, info.key)",
        after="silent",
    ),
    Mutant(
        fault="a power cut that takes what MLflow has uploaded of a model",
        test="test_a_logged_model_is_there_after_a_cut",
        definition="_StoringFlavor.confirm",
        before="place.settle()",
        after="",
    ),
    Mutant(
        fault="an fsync of a file that fails once",
        test="test_a_commit_fails_if_any_of_its_fsyncs_failed_once[files-fsync]",
        definition="NewFile.sync",
        before="os.fsync(self.descriptor)",
        after="""
            with __import__('contextlib').suppress(OSError):
                os.fsync(self.descriptor)
        """,
    ),
    Mutant(
        fault="an fsync of a folder that fails once",
        test="test_a_commit_fails_if_any_of_its_fsyncs_failed_once[files-sync]",
        definition="sync_folder",
        before="(errno.EINVAL, errno.ENOTSUP)",
        after="(errno.EINVAL, errno.ENOTSUP, errno.EIO)",
    ),
    Mutant(
        fault="a disk that writes a part of what it is given",
        test="test_a_disk_that_writes_a_part_of_what_it_is_given_keeps_all",
        definition="write_all",
        before="""
            while len(view):
                view = view[os.write(descriptor, view[:MOST_BYTES]) :]
        """,
        after="os.write(descriptor, view[:MOST_BYTES])",
    ),
    Mutant(
        fault="a delete that fails at the end of a stream",
        test="test_a_stream_is_stored_though_the_intent_of_a_batch_cannot_be_removed",
        definition="Ingest.__exit__",
        before="BackendError",
        after="FencedError",
    ),
    Mutant(
        fault="a power cut, and a copy of a log whose records say that they are durable",
        test="test_a_copy_of_a_log_is_synced_though_its_records_say_that_they_are_durable",
        definition="LogView.logs_to_sync",
        before="log.is_original and log.is_synced",
        after="log.is_synced",
    ),
    Mutant(
        fault="a power cut, and another file in the place of a log that was synced",
        test="test_another_file_in_the_place_of_a_synced_log_is_synced_too",
        definition="LogView._read_log",
        before="log.file not in (None, file)",
        after="False",
    ),
    Mutant(
        fault="a power cut that loses a save whose blobs another process has deleted",
        test="test_commit_in_the_place_of_a_lost_and_deleted_one_stays[deleted]",
        definition="LogView._add",
        before="(*place, record.check) in dead",
        after="any(each[:2] == place for each in dead)",
    ),
    Mutant(
        fault="a backup that is copied over the log of an open process",
        test="test_open_processes_go_on_with_a_store_that_was_put_back[over_it]",
        definition="LogWriter.is_current",
        before="found.st_size == self.end",
        after="True",
    ),
    Mutant(
        fault="a backup, and other saves at the places of the known ones",
        test="test_process_that_did_not_look_finds_what_others_saved_after_the_store_was_put_back[over_it-looked-at]",
        definition="LogView._read_log",
        before="not _has_last(log, descriptor)",
        after="False",
    ),
    Mutant(
        fault="a backup in the place of a store with blobs for the next commit",
        test="test_commit_whose_blobs_went_with_the_state_before_is_refused[in_its_place]",
        definition="LoggedBackend.promote",
        before="self._check_written()",
        after="pass",
    ),
    Mutant(
        fault="a deletion in a store with a snapshot by hard links",
        test="test_snapshot_by_hard_links_and_its_original_do_not_change_each_other[logs-original]",
        definition="LogFolder.locked_dead",
        before="_is_its_own(descriptor, path)",
        after="True",
    ),
    Mutant(
        fault="a snapshot by hard links that is taken during a save",
        test="test_snapshot_that_is_taken_during_a_save_does_not_change[files]",
        definition="LocalBackend.promote",
        before="found.st_nlink > 1",
        after="False",
    ),
    Mutant(
        fault="a withdrawal in a store with a snapshot by hard links",
        test="test_ref_of_a_store_with_a_snapshot_is_withdrawn[files]",
        definition="LocalBackend.withdraw",
        before="not self._has_name_of(found)",
        after="False",
    ),
    Mutant(
        fault="a sync of a log that fails, and a list of refs",
        test="test_failed_sync_takes_the_ref_of_its_commit_back",
        definition="LoggedBackend.promote",
        before="self._logs.take_back(writer.id, record)",
        after="pass",
    ),
    Mutant(
        fault="a sync of a log that fails, and a second one that succeeds without the bytes",
        test="test_save_that_relies_on_a_record_of_a_failed_sync_writes_it_again",
        definition="LogView._read_dead",
        before="self.failed.add(log.id)",
        after="pass",
    ),
    Mutant(
        fault="a sync of tombstones that fails, and a second one that succeeds without the bytes",
        test="test_failed_sync_of_a_tombstone_is_known_to_every_process",
        definition="LogFolder.append_dead",
        before="write_all(descriptor, closing(log, 0))",
        after="pass",
    ),
    Mutant(
        fault="a disk that has lost the bytes of a failed sync",
        test="test_record_of_a_failed_sync_that_the_disk_has_lost_is_relied_on_by_nobody",
        definition="LogRewriter.renew",
        before="if self._lost: ...",
        after="",
    ),
    Mutant(
        fault="a power cut that brings a deleted ref back beside a newer one",
        test="test_deleted_ref_does_not_come_back_in_place_of_a_newer_one_after_a_power_cut",
        definition="LoggedBackend.promote",
        before="self._view.undurable_deletions(dest)",
        after="()",
    ),
    Mutant(
        fault="a sync of a log that fails while the log is rewritten",
        test="test_failed_sync_of_a_log_that_is_being_rewritten_ends_the_sweep",
        definition="LogRewriter._rewrite",
        before="self._view.marking_failures()",
        after="contextlib.nullcontext()",
    ),
    Mutant(
        fault="a power cut that brings back a replaced ref, after a failed sync of its deletion",
        test="test_replaced_ref_does_not_come_back_after_a_failed_sync_of_its_deletion",
        definition="Logs.bury",
        before="self.sync(self.view.undurable_deletions(key))",
        after="False",
    ),
    Mutant(
        fault="a sync of an idle log that fails",
        test="test_nobody_appends_to_an_idle_log_whose_sync_failed",
        definition="_adopted",
        before="sync_open(log, descriptor)",
        after="os.fsync(descriptor)",
    ),
    Mutant(
        fault="a disk that has lost the bytes of a failed sync, found by another process",
        test="test_commit_is_refused_if_another_process_has_found_its_blobs_lost",
        definition="LoggedBackend.promote",
        before="self._check_written()",
        after="pass",
    ),
    Mutant(
        fault="a full disk with censuses",
        test="test_collection_on_a_full_disk_frees_garbage_in_the_room_of_the_censuses",
        definition="_condemn",
        before="census.drop()",
        after="pass",
    ),
)
