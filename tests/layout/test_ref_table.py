"""Tables of refs: their bytes, and listings that read them."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.errors import BackendError, CorruptError, NewerFormatError, TensorCasError
from tensorcas_mlflow.layout import REF_TABLES, RefSeen, RefTarget, _ref_table
from tensorcas_mlflow.layout._ref_table import read_ref_table, ref_table_bytes
from tensorcas_mlflow.maintenance import plan_gc, verify
from tensorcas_mlflow.store import Store

KEY = f"{REF_TABLES}/{'0' * 32}"
LEAST_LISTED, LEAST_NEW = 16, 8


@pytest.fixture(autouse=True)
def small_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ref_table, "LEAST_LISTED", LEAST_LISTED)
    monkeypatch.setattr(_ref_table, "LEAST_NEW", LEAST_NEW)


class Counting(MemoryBackend):
    """A remote store in memory that counts the reads of refs and tables, and can refuse to write tables."""

    def __init__(self) -> None:
        super().__init__(is_remote=True)
        self.reads: Counter[str] = Counter()
        self.refuses: set[str] = set()

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        self.reads[key.partition("/")[0]] += 1
        return super().get(key, max_bytes=max_bytes)

    def put_new(self, key: str, *args: Any, **settings: Any) -> str:
        if "put" in self.refuses and key.startswith(REF_TABLES):
            raise BackendError("write", key, "no room")
        return super().put_new(key, *args, **settings)

    def delete(self, *keys: str) -> None:
        for key in keys:
            if "delete" in self.refuses and key.startswith(REF_TABLES):
                raise BackendError("delete", key, "no answer")
            super().delete(key)


def save(store: Store, step: int, *, value: int = 0, run: str = "run") -> None:
    with store.write_checkpoint({"step": np.int64(step), "value": np.int64(value)}) as pending:
        pending.commit(RefTarget(run_id=run, step=step))


def key_of(step: int) -> str:
    return RefTarget(run_id="run", step=step).key


def new_store(n_steps: int) -> tuple[Store, Counting]:
    backend = Counting()
    store = Store.init_backend(backend)
    for step in range(n_steps):
        save(store, step)
    return store, backend


def collect(store: Store) -> None:
    plan_gc(store).execute()


def tables(backend: MemoryBackend) -> list[str]:
    return sorted(info.key for info in backend.list(REF_TABLES))


def truth(store: Store) -> list[Any]:
    """Read every ref by itself."""
    refs = [store.ref(info.key) for info in store.backend.list("refs")]
    return sorted((ref for ref in refs if ref is not None), key=lambda ref: (ref.created, ref.key))


def listing(store: Store) -> tuple[list[Any], Counter[str]]:
    """List all checkpoints, and count the reads."""
    backend = store.backend
    assert isinstance(backend, Counting)
    backend.reads.clear()
    refs = store.checkpoints()
    return refs, backend.reads.copy()


# --- listings


def test_listing_reads_one_table_instead_of_every_ref() -> None:
    store, backend = new_store(3 * LEAST_LISTED)
    before, reads_before = listing(store)
    collect(store)
    after, reads_after = listing(store)

    assert after == before == truth(store)
    assert reads_before == {"refs": 3 * LEAST_LISTED}
    assert reads_after == {REF_TABLES: 1}
    assert len(tables(backend)) == 1


def test_listing_reads_refs_that_changed_since_the_table_one_by_one() -> None:
    store, _ = new_store(3 * LEAST_LISTED)
    collect(store)
    save(store, 5, value=7)
    save(store, 1000)
    store.backend.delete(key_of(8))
    store.backend.delete(key_of(9))
    save(store, 9, value=8)
    refs, reads = listing(store)

    assert refs == truth(store)
    assert reads == {REF_TABLES: 1, "refs": 3}


def test_listing_of_few_refs_looks_for_no_table() -> None:
    store, backend = new_store(LEAST_LISTED - 1)
    collect(store)
    _, reads = listing(store)

    assert tables(backend)
    assert reads == {"refs": LEAST_LISTED - 1}


@pytest.mark.long
def test_every_listing_finds_what_reading_each_ref_finds() -> None:
    # A random walk of saves, replacements, deletions and collections.
    random_ = random.Random(0)
    store, backend = new_store(LEAST_LISTED + LEAST_NEW)
    for number in range(150):
        what = random_.random()
        if what < 0.1:
            collect(store)
        elif what < 0.4:
            backend.delete(key_of(random_.randrange(40)))
        else:
            save(store, random_.randrange(40), value=number)
        if number % 10 == 0:
            assert listing(store)[0] == truth(store)

    assert listing(store)[0] == truth(store)
    assert verify(store).problems == ()


@pytest.mark.long
def test_tables_are_merged_so_that_there_are_few() -> None:
    store, backend = new_store(0)
    n_written = 0
    for round_ in range(16):
        for step in range(LEAST_NEW):
            save(store, round_ * LEAST_NEW + step)
        before = set(tables(backend))
        collect(store)
        n_written += sum(
            len(read_ref_table(key, MemoryBackend.get(backend, key))) for key in set(tables(backend)) - before
        )

    n_refs = 16 * LEAST_NEW
    assert len(tables(backend)) <= np.log2(16) + 1
    assert n_written <= n_refs * (np.log2(16) + 1)
    refs, reads = listing(store)
    assert len(refs) == n_refs
    assert reads == {REF_TABLES: len(tables(backend))}


def test_table_without_living_refs_goes() -> None:
    store, backend = new_store(2 * LEAST_NEW)
    collect(store)
    for step in range(2 * LEAST_NEW):
        backend.delete(key_of(step))
    collect(store)

    assert tables(backend) == []


def test_local_store_has_no_tables(tmp_path: Any) -> None:
    # The number of a deleted file, its size and its time may be those of another one.
    store = Store.init(tmp_path)
    for step in range(LEAST_LISTED + LEAST_NEW):
        save(store, step)
    collect(store)

    assert list(store.backend.list(REF_TABLES)) == []


# --- deaths, races and damage


@pytest.mark.parametrize("what", ["put", "delete"])
def test_death_at_a_table_costs_no_listing_anything(what: str) -> None:
    store, backend = new_store(2 * LEAST_LISTED)
    collect(store)
    for step in range(LEAST_NEW):
        save(store, 1000 + step)
        save(store, step, value=1)
    backend.refuses.add(what)
    collect(store)

    assert listing(store)[0] == truth(store)

    backend.refuses.clear()
    collect(store)
    refs, reads = listing(store)
    assert refs == truth(store)
    assert reads["refs"] < LEAST_NEW
    # What a dead collection has left is in other tables too, so it goes.
    known = [seen for key in tables(backend) for seen in read_ref_table(key, backend.get(key))]
    assert len(known) <= len(refs) * 2


def test_table_that_disappears_during_a_listing_is_no_error() -> None:
    class Vanishing(Counting):
        def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
            if key.startswith(REF_TABLES):
                self.delete(key)
            return super().get(key, max_bytes=max_bytes)

    backend = Vanishing()
    store = Store.init_backend(backend)
    for step in range(2 * LEAST_LISTED):
        save(store, step)
    collect(store)

    assert listing(store)[0] == truth(store)


@pytest.mark.parametrize("at", [3, 20, 50, 70, -1])
def test_damaged_table_is_ignored_and_named_and_goes(at: int) -> None:
    store, backend = new_store(2 * LEAST_LISTED)
    collect(store)
    [key] = tables(backend)
    data = bytearray(backend.get(key))
    data[at] ^= 1
    backend.delete(key)
    backend.put_new(key, [bytes(data)])
    refs, reads = listing(store)
    [problem] = verify(store).problems

    assert refs == truth(store)
    assert reads["refs"] == 2 * LEAST_LISTED
    assert problem.key == key
    assert "nothing is lost, and gc frees it" in problem.reason

    collect(store)
    assert key not in tables(backend)
    assert verify(store).problems == ()


def test_table_whose_ref_is_damaged_has_not_the_last_word() -> None:
    store, backend = new_store(2 * LEAST_LISTED)
    collect(store)
    [key] = tables(backend)
    refs = read_ref_table(key, backend.get(key))
    forged = {seen: data[:-20] + b"x" * 20 if seen.key == key_of(3) else data for seen, data in refs.items()}
    other = {seen: forged[next(iter(refs))] if seen.key == key_of(4) else data for seen, data in forged.items()}
    backend.delete(key)
    backend.put_new(key, [ref_table_bytes({s: d for s, d in other.items() if len(d) == s.size})])

    assert listing(store)[0] == truth(store)


# --- bytes


def seen_of(step: int, data: bytes) -> RefSeen:
    return RefSeen(key_of(step), f"token-{step}", len(data), 1.5)


def some_table() -> dict[RefSeen, bytes]:
    return {seen_of(step, data): data for step, data in enumerate([b"{}", b"first", b"second" * 9])}


def test_table_gives_back_what_it_was_made_of() -> None:
    assert read_ref_table(KEY, ref_table_bytes(some_table())) == some_table()
    assert read_ref_table(KEY, ref_table_bytes({})) == {}


def table_of(head: str, rest: bytes = b"", *, raw_bytes: int | None = None) -> bytes:
    raw = head.encode() + rest
    body = zstandard.ZstdCompressor().compress(raw)
    n_bytes = len(raw) if raw_bytes is None else raw_bytes
    said = _ref_table._HEADER.pack(b"\x89TCRT\r\n\x01", len(head), n_bytes, b"", b"")[:32]
    return said + digest(body + said) + body


@pytest.mark.parametrize(
    "table",
    [
        b"",
        b"\x89TCRT\r\n\x01",
        table_of("[]"),
        table_of("{}"),
        table_of("[" * 100_000),
        table_of('{"format": true, "refs": []}'),
        table_of('{"format": 1, "refs": [["format", "t", 1, 1.0]]}', b"x"),
        table_of('{"format": 1, "refs": [["refs/runs/r/@1", 5, 1, 1.0]]}', b"x"),
        table_of('{"format": 1, "refs": [["refs/runs/r/@1", "t", -1, 1.0], ["refs/runs/r/@2", "t", 1, 1.0]]}'),
        table_of('{"format": 1, "refs": [["refs/runs/r/@1", "t", 1, 1.0]]}', b"xx"),
        table_of('{"format": 1, "refs": [["refs/runs/r/@1", "t", 1099511627776, 1.0]]}', b"x"),
        table_of('{"format": 1, "refs": []}', raw_bytes=1 << 60),
        table_of('{"format": 1, "refs": []}', raw_bytes=1 << 20),
    ],
)
def test_impossible_table_is_refused(table: bytes) -> None:
    with pytest.raises(CorruptError):
        read_ref_table(KEY, table)


def test_table_of_a_later_release_is_left_alone() -> None:
    with pytest.raises(NewerFormatError):
        read_ref_table(KEY, table_of('{"format": 2}'))

    store, backend = new_store(2 * LEAST_LISTED)
    backend.put_new(KEY, [table_of('{"format": 2}')])
    collect(store)
    assert KEY in tables(backend)
    assert listing(store)[0] == truth(store)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_table_however_damaged_ends_in_our_errors(data: st.DataObject) -> None:
    table = bytearray(ref_table_bytes(some_table()))
    for _ in range(data.draw(st.integers(1, 4))):
        table[data.draw(st.integers(0, len(table) - 1))] = data.draw(st.integers(0, 255))
    table = table[: data.draw(st.integers(0, len(table)))]

    try:
        found = read_ref_table(KEY, bytes(table))
    except TensorCasError:
        return
    assert found == some_table()
