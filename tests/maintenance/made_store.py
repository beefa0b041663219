"""A store whose maintenance has work for several workers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store

CHUNK_BYTES = 4096
N_STEPS = 6


def make_store(folder: Path, *, database: bool) -> None:
    """Write a store of deltas and full chunks in several packs."""
    store = Store.init(folder, chunk_bytes=CHUNK_BYTES, database=database)
    random = np.random.default_rng(0)
    values = random.standard_normal(20_000).astype(np.float32)
    for step in range(N_STEPS):
        values = values + np.float32(1e-4) * random.standard_normal(len(values)).astype(np.float32)
        state = {"moving": values, "new": random.integers(0, 256, 3 * CHUNK_BYTES, dtype=np.uint8)}
        with store.write_checkpoint(state, series="run") as pending:
            pending.commit(RefTarget(run_id="run", step=step))
