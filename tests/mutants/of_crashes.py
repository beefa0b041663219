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
        fault="a full disk with censuses",
        test="test_collection_on_a_full_disk_frees_garbage_in_the_room_of_the_censuses",
        definition="_condemn",
        before="census.drop()",
        after="pass",
    ),
    Mutant(
        fault="a power cut, and a database whose commits are not synced",
        test="test_a_commit_to_a_database_that_has_returned_is_there_after_a_cut",
        definition="Rows.wait_for_disk",
        before="f\"PRAGMA synchronous = {'FULL' if waits else 'NORMAL'}\"",
        after="'PRAGMA synchronous = NORMAL'",
    ),
    Mutant(
        fault="a writer that does not know of the failed sync of another process",
        test="test_failed_sync_of_another_process_is_known_to_every_process",
        definition="Database._take_to_write",
        before="os.path.lexists(self._unsynced)",
        after="False",
    ),
    Mutant(
        fault="a failed sync of which nobody is told",
        test="test_failed_sync_of_another_process_is_known_to_every_process",
        definition="Database._note_unsynced",
        before='open(self._unsynced, "wb")',
        after="contextlib.nullcontext()",
    ),
    Mutant(
        fault="a failed sync that is forgotten before it is repeated",
        test="test_failed_sync_is_not_forgotten_before_it_is_repeated",
        definition="Database._take_to_write",
        before="not self._checkpoint(rows)",
        after="self._checkpoint(rows) is None",
    ),
    Mutant(
        fault="a sync of the folder of a write-ahead log that fails",
        test="test_what_others_committed_is_there_after_a_sync_that_has_failed_and_a_cut[sync]",
        definition="Database._name_log",
        before="sync_folder(self._folder)",
        after="",
    ),
)
