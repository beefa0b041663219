"""Faults of bytes that change, or go, where they are stored."""

from __future__ import annotations

from mutant import Mutant

_FLIPPER = "tests/corruption/test_flipper.py"
_DAMAGED = f"{_FLIPPER}::test_a_damaged_blob_gives_no_wrong_tensor_and_is_told"
_INDEX = "tests/corruption/test_index_damage.py"
_COPIES = "tests/corruption/test_other_copies.py"

MUTANTS = (
    Mutant(
        fault="a chunk's bytes change in its pack",
        test=f"{_DAMAGED}[local-packs]",
        path="tensorcas_mlflow/store/_take.py",
        before='    if b"".join(actual) == expected.tobytes():\n',
        after="    if True:\n",
    ),
    Mutant(
        fault="a pack's table changes",
        test="tests/corruption/test_records.py::test_a_byte_that_has_changed_in_a_packs_table_is_seen_without_reading_a_chunk",
        path="tensorcas_mlflow/pack.py",
        before="    if digest(table + footer[:32]) != wanted:\n",
        after="    if False:\n",
    ),
    Mutant(
        fault="a manifest changes",
        test=f"{_DAMAGED}[local-manifests]",
        path="tensorcas_mlflow/manifest/_manifest.py",
        before="    if actual != name[: 2 * DIGEST_BYTES]:\n",
        after="    if False:\n",
    ),
    Mutant(
        fault="a figure in a ref changes",
        test="tests/corruption/test_records.py::test_a_figure_that_has_changed_in_a_ref_is_damage",
        path="tensorcas_mlflow/store/_json.py",
        before="    if not is_whole(record, data):\n",
        after="    if False:\n",
    ),
    Mutant(
        fault="the ref of one step is put in the place of another's",
        test="tests/corruption/test_records.py::test_the_ref_of_another_step_is_refused",
        path="tensorcas_mlflow/store/_records.py",
        before="    if key.startswith(RUNS) and (run_id is None or not is_run_key(key, run_id, name, step)):\n",
        after="    if False:\n",
    ),
    Mutant(
        fault="a digest in an intent changes",
        test="tests/corruption/test_records.py::test_an_intent_of_which_a_digest_has_changed_is_refused",
        path="tensorcas_mlflow/store/_records.py",
        before='        if record.get("digest", short_digest(tail)) != short_digest(tail):\n',
        after="        if False:\n",
    ),
    Mutant(
        fault="a segment of the index changes and leads to a pack that never held a chunk",
        test=f"{_INDEX}::test_a_save_does_not_rely_on_a_pack_to_which_a_damaged_segment_leads[local-digest]",
        path="tensorcas_mlflow/index.py",
        before='        if "digest" in head and head["digest"] != _digest_of_rows('
        'head["format"], packs, pack, entries):\n',
        after="        if False:\n",
    ),
    Mutant(
        fault="a segment of an earlier release changes, which has no digest",
        test=f"{_INDEX}::test_a_save_does_not_rely_on_a_pack_to_which_a_damaged_segment_leads[local-earlier release]",
        path="tensorcas_mlflow/store/_catalog.py",
        before="        if new and not table.is_checked:\n",
        after="        if False:\n",
    ),
    Mutant(
        fault="a chunk is damaged in one of two packs",
        test=f"{_COPIES}::test_the_whole_copy_is_read_whichever_pack_is_damaged",
        path="tensorcas_mlflow/store/_read.py",
        before="                places = self._catalog.find(wanted.digests[chunks], besides)\n",
        after="                places = self._catalog.find(wanted.digests[chunks], set(self._catalog._packs))\n",
    ),
    Mutant(
        fault="a save finds a chunk that was found damaged before",
        test=f"{_COPIES}::test_a_save_of_the_process_that_found_a_copy_damaged_writes_another",
        path="tensorcas_mlflow/store/_catalog.py",
        before="            self._distrusted.add((pack, digest))\n",
        after="            pass\n",
    ),
    Mutant(
        fault="stored bytes change, and are looked at without being decoded",
        test="tests/corruption/test_verify_parts.py::test_the_parts_together_find_every_damaged_chunk_once[False]",
        path="tensorcas_mlflow/verify/_chunks.py",
        before='    if actual == entry["stored_digest"].tobytes():\n',
        after="    if True:\n",
    ),
    Mutant(
        fault="a folder of refs is moved away and linked",
        test=f"{_COPIES}::test_a_collection_takes_nothing_that_a_linked_ref_or_folder_of_refs_keeps",
        path="tensorcas_mlflow/backends/_local.py",
        before="                elif (entry.is_symlink() or entry.is_file(follow_symlinks=False)) and not",
        after="                elif entry.is_file(follow_symlinks=False) and not",
    ),
)
