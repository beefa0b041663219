"""Workers of torch's DataLoader, made by fork and by spawn, read from a store and save into it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import verify
from tensorcas_mlflow.store import Store

N_ITEMS = 8
_open: dict[str, Store] = {}
"""Stores that are open in this process, and so in one that is forked from it."""


def store_at(uri: str) -> Store:
    if uri not in _open:
        _open[uri] = Store.open(uri)
    return _open[uri]


class Rows(Dataset[torch.Tensor]):
    """Tensors of one checkpoint; each that is read is noted by a save."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def __len__(self) -> int:
        return N_ITEMS

    def __getitem__(self, at: int) -> torch.Tensor:
        store = store_at(self.uri)
        ref = store.ref(RefTarget(run_id="data", step=0).key)
        assert ref is not None
        found = torch.from_numpy(store.read_tensors(store.manifest(ref), [f"row{at}"])[f"row{at}"])
        with store.write_checkpoint({"seen": np.array(at), "row": found.numpy()}) as save:
            save.commit(RefTarget(run_id="seen", step=at))
        return found


@pytest.mark.parametrize("way", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_workers_of_a_data_loader_read_and_save(way: str, tmp_path: Path) -> None:
    store = store_at(Store.init(tmp_path, chunk_bytes=4096).uri)
    rows = {f"row{at}": np.random.default_rng(at).normal(size=2_000) for at in range(N_ITEMS)}
    with store.write_checkpoint(rows) as save:
        save.commit(RefTarget(run_id="data", step=0))
    found = torch.cat(list(DataLoader(Rows(store.uri), num_workers=2, multiprocessing_context=way, timeout=60)))

    assert np.array_equal(found.numpy(), np.stack([rows[f"row{at}"] for at in range(N_ITEMS)]))
    assert {ref.step for ref in store.checkpoints() if ref.run_id == "seen"} == set(range(N_ITEMS))
    assert verify(store, full=True).problems == ()
