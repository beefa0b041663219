"""A store whose chunks take the longest chains there can be, and a process that works on it until it is interrupted.

python -m tests.hostile.deep OPERATION FOLDER
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from tensorcas_mlflow.backends import LocalBackend
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.codecs import DELTA, RAW
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout.packs import MAX_DEPTH, Base, PackWriter, Payload, pack_key
from tensorcas_mlflow.store import Store
from tests.hostile.test_forged_deltas import OPERATIONS, load

CHUNK_BYTES = 4 << 20
N_CHUNKS = 40
"""Chunks of the checkpoint: all have one chain but for themselves."""


def words(seed: int) -> bytes:
    return np.random.default_rng(seed).normal(0, 1, CHUNK_BYTES // 4).astype(np.float32).tobytes()


def make(folder: Path) -> None:
    """Save a checkpoint, and store its chunks again as the ends of long chains."""
    store = Store.init(folder, chunk_bytes=CHUNK_BYTES)
    ends = [words(seed) for seed in range(N_CHUNKS)]
    with store.write_checkpoint({"w": np.frombuffer(b"".join(ends), np.float32)}, policy="fast") as save:
        save.commit(RefTarget(run_id="r", step=1))
    name = f"{1:032x}"
    made = []
    before = b""
    for depth in range(MAX_DEPTH):
        # All links differ by little, so that one delta serves them all.
        raw = words(0)[:-4] + depth.to_bytes(4, "little")
        data = DELTA.encode(raw, 4, before) if depth else raw
        base = Base(pack=name, digest=digest(before), depth=depth - 1) if depth else None
        made.append(Payload(digest(raw), CHUNK_BYTES, DELTA if depth else RAW, 4, data, False, base))
        before = raw
    for raw in ends:
        base = Base(pack=name, digest=digest(before), depth=MAX_DEPTH - 1)
        made.append(Payload(digest(raw), CHUNK_BYTES, DELTA, 4, DELTA.encode(raw, 4, before), False, base))
    backend = LocalBackend(folder / ".tensorcas")
    for prefix in ("packs", "index"):
        for info in list(backend.list(prefix)):
            backend.delete(info.key)
    backend.put_new(pack_key(name), [bytes(piece) for piece in PackWriter().pieces(made)])
    backend.put_new(f"index/{name}.loose", [])


def save(store: Store) -> None:
    w = np.tile(np.frombuffer(words(1), np.float32), 100) * np.arange(100, dtype=np.float32).repeat(CHUNK_BYTES // 4)
    print("begins", flush=True)
    with store.write_checkpoint({"w": w}, policy="small") as pending:
        pending.commit(RefTarget(run_id="r", step=2))


WORK = {**OPERATIONS, "load": load, "save": save}


def main(operation: str, folder: str) -> None:
    store = Store.open(folder)
    if operation != "save":
        print("begins", flush=True)
    try:
        WORK[operation](store)
    except KeyboardInterrupt:
        print(time.monotonic(), flush=True)
        return
    raise SystemExit("it was over before the signal")


if __name__ == "__main__":
    main(*sys.argv[1:])
