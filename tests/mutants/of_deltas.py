"""Faults that meet chunks which are stored as deltas: their bases go, rot, move, or are lied about."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        fault="deltas without bases, each in the pack of another chunk's copy",
        test="test_reader_finds_a_full_copy_beside_a_delta_without_its_base",
        definition="find_places",
        before="{pack}",
        after="{places.packs[at] for at in places.pack[rows].tolist()}",
    ),
    Mutant(
        fault="a base that another thread misses in the middle of a read",
        test="test_a_base_that_another_thread_finds_gone_meanwhile_is_a_chunk_that_has_moved",
        definition="ChunkReader._read_from",
        before="moved or not is_whole.all()",
        after="moved",
    ),
    Mutant(
        fault="a digit that changes at the end of a chain of deltas",
        test="test_error_names_the_pack_in_which_a_chain_is_damaged[0]",
        definition="DeltaReading._decode",
        before="self._decode_chain(delta, links, memory, checks_all=True)",
        after="self._decode_chain(delta, links, memory)",
    ),
    Mutant(
        fault="a save of what takes a copy that was read in vain",
        test="test_next_save_writes_a_chunk_again_that_could_not_be_read[0]",
        definition="rows_that_take",
        before="at, level = at[deltas[bases.found]], bases.some(np.flatnonzero(bases.found))",
        after="break",
    ),
    Mutant(
        fault="a base of which the first copy is damaged and the second is not",
        test="test_save_names_the_readable_one_of_two_copies_of_a_base[0]",
        definition="BasePlan.bases",
        before="found = self._look_up(rows).up_to(depth)",
        after="",
    ),
    Mutant(
        fault="a base whose bytes are remembered and whose copy is damaged",
        test="test_a_remembered_base_of_which_the_stored_copy_is_damaged_is_no_base",
        definition="RecentChunks.are_whole",
        before='digest(payload)[:STORED_DIGEST_BYTES] != entry["stored_digest"].tobytes()',
        after="False",
    ),
    Mutant(
        fault="remembered bytes of a base change in memory",
        test="test_remembered_bytes_that_have_changed_are_not_given_out",
        definition="RecentChunks.find",
        before="chunks if np.array_equal(digest_each(chunks), digests) else None",
        after="chunks",
    ),
    Mutant(
        fault="the pack of a base goes before a save relies on its delta",
        test="test_a_delta_whose_base_is_gone_is_no_copy_for_a_save",
        definition="probe",
        before="used |= set(map(pack_key, catalog.find_chains(places)[1]))",
        after="",
    ),
    Mutant(
        fault="the checkpoint of a base is dropped, and that of its delta is not",
        test="test_bases_that_only_live_deltas_need_are_kept",
        definition="Survey.bases_of",
        before="return bases",
        after="return bases & False",
    ),
    Mutant(
        fault="a collection while a save is about to store deltas",
        test="test_a_pack_that_a_save_under_way_may_write_deltas_against_is_kept",
        definition="survey",
        before="pinned |= intent.bases",
        after="",
    ),
    Mutant(
        fault="a collection that has its plan when a save is about to store deltas against deltas",
        test="test_pack_that_a_save_begun_after_the_plan_may_use_keeps_its_bases",
        definition="still_needed",
        before="at_risk | state.rows_in(state.pinned)",
        after="at_risk",
    ),
    Mutant(
        fault="two collectors, one of which would delete a base and the other the copy in full",
        test="test_plays_of_deltas_with_all_rules_lose_nothing[two_copies]",
        definition="Survey.copies",
        before="copies[deltas] &= copies[self.base[deltas]]",
        after="",
    ),
    Mutant(
        fault="a collector that dies when it has condemned a base",
        test="test_a_dead_collectors_list_with_bases_on_it_is_finished",
        definition="copy_out",
        before="sources |= _holders_of_dependents(state, lacking, going=going, sources=sources)",
        after="",
    ),
    Mutant(
        fault="a collector that dies when it has condemned the middle of a chain",
        test="test_dead_collectors_list_with_the_middle_of_a_chain_is_finished",
        definition="_payloads",
        before="bases.packs(entry) & going",
        after="False",
    ),
    Mutant(
        fault="a bad sector in a delta beside damage in the pack of its base",
        test="test_the_base_of_a_delta_that_could_not_be_read_stays",
        definition="mend_packs",
        before="anchored(backend, holdings) & holdings.damaged()",
        after="anchored(backend, holdings) & frozenset()",
    ),
    Mutant(
        fault="a repair where a collection has left deltas without their bases",
        test="test_a_delta_that_a_collection_has_left_without_its_base_is_no_damage",
        definition="_judged",
        before="Verdict.BASELESS if is_as_written else Verdict.BAD",
        after="Verdict.BAD",
    ),
    Mutant(
        fault="a base is damaged of which another pack has a copy",
        test="test_repair_decodes_a_delta_with_another_copy_of_its_base[damaged]",
        definition="mend_packs",
        before="done.n_healed += revive(store, holdings, sources, needed)",
        after="",
    ),
    Mutant(
        fault="a repair of a base while a save relies on a delta against it",
        test="test_a_save_that_relies_on_a_delta_whose_base_is_damaged_begins_again",
        definition="mend_packs",
        before="np.concatenate([_owed(holdings, doomed), as_keys(holdings.baseless())])",
        after="_owed(holdings, doomed)",
    ),
    Mutant(
        fault="damage of a base that is nobody's chunk any more",
        test="test_damage_of_a_base_alone_is_not_called_unneeded",
        definition="_sorted_out",
        before="bad = {**bad, **_dependents(table, bad, is_sound)}",
        after="",
    ),
    Mutant(
        fault="a base that is moved while its delta is verified",
        test="test_deltas_that_a_collector_moves_during_verify_are_no_problem",
        definition="read_chunks",
        before="""
            gone.add(pack_name(error.key))
            continue
        """,
        after="reason = str(error)",
    ),
    Mutant(
        fault="a segment that tells of a chain of ten",
        test="test_a_segment_that_tells_of_a_longer_chain_than_there_can_be_is_damage",
        definition="has_depth",
        before='(deltas["depth"] > 0) & (deltas["depth"] <= MAX_DEPTH)',
        after='deltas["depth"] > 0',
    ),
    Mutant(
        fault="an intent whose bases are no packs",
        test="test_intent_that_names_an_invalid_pack_is_damage[../../x]",
        definition="parse_intent",
        before="not isinstance(bases, list) or not all(map(is_pack_name, bases))",
        after="not isinstance(bases, list)",
    ),
    Mutant(
        fault="a frame in a plane that unpacks to more than the plane",
        test="test_a_plane_that_unpacks_to_more_than_it_may_costs_nothing",
        definition="frame_into",
        before="zstandard.frame_content_size(frame) != len(out)",
        after="False",
    ),
)
