"""Write the golden store of format 2, with a database. It was run once; a store that was written is never changed.

    python -m tests.golden.make_v2

``expected.json`` says what it must hold, by SHA-256 of the bytes before they came near a store; what that was is said
in `golden_v1_deltas.py` and below, which the test reads too.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tensorcas_mlflow.backends._database import Database
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.store import Store
from tests.golden.golden_v1_deltas import far, sha_of, tensors

HERE = Path(__file__).parent / "v2"
N_SMALL = 80
N_LARGE = 3


def small(step: int) -> dict[str, np.ndarray]:
    """A step whose pack shares its record with the manifest and the ref."""
    skeleton = np.frombuffer(b'{"kind": "small"}' * 10 + str(step).encode(), np.uint8)
    return {"weight": np.arange(step, step + 16, dtype=np.float32), "__skeleton__": skeleton}


Expected = dict[str, dict[str, str]]


def save(store: Store, expected: Expected, name: str, step: int, arrays: dict[str, np.ndarray]) -> None:
    with store.write_checkpoint(arrays) as pending:
        expected[pending.commit(RefTarget(run_id="run", name=name, step=step)).key] = sha_of(arrays)


def main() -> None:
    if HERE.exists():
        raise SystemExit(f"{HERE} is there, and stays as it is")
    expected: Expected = {}
    store = Store.init(HERE / "root", chunk_bytes=32 << 10, database=True)
    for step in range(N_LARGE):  # packs in records of their own, with deltas
        save(store, expected, "large", step, tensors(step) | far(step))
    for step in range(N_SMALL):
        save(store, expected, "small", step, small(step))
    save(store, expected, "small", 3, small(1003))  # in the place of another
    for step in (5, 70):
        ref = store.ref(RefTarget(run_id="run", name="small", step=step).key)
        assert ref is not None
        store.drop(ref)
        del expected[ref.key]
    plan_gc(Store.open(HERE / "root"), grace_s=0).execute()
    save(Store.open(HERE / "root"), expected, "small", N_SMALL, small(N_SMALL))
    Database.close_all()  # empties the write-ahead log
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
