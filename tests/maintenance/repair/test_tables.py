"""Packs whose table is damaged: what others know of them, or is left of the table, and hashes right."""

from __future__ import annotations

import numpy as np
import pytest

from tensorcas_mlflow.backends import Backend, MemoryBackend
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.codecs import RAW
from tensorcas_mlflow.errors import BackendError
from tensorcas_mlflow.layout.packs import PackWriter, Payload, make_table, pack_key, segment_bytes
from tensorcas_mlflow.layout.packs._pack import FOOTER_BYTES
from tensorcas_mlflow.maintenance import plan_repair
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import list_packs, read_pack_table
from tests.maintenance.repair.damaging import (
    CHUNK_BYTES,
    flip,
    keys,
    loads,
    new_store,
    overwrite,
    pack_of,
    repair,
    save,
    target,
)


@pytest.mark.parametrize("at", [-1, -FOOTER_BYTES, -FOOTER_BYTES - 1])
def test_a_pack_with_a_damaged_table_gives_back_what_hashes_right(store: Store, at: int) -> None:
    key = pack_key(pack_of(store.backend, "a"))
    flip(store.backend, key, len(store.backend.get(key)) + at)
    report = repair(store)

    assert report.is_whole
    assert key not in keys(store.backend, "packs")
    assert loads(store, "ab", 0)


def test_a_table_with_a_wrong_digest_of_stored_bytes_loses_no_chunk() -> None:
    store, steps = new_store(), np.arange(CHUNK_BYTES // 4, dtype=np.int32) // 3
    with store.write_checkpoint({"steps": steps}) as pending:
        ref = pending.commit(target(0))
    [(name, size)] = list_packs(store.backend)
    flip(store.backend, pack_key(name), size - FOOTER_BYTES - 68 + 32)  # the second field of the only row

    assert repair(store).is_whole
    assert np.array_equal(store.read_tensors(store.manifest(ref))["steps"], steps)


def put_many(backend: Backend, n: int) -> str:
    """Write a pack of small chunks; return its name."""
    raws = [number.to_bytes(8, "little") for number in range(n)]
    payloads = [
        Payload(digest=digest(raw), raw_bytes=8, codec=RAW, typesize=1, data=raw, begins_row=False) for raw in raws
    ]
    backend.put_new(pack_key("9" * 32), PackWriter().pieces(payloads))
    return "9" * 32


def n_chunks(backend: Backend) -> int:
    return sum(len(read_pack_table(backend, name)) for name, _ in list_packs(backend))


@pytest.mark.long
def test_a_damaged_table_of_many_rows_gives_back_every_chunk() -> None:
    store = new_store()
    key = pack_key(put_many(store.backend, 70_000))
    flip(store.backend, key, len(store.backend.get(key)) - 1)
    repair(store)

    assert key not in keys(store.backend, "packs")
    assert n_chunks(store.backend) == 70_000


class BadPage(MemoryBackend):
    """A disk that does not give one byte of a pack, some times."""

    def __init__(self, store: Store, pack: str, at: int, n_times: int) -> None:
        super().__init__()
        self._blobs = store.backend._blobs  # type: ignore[attr-defined]
        self._key, self._at, self._n_times = pack_key(pack), at, n_times

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        if key == self._key and start <= self._at < start + len(out) and self._n_times:
            self._n_times -= 1
            raise BackendError("read", key, "Input/output error")
        super().read_into(key, start, out)


def test_a_bad_sector_in_a_table_that_is_given_up_costs_only_the_chunks_in_its_rows() -> None:
    store = new_store()
    name = put_many(store.backend, 200)
    disk = BadPage(store, name, len(store.backend.get(pack_key(name))) - 8000, n_times=1 << 40)
    report = plan_repair(Store.open_backend(disk), abandon=[pack_key(name)]).execute()

    assert report.packs_gone == (pack_key(name),)
    assert n_chunks(store.backend) >= 200 - 4096 // 68 - 2


def test_a_pack_stays_if_its_damaged_table_cannot_be_read_again() -> None:
    store = new_store()
    name = put_many(store.backend, 200)
    size = len(store.backend.get(pack_key(name)))
    flip(store.backend, pack_key(name), size - 1)
    report = plan_repair(Store.open_backend(BadPage(store, name, 8, n_times=1))).execute()

    assert report.left.keys() == {pack_key(name)}
    assert keys(store.backend, "packs") == [pack_key(name)]
    repair(store)
    assert n_chunks(store.backend) == 200


def test_wrong_row_of_a_table_restores_no_chunk(store: Store) -> None:
    key = pack_key(pack_of(store.backend, "a"))
    flip(store.backend, key, len(store.backend.get(key)) - FOOTER_BYTES - 60)  # the digest of b, which is the last row
    report = repair(store)

    assert [loss.tensors for loss in report.losses] == [("b",), ("b",)]
    assert loads(store, "ab", 0, "a")


def test_a_pack_that_is_cut_short_gives_back_what_an_index_segment_knows_of(store: Store) -> None:
    name = pack_of(store.backend, "a")
    table = make_table({name: read_pack_table(store.backend, name)})
    for key in keys(store.backend, "index"):
        store.backend.delete(key)
    store.backend.put_new("index/" + "f" * 32 + ".segment", [segment_bytes(table)])
    whole = store.backend.get(pack_key(name))
    overwrite(store.backend, pack_key(name), whole[: 8 + 2 * CHUNK_BYTES + 70])
    report = repair(store)

    assert report.is_whole
    assert loads(store, "ab", 0)


def test_a_cut_pack_is_put_aside(store: Store) -> None:
    name = pack_of(store.backend, "d")
    for key in keys(store.backend, "index"):
        store.backend.delete(key)
    cut = store.backend.get(pack_key(name))[:3000]
    overwrite(store.backend, pack_key(name), cut)
    report = repair(store)

    assert [loss.checkpoint for loss in report.losses] == ["run run step 2"]
    assert [store.backend.get(key) for key in keys(store.backend, "quarantine")] == [cut]


def test_hints_of_manifests_find_chunks_of_a_pack_without_a_table() -> None:
    store = new_store(MemoryBackend(is_remote=True))
    save(store, "ab", 0)
    name = pack_of(store.backend, "a")
    whole = store.backend.get(pack_key(name))
    overwrite(store.backend, pack_key(name), whole[: -FOOTER_BYTES - 2 * 68])

    assert repair(store).is_whole
    assert loads(store, "ab", 0)
