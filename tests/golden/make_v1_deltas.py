"""Write golden stores of format 1 with deltas. It was run once; a store that was written is never changed.

    python -m tests.golden.make_v1_deltas

Two stores: one of files, of which an optimization has encoded the first steps anew, and the objects of one in a bucket.
Packs and intent are of version 2, the census of version 3. ``expected.json`` says what they must hold, by SHA-256 of
the bytes before they came near a store; what that was is said in `golden_v1_deltas.py`, which the test reads too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import numpy as np
import obstore
from obstore.store import MemoryStore

from tensorcas_mlflow.chunk_io import _catalog
from tensorcas_mlflow.layout import RefTarget, _records
from tensorcas_mlflow.maintenance import _census, plan_gc, plan_optimize
from tensorcas_mlflow.store import Store
from tests.golden.bucket import opened
from tests.golden.golden_v1_deltas import counts, sha_of, tensors

HERE = Path(__file__).parent / "v1_deltas"
CHUNK_BYTES = 32 << 10
Expected = dict[str, dict[str, str]]


def save(store: Store, expected: Expected, step: int, arrays: Mapping[str, np.ndarray]) -> None:
    with store.write_checkpoint(arrays) as pending:
        expected[pending.commit(RefTarget(run_id="run", step=step)).key] = sha_of(arrays)


def make_root(expected: Expected) -> None:
    """Two steps that are optimized, two that are stored against them, and a save under way that may rely on both."""
    uri = HERE / "root"
    store = Store.init(uri, chunk_bytes=CHUNK_BYTES, database=False)
    for step in (0, 1):
        save(store, expected, step, tensors(step))
    plan_optimize(Store.open(uri)).execute()
    store = Store.open(uri)
    for step in (2, 3):
        save(store, expected, step, tensors(step))
    # Something for a collection to do, which leaves a census.
    gone: Expected = {}
    save(store, gone, 4, {"gone": counts(4)})
    ref = store.ref(next(iter(gone)))
    assert ref is not None
    store.drop(ref)
    plan_gc(Store.open(uri), grace_s=0).execute()
    under_way = {"counts": counts(9)}
    store.write_checkpoint(under_way)  # and neither committed nor given up
    expected["pending"] = sha_of(under_way)


def make_objects(expected: Expected) -> None:
    """A store in a bucket, in which only an optimization makes deltas: the hints of a manifest lead to what is gone."""
    memory = MemoryStore()
    store = Store.init_backend(opened(memory), chunk_bytes=CHUNK_BYTES)
    for step in range(3):
        save(store, expected, step, {"counts": counts(step), "step": np.array(step)})
        if step == 1:
            plan_optimize(store).execute()
    for batch in obstore.list(memory):
        for found in batch:
            to = HERE / "objects" / found["path"]
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(bytes(obstore.get(memory, found["path"]).bytes()))


def main() -> None:
    if HERE.exists():
        raise SystemExit(f"{HERE} is there, and stays as it is")
    _catalog._FOLD_AT = 3  # a segment of few packs, and a census of few blobs, keep the store small
    _census.LEAST_NEW = 1
    expected: dict[str, Expected] = {"root": {}, "objects": {}}
    with (
        mock.patch.object(_records, "_this_process", return_value=("golden", 1)),
        mock.patch("platform.node", return_value="golden"),
        mock.patch.object(_records.os, "getpid", return_value=1),
    ):
        make_root(expected["root"])
        make_objects(expected["objects"])
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
