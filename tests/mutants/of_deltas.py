"""Faults that meet chunks which are stored as deltas: their bases go, rot, move, or are lied about."""

from __future__ import annotations

from mutant import Mutant

_READS = "tests/deltas/test_reads.py"
_MOVES = "tests/deltas/test_collections.py"
_COLLECTORS = "tests/deltas/test_collectors.py"
_REPAIRS = "tests/deltas/test_repairs.py"
_VERIFYING = "tests/deltas/test_verifying.py"
_FORGED = "tests/hostile/test_forged_deltas.py"

MUTANTS = (
    Mutant(
        fault="deltas without bases, each in the pack of another chunk's copy",
        test=f"{_READS}::test_a_copy_is_found_that_lies_beside_a_delta_whose_base_is_gone",
        path="tensorcas_mlflow/store/_lookup.py",
        before="            others = besides | {pack}\n            places = places.replaced(again, _find(",
        after="            others = besides | {places.packs[at] for at in places.pack[rows].tolist()}\n"
        "            places = places.replaced(again, _find(",
    ),
    Mutant(
        fault="a base that another thread misses in the middle of a read",
        test=f"{_READS}::test_a_base_that_another_thread_finds_gone_meanwhile_is_a_chunk_that_has_moved",
        path="tensorcas_mlflow/store/_read.py",
        before="not (moved or not is_whole.all())",
        after="not moved",
    ),
    Mutant(
        fault="a digit that changes at the end of a chain of deltas",
        test=f"{_READS}::test_the_pack_is_told_in_which_a_chain_is_damaged[0]",
        path="tensorcas_mlflow/store/_chains.py",
        before="fault = self._decode_chain(delta, links, memory, checks_all=True)",
        after="fault = self._decode_chain(delta, links, memory)",
    ),
    Mutant(
        fault="a save of what takes a copy that was read in vain",
        test=f"{_READS}::test_what_was_read_in_vain_is_written_again_by_the_next_save[0]",
        path="tensorcas_mlflow/store/_lookup.py",
        before="        at, level = at[deltas[bases.found]], bases.some(np.flatnonzero(bases.found))\n",
        after="        break\n",
    ),
    Mutant(
        fault="a base of which the first copy is damaged and the second is not",
        test="tests/deltas/test_saves.py::test_of_two_copies_of_a_base_the_one_is_named_that_can_be_read[0]",
        path="tensorcas_mlflow/store/_base_plan.py",
        before="            found = self._look_up(rows).up_to(depth)\n",
        after="",
    ),
    Mutant(
        fault="a base whose bytes are remembered and whose copy is damaged",
        test="tests/deltas/test_ancestry.py::test_a_remembered_base_of_which_the_stored_copy_is_damaged_is_no_base",
        path="tensorcas_mlflow/store/_recent_chunks.py",
        before='            if digest(payload)[:STORED_DIGEST_BYTES] != entry["stored_digest"].tobytes():\n',
        after="            if False:\n",
    ),
    Mutant(
        fault="remembered bytes of a base change in memory",
        test="tests/deltas/test_ancestry.py::test_remembered_bytes_that_have_changed_are_not_given_out",
        path="tensorcas_mlflow/store/_recent_chunks.py",
        before="return chunks if np.array_equal(digest_each(chunks), digests) else None",
        after="return chunks",
    ),
    Mutant(
        fault="the pack of a base goes before a save relies on its delta",
        test=f"{_MOVES}::test_a_delta_whose_base_is_gone_is_no_copy_for_a_save",
        path="tensorcas_mlflow/store/_claim.py",
        before="        used |= set(map(pack_key, catalog.find_chains(places)[1]))\n",
        after="",
    ),
    Mutant(
        fault="the checkpoint of a base is dropped, and that of its delta is not",
        test=f"{_MOVES}::test_the_bases_of_what_is_needed_are_kept_when_nothing_else_needs_them",
        path="tensorcas_mlflow/gc/_survey.py",
        before="        return bases\n",
        after="        return bases & False\n",
    ),
    Mutant(
        fault="a collection while a save is about to store deltas",
        test=f"{_MOVES}::test_a_pack_that_a_save_under_way_may_write_deltas_against_is_kept",
        path="tensorcas_mlflow/gc/_survey.py",
        before="        pinned |= intent.bases\n",
        after="",
    ),
    Mutant(
        fault="a collection that has its plan when a save is about to store deltas against deltas",
        test=f"{_COLLECTORS}::test_so_it_does_if_the_save_begins_after_the_plan",
        path="tensorcas_mlflow/gc/_choose.py",
        before="at_risk |= state.bases_of(at_risk | state.rows_in(state.pinned))",
        after="at_risk |= state.bases_of(at_risk)",
    ),
    Mutant(
        fault="two collectors, one of which would delete a base and the other the copy in full",
        test="tests/protocol/test_delta_rules_off.py::test_with_all_rules_the_same_plays_lose_nothing[two_copies]",
        path="tensorcas_mlflow/gc/_survey.py",
        before="            copies[deltas] &= copies[self.base[deltas]]\n",
        after="            pass\n",
    ),
    Mutant(
        fault="a collector that dies when it has condemned a base",
        test=f"{_COLLECTORS}::test_a_dead_collectors_list_with_bases_on_it_is_finished",
        path="tensorcas_mlflow/gc/_copy.py",
        before="    sources |= _holders_of_dependents(state, lacking, going=going, sources=sources)\n",
        after="",
    ),
    Mutant(
        fault="a collector that dies when it has condemned the middle of a chain",
        test=f"{_COLLECTORS}::test_so_it_is_if_a_chain_goes_through_it",
        path="tensorcas_mlflow/gc/_copy.py",
        before="if bases.packs(entry) & going:",
        after="if False:",
    ),
    Mutant(
        fault="a bad sector in a delta beside damage in the pack of its base",
        test=f"{_REPAIRS}::test_the_base_of_a_delta_that_could_not_be_read_stays",
        path="tensorcas_mlflow/repair/_mend_packs.py",
        before="    held = anchored(backend, holdings) & holdings.damaged()\n",
        after="    held = anchored(backend, holdings) & frozenset()\n",
    ),
    Mutant(
        fault="a repair where a collection has left deltas without their bases",
        test=f"{_REPAIRS}::test_a_delta_that_a_collection_has_left_without_its_base_is_no_damage",
        path="tensorcas_mlflow/repair/_chunks.py",
        before="verdict=Verdict.BASELESS if is_as_written else Verdict.BAD",
        after="verdict=Verdict.BAD",
    ),
    Mutant(
        fault="a base is damaged of which another pack has a copy",
        test=f"{_REPAIRS}::test_what_is_a_delta_is_decoded_with_another_copy_of_its_base[damaged]",
        path="tensorcas_mlflow/repair/_mend_packs.py",
        before="    done.n_healed += revive(store, holdings, sources, needed)\n",
        after="",
    ),
    Mutant(
        fault="a repair of a base while a save relies on a delta against it",
        test=f"{_REPAIRS}::test_a_save_that_relies_on_a_delta_whose_base_is_damaged_begins_again",
        path="tensorcas_mlflow/repair/_mend_packs.py",
        before="np.concatenate([_owed(holdings, doomed), as_keys(holdings.baseless())])",
        after="_owed(holdings, doomed)",
    ),
    Mutant(
        fault="damage of a base that is nobody's chunk any more",
        test=f"{_VERIFYING}::test_damage_of_a_base_alone_is_not_called_unneeded",
        path="tensorcas_mlflow/verify/_chunks.py",
        before="    bad = {**bad, **_dependents(table, bad, is_sound)}\n",
        after="",
    ),
    Mutant(
        fault="a base that is moved while its delta is verified",
        test=f"{_VERIFYING}::test_what_a_collector_moves_while_it_is_verified_is_no_problem",
        path="tensorcas_mlflow/verify/_chunks.py",
        before="                gone.add(pack_name(error.key))  # the pack of its base\n                continue\n",
        after="                reason = str(error)\n",
    ),
    Mutant(
        fault="a segment that tells of a chain of ten",
        test=f"{_FORGED}::test_a_segment_that_tells_of_a_longer_chain_than_there_can_be_is_damage",
        path="tensorcas_mlflow/pack.py",
        before='    return (deltas["depth"] > 0) & (deltas["depth"] <= MAX_DEPTH)\n',
        after='    return deltas["depth"] > 0\n',
    ),
    Mutant(
        fault="an intent whose bases are no packs",
        test=f"{_FORGED}::test_an_intent_that_names_what_is_no_pack_is_damage[../../x]",
        path="tensorcas_mlflow/store/_records.py",
        before="    if not isinstance(bases, list) or not all(map(is_pack_name, bases)):\n",
        after="    if not isinstance(bases, list):\n",
    ),
    Mutant(
        fault="a frame in a plane that unpacks to more than the plane",
        test=f"{_FORGED}::test_a_plane_that_unpacks_to_more_than_it_may_costs_nothing",
        path="tensorcas_mlflow/codecs/_zstd.py",
        before="        if zstandard.frame_content_size(frame) != len(out):\n",
        after="        if False:\n",
    ),
)
