"""Faults of repairs: what is damaged while, before or because something is repaired."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        fault="a disk that fails while good chunks of a damaged pack are copied",
        test="test_a_pack_stays_if_a_good_chunk_of_it_could_not_be_copied",
        definition="mend_packs",
        before="_owed(...) if name in replaced else _kept(checked, name)",
        after="_owed(checked, frozenset({name})) if name in replaced else _kept(checked, name)[:0]",
    ),
    Mutant(
        fault="a chunk that decodes although its bytes have changed, in a repair",
        test="test_a_chunk_that_decodes_although_its_bytes_have_changed_is_not_lost",
        definition="_encoded_anew",
        before="pack.bad[is_possible(pack.bad)] if name in doomed else NO_ENTRIES",
        after="NO_ENTRIES",
    ),
    Mutant(
        fault="a disk that fails as the rest of a damaged table is read",
        test="test_a_pack_stays_if_its_damaged_table_cannot_be_read_again",
        definition="_read",
        before="isinstance(error, StarvedError) or not is_given_up",
        after="isinstance(error, StarvedError)",
    ),
    Mutant(
        fault="a machine that reads a good chunk wrongly once",
        test="test_damage_that_a_second_look_does_not_see_is_left_alone",
        definition="_put_aside",
        before="_are_still_bad(backend, name, pack.bad) if pack.has_table else not _has_table(backend, name)",
        after="True",
    ),
    Mutant(
        fault="a chunk that is damaged in the backup too",
        test="test_repair_takes_no_chunk_that_is_damaged_in_the_other_store",
        definition="_fault_in",
        before="return ChunkFault(verdict=Verdict.BAD, reason=str(error))",
        after="return None",
    ),
    Mutant(
        fault="a good copy that a collector deletes while the bad one is repaired",
        test="test_a_good_copy_that_a_collector_is_about_to_delete_is_copied_and_does_not_count",
        definition="_copy",
        before="frozenset(checked.packs) - doomed - lists.packs",
        after="frozenset(checked.packs) - doomed",
    ),
    Mutant(
        fault="a save that relies on a damaged chunk while it is repaired",
        test="test_a_save_under_way_that_relies_on_a_damaged_chunk_begins_again_and_writes_it",
        definition="_fence",
        before="n_fenced += backend.withdraw(info.key, info.token)",
        after="",
    ),
    Mutant(
        fault="a save that begins between a repair's look at intents and its deletions",
        test="test_a_save_that_commits_after_the_repair_is_whole",
        definition="mend_packs",
        before="backend.put_new(condemned, [p.condemned_bytes(doomed, frozenset())])",
        after="",
    ),
    Mutant(
        fault="a chunk of a codec of a later release in a pack of which another chunk is damaged",
        test="test_a_chunk_of_a_codec_of_a_later_release_is_left_where_it_is",
        definition="CheckedPacks.damaged",
        before="pack.damage and pack.failure is None",
        after="pack.damage",
    ),
    Mutant(
        fault="a manifest of the backup that is another one than its name says",
        test="test_a_manifest_that_is_another_one_in_the_other_store_is_not_taken",
        definition="Sources.manifest",
        before="Manifest.from_blob(blob, name)",
        after="Manifest.from_blob(blob)",
    ),
    Mutant(
        fault="a step that is saved anew while its damaged ref is repaired",
        test="test_a_step_that_is_saved_anew_while_its_ref_is_repaired_stays_the_new_one",
        definition="_remove",
        before="""
            if p.read_ref(backend, key) is not None:
                return False
        """,
        after="p.read_ref(backend, key)",
    ),
    Mutant(
        fault="a repair that dies between a damaged ref and its replacement",
        test="test_a_repair_that_dies_between_a_damaged_ref_and_its_replacement_is_finished",
        definition="_remove",
        before="note_ref(backend, key, error.reason)",
        after="",
    ),
    Mutant(
        fault="a damaged condemned list that may name a copy",
        test="test_repair_counts_no_copy_that_a_damaged_condemned_list_may_name",
        definition="_copy",
        before="""
            if lists.damaged:
                ...
        """,
        after="",
    ),
    Mutant(
        fault="a pack that is still on its way through a server",
        test="test_a_cut_pack_beside_a_cut_intent_may_still_be_on_its_way_through_a_server",
        definition="_put_aside",
        before="not pack.has_table and may_be_written",
        after="False",
    ),
    Mutant(
        fault="a save through a server that begins between the plan of a repair and what it does",
        test="test_a_pack_is_left_alone_that_a_save_through_a_server_began_to_send_after_the_first_look",
        definition="_execute_rest",
        before="bool(_look_at_intents(store)) and may_be_carried(backend)",
        after="False",
    ),
    Mutant(
        fault="a chunk of a codec of a later release, in a repair",
        test="test_a_chunk_of_a_codec_of_a_later_release_is_left_where_it_is",
        definition="_not_read",
        before='fits & ~np.isin(entries["codec"], list(CODECS))',
        after="~fits & fits",
    ),
    Mutant(
        fault="a commit that a repair meets half way, of a chunk that is lost",
        test="test_a_save_that_is_half_committed_to_a_lost_chunk_begins_again",
        definition="_fence",
        before="not intent.through_carrier and relies_on_it(intent)",
        after="not intent.through_carrier and intent.digests is not None and relies_on_it(intent)",
    ),
    Mutant(
        fault="a bad sector of which a backup has a copy, and a collection after the repair",
        test="test_chunks_healed_from_a_backup_outlive_the_next_collection",
        definition="mend_packs",
        before="checked.give_up_replaced()",
        after="frozenset()",
    ),
)
