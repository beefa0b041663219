"""Faults of many processes and threads at once, of forks and interrupts, and of what a later release has written."""

from __future__ import annotations

from mutant import Mutant

THREADS = "tensorcas_mlflow/threads.py"
LOCAL = "tensorcas_mlflow/backends/_local.py"
LATER = "tests/store/test_later_versions.py::test_what_a_later_release_wrote_is_refused_before_anything_is_changed"
FORKS = "tests/store/test_threads_and_forks.py"

CATALOG = "tests/store/test_catalog.py"

MUTANTS = (
    Mutant(
        fault="two threads take up one pack",
        test=f"{CATALOG}::test_segment_names_a_pack_once_that_two_threads_took_up",
        path="tensorcas_mlflow/store/_catalog.py",
        before="            if name in self._packs:\n                return\n",
        after="",
    ),
    Mutant(
        fault="a condemned pack that hints name twice",
        test=f"{CATALOG}::test_save_relies_on_no_condemned_pack_that_hints_name_twice",
        path="tensorcas_mlflow/index.py",
        before="        if len(names) == len(self.packs):\n            return\n",
        after="        return\n",
    ),
    Mutant(
        fault="a fork while another thread holds a lock",
        test="tests/core/test_threads.py::test_a_lock_that_another_thread_holds_is_open_in_a_forked_child",
        path=THREADS,
        before="    Lock.open_all()\n",
        after="",
    ),
    Mutant(
        fault="a fork of a process with a pool of threads",
        test="tests/core/test_threads.py::test_a_forked_child_gets_a_pool_of_its_own",
        path=THREADS,
        before="    _pools.clear()\n",
        after="",
    ),
    Mutant(
        fault="a fork while a folder is locked",
        test="tests/backends/test_local_locks.py::test_a_child_without_hooks_does_not_keep_a_folder_locked_either",
        path=LOCAL,
        before="            fcntl.flock(descriptor, fcntl.LOCK_UN)\n",
        after="            pass\n",
    ),
    Mutant(
        fault="a kill of a process that has locked a folder and forked",
        test="tests/backends/test_local_locks.py"
        "::test_a_parent_killed_while_it_has_locked_a_folder_leaves_no_lock_in_its_child",
        path=LOCAL,
        before="            os.close(_locking.pop())\n",
        after="            _locking.pop()\n",
    ),
    Mutant(
        fault="an interrupt while a lock is taken",
        test="tests/core/test_threads.py::test_an_interrupt_leaves_no_lock_taken",
        path=THREADS,
        before="""    @classmethod
    def open_all(cls) -> None:
""",
        after="""    def __enter__(self) -> bool:
        self.acquire()
        return True

    @classmethod
    def open_all(cls) -> None:
""",
    ),
    Mutant(
        fault="an interrupt while another thread fails",
        test="tests/core/test_threads.py::test_an_interrupt_is_not_lost_behind_the_failure_of_an_earlier_item",
        path=THREADS,
        before="key=lambda each: (isinstance(each[1], Exception), each[0])",
        after="key=lambda each: each[0]",
    ),
    Mutant(
        fault="an interrupt while a save is given to the background",
        test="tests/core/test_background.py::test_a_job_whose_giver_was_interrupted_is_done_when_somebody_waits",
        path=THREADS,
        before="        self._see_to_it()  # whoever gave it may have been interrupted before\n",
        after="",
    ),
    Mutant(
        fault="an interpreter that ends while a thread saves",
        test="tests/mlflow/test_checkpoints_background.py::test_an_interpreter_that_ends_saves_first",
        path=THREADS,
        before="""        future: Future[R] = Future()
        try:
            future.set_result(function(item))
        except Exception as error:  # noqa: BLE001 -- as a pool does
            future.set_exception(error)
        return future
""",
        after="        raise\n",
    ),
    Mutant(
        fault="a ref that is replaced while another process withdraws the old one",
        test="tests/backends/test_local_locks.py::test_a_ref_is_not_withdrawn_in_place_of_the_one_that_was_looked_at",
        path=LOCAL,
        before="            fcntl.flock(descriptor, fcntl.LOCK_EX)\n        yield",
        after="            pass\n        yield",
    ),
    Mutant(
        fault="a collection in a store with an intent of a later release",
        test=f"{LATER}[intent-collect]",
        path="tensorcas_mlflow/gc/_survey.py",
        before="""        except NewerFormatError:
            raise  # what it keeps, and how it is given up, only a later release knows
""",
        after="",
    ),
    Mutant(
        fault="a collection in a store with an index segment of a later release",
        test=f"{LATER}[segment-collect]",
        path="tensorcas_mlflow/gc/_plan.py",
        before="    p.check_index(store.backend)\n",
        after="",
    ),
    Mutant(
        fault="a collection in a store with a pack of a later release",
        test=f"{LATER}[pack-collect]",
        path="tensorcas_mlflow/pack.py",
        before="""            raise NewerFormatError(f"the pack {key!r}", magic[-1], _VERSION)
""",
        after="            pass\n",
    ),
    Mutant(
        fault="a collection in a store with a ref of a later release",
        test=f"{LATER}[ref-collect]",
        path="tensorcas_mlflow/store/_json.py",
        before="""    if record["format"] > newest:
        raise NewerFormatError(f"{key!r}", record["format"], newest)
""",
        after="",
    ),
    Mutant(
        fault="a load from a store with a manifest of a later release",
        test=f"{LATER}[manifest-load]",
        path="tensorcas_mlflow/manifest/_stream.py",
        before="    if version > VERSION:\n",
        after="    if False:\n",
    ),
    Mutant(
        fault="a copy to a store with a condemned list of a later release",
        test=f"{LATER}[condemned list-copy to]",
        path="tensorcas_mlflow/transfer/_all.py",
        before="    read_condemned(destination.store.backend)\n",
        after="",
    ),
    Mutant(
        fault="a collection that condemns what a batch of a stream would be stored against",
        test="tests/deltas/test_files.py::test_no_batch_is_stored_against_a_condemned_pack",
        path="tensorcas_mlflow/store/_ingest.py",
        before="            plan.leave_out(self._backend, condemned.packs)\n",
        after="            pass\n",
    ),
    Mutant(
        fault="a collection of what the batches of a stream are stored against",
        test="tests/deltas/test_files.py::test_the_intent_of_a_batch_names_the_packs_of_its_bases",
        path="tensorcas_mlflow/store/_ingest.py",
        before="unique, plan.packs if plan is not None else ()))",
        after="unique, ()))",
    ),
    Mutant(
        fault="a file that is committed between the writing of a text and the drop of the ref it replaces",
        test="tests/mlflow/test_overwriting.py::"
        "test_a_commit_between_the_writing_of_a_text_and_its_drop_is_not_dropped",
        path="tensorcas_mlflow/artifact_repo/_repository.py",
        before="            store.drop_artifact(in_store, replaced)\n",
        after="            store.drop_artifact(in_store, store.artifact_token(in_store))\n",
    ),
    Mutant(
        fault="a file that is committed while a text is about to drop the ref it replaces",
        test="tests/mlflow/test_overwriting.py::"
        "test_a_commit_between_the_writing_of_a_text_and_its_drop_is_not_dropped",
        path="tensorcas_mlflow/store/_refs.py",
        before="token is not None and self.backend.withdraw(artifact_key(path), token)",
        after="bool(self.drop_artifacts(path))",
    ),
)
