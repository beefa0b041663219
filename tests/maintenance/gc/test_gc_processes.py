"""Collection on files, by processes that are killed and by processes that run at once."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import list_packs, read_condemned, read_pack_table, read_refs

KILLS_S = 8.0
TOGETHER_S = 8.0

COMMON = """
import random, sys, time
import numpy as np
from tensorcas_mlflow.errors import FencedError
from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
store = Store.open(sys.argv[1])
seed, until = int(sys.argv[2]), time.monotonic() + float(sys.argv[3])
draw = random.Random(seed)

def tensor(number):
    return np.random.default_rng(number).integers(0, 256, 4096, dtype=np.uint8)

def save(numbers, step):
    with store.write_checkpoint({str(number): tensor(number) for number in numbers}) as pending:
        return pending.commit(RefTarget(run_id=f"saver-{seed}", step=step))
"""

SAVER = (
    COMMON
    + """
step = n_fenced = 0
kept = []
while time.monotonic() < until:
    try:
        kept.append(save(draw.sample(range(12), 4), step))
        print("saved", step, flush=True)
    except FencedError:
        n_fenced += 1
    step += 1
    if len(kept) > 3:
        ref = kept.pop(draw.randrange(len(kept)))
        print("dropped", ref.step, flush=True)
        store.drop(ref)
    if not kept:
        continue
    ref = draw.choice(kept)
    for name, array in store.read_tensors(store.manifest(ref)).items():
        assert (array == tensor(int(name))).all()
print("fenced", n_fenced, flush=True)
"""
)

COLLECTOR = (
    COMMON
    + """
n = 0
print("ready", flush=True)
while time.monotonic() < until:
    plan_gc(store, grace_s=0, max_waste=0).execute()
    n += 1
print("collected", n, flush=True)
"""
)


def start(program: str, store: Store, seed: int, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, store.uri, str(seed), str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TENSORCAS_THREADS": "1"},
    )


def check_all(store: Store) -> list[Ref]:
    """Load everything, bit for bit."""
    fresh = Store.open(store.uri)
    refs = fresh.checkpoints()
    for ref in refs:
        for name, array in fresh.read_tensors(fresh.manifest(ref), verify=True).items():
            assert np.array_equal(array, np.random.default_rng(int(name)).integers(0, 256, 4096, dtype=np.uint8))
    return refs


def check_clean(store: Store) -> None:
    """Collect twice, after which there is nothing that no ref needs.

    A dead collector's list stays as long as something on it is needed.
    """
    for _ in range(2):
        plan_gc(store, grace_s=0, max_waste=0).execute()
    backend = store.backend
    refs = read_refs(backend)
    live = {row.tobytes() for ref in refs for row in store.manifest(ref).digests}
    held = [entry["digest"].tobytes() for name, _ in list_packs(backend) for entry in read_pack_table(backend, name)]
    manifests = {ref.manifest for ref in refs}
    assert list(backend.list("intents")) == []
    packs = {name for name, _ in list_packs(backend)}
    assert [each for each in read_condemned(backend).lists if not each.manifests & manifests | each.packs & packs] == []
    assert sorted(held) == sorted(live)
    assert {info.key for info in backend.list("manifests")} == {f"manifests/{name}" for name in manifests}
    root = Path(store.uri.removeprefix("tensorcas://")) / ".tensorcas"
    assert not [path for path in root.rglob("*") if path.is_file() and "staging" in path.name]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.init(tmp_path / "root", chunk_bytes=4096)


@pytest.mark.long
def test_killed_collectors_lose_nothing_and_the_next_one_cleans_up(store: Store) -> None:
    draw = random.Random(1)
    deadline = time.monotonic() + KILLS_S
    n_kills = 0
    seconds = 60
    while time.monotonic() < deadline:
        saver = start(SAVER, store, n_kills, 60)
        collector = start(COLLECTOR, store, n_kills, seconds)
        assert collector.stdout is not None
        assert collector.stdout.readline() == "ready\n", collector.communicate()[1]
        time.sleep(draw.uniform(0, 0.4))
        for process in (collector, saver):
            process.kill()
            process.communicate()
        n_kills += 1
        check_all(store)
    check_clean(store)

    assert n_kills > 1
    for ref in check_all(store):
        store.drop(ref)
    check_clean(store)
    assert read_condemned(store.backend).lists == []


@pytest.mark.long  # tests/race does more on every change
def test_savers_and_collectors_of_many_processes_lose_nothing(store: Store) -> None:
    savers = [start(SAVER, store, seed, TOGETHER_S) for seed in range(3)]
    collectors = [start(COLLECTOR, store, seed, TOGETHER_S) for seed in range(2)]
    for collector in collectors:
        out, error = collector.communicate(timeout=60)
        assert collector.returncode == 0, error
        print(out)
    expected = set()
    for seed, saver in enumerate(savers):
        out, error = saver.communicate(timeout=60)
        assert saver.returncode == 0, error
        *lines, (_, n_fenced) = [line.split() for line in out.splitlines()]
        print(f"saver {seed}: {len(lines)} saves and deletions, fenced {n_fenced} times")
        steps = {int(step) for what, step in lines if what == "saved"}
        expected |= {
            (f"saver-{seed}", step) for step in steps - {int(step) for what, step in lines if what == "dropped"}
        }
    found = {(ref.run_id, ref.step) for ref in check_all(store)}
    check_clean(store)

    assert found == expected
    assert {(ref.run_id, ref.step) for ref in check_all(store)} == expected
