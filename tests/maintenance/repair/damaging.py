"""A store for the tests of repair, ways to damage it, and checks of what is left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend, MemoryBackend
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.layout.packs import decode_chunk, pack_key
from tensorcas_mlflow.maintenance import RepairReport, open_damaged_backend, plan_repair
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import list_packs, read_pack_table

CHUNK_BYTES = 4096


def tensors(letters: str) -> dict[str, Any]:
    """One incompressible chunk a letter."""
    return {
        letter: np.random.default_rng(ord(letter)).integers(0, 256, CHUNK_BYTES, dtype=np.uint8) for letter in letters
    }


def new_store(backend: Backend | None = None) -> Store:
    return Store.init_backend(backend or MemoryBackend(), chunk_bytes=CHUNK_BYTES, store_id="5" * 32)


def target(step: int) -> RefTarget:
    return RefTarget(run_id="run", step=step)


def save(store: Store, letters: str, step: int) -> Ref:
    with store.write_checkpoint(tensors(letters)) as pending:
        return pending.commit(target(step))


def afresh(store: Store) -> Store:
    """Open the same store as another process does."""
    return Store.open_backend(store.backend)


def loads(store: Store, letters: str, step: int, names: str | None = None) -> bool:
    """Tell whether a step, or some of its tensors, loads as it was saved."""
    fresh = afresh(store)
    ref = fresh.ref(target(step).key)
    assert ref is not None
    found: Mapping[str, Any] = fresh.read_tensors(fresh.manifest(ref), names)
    expected = tensors(letters if names is None else names)
    return found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in expected)


def keys(backend: Backend, prefix: str) -> list[str]:
    return sorted(info.key for info in backend.list(prefix))


def overwrite(backend: Backend, key: str, data: bytes) -> None:
    backend.delete(key)
    backend.put_new(key, [data])


def flip(backend: Backend, key: str, at: int) -> None:
    """Damage one bit of a blob."""
    data = bytearray(backend.get(key))
    data[at] ^= 1
    overwrite(backend, key, bytes(data))


def pack_of(backend: Backend, letter: str) -> str:
    """Return the pack that holds a chunk."""
    [name] = packs_of(backend, letter)
    return name


def packs_of(backend: Backend, letter: str) -> list[str]:
    wanted = digest(tensors(letter)[letter])
    held = {name: read_pack_table(backend, name)["digest"] for name, _ in list_packs(backend)}
    return sorted(name for name, digests in held.items() if wanted in {row.tobytes() for row in digests})


def flip_chunk(backend: Backend, letter: str, pack: str | None = None) -> str:
    """Damage a chunk, and say in which pack."""
    name = pack or pack_of(backend, letter)
    for entry in read_pack_table(backend, name):
        if entry["digest"].tobytes() == digest(tensors(letter)[letter]):
            flip(backend, f"packs/{name}.pack", int(entry["offset"]) + 7)
    return name


def flip_ignored_bit(backend: Backend, pack: str, chunk: Any) -> None:
    """Damage a bit of an encoded chunk that its decoder ignores, so that it decodes all the same."""
    [entry] = [each for each in read_pack_table(backend, pack) if each["digest"].tobytes() == digest(chunk)]
    start, n_bytes = int(entry["offset"]), int(entry["stored_bytes"])
    data = bytearray(backend.get(pack_key(pack)))
    for at in range(start, start + n_bytes):
        data[at] ^= 16
        try:
            decode_chunk(entry, memoryview(data)[start : start + n_bytes])
        except FormatError:
            data[at] ^= 16
        else:
            overwrite(backend, pack_key(pack), bytes(data))
            return
    raise AssertionError("the decoder reads every bit")


def repair(store: Store, *sources: Store, abandon: tuple[str, ...] = ()) -> RepairReport:
    opened, format_fix = open_damaged_backend(store.backend, sources)
    return plan_repair(opened, sources=sources, abandon=abandon, format_fix=format_fix).execute()
