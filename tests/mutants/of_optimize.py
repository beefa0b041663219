"""Faults that an `optimize` meets."""

from __future__ import annotations

from mutant import Mutant

BESIDE = "tests/optimize/test_beside_others.py::"
HAZARDS = "tests/optimize/test_hazards.py::"
DONE = "tests/optimize/test_optimize.py::"

MUTANTS = (
    Mutant(
        fault="a collection after which the copies in the new packs are those that went",
        test=DONE + "test_a_second_run_finds_nothing_and_writes_nothing",
        path="tensorcas_mlflow/gc/_choose.py",
        before="(pack, -weight[pack], -effort, is_other[pack], is_avoided)",
        after="(pack, -weight[pack], effort, ~is_other[pack], is_avoided)",
    ),
    Mutant(
        fault="a chunk that is damaged where it is read to be encoded anew",
        test=DONE + "test_a_damaged_chunk_stays_as_it_is_and_the_rest_is_optimized",
        path="tensorcas_mlflow/optimize/_reading.py",
        before="    store.chunks.read(digests, outs, verify=True)",
        after="    store.chunks.read(digests, outs, verify=False)",
    ),
    Mutant(
        fault="steps that are dropped after they were optimized beside others",
        test=DONE + "test_steps_that_are_dropped_give_their_room_back_though_bases_lie_beside_them",
        path="tensorcas_mlflow/optimize/_holdings.py",
        before="stays & (unneeded > DEFAULT_MAX_WASTE * total)",
        after="stays & (unneeded > total)",
    ),
    Mutant(
        fault="a collection that copies what was optimized",
        test=DONE + "test_a_collection_that_rewrites_keeps_what_was_spent",
        path="tensorcas_mlflow/pack.py",
        before='        effort=int(entry["effort"]),\n',
        after="",
    ),
    Mutant(
        fault="an optimize that dies when its packs are written and the old ones are not gone",
        test=BESIDE + "test_what_was_written_before_a_death_is_not_written_again",
        path="tensorcas_mlflow/pack.py",
        before='"typesize", "depth", "effort")',
        after='"typesize", "depth", "depth")',
    ),
    Mutant(
        fault="a base that is condemned while an optimize is about to store deltas against it",
        test=BESIDE + "test_a_base_that_somebody_condemns_at_the_last_moment_is_none",
        path="tensorcas_mlflow/optimize/_holdings.py",
        before="        lost = condemned | {name",
        after="        lost = {name",
    ),
    Mutant(
        fault="a collection beside an optimize that is about to store deltas against what it condemns",
        test=BESIDE + "test_packs_of_bases_are_named_in_an_intent_before_deltas_are_written",
        path="tensorcas_mlflow/optimize/_write.py",
        before="digests[~is_done], bases)",
        after="digests[~is_done])",
    ),
    Mutant(
        fault="a base that has rotted in the pack a delta would name, and is sound in another",
        test=HAZARDS + "test_a_copy_that_has_rotted_is_no_base_though_another_is_sound",
        path="tensorcas_mlflow/optimize/_encode.py",
        before="    raws |= read_bases(store.backend, [(outside[base], n_bytes) for base, n_bytes in named.items()])\n",
        after='    found = np.frombuffer(b"".join(named), np.uint8).reshape(-1, DIGEST_BYTES)\n'
        "    raws |= read_chunks(store, found, list(named.values()))\n",
    ),
    Mutant(
        fault="a step that is replaced, and collected, while an optimize reads what there is",
        test=HAZARDS + "test_a_step_that_is_replaced_and_collected_meanwhile_is_no_damage",
        path="tensorcas_mlflow/optimize/_plan.py",
        before="        if now is None or now.manifest != ref.manifest:",
        after="        if now is None:",
    ),
    Mutant(
        fault="a pack of chunks that are optimized and others that are not",
        test="tests/optimize/test_convergence.py::test_a_pack_with_chunks_that_are_optimized_and_others_that_are_not",
        path="tensorcas_mlflow/optimize/_plan.py",
        before="_MOST_ROUNDS = 4\n",
        after="_MOST_ROUNDS = 1\n",
    ),
    Mutant(
        fault="a collection after an optimize that did not come to its own",
        test="tests/optimize/test_convergence.py::"
        "test_a_collection_keeps_the_copies_that_were_optimized_though_the_run_died_before_its_own",
        path="tensorcas_mlflow/gc/_choose.py",
        before="(pack, -weight[pack], -effort, is_other[pack], is_avoided)",
        after="(pack, -weight[pack], is_other[pack], is_avoided)",
    ),
    Mutant(
        fault="a store of deltas that is copied",
        test="tests/transfer/test_copy_deltas.py::test_a_copy_of_an_optimized_store_takes_the_room_of_its_source",
        path="tensorcas_mlflow/transfer/_chunks.py",
        before='        is_kept = is_delta(entry) and entry["base_digest"].tobytes() in self._wanted_bases\n',
        after="        is_kept = False\n",
    ),
    Mutant(
        fault="a base that has rotted at the destination of a copy",
        test="tests/transfer/test_copy_deltas.py::test_a_base_that_has_rotted_in_the_destination_is_none",
        path="tensorcas_mlflow/transfer/_deltas.py",
        before="        return base if self._is_sound(base, delta.raw_bytes) else None\n",
        after="        return base\n",
    ),
)
