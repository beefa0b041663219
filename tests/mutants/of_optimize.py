"""Faults that an `optimize` meets."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        fault="a collection after which the copies in the new packs are those that went",
        test="test_a_second_run_finds_nothing_and_writes_nothing",
        definition="choose",
        before="(pack, -weight[pack], -effort, is_other[pack], is_avoided)",
        after="(pack, -weight[pack], effort, ~is_other[pack], is_avoided)",
    ),
    Mutant(
        fault="a chunk that is damaged where it is read to be encoded anew",
        test="test_a_damaged_chunk_stays_as_it_is_and_the_rest_is_optimized",
        definition="_read",
        before="store.chunks.read(digests, outs, verify=True)",
        after="store.chunks.read(digests, outs, verify=False)",
    ),
    Mutant(
        fault="steps that are dropped after they were optimized beside others",
        test="test_steps_that_are_dropped_give_their_room_back_though_bases_lie_beside_them",
        definition="DoneChunks._find_wasteful",
        before="self.max_waste * total",
        after="total",
    ),
    Mutant(
        fault="a collection that copies what was optimized",
        test="test_a_collection_that_rewrites_keeps_what_was_spent",
        definition="payload_of",
        before='int(entry["effort"])',
        after="0",
    ),
    Mutant(
        fault="an optimize that dies when its packs are written and the old ones are not gone",
        test="test_optimization_writes_no_chunk_again_that_was_written_before_a_death",
        definition="_NUMBERS",
        before='("offset", "stored_bytes", "raw_bytes", "codec", "typesize", "depth", "effort")',
        after='("offset", "stored_bytes", "raw_bytes", "codec", "typesize", "depth", "depth")',
    ),
    Mutant(
        fault="a base that is condemned while an optimize is about to store deltas against it",
        test="test_optimization_uses_no_base_condemned_at_the_last_moment",
        definition="DoneChunks.there",
        before="condemned | {name for name in packs if pack_key(name) in gone}",
        after="{name for name in packs if pack_key(name) in gone}",
    ),
    Mutant(
        fault="a collection beside an optimize that is about to store deltas against what it condemns",
        test="test_packs_of_bases_are_named_in_an_intent_before_deltas_are_written",
        definition="write_unit",
        before="p.protected(store.backend, digests[~is_done], bases)",
        after="p.protected(store.backend, digests[~is_done], ())",
    ),
    Mutant(
        fault="a base that has rotted in the pack a delta would name, and is sound in another",
        test="test_a_copy_that_has_rotted_is_no_base_though_another_is_sound",
        definition="_encode_all",
        before="bases = read_bases(store.backend, outside.values())",
        after="bases = read_by_digest(store, _as_rows(outside), [n_bytes for _, n_bytes in outside.values()])",
    ),
    Mutant(
        fault="a step that is replaced, and collected, while an optimize reads what there is",
        test="test_a_step_that_is_replaced_and_collected_meanwhile_is_no_damage",
        definition="manifest_of",
        before="now is not None and now.manifest == ref.manifest",
        after="now is not None",
    ),
    Mutant(
        fault="a pack of chunks that are optimized and others that are not",
        test="test_a_pack_that_is_optimized_in_part_is_optimized_to_an_end",
        definition="_MOST_ROUNDS",
        before="_MOST_ROUNDS = 4",
        after="_MOST_ROUNDS = 1",
    ),
    Mutant(
        fault="a collection after an optimize that did not come to its own",
        test="test_a_collection_keeps_the_copies_that_were_optimized_though_the_run_died_before_its_own",
        definition="choose",
        before="(pack, -weight[pack], -effort, is_other[pack], is_avoided)",
        after="(pack, -weight[pack], is_other[pack], is_avoided)",
    ),
    Mutant(
        fault="an optimize for restore of a store in which deep copies lie",
        test="test_latest_and_pinned_steps_of_an_optimized_store_take_one_base_at_most",
        definition="DoneChunks.refresh",
        before="self._find_wasteful(table, links, is_optimized) | self._find_deep(table)",
        after="self._find_wasteful(table, links, is_optimized)",
    ),
    Mutant(
        fault="a chunk that the latest step shares with a deep version of another tensor",
        test="test_chunk_shared_with_a_deep_version_of_another_tensor_takes_one_base_at_most",
        definition="choose_bases",
        before="np.where(shallow, SHALLOW_DEPTH, MAX_DEPTH)",
        after="np.full(n, MAX_DEPTH)",
    ),
    Mutant(
        fault="a store of deltas that is copied",
        test="test_a_copy_of_an_optimized_store_takes_the_room_of_its_source",
        definition="_read_here",
        before='is_delta(entry) and entry["base_digest"].tobytes() in wanted_bases',
        after="False",
    ),
    Mutant(
        fault="a base that has rotted at the destination of a copy",
        test="test_copy_uses_no_base_that_has_rotted_in_the_destination",
        definition="Rebaser.base_of",
        before="base if self._is_sound(base, delta.raw_bytes) else None",
        after="base",
    ),
)
