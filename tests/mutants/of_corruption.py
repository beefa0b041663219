"""Faults of bytes that change, or go, where they are stored."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        fault="a chunk's bytes change in its pack",
        test="test_a_damaged_blob_gives_no_wrong_tensor_and_is_told[local-packs]",
        definition="_Reading._decode_alone",
        before="wanted.digests[chunk].tobytes() if wanted.verify else None",
        after="None",
    ),
    Mutant(
        fault="the compiled core decodes a chunk of other bytes",
        test="test_core_decodes_a_changed_payload_to_the_chunk_or_not_at_all[1]",
        definition="decode",
        before="wanted.verify",
        after="False",
    ),
    Mutant(
        fault="a pack's table changes",
        test="test_a_byte_that_has_changed_in_a_packs_table_is_seen_without_reading_a_chunk",
        definition="read_table",
        before="digest(table + footer[:32]) != wanted",
        after="False",
    ),
    Mutant(
        fault="a manifest changes",
        test="test_a_damaged_blob_gives_no_wrong_tensor_and_is_told[local-manifests]",
        definition="_check_digest",
        before="actual != name[: 2 * DIGEST_BYTES]",
        after="False",
    ),
    Mutant(
        fault="a figure in a ref changes",
        test="test_a_figure_that_has_changed_in_a_ref_is_damage",
        definition="load_record",
        before="not is_whole(data)",
        after="False",
    ),
    Mutant(
        fault="the ref of one step is put in the place of another's",
        test="test_the_ref_of_another_step_is_refused",
        definition="_check_key",
        before="key.startswith(RUNS) and (run_id is None or not is_run_key(key, run_id, name, step))",
        after="False",
    ),
    Mutant(
        fault="a digest in an intent changes",
        test="test_an_intent_of_which_a_digest_has_changed_is_refused",
        definition="parse_intent",
        before='record.get("digest") != short_digest(tail)',
        after="False",
    ),
    Mutant(
        fault="a segment of the index changes and leads to a pack that never held a chunk",
        test="test_a_save_does_not_rely_on_a_pack_to_which_a_damaged_segment_leads[local]",
        definition="_are_sound",
        before='np.all(_checks_of(rows) == rows["check"], axis=1)',
        after="np.ones(len(rows), dtype=bool)",
    ),
    Mutant(
        fault="a row of a large segment changes and leads to a pack that never held a chunk",
        test="test_a_large_damaged_segment_leads_no_save_to_a_pack[local]",
        definition="Segment._look_up",
        before="hit[hit] = _are_sound(rows[hit], len(self.packs))",
        after="pass",
    ),
    Mutant(
        fault="a chunk is damaged in one of two packs",
        test="test_the_whole_copy_is_read_whichever_pack_is_damaged",
        definition="ChunkReader._read_other_copies",
        before="self._catalog.find(wanted.digests[chunks], besides)",
        after="self._catalog.find(wanted.digests[chunks], set(self._catalog._packs))",
    ),
    Mutant(
        fault="a save finds a chunk that was found damaged before",
        test="test_a_save_of_the_process_that_found_a_copy_damaged_writes_another",
        definition="Catalog.distrust",
        before="self._distrusted.add((pack, digest))",
        after="",
    ),
    Mutant(
        fault="stored bytes change, and are looked at without being decoded",
        test="test_the_parts_together_find_every_damaged_chunk_once[False]",
        definition="_changed",
        before="actual == wanted",
        after="True",
    ),
    Mutant(
        fault="a folder of refs is moved away and linked",
        test="test_a_collection_takes_nothing_that_a_linked_ref_or_folder_of_refs_keeps",
        definition="LocalBackend.list_dir",
        before="entry.is_file(follow_symlinks=False) or entry.is_symlink()",
        after="entry.is_file(follow_symlinks=False)",
    ),
    Mutant(
        fault="a row that is missing in a database",
        test="test_row_that_is_missing_is_an_error_of_the_listing_that_lacks_it[packs]",
        definition="Rows.check_folder",
        before="raise DamagedError(...)",
        after="pass",
    ),
    Mutant(
        fault="an earlier row of a ref beside sums that are wrong",
        test="test_row_of_an_earlier_commit_of_a_ref_is_refused_and_others_load",
        definition="Rows.check_ref",
        before="row is None or self._may_be_followed(row)",
        after="row is None",
    ),
    Mutant(
        fault="an older database that is put back",
        test="test_an_older_database_that_is_put_back_is_named",
        definition="Database._look",
        before="self._compare(rows, head, found)",
        after="pass",
    ),
    Mutant(
        fault="a write-ahead log that is deleted",
        test="test_write_ahead_log_that_somebody_deletes_is_missed",
        definition="Database.write",
        before="self._note_commits(change)",
        after="pass",
    ),
)
