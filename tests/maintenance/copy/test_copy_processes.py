"""Copies between files, while other processes save and collect at both ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.maintenance import copy_refs, read_source, verify
from tensorcas_mlflow.store import Store

TOGETHER_S = 6.0

COMMON = """
import random, sys, time
import numpy as np
from tensorcas_mlflow.errors import FencedError
from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.maintenance import copy_refs, read_source
stores = [Store.open(root) for root in sys.argv[3:]]
store = stores[0]
seed, until = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
draw = random.Random(seed)

def tensor(number):
    return np.random.default_rng(number).integers(0, 256, 4096, dtype=np.uint8)
"""

SAVER = (
    COMMON
    + """
kept, step = [], 0
while time.monotonic() < until:
    try:
        with store.write_checkpoint({str(n): tensor(n) for n in draw.sample(range(12), 4)}) as pending:
            kept.append(pending.commit(RefTarget(run_id=f"saver-{seed}", step=step)))
    except FencedError:
        pass
    step += 1
    if len(kept) > 3:
        store.drop(kept.pop(draw.randrange(len(kept))))
"""
)

COLLECTOR = (
    COMMON
    + """
while time.monotonic() < until:
    plan_gc(store, grace_s=0, max_waste=0).execute()
"""
)

COPIER = (
    COMMON
    + """
n_copied = n_dropped = n_fenced = 0
while time.monotonic() < until:
    refs, failed = read_source(store)
    assert not failed, failed
    report = copy_refs(store, stores[1], refs)
    n_copied += report.n_copied
    n_dropped += len(report.deleted)
    fenced = [each for each in report.failed if "treated the save as dead" in each.reason]
    n_fenced += len(fenced)
    assert len(fenced) == len(report.failed), report.failed
    for ref in draw.sample(stores[1].checkpoints(), len(stores[1].checkpoints()) // 2):
        stores[1].drop(ref)
print(n_copied, n_dropped, n_fenced)
"""
)


def start(program: str, seed: int, *stores: Store) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, str(seed), str(TOGETHER_S), *(store.uri for store in stores)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TENSORCAS_THREADS": "2"},
    )


def check_all(root: Path) -> int:
    store = Store.open(root)
    refs = store.checkpoints()
    for ref in refs:
        for name, array in store.read_tensors(store.manifest(ref)).items():
            assert np.array_equal(array, np.random.default_rng(int(name)).integers(0, 256, 4096, dtype=np.uint8))
    return len(refs)


@pytest.mark.long
def test_collectors_at_both_ends_break_no_copy(tmp_path: Path) -> None:
    source = Store.init(tmp_path / "source", chunk_bytes=4096)
    destination = Store.init(tmp_path / "destination", chunk_bytes=4096, store_id=source.id)
    others = [
        start(SAVER, 0, source),
        start(COLLECTOR, 1, source),
        start(COLLECTOR, 2, destination),
    ]
    copier = start(COPIER, 3, source, destination)
    for process in others:
        _, error = process.communicate(timeout=60)
        assert process.returncode == 0, error
    out, error = copier.communicate(timeout=60)
    assert copier.returncode == 0, error
    n_copied, n_dropped, n_fenced = map(int, out.split())
    print(f"copied {n_copied}, dropped meanwhile {n_dropped}, fenced {n_fenced}")

    assert n_copied > 0
    check_all(tmp_path / "destination")
    refs, _ = read_source(source)
    copy_refs(source, destination, refs)
    assert check_all(tmp_path / "destination") >= len(refs)
    assert verify(destination, full=True).problems == ()
    assert verify(source, full=True).problems == ()
