"""A save may die anywhere: what was committed before loads bit for bit, and the next save works."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.backends import LocalBackend, MemoryBackend
from tensorcas_mlflow.errors import BackendError
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.store import Store, protocol
from tests.faulty import FaultyBackend, SimulatedCrash


def model(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {
        "same": np.arange(3_000),
        "changing": rng.normal(size=4_000).astype(np.float32),
        "noise": rng.integers(0, 256, 9_000).astype(np.uint8),
    }


def save(store: Store, step: int) -> Ref:
    with store.write_checkpoint(model(step)) as pending:
        return pending.commit(RefTarget(run_id="r", step=step))


def assert_all_load(store: Store) -> set[int]:
    steps = set()
    for ref in store.checkpoints():
        assert ref.step is not None
        loaded = store.read_tensors(store.manifest(ref))
        for name, array in model(ref.step).items():
            assert loaded[name].tobytes() == array.tobytes()
        steps.add(ref.step)
    return steps


def assert_no_garbage(store: Store) -> None:
    """No save is pending, and packs hold nothing but what some checkpoint needs."""
    backend = store.backend
    live = {row.tobytes() for ref in store.checkpoints() for row in store.manifest(ref).digests}
    held = [
        entry["digest"].tobytes()
        for name, _ in protocol.list_packs(backend)
        for entry in protocol.read_pack_table(backend, name)
    ]
    assert list(backend.list("intents")) == []
    assert list(backend.list("condemned")) == []
    assert {info.key for info in backend.list("manifests")} == {f"manifests/{r.manifest}" for r in store.checkpoints()}
    assert set(held) == live
    assert len(held) == len(live)


def n_calls_of_a_save() -> int:
    backend = FaultyBackend(MemoryBackend())
    store = Store.init_backend(backend, chunk_bytes=4096)
    save(store, 1)
    backend.calls.clear()
    save(store, 2)
    return len(backend.calls)


N_CALLS = n_calls_of_a_save()
"""Number of a second save's calls to its backend."""


def test_a_save_speaks_to_its_backend_a_few_times_only() -> None:
    assert 8 <= N_CALLS <= 20


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["memory", "local"])
def test_a_crash_at_any_call_leaves_only_garbage(tmp_path: Path, kind: str, when: str) -> None:
    for nth in range(N_CALLS):
        inner = MemoryBackend() if kind == "memory" else LocalBackend(tmp_path / str(nth))
        save(Store.init_backend(inner, chunk_bytes=4096), 1)
        faulty = FaultyBackend(inner)
        dying = Store.open_backend(faulty)
        faulty.crash(nth, when=when)  # type: ignore[arg-type]
        with pytest.raises(SimulatedCrash):
            save(dying, 2)
        reopened = Store.open_backend(inner)

        assert assert_all_load(reopened) in ({1}, {1, 2}), nth
        save(reopened, 3)
        save(reopened, 2)
        assert assert_all_load(Store.open_backend(inner)) == {1, 2, 3}
        plan_gc(reopened, grace_s=0, max_waste=0).execute()
        assert assert_all_load(Store.open_backend(inner)) == {1, 2, 3}
        assert_no_garbage(Store.open_backend(inner))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failure_at_any_call_is_an_error_and_leaves_no_intent(when: str) -> None:
    for nth in range(N_CALLS):
        inner = MemoryBackend()
        faulty = FaultyBackend(inner)
        store = Store.init_backend(faulty, chunk_bytes=4096)
        save(store, 1)
        faulty.fail(nth, when=when)  # type: ignore[arg-type]
        try:
            save(store, 2)
            may_have = [{1, 2}]
        except BackendError:
            may_have = [{1}, {1, 2}]

        assert assert_all_load(Store.open_backend(inner)) in may_have, nth
        save(store, 3)
        save(store, 2)
        assert assert_all_load(store) == {1, 2, 3}
        assert_all_load(Store.open_backend(inner))


@pytest.mark.usefixtures("store_of_files")
def test_a_full_disk_in_the_middle_of_a_pack_leaves_no_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.init(tmp_path, chunk_bytes=4096)
    save(store, 1)
    packs = sorted(info.key for info in store.backend.list("packs"))
    write = os.write
    written = [0]

    def full(descriptor: int, data: memoryview) -> int:
        written[0] += len(data)
        if written[0] > 8_000:
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(BackendError, match="No space left"):
        save(store, 2)
    monkeypatch.undo()

    assert sorted(info.key for info in store.backend.list("packs")) == packs
    assert list(store.backend.list("intents")) == []
    assert not list(tmp_path.rglob("+staging-*"))
    save(store, 2)
    assert assert_all_load(Store.open(tmp_path)) == {1, 2}


CHILD = """
import sys
from tensorcas_mlflow.store import Store
from tests.store.test_kill import save
store = Store.open(sys.argv[1])
print("ready", flush=True)
step = int(sys.argv[2])
while True:
    save(store, step)
    print(step, flush=True)
    step += 1
"""


@pytest.mark.long
def test_kill_9_at_random_moments_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    store = Store.init(tmp_path, chunk_bytes=4096)
    chance = random.Random(4)
    committed: set[int] = set()
    for turn in range(8):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path), str(turn * 1_000)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        if turn % 2:  # or else while it makes its first save
            committed.add(int(child.stdout.readline()))
        time.sleep(chance.uniform(0.0, 0.15))
        child.send_signal(signal.SIGKILL)
        said, _ = child.communicate()
        committed |= {int(line) for line in said.splitlines()}

        assert committed <= {ref.step for ref in store.checkpoints()}
    steps = assert_all_load(Store.open(tmp_path))
    # Without a grace: the intent of a save killed in the middle of its commit no longer says whose it is.
    plan_gc(store, grace_s=0, max_waste=0).execute()

    assert committed <= steps
    assert len(committed) >= 4
    assert assert_all_load(Store.open(tmp_path)) == steps
    assert_no_garbage(Store.open(tmp_path))
    assert not list(tmp_path.rglob("+staging-*"))
    save(Store.open(tmp_path), 999_999)
