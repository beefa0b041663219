"""Deltas while packs are damaged, repaired and copied to other stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.errors import CorruptChunkError
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.maintenance import copy_all, end_of, plan_gc, plan_repair, read_source, verify
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import declare, list_packs
from tests.deltas.made import CHUNK_BYTES, base_packs, packs_of, save, weights, write_deltas


@pytest.fixture
def store() -> Store:
    return Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)


def load(store: Store, ref: Ref) -> Any:
    fresh = Store.open_backend(store.backend)
    now = fresh.ref(ref.key)
    assert now is not None
    return fresh.read_tensors(fresh.manifest(now), ["w"])["w"]


def flip(store: Store, pack: str, at: int) -> None:
    key = f"packs/{pack}.pack"
    data = bytearray(store.backend.get(key))
    data[at] ^= 1
    store.backend.delete(key)
    store.backend.put_new(key, [bytes(data)])


def failure(store: Store, ref: Ref) -> str | None:
    """Load the second step; what loads is right."""
    try:
        assert load(store, ref).tobytes() == weights(2).tobytes()
    except CorruptChunkError as error:
        return str(error)
    return None


def based(store: Store) -> tuple[Ref, Ref, str, str]:
    """Two steps, the second of deltas; the packs of bases and of deltas. The pack of bases holds something else too."""
    first = save(store, {"other": weights(9), "w": weights(1)}, 1)
    deltas = write_deltas(store, (weights(2), weights(1)))
    second = save(store, {"w": weights(2)}, 2)
    [bases] = base_packs(store.backend)[deltas]
    return first, second, bases, deltas


def test_delta_against_a_damaged_base_is_reported_and_never_wrong(store: Store) -> None:
    _, second, bases, _ = based(store)
    for at in range(8, len(store.backend.get(f"packs/{bases}.pack")), 997):
        flip(store, bases, at)
        error = failure(store, second)
        if error is not None:
            assert second.label in error
            assert verify(Store.open_backend(store.backend), full=True).problems
        flip(store, bases, at)


def test_a_repair_writes_in_full_what_is_a_delta_against_a_pack_that_goes(store: Store) -> None:
    first, second, bases, _ = based(store)
    flip(store, bases, 3_000)  # in the tensor that is nobody's base
    plan_repair(Store.open_backend(store.backend)).execute()

    assert bases not in packs_of(store.backend)
    assert load(store, second).tobytes() == weights(2).tobytes()
    assert load(store, first).tobytes() == weights(1).tobytes()
    plan_gc(Store.open_backend(store.backend), grace_s=0, max_waste=0).execute()
    assert load(store, second).tobytes() == weights(2).tobytes()


def test_a_repair_brings_from_another_store_what_is_a_delta_against_a_lost_base(store: Store) -> None:
    _, second, bases, _ = based(store)
    other = Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES, store_id=store.id)
    save(other, {"w": weights(2)}, 2)
    store.backend.delete(f"packs/{bases}.pack")
    plan_repair(Store.open_backend(store.backend), sources=[other]).execute()

    assert load(store, second).tobytes() == weights(2).tobytes()


def test_a_repair_gives_up_a_save_that_may_write_deltas_against_what_goes(store: Store) -> None:
    _, _, bases, _ = based(store)
    key, _ = declare(store.backend, "0" * 64, np.empty((0, 32), np.uint8), [bases])
    flip(store, bases, 3_000)
    plan_repair(Store.open_backend(store.backend)).execute()

    assert store.backend.stat(key) is None


def test_a_copy_of_a_store_depends_on_no_base_of_the_other(store: Store, tmp_path: Path) -> None:
    _, second, _, _ = based(store)
    other = Store.init(tmp_path / "other", chunk_bytes=CHUNK_BYTES, store_id=store.id)
    refs, failed = read_source(Store.open_backend(store.backend))
    copied = copy_all(end_of(store), end_of(other), refs)

    assert not failed
    assert not copied.refs.failed
    there = {name for name, _ in list_packs(other.backend)}
    assert base_packs(other.backend)
    assert all(bases <= there for bases in base_packs(other.backend).values())
    assert load(other, second).tobytes() == weights(2).tobytes()
