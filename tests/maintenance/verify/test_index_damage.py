"""A damaged index: nothing is relied on because of it, and nothing is missed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tensorcas_mlflow.backends import Backend, MemoryBackend
from tensorcas_mlflow.chunk_io import _catalog
from tensorcas_mlflow.layout import RefTarget
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
    [info] = [info for info in backend.list("index") if info.key.endswith(".arrow")]
    return info.key


def rewrite(backend: MemoryBackend, *, has_digest: bool, **columns: Any) -> None:
    """Put another segment in the place of the one that is there."""
    key = segment_key(backend)
    batch = pa.ipc.open_file(backend.get(key)).get_batch(0)
    head = json.loads(batch.schema.metadata[b"tensorcas"])
    if not has_digest:
        del head["digest"]
    arrays = {
        name: pa.array(columns[name], batch.schema.field(name).type) if name in columns else batch.column(name)
        for name in batch.schema.names
    }
    changed = pa.record_batch(arrays).replace_schema_metadata({b"tensorcas": json.dumps(head)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, changed.schema) as writer:
        writer.write_batch(changed)
    put(backend, key, sink.getvalue().to_pybytes())


def save_and_load(backend: MemoryBackend, seed: int) -> int:
    store = Store.open_backend(backend)
    with store.write_checkpoint({"w": noise(seed)}) as pending:
        ref = pending.commit(RefTarget(run_id="new", step=seed))
    fresh = Store.open_backend(backend)

    assert fresh.read_tensors(fresh.manifest(ref))["w"].tobytes() == noise(seed).tobytes()
    return pending.n_new_bytes


@pytest.mark.parametrize("has_digest", [True, False], ids=["digest", "earlier release"])
def test_a_save_does_not_rely_on_a_pack_to_which_a_damaged_segment_leads(
    folded: MemoryBackend, has_digest: bool
) -> None:
    live = [name for name, _ in list_packs(folded)]
    table = pa.ipc.open_file(folded.get(segment_key(folded))).get_batch(0)
    packs = json.loads(table.schema.metadata[b"tensorcas"])["packs"]
    rewrite(folded, has_digest=has_digest, pack=[packs.index(live[0])] * 2)

    assert save_and_load(folded, 1) == CHUNK_BYTES


@pytest.mark.parametrize("has_digest", [True, False], ids=["digest", "earlier release"])
def test_a_damaged_segment_hides_no_chunk(folded: MemoryBackend, has_digest: bool) -> None:
    rewrite(folded, has_digest=has_digest, digest=[bytes(32), bytes([255] * 32)])

    assert save_and_load(folded, 2) == 0


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
    [key] = [info.key for info in folded.list("index") if info.key.endswith(".arrow")]
    table = _catalog.read_segment(key, folded.get(key))
    table.entries["offset"] += 64
    put(folded, key, _catalog.segment_bytes(table))

    assert [problem.key for problem in told(folded, full=False)] == [key]


def test_a_segment_of_an_earlier_release_is_replaced_by_a_collection(folded: MemoryBackend) -> None:
    rewrite(folded, has_digest=False)
    tidy_index(folded, {name for name, _ in list_packs(folded)})

    assert not [info.key for info in folded.list("index") if info.key.endswith(".arrow")]
    assert save_and_load(folded, 2) == 0
