"""A damaged index: nothing is relied on because of it, and nothing is missed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import Backend, MemoryBackend
from tensorcas_mlflow.chunk_io import _catalog
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout.packs import _index, read_segment, segment_bytes
from tensorcas_mlflow.layout.packs._index import ROW
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import list_packs, tidy_index
from tests.maintenance.verify.stores import CHUNK_BYTES, noise, put, save, told


@pytest.fixture(params=[False, True], ids=["local", "remote"])
def backend(request: pytest.FixtureRequest) -> MemoryBackend:
    return MemoryBackend(is_remote=request.param)


@pytest.fixture
def folded(backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch) -> MemoryBackend:
    """Two packs of one chunk each, in one segment; the first pack has been collected since."""
    with monkeypatch.context() as patch:
        patch.setattr(_catalog, "_FOLD_AT", 2)
        store = Store.init_backend(backend, chunk_bytes=CHUNK_BYTES)
        first = save(store, {"w": noise(1)}, run_id="run", step=1)
        (gone,) = [name for name, _ in list_packs(backend)]
        save(store, {"w": noise(2)}, run_id="run", step=2)
        store.catalog.refresh()
        store.catalog.fold()
    store.drop(first)
    backend.delete(f"packs/{gone}.pack")
    if backend.is_remote:
        # A reader there reads segments where many packs are new.
        monkeypatch.setattr(_catalog, "_FOLD_AT", 0)
    return backend


def segment_key(backend: Backend) -> str:
    [info] = [info for info in backend.list("index") if info.key.endswith(".segment")]
    return info.key


def rewrite(backend: MemoryBackend, **columns: Any) -> None:
    """Change values of the rows of the segment that is there."""
    key = segment_key(backend)
    data = bytearray(backend.get(key))
    rows = np.frombuffer(data, ROW, len(read_segment(key, bytes(data))))
    for name, values in columns.items():
        rows[name] = values
    put(backend, key, bytes(data))


def save_and_load(backend: MemoryBackend, seed: int) -> int:
    store = Store.open_backend(backend)
    with store.write_checkpoint({"w": noise(seed)}) as pending:
        ref = pending.commit(RefTarget(run_id="new", step=seed))
    fresh = Store.open_backend(backend)

    assert fresh.read_tensors(fresh.manifest(ref))["w"].tobytes() == noise(seed).tobytes()
    return pending.n_new_bytes


def test_a_save_does_not_rely_on_a_pack_to_which_a_damaged_segment_leads(folded: MemoryBackend) -> None:
    live = [name for name, _ in list_packs(folded)]
    packs = read_segment(segment_key(folded), folded.get(segment_key(folded))).packs
    rewrite(folded, pack=packs.index(live[0]))

    assert save_and_load(folded, 1) == CHUNK_BYTES


def test_a_large_damaged_segment_leads_no_save_to_a_pack(
    folded: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_index, "_SMALL_BYTES", 0)
    live = [name for name, _ in list_packs(folded)]
    packs = read_segment(segment_key(folded), folded.get(segment_key(folded))).packs
    rewrite(folded, pack=packs.index(live[0]))

    assert save_and_load(folded, 1) == CHUNK_BYTES
    assert save_and_load(folded, 2) == 0


def test_a_chunk_whose_row_of_a_large_segment_is_damaged_is_read_and_stored_again(
    folded: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_index, "_SMALL_BYTES", 0)
    store = Store.open_backend(folded)
    [ref] = store.checkpoints()
    rewrite(folded, offset=1)
    fresh = Store.open_backend(folded)

    assert fresh.read_tensors(fresh.manifest(ref))["w"].tobytes() == noise(2).tobytes()
    assert save_and_load(folded, 2) == CHUNK_BYTES


def test_a_damaged_segment_hides_no_chunk(folded: MemoryBackend) -> None:
    rewrite(folded, digest=[list(bytes(32)), [255] * 32])

    assert save_and_load(folded, 2) == 0


@pytest.mark.long
def test_every_flipped_byte_of_a_segment_leaves_saves_and_loads_right(folded: MemoryBackend) -> None:
    whole = {info.key: folded.get(info.key) for prefix in ("index", "packs") for info in folded.list(prefix)}
    key = segment_key(folded)
    chance = np.random.default_rng(5)
    for at in chance.choice(len(whole[key]), 24, replace=False).tolist():
        for prefix in ("index", "packs"):
            for new in [info.key for info in folded.list(prefix) if info.key not in whole]:
                folded.delete(new)
        flipped = bytearray(whole[key])
        flipped[at] ^= 1 << int(chance.integers(8))
        put(folded, key, bytes(flipped))

        assert save_and_load(folded, 1) == CHUNK_BYTES, at
        assert save_and_load(folded, 2) == 0, at


def test_a_segment_that_says_other_things_than_a_pack_itself_is_told(folded: MemoryBackend) -> None:
    store = Store.open_backend(folded)
    store.catalog.refresh()
    [key] = [info.key for info in folded.list("index") if info.key.endswith(".segment")]
    table = read_segment(key, folded.get(key))
    table.entries["offset"] += 64
    put(folded, key, segment_bytes(table))

    assert [problem.key for problem in told(folded, full=False)] == [key]


@pytest.mark.parametrize("is_large", [False, True])
def test_a_damaged_segment_is_replaced_by_a_collection(
    folded: MemoryBackend, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_large:
        monkeypatch.setattr(_index, "_SMALL_BYTES", 0)
    rewrite(folded, offset=1)
    tidy_index(folded, {name for name, _ in list_packs(folded)})

    assert not [info.key for info in folded.list("index") if info.key.endswith(".segment")]
    assert save_and_load(folded, 2) == 0
