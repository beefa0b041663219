"""Faults of machines that go down and of disks that fail."""

from __future__ import annotations

from mutant import Mutant

_CUTS = "tests/crash/test_cuts.py"
_ERRORS = "tests/crash/test_errors.py"
_NEW_FILE = "tensorcas_mlflow/backends/_new_file.py"
_LOCAL = "tensorcas_mlflow/backends/_local.py"
_DURABLE = "tensorcas_mlflow/_durable.py"

MUTANTS = (
    Mutant(
        fault="a power cut that takes the bytes of packs and manifests that were not synced",
        test=f"{_CUTS}::test_a_commit_that_has_returned_is_there_after_a_cut",
        path=_LOCAL,
        before="        threads.run_all(sync, list(files), waits=True)\n",
        after="",
    ),
    Mutant(
        fault="a power cut that takes the bytes of a ref that were not synced",
        test=f"{_CUTS}::test_a_commit_that_has_returned_is_there_after_a_cut",
        path=_LOCAL,
        before="[partial(os.fsync, descriptor), *folders]",
        after="folders",
    ),
    Mutant(
        fault="a power cut that takes the names of packs and manifests that were not synced",
        test=f"{_CUTS}::test_a_commit_that_has_returned_is_there_after_a_cut",
        path=_LOCAL,
        before="[partial(os.fsync, descriptor), *folders]",
        after="[partial(os.fsync, descriptor)]",
    ),
    Mutant(
        fault="a power cut that takes the name of a ref that was not synced",
        test=f"{_CUTS}::test_a_commit_that_has_returned_is_there_after_a_cut",
        path=_LOCAL,
        before="                    os.unlink(source_path)\n            self._settled.settle(folder)\n",
        after="                    os.unlink(source_path)\n",
    ),
    Mutant(
        fault="a power cut that takes the folder of a store that was not synced",
        test=f"{_CUTS}::test_a_folder_is_durable_that_a_process_made_which_was_then_killed",
        path=_DURABLE,
        before="            with contextlib.suppress(PermissionError):\n                sync_folder(above)\n",
        after="",
    ),
    Mutant(
        fault="a power cut that takes a pack whose writer was killed, after somebody relied on it",
        test=f"{_CUTS}::test_a_pack_is_durable_that_a_process_put_which_was_then_killed",
        path=_LOCAL,
        before="        new = there - self._durable\n",
        after="        new: set[str] = set()\n",
    ),
    Mutant(
        fault="a power cut that brings a replaced ref back, whose packs are collected",
        test=f"{_CUTS}::test_a_ref_that_a_process_was_killed_over_is_durable_before_what_it_replaced_goes",
        path="tensorcas_mlflow/gc/_plan.py",
        before="            backend.settle(prefix)\n",
        after="            pass\n",
    ),
    Mutant(
        fault="a power cut that brings a dropped ref back, whose packs are collected",
        test=f"{_CUTS}::test_a_dropped_ref_comes_back_whole_or_not_at_all",
        path="tensorcas_mlflow/gc/_plan.py",
        before='for prefix in ("intents", "refs", "packs"):',
        after='for prefix in ("intents", "packs"):',
    ),
    Mutant(
        fault="a power cut that takes the copy by which a repair went, whose writer was killed",
        test=f"{_CUTS}::test_a_damaged_pack_goes_only_when_the_other_copy_is_durable_and_never_comes_back",
        path="tensorcas_mlflow/repair/_mend_packs.py",
        before='        backend.settle("packs")\n        for name in',
        after="        for name in",
    ),
    Mutant(
        fault="a power cut that brings a damaged pack back, after a repair",
        test=f"{_CUTS}::test_a_damaged_pack_goes_only_when_the_other_copy_is_durable_and_never_comes_back",
        path="tensorcas_mlflow/repair/_mend_packs.py",
        before='        backend.settle("packs")\n        store.catalog',
        after="        store.catalog",
    ),
    Mutant(
        fault="a power cut that takes the copy a collection has kept, whose writer was killed",
        test=f"{_CUTS}::test_a_copy_whose_writer_was_killed_is_durable_before_the_other_copy_goes",
        path="tensorcas_mlflow/gc/_plan.py",
        before='for prefix in ("intents", "refs", "packs"):',
        after='for prefix in ("intents", "refs"):',
    ),
    Mutant(
        fault="a power cut that takes what a compaction has copied and not synced",
        test=f"{_CUTS}::test_what_a_compaction_copies_is_durable_before_the_rest_goes",
        path="tensorcas_mlflow/gc/_copy.py",
        before="writer.pieces(_payloads(store, table, rows, going=going)))",
        after="writer.pieces(_payloads(store, table, rows, going=going)), durable=False)",
    ),
    Mutant(
        fault="a power cut that takes the bytes of a text that was not synced",
        test=f"{_CUTS}::test_a_text_is_durable_before_the_file_it_replaces_goes",
        path="tensorcas_mlflow/artifact_repo/_plain.py",
        before="                    os.fsync(file.fileno())\n",
        after="",
    ),
    Mutant(
        fault="a power cut that brings the file back that a text has replaced",
        test=f"{_CUTS}::test_a_text_is_durable_before_the_file_it_replaces_goes",
        path=_LOCAL,
        before="                sync_folder(os.path.dirname(path))\n",
        after="",
    ),
    Mutant(
        fault="a power cut that leaves an intent without bytes",
        test=f"{_CUTS}::test_an_intent_that_lost_its_bytes_in_a_cut_does_not_keep_collections_waiting",
        path="tensorcas_mlflow/gc/_survey.py",
        before="(silent or _is_blank(backend, info.key))",
        after="silent",
    ),
    Mutant(
        fault="a power cut that takes what MLflow has uploaded of a model",
        test="tests/crash/test_models.py::test_a_logged_model_is_there_after_a_cut",
        path="tensorcas_mlflow/flavor/_log.py",
        before="            place.settle()\n",
        after="",
    ),
    Mutant(
        fault="an fsync of a file that fails once",
        test=f"{_ERRORS}::test_a_commit_fails_if_any_of_its_fsyncs_failed_once[fsync]",
        path=_NEW_FILE,
        before="        os.fsync(self._descriptor)\n",
        after="        with __import__('contextlib').suppress(OSError):\n            os.fsync(self._descriptor)\n",
    ),
    Mutant(
        fault="an fsync of a folder that fails once",
        test=f"{_ERRORS}::test_a_commit_fails_if_any_of_its_fsyncs_failed_once[sync]",
        path=_DURABLE,
        before="if error.errno not in (errno.EINVAL, errno.ENOTSUP):",
        after="if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EIO):",
    ),
    Mutant(
        fault="a disk that writes a part of what it is given",
        test=f"{_ERRORS}::test_a_disk_that_writes_a_part_of_what_it_is_given_keeps_all",
        path=_NEW_FILE,
        before="    while len(view):\n        view = view[os.write(descriptor, view[:MOST_BYTES]) :]\n",
        after="    os.write(descriptor, view[:MOST_BYTES])\n",
    ),
    Mutant(
        fault="a delete that fails at the end of a stream",
        test="tests/crash/test_backend_kills.py"
        "::test_a_stream_is_stored_though_the_intent_of_a_batch_cannot_be_removed",
        path="tensorcas_mlflow/store/_ingest.py",
        before="            except BackendError as failure:\n",
        after="            except FencedError as failure:\n",
    ),
)
