"""Stores in which chunks are deltas, made chunk by chunk, so that a test says what lies where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.codecs import DELTA
from tensorcas_mlflow.digest import digest
from tensorcas_mlflow.pack import Base, Payload, bases_of, is_delta
from tensorcas_mlflow.store import Ref, RefTarget, Store
from tensorcas_mlflow.store.protocol import list_packs, read_pack_table, write_packs

CHUNK_BYTES = 4096


def weights(seed: int, n: int = 3_000) -> Any:
    """Chunks that are like those of the next seed, as those of the next step are."""
    start = np.random.default_rng(7).normal(0, 0.02, n).astype(np.float32)
    moved = np.random.default_rng(seed).normal(0, 1e-6, n).astype(np.float32)
    return start + moved


def save(store: Store, tensors: Mapping[str, Any], step: int, run_id: str = "run") -> Ref:
    with store.write_checkpoint(tensors) as pending:
        return pending.commit(RefTarget(run_id=run_id, step=step))


def chunks_of(array: Any) -> list[bytes]:
    data = array.tobytes()
    return [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]


def write_deltas(store: Store, *pairs: tuple[Any, Any]) -> str:
    """Put the chunks of arrays into a pack of their own, each as a delta against that of another array; its name."""
    store.catalog.refresh()
    before = packs_of(store.backend)
    payloads = []
    chunks = [zip(chunks_of(array), chunks_of(base), strict=True) for array, base in pairs]
    for raw, base_raw in (both for each in chunks for both in each):
        wanted = np.frombuffer(digest(base_raw), np.uint8).reshape(1, -1)
        places = store.catalog.find(wanted)
        assert places.found.all()
        payloads.append(
            Payload(
                digest=digest(raw),
                raw_bytes=len(raw),
                codec=DELTA,
                typesize=4,
                data=DELTA.encode(raw, 4, base_raw),
                begins_row=False,
                base=Base(
                    pack=places.packs[int(places.pack[0])],
                    digest=digest(base_raw),
                    depth=int(places.entries[0]["depth"]),
                ),
            )
        )
    write_packs(store.backend, store.catalog, iter(payloads))
    [name] = packs_of(store.backend) - before
    return name


def packs_of(backend: Backend) -> set[str]:
    return {name for name, _ in list_packs(backend)}


def base_packs(backend: Backend) -> dict[str, set[str]]:
    """For each pack with deltas the packs of their bases."""
    tables = {name: read_pack_table(backend, name) for name in packs_of(backend)}
    found = {name: {base.pack for base in bases_of(table[is_delta(table)])} for name, table in tables.items()}
    return {name: packs for name, packs in found.items() if packs}
