"""Stores for the tests of copying, and comparisons of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend, MemoryBackend
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.maintenance import CopyReport, copy_refs, read_source
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import list_packs, read_pack_table

CHUNK_BYTES = 4096


def new_store(backend: Backend | None = None, *, like: Store | None = None) -> Store:
    """Make a store in a backend, in memory by default, perhaps with the id of another one."""
    store_id = None if like is None else like.id
    return Store.init_backend(backend or MemoryBackend(), chunk_bytes=CHUNK_BYTES, store_id=store_id)


def state(step: int) -> dict[str, Any]:
    """A tensor that is the same at every step, one that changes and is encoded, one that changes and stays raw."""
    rng = np.random.default_rng(step)
    return {
        "same": np.arange(3_000),
        "changing": rng.normal(size=4_000).astype(np.float32),
        "noise": rng.integers(0, 256, 9_000).astype(np.uint8),
    }


def save(store: Store, tensors: dict[str, Any], **target: Any) -> Ref:
    with store.write_checkpoint(tensors, flavor="test") as pending:
        return pending.commit(RefTarget(**{"run_id": "run", **target}))


def save_steps(store: Store, *steps: int, run_id: str = "run") -> list[Ref]:
    return [save(store, state(step), run_id=run_id, step=step) for step in steps]


def save_file(store: Store, data: bytes, path: str, folder: Path) -> Ref:
    file = folder / "to-be-stored"
    file.write_bytes(data)
    with store.write_file(file) as pending:
        return pending.commit(RefTarget(path=path))


def copy(source: Store, destination: Store, **options: Any) -> CopyReport:
    refs, failed = read_source(source)
    assert failed == []
    return copy_refs(source, destination, refs, **options)


def assert_steps_load(store: Store, *steps: int) -> None:
    """Everything is there, bit for bit."""
    fresh = Store.open_backend(store.backend)
    refs = fresh.checkpoints()
    assert sorted(ref.step for ref in refs if ref.step is not None) == sorted(steps)
    for ref in refs:
        assert ref.step is not None
        loaded = fresh.read_tensors(fresh.manifest(ref))
        for name, array in state(ref.step).items():
            assert loaded[name].tobytes() == array.tobytes()
            assert loaded[name].dtype == array.dtype


def blobs(store: Store) -> dict[str, bytes]:
    prefixes = ("refs", "manifests", "packs", "index", "intents", "condemned")
    return {info.key: store.backend.get(info.key) for prefix in prefixes for info in store.backend.list(prefix)}


def payloads(store: Store) -> dict[bytes, tuple[int, int, bytes]]:
    """Every chunk as it is stored: codec, typesize, bytes."""
    found = {}
    for name, _ in list_packs(store.backend):
        pack = store.backend.get(f"packs/{name}.pack")
        for entry in read_pack_table(store.backend, name):
            begin = int(entry["offset"])
            data = pack[begin : begin + int(entry["stored_bytes"])]
            assert entry["digest"].tobytes() not in found
            found[entry["digest"].tobytes()] = (int(entry["codec"]), int(entry["typesize"]), data)
    return found


def damage(store: Store, tensor: str, ref: Ref) -> None:
    """Spoil the first chunk of a tensor where it lies."""
    wanted = store.manifest(ref).row(tensor).digests[0].tobytes()
    for name, _ in list_packs(store.backend):
        key = f"packs/{name}.pack"
        for entry in read_pack_table(store.backend, name):
            if entry["digest"].tobytes() == wanted:
                data = bytearray(store.backend.get(key))
                at = int(entry["offset"]) + int(entry["stored_bytes"]) // 2
                data[at] ^= 0xFF
                store.backend.delete(key)
                store.backend.put_new(key, [bytes(data)])
                return
    raise AssertionError("no pack holds it")
