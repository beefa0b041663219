"""A save tells how far it has come."""

from __future__ import annotations

from typing import Any

import numpy as np

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store


def test_a_save_tells_of_all_bytes_that_are_hashed_and_of_those_that_are_stored() -> None:
    store = Store.init_backend(MemoryBackend(), chunk_bytes=1 << 16)
    known = np.random.default_rng(0).normal(size=1 << 16)
    new = np.random.default_rng(1).normal(size=(300, 1000))
    with store.write_checkpoint({"known": known}) as pending:
        pending.commit(RefTarget(run_id="r", step=1))
    hashed: list[int] = []
    stored: list[int] = []
    arrays: dict[str, Any] = {"known": known, "new": new, "in columns": np.asfortranarray(new)}
    with store.begin_checkpoint(arrays, watch=hashed.append) as pending:
        pending.write(watch=stored.append)
        ref = pending.commit(RefTarget(run_id="r", step=2))

    assert sum(hashed) == sum(array.nbytes for array in arrays.values())
    assert sum(stored) == pending.n_new_bytes == new.nbytes
    read = store.read_tensors(store.manifest(ref))
    assert all(read[name].tobytes() == array.tobytes() for name, array in arrays.items())


def test_watching_a_save_does_not_change_its_result() -> None:
    store = Store.init_backend(MemoryBackend(), chunk_bytes=1 << 16)
    arrays: dict[str, Any] = {f"w{at}": np.full((at, 700), at) for at in range(40)}
    pendings = [store.begin_checkpoint(arrays), store.begin_checkpoint(arrays, watch=lambda n_bytes: None)]

    assert pendings[0].manifest.digest == pendings[1].manifest.digest
