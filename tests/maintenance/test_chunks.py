"""Checks of chunks, divided into shards and merged."""

from __future__ import annotations

import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from functools import reduce
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcas_mlflow.backends import Backend, LocalBackend, MemoryBackend
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.chunk_io import BlockScreen
from tensorcas_mlflow.codecs import DELTA, RAW
from tensorcas_mlflow.errors import BackendError, StarvedError
from tensorcas_mlflow.layout.packs import ENTRY, Base, PackWriter, Payload, Table, make_table, pack_key
from tensorcas_mlflow.maintenance import _chunks
from tensorcas_mlflow.maintenance._chunks import Checked, Shard, Verdict, check_chunks, divide, merge_checks, shard_of
from tensorcas_mlflow.maintenance._inventory import PackTables
from tensorcas_mlflow.store import Store

CHUNK_BYTES = 4096


class BadSectors(MemoryBackend):
    """Memory that fails to give some byte ranges."""

    def __init__(self) -> None:
        super().__init__()
        self.bad: list[tuple[str, int, int]] = []

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        for bad_key, begin, end in self.bad:
            if key == bad_key and start < end and begin < start + len(out):
                raise BackendError("read", key, "bad sector")
        super().read_into(key, start, out)


def raw(seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, CHUNK_BYTES, dtype=np.uint8).tobytes()


def payload(content: bytes) -> Payload:
    return Payload(digest=digest(content), raw_bytes=len(content), codec=RAW, typesize=1, data=content, begins_row=True)


def delta(content: bytes, base: bytes, pack: str) -> Payload:
    of = Base(pack=pack, digest=digest(base), depth=0)
    data = DELTA.encode(content, 4, base)
    return Payload(
        digest=digest(content), raw_bytes=len(content), codec=DELTA, typesize=4, data=data, begins_row=True, base=of
    )


def put_pack(backend: Backend, name: str, *payloads: Payload) -> str:
    backend.put_new(pack_key(name), PackWriter().pieces(payloads))
    return name


def damaged_store() -> tuple[BadSectors, Table]:
    """Five packs: sound chunks, flipped bits, a bad sector, deltas against both, and one pack that goes."""
    backend = BadSectors()
    Store.init_backend(backend, chunk_bytes=CHUNK_BYTES)
    names = [f"{number:032x}" for number in range(1, 6)]
    put_pack(backend, names[0], *(payload(raw(seed)) for seed in range(8)))
    put_pack(backend, names[1], *(payload(raw(seed)) for seed in range(6, 14)))
    put_pack(backend, names[2], *(delta(near(seed), raw(seed), names[0]) for seed in range(4)))
    put_pack(backend, names[3], *(delta(near(seed), raw(seed), names[4]) for seed in range(20, 23)))
    put_pack(backend, names[4], *(payload(raw(seed)) for seed in range(20, 24)))
    packs = PackTables(backend)
    packs.refresh()
    table = packs.table()
    flip(backend, table, raw(1))
    flip(backend, table, raw(9))
    at = int(table.find(np.frombuffer(digest(raw(3)), np.uint8).reshape(1, -1))[0])
    begin = int(table.entries["offset"][at])
    backend.bad.append((table.key_of(at), begin + 7, begin + 9))
    backend.delete(pack_key(names[4]))
    return backend, table


def near(seed: int) -> bytes:
    content = bytearray(raw(seed))
    content[5] ^= 1
    return bytes(content)


def flip(backend: Backend, table: Table, content: bytes) -> None:
    at = int(table.find(np.frombuffer(digest(content), np.uint8).reshape(1, -1))[0])
    data = bytearray(backend.get(table.key_of(at)))
    data[int(table.entries["offset"][at]) + 11] ^= 4
    backend.delete(table.key_of(at))
    backend.put_new(table.key_of(at), [bytes(data)])


def as_value(checked: Checked) -> tuple[list[int], list[object]]:
    return checked.row.tolist(), list(checked.faults.items())


@pytest.fixture(scope="module")
def store() -> tuple[BadSectors, Table]:
    return damaged_store()


@pytest.fixture(scope="module", params=[True, False], ids=["decoded", "as stored"])
def decode(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def whole(store: tuple[BadSectors, Table], decode: bool) -> tuple[list[int], list[object]]:
    backend, table = store
    return as_value(check_chunks(backend, shard_of(table), decode=decode))


def test_a_check_gives_each_chunk_its_verdict(store: tuple[BadSectors, Table]) -> None:
    backend, table = store
    checked = check_chunks(backend, shard_of(table), decode=True)
    verdicts = [fault.verdict for fault in checked.faults.values()]

    assert checked.row.tolist() == list(range(len(table)))
    # Two flipped chunks. A sector that fails two chunks: one that lies there, and a delta against it. A delta against a
    # flipped chunk, three against chunks of a pack that is gone, and the four chunks of that pack.
    assert {each: verdicts.count(each) for each in Verdict} == {
        Verdict.BAD: 2,
        Verdict.FAILED: 2,
        Verdict.BASELESS: 4,
        Verdict.GONE: 4,
    }
    assert checked.gone == {f"{5:032x}"}


@pytest.mark.long
@settings(max_examples=60)
@given(data=st.data())
def test_shards_merged_in_any_order_give_the_result_of_one_check(
    store: tuple[BadSectors, Table], decode: bool, whole: tuple[list[int], list[object]], data: st.DataObject
) -> None:
    backend, table = store
    one = shard_of(table)
    of = np.array(data.draw(st.lists(st.integers(0, 4), min_size=len(one), max_size=len(one))))
    parts = [check_chunks(backend, one.take(of == number), decode=decode) for number in range(5)]
    order = data.draw(st.permutations(parts))
    while len(order) > 1:  # merged as a tree of any form
        at = data.draw(st.integers(0, len(order) - 2))
        order[at : at + 2] = [merge_checks(order[at], order[at + 1])]

    assert as_value(order[0]) == whole


def test_shards_of_packs_merge_in_every_order(
    store: tuple[BadSectors, Table], decode: bool, whole: tuple[list[int], list[object]]
) -> None:
    backend, table = store
    parts = [check_chunks(backend, shard, decode=decode) for shard in divide(shard_of(table), 1)]

    assert len(parts) == 5
    assert all(as_value(reduce(merge_checks, order)) == whole for order in permutations(parts))
    assert as_value(merge_checks(*parts)) == whole


def test_shards_have_few_rows_where_chunks_are_small() -> None:
    sizes = [3, 4, 5, 100, 1, 2]
    entries = np.zeros(sum(sizes), ENTRY)
    entries["digest"] = np.random.default_rng(0).integers(0, 256, (len(entries), 32))
    names = [f"{number:032x}" for number in range(len(sizes))]
    table = make_table(dict(zip(names, np.split(entries, np.cumsum(sizes)[:-1]), strict=True)))

    parts = list(divide(shard_of(table), n_rows=10))

    assert [part.packs for part in parts] == [tuple(names[:3]), (names[3],), tuple(names[4:])]
    assert sorted(row for part in parts for row in part.row.tolist()) == list(range(len(table)))
    assert list(divide(shard_of(make_table({})))) == []


def test_merge_keeps_the_larger_of_two_faults_of_one_chunk(store: tuple[BadSectors, Table]) -> None:
    backend, table = store
    before = check_chunks(backend, shard_of(table), decode=True)
    healed = BadSectors()
    for info in list(backend.list("packs")):
        healed.put_new(info.key, [backend.get(info.key)])
    after = check_chunks(healed, shard_of(table), decode=True)

    assert len(after.faults) < len(before.faults)
    assert as_value(merge_checks(before, after)) == as_value(merge_checks(after, before)) == as_value(before)
    assert as_value(merge_checks(before, Checked())) == as_value(before)


def test_shards_and_results_survive_pickling(store: tuple[BadSectors, Table], decode: bool) -> None:
    backend, table = store
    shard = pickle.loads(pickle.dumps(shard_of(table)))
    checked = check_chunks(backend, shard, decode=decode)

    assert as_value(pickle.loads(pickle.dumps(checked))) == as_value(
        check_chunks(backend, shard_of(table), decode=decode)
    )


def check_in_folder(folder: Path, shard: Shard) -> Checked:
    """Check a shard in a process of its own."""
    return check_chunks(LocalBackend(folder), shard, decode=True)


@pytest.mark.long
def test_processes_that_each_check_a_shard_find_what_one_finds(store: tuple[BadSectors, Table], tmp_path: Path) -> None:
    memory, table = store
    backend = LocalBackend(tmp_path)
    for info in list(memory.list("packs")):
        backend.put_new(info.key, [memory.get(info.key)])
    parts = list(divide(shard_of(table), 1))
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        checked = reduce(merge_checks, pool.map(check_in_folder, [tmp_path] * len(parts), parts))

    assert as_value(checked) == as_value(check_chunks(backend, shard_of(table), decode=True))
    assert len(checked.faults) > 4


@pytest.mark.parametrize("way", [None, "direct"])
def test_check_of_many_files_at_once_finds_what_a_look_at_each_chunk_finds(
    store: tuple[BadSectors, Table], decode: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str | None
) -> None:
    memory, table = store
    backend = LocalBackend(tmp_path)
    for info in list(memory.list("packs")):
        backend.put_new(info.key, [memory.get(info.key)])
    if way is not None:
        monkeypatch.setenv("TENSORCAS_READ", way)
    read: list[int] = []
    of_core = check_chunks(backend, shard_of(table), decode=decode, on_read=read.append)

    def nothing_is_sound(*arguments: Any) -> Any:
        return np.zeros(len(arguments[-3].found), dtype=bool)

    monkeypatch.setattr(_chunks, "find_sound", nothing_is_sound)
    monkeypatch.setattr(BlockScreen, "find_sound", nothing_is_sound)
    without = check_chunks(backend, shard_of(table), decode=decode)

    assert of_core.row.tolist() == without.row.tolist() == list(range(len(table)))
    assert {row: fault.verdict for row, fault in of_core.faults.items()} == {
        row: fault.verdict for row, fault in without.faults.items()
    }
    assert len(of_core.faults) > 4
    assert sum(read) > 0


def test_a_process_without_memory_says_nothing_of_any_chunk(store: tuple[BadSectors, Table]) -> None:
    class Starved(MemoryBackend):
        def read_into(self, key: str, start: int, out: memoryview) -> None:
            raise StarvedError("read", key, "too many open files")

    _, table = store

    with pytest.raises(StarvedError):
        check_chunks(Starved(), shard_of(table), decode=True)
