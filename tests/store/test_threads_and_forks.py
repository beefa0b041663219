from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.errors import CheckpointExistsError
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.maintenance import plan_gc, verify
from tensorcas_mlflow.store import Store


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("TENSORCAS_THREADS", "3")
    return Store.init(tmp_path, chunk_bytes=4096)


def model(seed: int) -> dict[str, np.ndarray]:
    return {"own": np.random.default_rng(seed).normal(size=20_000), "shared": np.arange(30_000), "n": np.array(seed)}


def save(store: Store, seed: int, step: int, *, replace: bool = True) -> Ref:
    with store.write_checkpoint(model(seed)) as pending:
        return pending.commit(RefTarget(run_id="r", step=step), replace=replace)


def is_right(store: Store, ref: Ref) -> bool:
    loaded = store.read_tensors(store.manifest(ref))
    return all(loaded[name].tobytes() == array.tobytes() for name, array in model(int(loaded["n"])).items())


def in_threads(n_threads: int, work: Callable[[int], None]) -> None:
    errors: list[BaseException] = []

    def run(n: int) -> None:
        try:
            work(n)
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            errors.append(error)

    workers = [threading.Thread(target=run, args=(n,)) for n in range(n_threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert errors == []


def in_a_child(work: Callable[[], None], timeout_s: float = 30) -> None:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            assert status == 0
            return
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    pytest.fail("the child hangs")


@pytest.mark.long
def test_threads_that_share_a_store_save_and_load_what_is_theirs(store: Store) -> None:
    def work(n: int) -> None:
        for k in range(4):
            assert is_right(store, save(store, 10 * n + k, 10 * n + k))

    in_threads(6, work)

    assert len(store.checkpoints()) == 24
    other = Store.open(store.uri)
    assert all(is_right(other, ref) for ref in other.checkpoints())
    assert list(store.backend.list("intents")) == []


@pytest.mark.long
def test_32_threads_that_share_a_store_lose_nothing_while_another_one_collects(store: Store) -> None:
    done, has_collected = threading.Event(), threading.Event()

    def collect() -> None:
        while not done.is_set():
            if plan_gc(store, grace_s=3600, max_waste=0).execute().n_packs:
                has_collected.set()

    def work(n: int) -> None:
        if n >= 16:
            # On a busy machine the collector may begin late.
            assert has_collected.wait(60)
        ref = save(store, n, n)
        assert is_right(store, ref)
        assert n in {each.step for each in store.checkpoints()}
        if n % 2:
            store.drop(ref)

    collector = threading.Thread(target=collect)
    collector.start()
    try:
        in_threads(32, work)
    finally:
        done.set()
        collector.join()
    collect_rest(store)

    assert [ref.step for ref in sorted(store.checkpoints(), key=lambda ref: ref.step or 0)] == list(range(0, 32, 2))
    assert all(is_right(store, ref) for ref in store.checkpoints())
    assert verify(store, full=True).problems == ()


def collect_rest(store: Store) -> None:
    plan_gc(Store.open(store.uri), grace_s=0, max_waste=0).execute()


def test_one_of_the_threads_that_save_a_step_wins(store: Store) -> None:
    won: list[Ref] = []

    def work(n: int) -> None:
        with contextlib.suppress(CheckpointExistsError):
            won.append(save(store, n, 1, replace=False))

    in_threads(6, work)

    assert len(won) == 1
    assert [ref.write for ref in store.checkpoints()] == [won[0].write]
    assert is_right(store, won[0])
    assert list(store.backend.list("intents")) == []


def test_one_checkpoint_is_loaded_by_many_threads(store: Store) -> None:
    ref = save(store, 1, 1)
    reader = Store.open(store.uri)

    def work(n: int) -> None:
        for _ in range(3):
            assert is_right(reader, ref)

    in_threads(6, work)


@pytest.mark.long
def test_threads_that_fold_the_index_at_once_lose_nothing(store: Store) -> None:
    def work(n: int) -> None:
        mine = Store.open(store.uri)
        for k in range(25):
            with mine.write_checkpoint({"n": np.array([n, k]), "k": np.full(20, 100 * n + k)}) as pending:
                pending.commit(RefTarget(run_id=str(n), step=k))

    in_threads(5, work)

    other = Store.open(store.uri)
    for ref in other.checkpoints():
        loaded = other.read_tensors(other.manifest(ref))
        assert loaded["n"].tolist() == [int(ref.run_id or -1), ref.step]
    assert len(list(other.backend.list("index"))) < 110


@pytest.mark.long
def test_a_forked_child_saves_and_loads(store: Store) -> None:
    first = save(store, 1, 1)
    assert is_right(store, first)

    def work() -> None:
        assert is_right(store, first)
        assert is_right(store, save(store, 2, 2))

    in_a_child(work)

    assert [ref.step for ref in store.checkpoints()] == [1, 2]
    assert all(is_right(store, ref) for ref in store.checkpoints())


@pytest.mark.long
def test_a_child_forked_while_threads_save_can_save(store: Store) -> None:
    # What is imported lazily is imported: a fork in the middle of an import is beyond us.
    save(store, 99, 99)
    done = threading.Event()

    def keep_saving() -> None:
        step = 100
        while not done.is_set():
            save(store, step, step)
            step += 1

    saver = threading.Thread(target=keep_saving)
    saver.start()
    try:
        for n in range(8):
            time.sleep(0.01)
            in_a_child(lambda n=n: None if is_right(store, save(store, n, n)) else os._exit(2), timeout_s=10)  # type: ignore[misc]
    finally:
        done.set()
        saver.join()

    assert {ref.step for ref in store.checkpoints()} >= set(range(8))


def pooled(n: int) -> bool:
    """In a process of a pool: by the store that its parent has open, and by one of its own."""
    assert pooled_store is not None
    ref = save(pooled_store, n, n)
    return is_right(pooled_store, ref) and is_right(Store.open(pooled_store.uri), ref)


pooled_store: Store | None = None


@pytest.mark.long
def test_a_pool_forked_while_threads_save_and_collect_can_save_and_load(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "pooled_store", store)
    save(store, 99, 99)
    done = threading.Event()

    def keep(work: Callable[[], object]) -> threading.Thread:
        def repeat() -> None:
            while not done.is_set():
                work()

        thread = threading.Thread(target=repeat)
        thread.start()
        return thread

    busy = [
        keep(lambda: save(store, 98, 98)),
        keep(lambda: is_right(store, save(store, 97, 97))),
        keep(lambda: plan_gc(store, grace_s=3600, max_waste=0).execute()),
    ]
    try:
        for _ in range(3):
            with multiprocessing.get_context("fork").Pool(2) as pool:
                assert all(pool.map_async(pooled, range(6)).get(60))
    finally:
        done.set()
        for thread in busy:
            thread.join()

    assert {ref.step for ref in store.checkpoints()} == {*range(6), 97, 98, 99}
    assert all(is_right(store, ref) for ref in store.checkpoints())


ENDING = """
import sys, threading, time
import numpy as np
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store

store = Store.open(sys.argv[1])
begun = threading.Event()

def keep_saving(name, ends):
    step = 0
    while True:
        weights = np.random.default_rng(step).normal(size=20_000)
        with store.write_checkpoint({"w": weights, "n": np.array(step)}) as save:
            if ends and step == 3:
                sys.exit("from a thread")
            save.commit(RefTarget(run_id=name, step=step))
        begun.set()
        step += 1

threading.Thread(target=keep_saving, args=("daemon", False), daemon=True).start()
threading.Thread(target=keep_saving, args=("ends", True)).start()
begun.wait()
time.sleep(0.2)
sys.exit(7)
"""


@pytest.mark.long
def test_an_interpreter_that_ends_waits_for_no_daemon_and_leaves_a_sound_store(store: Store) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", ENDING, store.uri],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        timeout=60,
        check=False,
    )
    saved = [ref.run_id for ref in store.checkpoints()]
    for ref in store.checkpoints():
        loaded = store.read_tensors(store.manifest(ref))
        assert np.array_equal(loaded["w"], np.random.default_rng(ref.step).normal(size=20_000))
    collect_rest(store)

    assert done.returncode == 7, done.stderr
    assert saved.count("ends") == 3
    assert "daemon" in saved
    assert list(store.backend.list("intents")) == []
    assert verify(store, full=True).problems == ()


@pytest.mark.long
def test_a_save_begun_before_a_fork_is_committed_by_one_of_the_two(store: Store) -> None:
    with store.write_checkpoint(model(1)) as pending:
        in_a_child(lambda: assert_committed(store, pending.commit(RefTarget(run_id="child", step=1))))
        ref = pending.commit(RefTarget(run_id="parent", step=1))

    assert is_right(store, ref)
    assert {ref.run_id for ref in store.checkpoints()} == {"child", "parent"}
    assert list(store.backend.list("intents")) == []


def assert_committed(store: Store, ref: Ref) -> None:
    assert is_right(store, ref)
