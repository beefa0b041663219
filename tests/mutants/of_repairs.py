"""Faults of repairs: what is damaged while, before or because something is repaired."""

from __future__ import annotations

from mutant import Mutant

PACKS = "tests/repair/test_packs.py"
RECORDS = "tests/repair/test_records.py"

MUTANTS = (
    Mutant(
        fault="a disk that fails while good chunks of a damaged pack are copied",
        test=f"{PACKS}::test_a_pack_stays_if_a_good_chunk_of_it_could_not_be_copied",
        path="tensorcas_mlflow/repair/_mend_packs.py",
        before="else _kept(holdings, name), safe).all()",
        after="else _kept(holdings, name)[:0], safe).all()",
    ),
    Mutant(
        fault="a machine that reads a good chunk wrongly once",
        test=f"{PACKS}::test_damage_that_a_second_look_does_not_see_is_left_alone",
        path="tensorcas_mlflow/repair/_mend_packs.py",
        before="if piece.entry is not None and not _is_still_bad(store.backend, name, piece):",
        after="if False:",
    ),
    Mutant(
        fault="a chunk that is damaged in the backup too",
        test=f"{PACKS}::test_what_is_damaged_in_the_other_store_too_is_not_taken",
        path="tensorcas_mlflow/transfer/_chunks.py",
        before="            if fault is None:\n",
        after="            if fault != '':\n",
    ),
    Mutant(
        fault="a good copy that a collector deletes while the bad one is repaired",
        test=f"{PACKS}::test_a_good_copy_that_a_collector_is_about_to_delete_is_copied_and_does_not_count",
        path="tensorcas_mlflow/repair/_mend_packs.py",
        before="usable = frozenset(holdings.packs) - doomed - lists.packs",
        after="usable = frozenset(holdings.packs) - doomed",
    ),
    Mutant(
        fault="a save that relies on a damaged chunk while it is repaired",
        test=f"{PACKS}::test_a_save_under_way_that_relies_on_a_damaged_chunk_begins_again_and_writes_it",
        path="tensorcas_mlflow/repair/_mend_packs.py",
        before="            n_fenced += backend.withdraw(info.key, info.token)\n",
        after="            pass\n",
    ),
    Mutant(
        fault="a save that begins between a repair's look at intents and its deletions",
        test="tests/protocol/test_repair_schedules.py::test_a_save_that_commits_after_the_repair_is_whole",
        path="tensorcas_mlflow/repair/_mend_packs.py",
        before="        backend.put_new(condemned, [p.condemned_bytes(doomed, frozenset())])\n",
        after="        pass\n",
    ),
    Mutant(
        fault="a bad sector in a pack of which another chunk is damaged",
        test=f"{PACKS}::test_a_pack_with_a_bad_sector_stays_although_another_chunk_of_it_is_damaged",
        path="tensorcas_mlflow/repair/_holdings.py",
        before="if pack.damage and pack.failure is None",
        after="if pack.damage",
    ),
    Mutant(
        fault="a manifest of the backup that is another one than its name says",
        test=f"{RECORDS}::test_a_manifest_that_is_another_one_in_the_other_store_is_not_taken",
        path="tensorcas_mlflow/repair/_sources.py",
        before="manifest=Manifest.from_blob(blob, name)",
        after="manifest=Manifest.from_blob(blob)",
    ),
    Mutant(
        fault="a step that is saved anew while its damaged ref is repaired",
        test=f"{RECORDS}::test_a_step_that_is_saved_anew_while_its_ref_is_repaired_stays_the_new_one",
        path="tensorcas_mlflow/repair/_mend_records.py",
        before="        if p.read_ref(backend, key) is not None:\n            return False\n",
        after="        p.read_ref(backend, key)\n",
    ),
    Mutant(
        fault="a repair that dies between a damaged ref and its replacement",
        test="tests/repair/test_kill.py::test_one_that_dies_between_a_damaged_ref_and_its_replacement_is_finished",
        path="tensorcas_mlflow/repair/_mend_records.py",
        before='        backend.put_new(_note_key(key), [json.dumps({"format": 1, "key": key}).encode()])\n',
        after="        pass\n",
    ),
    Mutant(
        fault="a damaged condemned list that may name a copy",
        test=f"{RECORDS}::test_beside_a_damaged_list_no_copy_counts_that_it_may_name",
        path="tensorcas_mlflow/repair/_mend_packs.py",
        before="        if lists.damaged:\n",
        after="        if False:\n",
    ),
    Mutant(
        fault="a pack that is still on its way through a server",
        test=f"{RECORDS}::test_a_cut_pack_beside_a_cut_intent_may_still_be_on_its_way_through_a_server",
        path="tensorcas_mlflow/repair/_mend_packs.py",
        before="            if may_be_written:\n",
        after="            if False:\n",
    ),
    Mutant(
        fault="a save through a server that begins between the plan of a repair and what it does",
        test="tests/repair/test_records.py"
        "::test_a_pack_is_left_alone_that_a_save_through_a_server_began_to_send_after_the_first_look",
        path="tensorcas_mlflow/repair/_plan.py",
        before="may_be_written = bool(_look_at_intents(store)) and is_carried(backend)",
        after="may_be_written = False",
    ),
    Mutant(
        fault="a chunk of a codec of a later release, in a repair",
        test="tests/repair/test_packs.py::test_a_chunk_of_a_codec_of_a_later_release_is_left_where_it_is",
        path="tensorcas_mlflow/repair/_chunks.py",
        before='known = np.isin(entries["codec"], list(CODECS))',
        after="known = fits",
    ),
    Mutant(
        fault="a commit that a repair meets half way, of a chunk that is lost",
        test="tests/repair/test_packs.py::test_a_save_that_is_half_committed_to_a_lost_chunk_begins_again",
        path="tensorcas_mlflow/repair/_mend_packs.py",
        before="        if not intent.through_carrier and relies_on_it(intent):\n",
        after="        if not intent.through_carrier and intent.digests is not None and relies_on_it(intent):\n",
    ),
    Mutant(
        fault="a bad sector of which a backup has a copy, and a collection after the repair",
        test=f"{PACKS}::test_what_a_backup_healed_of_a_bad_sector_outlives_the_next_collection",
        path="tensorcas_mlflow/repair/_mend_packs.py",
        before="    return holdings.give_up_replaced()\n",
        after="    return frozenset()\n",
    ),
)
