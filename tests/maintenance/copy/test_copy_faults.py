"""A copy may fail or die anywhere: what is there loads, and the next copy goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.errors import BackendError
from tensorcas_mlflow.maintenance import copy_refs, plan_gc, read_source
from tensorcas_mlflow.store import Store, protocol
from tests.faulty import FaultyBackend, SimulatedCrash
from tests.maintenance.copy.copying import assert_steps_load, copy, new_store, payloads, save_steps

STEPS = (1, 2)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    # The number of a call then means the same call each time.
    monkeypatch.setenv("TENSORCAS_THREADS", "1")


def make_source() -> Store:
    source = new_store()
    save_steps(source, *STEPS)
    return source


def n_calls(side: str) -> int:
    os.environ["TENSORCAS_THREADS"] = "1"
    try:
        source = make_source()
        ends = {"source": FaultyBackend(source.backend), "destination": FaultyBackend(new_store(like=source).backend)}
        opened = {name: Store.open_backend(backend) for name, backend in ends.items()}
        ends[side].calls.clear()
        copy(opened["source"], opened["destination"])
        return len(ends[side].calls)
    finally:
        del os.environ["TENSORCAS_THREADS"]


N_READS, N_WRITES = n_calls("source"), n_calls("destination")


def steps_of(store: Store) -> set[int]:
    steps = {ref.step for ref in store.checkpoints() if ref.step is not None}
    assert_steps_load(store, *steps)
    return steps


def assert_no_garbage_after_collection(store: Store) -> None:
    for _ in range(2):
        plan_gc(store, grace_s=0, max_waste=0).execute()
    live = {row.tobytes() for ref in store.checkpoints() for row in store.manifest(ref).digests}
    assert set(payloads(store)) == live
    assert list(store.backend.list("intents")) == []


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failure_of_any_call_to_the_destination_loses_nothing_and_the_next_copy_goes_on(when: str) -> None:
    for nth in range(N_WRITES):
        source = make_source()
        inner = new_store(like=source).backend
        faulty = FaultyBackend(inner)
        destination = Store.open_backend(faulty)
        faulty.fail(nth, when=when)  # type: ignore[arg-type]
        try:
            copy(source, destination)
        except BackendError:
            steps_of(Store.open_backend(inner))
        report = copy(source, Store.open_backend(inner))

        assert steps_of(Store.open_backend(inner)) == set(STEPS), nth
        assert report.failed == ()
        assert_no_garbage_after_collection(Store.open_backend(inner))
        assert steps_of(Store.open_backend(inner)) == set(STEPS), nth


@pytest.mark.long
def test_a_failure_of_any_call_to_the_source_loses_nothing_and_the_next_copy_goes_on() -> None:
    for nth in range(N_READS):
        source = make_source()
        faulty = FaultyBackend(source.backend)
        opened = Store.open_backend(faulty)
        destination = new_store(like=source)
        faulty.fail(nth)
        try:
            refs, _ = read_source(opened)
            copy_refs(opened, destination, refs)
        except BackendError:
            pass
        steps_of(destination)
        copy(opened, destination)

        assert steps_of(destination) == set(STEPS), nth


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_death_at_any_call_leaves_what_loads_and_garbage(when: str) -> None:
    for nth in range(N_WRITES):
        source = make_source()
        inner = new_store(like=source).backend
        faulty = FaultyBackend(inner)
        dying = Store.open_backend(faulty)
        faulty.crash(nth, when=when)  # type: ignore[arg-type]
        with pytest.raises(SimulatedCrash):
            copy(source, dying)

        assert steps_of(Store.open_backend(inner)) <= set(STEPS), nth
        copy(source, Store.open_backend(inner))
        assert steps_of(Store.open_backend(inner)) == set(STEPS), nth
        assert_no_garbage_after_collection(Store.open_backend(inner))


def test_chunks_copied_before_a_death_are_not_moved_again() -> None:
    source = make_source()
    inner = new_store(like=source).backend
    faulty = FaultyBackend(inner)
    dying = Store.open_backend(faulty)
    # The refs: all chunks are there by then.
    faulty.crash(0, operations=["promote"])
    with pytest.raises(SimulatedCrash):
        copy(source, dying)
    report = copy(source, Store.open_backend(inner))

    assert (report.n_copied, report.read_bytes) == (2, 0)


def test_a_copy_that_collectors_give_up_begins_again() -> None:
    source = make_source()
    inner = MemoryBackend()
    destination = new_store(Impatient(inner), like=source)
    report = copy(source, destination)

    assert (report.n_copied, report.failed) == (2, ())
    assert_steps_load(new_view(inner), *STEPS)


def test_a_copy_that_collectors_give_up_again_and_again_says_so_and_leaves_the_rest() -> None:
    source = make_source()
    inner = MemoryBackend()
    backend = Impatient(inner)
    destination = new_store(backend, like=source)
    backend.n_left = 1_000
    report = copy(source, destination)

    assert report.n_copied == 0
    assert ["treated the save as dead" in failure.reason for failure in report.failed] == [True, True]
    assert list(inner.list("intents")) == []


def new_view(backend: MemoryBackend) -> Store:
    return Store.open_backend(backend)


class Impatient(FaultyBackend):
    """A backend beside which somebody collects without a grace just before a commit."""

    n_left = 1

    def promote(self, source: str, dest: str, data, *, token: str, replace: bool) -> None:  # type: ignore[no-untyped-def]
        if self.n_left > 0:
            self.n_left -= 1
            plan_gc(Store.open_backend(self.inner), grace_s=0, max_waste=0).execute()
        super().promote(source, dest, data, token=token, replace=replace)


CHILD = """
import sys
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.maintenance import copy_refs, read_source, _copy_refs
_copy_refs.MAX_BATCH_BYTES = 100_000
source, destination = Store.open(sys.argv[1]), Store.open(sys.argv[2])
refs, _ = read_source(source)
copy_refs(source, destination, refs, watch=lambda progress: print("on", flush=True))
print("done", flush=True)
"""


@pytest.mark.long
def test_kill_9_at_random_moments_and_then_copies_to_the_end(tmp_path: Path) -> None:
    source = Store.init(tmp_path / "source", chunk_bytes=4096)
    steps = range(120)
    save_steps(source, *steps)
    destination = Store.init(tmp_path / "destination", chunk_bytes=4096, store_id=source.id)
    chance = random.Random(5)
    n_there = [0]
    n_killed = 0
    for _ in range(30):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, source.uri, destination.uri],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert child.stdout is not None
        for _ in range(chance.randrange(1, 40)):
            child.stdout.readline()
        time.sleep(chance.uniform(0.0, 0.01))
        child.send_signal(signal.SIGKILL)
        said, _ = child.communicate()
        n_there.append(len(steps_of(Store.open(tmp_path / "destination"))))
        if "done" in said:
            break
        n_killed += 1
    copy(source, destination)

    assert n_killed > 1
    assert n_there == sorted(n_there)
    assert steps_of(Store.open(tmp_path / "destination")) == set(steps)
    assert set(payloads_twice(destination)) == set(payloads(source))
    assert_no_garbage_after_collection(destination)
    assert not list(tmp_path.rglob("+staging-*"))


def payloads_twice(store: Store) -> set[bytes]:
    """Chunks of a store in which a chunk may lie twice."""
    tables = [protocol.read_pack_table(store.backend, name) for name, _ in protocol.list_packs(store.backend)]
    return {entry["digest"].tobytes() for table in tables for entry in table}
