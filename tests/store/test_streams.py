"""Files longer than a batch: stored while they stream in, whatever collectors do meanwhile."""

from __future__ import annotations

import io
import json
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.errors import FencedError
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.store import Store, _ingest

CHUNK = 4096
LONG = 600 * CHUNK
"""Longer than what is looked at ahead, so that batches are stored before all is read."""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(_ingest, "BATCH_BYTES", 8 * CHUNK)
    monkeypatch.setattr(_ingest, "_TAKE_BYTES", 3 * CHUNK)
    return Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK)


class Stream(io.BytesIO):
    """Bytes, and something that happens before each read from some offset on."""

    def __init__(self, data: bytes, *, at: int = 0, then: Callable[[], None] = lambda: None) -> None:
        super().__init__(data)
        self._at = at
        self._then = then

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if self.tell() >= self._at:
            self._then()
        return super().readinto(buffer[:CHUNK])


def noise(n_bytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(n_bytes)


def commit(store: Store, stream: io.BytesIO, path: str = "file") -> Ref:
    with store.write_stream(stream) as save:
        return save.commit(RefTarget(path=path))


def read(store: Store, ref: Ref) -> bytes:
    return b"".join(store.iter_file(ref))


@pytest.mark.parametrize("n_bytes", [8 * CHUNK - 1, 8 * CHUNK, 8 * CHUNK + 1, 50 * CHUNK + 7])
def test_a_stream_of_several_batches_comes_back_bit_for_bit(store: Store, n_bytes: int) -> None:
    data = noise(n_bytes)
    with store.write_stream(Stream(data)) as save:
        ref = save.commit(RefTarget(path="file"))

    assert read(store, ref) == data
    assert save.n_new_bytes == n_bytes
    assert list(store.backend.list("intents")) == []


def test_a_stream_that_is_stored_already_adds_a_manifest_and_a_ref(store: Store) -> None:
    data = noise(LONG)
    commit(store, Stream(data), "one")
    packs = sorted(info.key for info in store.backend.list("packs"))
    with store.write_stream(Stream(data)) as save:
        ref = save.commit(RefTarget(path="two"))

    assert save.n_new_bytes == 0
    assert sorted(info.key for info in store.backend.list("packs")) == packs
    assert read(store, ref) == data


def test_a_collection_during_a_stream_takes_nothing_of_it(store: Store) -> None:
    data = noise(LONG)
    n_collections = 0

    def collect() -> None:
        nonlocal n_collections
        n_collections += 1
        plan_gc(store).execute()

    ref = commit(store, Stream(data, at=LONG * 3 // 4, then=collect))

    assert n_collections > 1
    assert read(store, ref) == data


@pytest.mark.long
def test_stream_keeps_the_chunks_that_others_drop_meanwhile(store: Store) -> None:
    data = noise(LONG)
    commit(store, Stream(data), "one")

    def drop_and_collect() -> None:
        store.drop_artifacts("one")
        plan_gc(store).execute()

    ref = commit(store, Stream(data, at=LONG * 3 // 4, then=drop_and_collect), "two")

    assert read(store, ref) == data


@pytest.mark.parametrize("n_names", [100, 4])
def test_one_intent_covers_many_batches(store: Store, monkeypatch: pytest.MonkeyPatch, n_names: int) -> None:
    monkeypatch.setattr(_ingest, "_NAMES_AHEAD", n_names)
    data = noise(LONG)
    seen: list[int] = []
    stream = Stream(data, at=1, then=lambda: seen.append(len(list(store.backend.list("intents")))))
    ref = commit(store, stream)

    n_packs = len(list(store.backend.list("packs")))
    assert n_packs > 30
    assert 1 <= max(seen) <= 1 + n_packs // n_names
    assert (max(seen) == 1) == (n_names > n_packs)
    assert read(store, ref) == data


def test_batch_that_shares_chunks_with_another_file_is_protected_by_an_intent_of_its_own(store: Store) -> None:
    one, other = noise(100 * CHUNK, 1), noise(100 * CHUNK, 2)
    commit(store, Stream(one), "one")

    def drop_and_collect() -> None:
        store.drop_artifacts("one")
        plan_gc(store).execute()

    data = other + one
    ref = commit(store, Stream(data, at=len(data) - CHUNK, then=drop_and_collect), "two")

    assert read(store, ref) == data


@pytest.mark.long
def test_a_stream_given_up_for_dead_fails_whole_and_can_be_stored_again(store: Store) -> None:
    data = noise(LONG)

    def collect_without_grace() -> None:
        plan_gc(store, grace_s=0).execute()

    with pytest.raises(FencedError):
        commit(store, Stream(data, at=LONG * 3 // 4, then=collect_without_grace))
    assert store.walk_artifacts() == []
    assert list(store.backend.list("intents")) == []

    assert read(store, commit(store, Stream(data))) == data


def test_a_stream_whose_batches_are_collected_after_its_last_look_is_not_committed(store: Store) -> None:
    data = noise(LONG)
    with store.write_stream(Stream(data)) as save:
        plan_gc(store, grace_s=0).execute()

        with pytest.raises(FencedError):
            save.commit(RefTarget(path="file"))
    assert store.walk_artifacts() == []


def test_a_long_stream_needs_no_more_memory_than_a_few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.init_backend(MemoryBackend())
    block = noise(1 << 20)
    commit(store, io.BytesIO(block + block), "warm")

    class Repeating(io.RawIOBase):
        n_left = 160

        def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
            if not self.n_left or len(buffer) < len(block):
                n_bytes = min(len(buffer), len(block)) if self.n_left else 0
                buffer[:n_bytes] = block[:n_bytes]
                return n_bytes
            self.n_left -= 1
            buffer[: len(block)] = block
            return len(block)

    tracemalloc.start()
    try:
        commit(store, Repeating())  # type: ignore[arg-type]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 3 * _ingest.BATCH_BYTES


def safetensors_of(n_tensors: int, name: str = "t{}") -> bytes:
    """Tensors of 64 bytes, as many as a header says."""
    header = {
        name.format(at): {"dtype": "F32", "shape": [16], "data_offsets": [64 * at, 64 * at + 64]}
        for at in range(n_tensors)
    }
    said = json.dumps(header).encode()
    return len(said).to_bytes(8, "little") + said + noise(64 * n_tensors)


def test_tensors_that_come_thicker_than_rows_may_be_are_no_rows(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ingest, "_FREE_ROWS", 100)
    data = safetensors_of(3_000)
    ref = commit(store, io.BytesIO(data))
    names = [row.spec.name for row in store.manifest(ref).rows]

    assert read(store, ref) == data
    assert 100 <= len(names) <= 102 + len(data) / _ingest._BYTES_A_ROW * 2
    assert names[1:90] == [f"t{at}" for at in range(89)]


def test_names_that_take_more_than_their_part_of_a_file_are_left_out(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ingest, "_FREE_NAME_BYTES", 10_000)
    data = safetensors_of(100, "x" * 1000 + "{}")
    ref = commit(store, io.BytesIO(data))
    manifest = store.manifest(ref)

    assert read(store, ref) == data
    assert sum(row.spec.name != "" for row in manifest.rows) == (10_000 + len(data) // 16) // 1002
    assert [row.spec.dtype for row in manifest.rows].count("float32") == 100
