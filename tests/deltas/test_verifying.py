"""Verification of chains of deltas: broken chains, and chains in another pack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tensorcas_mlflow.backends import LocalBackend, MemoryBackend
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.maintenance import VerifyReport, copy_refs, read_source, verify
from tensorcas_mlflow.store import Store, _deltas
from tensorcas_mlflow.store.protocol import read_pack_table
from tests.deltas.made import CHUNK_BYTES, BadSectors, a_chunk, flip, lose, packs_of, put_pack, save_chunks
from tests.faulty import FaultyBackend

A, B, C, D, E = (a_chunk(seed) for seed in range(5))
CHAIN = (A, B, C, D)


@pytest.fixture
def store() -> Store:
    return Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)


def fresh(store: Store) -> Store:
    return Store.open_backend(store.backend)


def chain(store: Store) -> tuple[list[str], list[Ref]]:
    """Four steps of another chunk and one of a chain; the packs of that, and the refs."""
    packs: list[str] = []
    refs = []
    for step, chunk in enumerate(CHAIN):
        packs.append(put_pack(store, (chunk, CHAIN[step - 1], packs[-1]) if step else chunk))
        refs.append(save_chunks(store, step, E, chunk))
    return packs, refs


def told(report: VerifyReport) -> set[tuple[str | None, tuple[str, ...]]]:
    return {(problem.checkpoint, problem.tensors) for problem in report.problems if problem.checkpoint}


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("how", [{"full": True}, {"sample": 1.0}, {"part": (1, 1)}], ids=lambda how: next(iter(how)))
def test_damage_in_a_chain_is_reported_for_every_delta_on_it(store: Store, at: int, how: Any) -> None:
    packs, refs = chain(store)
    flip(store, packs[at], CHAIN[at])
    report = verify(fresh(store), **how)

    assert told(report) == {(ref.label, ("1",)) for ref in refs[at:]}
    assert any(f"packs/{packs[at]}.pack" in f"{problem.key} {problem.reason}" for problem in report.problems)


@pytest.mark.parametrize("at", range(4))
def test_damage_in_a_chain_of_files_is_reported_though_it_may_decode_all_the_same(tmp_path: Path, at: int) -> None:
    store = Store.init_backend(LocalBackend(tmp_path), chunk_bytes=CHUNK_BYTES)
    packs, refs = chain(store)
    whole = verify(fresh(store), full=True)
    flip(store, packs[at], CHAIN[at])
    report = verify(fresh(store), full=True)

    assert whole.problems == ()
    assert whole.n_read == whole.n_chunks == 5
    assert told(report) == {(ref.label, ("1",)) for ref in refs[at:]}
    assert any(f"packs/{packs[at]}.pack" in f"{problem.key} {problem.reason}" for problem in report.problems)


@pytest.mark.parametrize("at", range(4))
def test_lost_pack_of_a_chain_is_reported_for_every_delta_without_reading(store: Store, at: int) -> None:
    packs, refs = chain(store)
    lose(store, packs[at])
    report = verify(fresh(store))

    assert told(report) == {(ref.label, ("1",)) for ref in refs[at:]}
    assert all(f"packs/{packs[at]}.pack" in f"{each.key} {each.reason}" for each in report.problems if each.checkpoint)


@pytest.mark.parametrize("at", range(3))
def test_unreadable_base_is_reported_for_every_delta_on_it(store: Store, at: int) -> None:
    packs, refs = chain(store)
    bad = BadSectors(store.backend, packs[at], chunk=CHAIN[at])
    bad.is_bad = True

    assert told(verify(Store.open_backend(bad), full=True)) == {(ref.label, ("1",)) for ref in refs[at:]}


def test_damage_of_a_base_alone_is_not_called_unneeded(store: Store) -> None:
    packs, refs = chain(store)
    for ref in refs[:-1]:
        store.drop(ref)
    flip(store, packs[0], A)
    report = verify(fresh(store), sample=1.0)

    assert told(report) == {(refs[-1].label, ("1",))}


def test_a_delta_whose_base_is_damaged_has_another_copy(store: Store) -> None:
    packs, _ = chain(store)
    put_pack(store, B)
    put_pack(store, C)
    put_pack(store, D)
    flip(store, packs[1], B)
    report = verify(fresh(store), full=True)

    assert told(report) == set()
    assert report.problems
    assert all("another pack has a whole copy" in problem.reason for problem in report.problems)


class Moves(MemoryBackend):
    """Somebody moves a chunk in full elsewhere, and takes the pack of its base away, at a read of that."""

    def __init__(self) -> None:
        super().__init__()
        self.at: tuple[str, bytes] | None = None

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        if self.at is not None and key == f"packs/{self.at[0]}.pack":
            (pack, chunk), self.at = self.at, None
            put_pack(Store.open_backend(self), chunk)
            self.delete(f"packs/{pack}.pack")
        super().read_into(key, start, out)


@pytest.fixture
def moving() -> Store:
    store = Store.init_backend(Moves(), chunk_bytes=CHUNK_BYTES)
    bases = put_pack(store, A)
    put_pack(store, (B, A, bases))
    save_chunks(store, 1, B)
    return store


def begin_to_move(store: Store, reader: Store) -> None:
    assert isinstance(store.backend, Moves)
    reader.catalog.refresh()
    [ref] = reader.checkpoints()
    places = reader.catalog.find(reader.manifest(ref).digests)
    _, bases = reader.catalog.find_chains(places)
    store.backend.at = (min(bases), B)


def test_reader_finds_deltas_that_a_collector_moves_meanwhile(moving: Store) -> None:
    reader = fresh(moving)
    begin_to_move(moving, reader)
    [ref] = reader.checkpoints()

    assert reader.read_tensors(reader.manifest(ref))["0"].tobytes() == B


def test_copy_finds_deltas_that_a_collector_moves_meanwhile(moving: Store) -> None:
    reader = fresh(moving)
    begin_to_move(moving, reader)
    other = Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES, store_id=moving.id)
    refs, _ = read_source(reader)
    copied = copy_refs(reader, other, refs)
    [ref] = other.checkpoints()

    assert not copied.failed
    assert other.read_tensors(other.manifest(ref))["0"].tobytes() == B


def test_deltas_that_a_collector_moves_during_verify_are_no_problem(
    moving: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = fresh(moving)
    begin_to_move(moving, reader)
    assert isinstance(moving.backend, Moves)
    at, moving.backend.at = moving.backend.at, None
    read = verify.__globals__["_read_chunks"]

    def later(*args: Any, **more: Any) -> Any:
        moving.backend.at = at  # type: ignore[attr-defined]
        return read(*args, **more)

    monkeypatch.setitem(verify.__globals__, "_read_chunks", later)

    assert verify(reader, full=True).problems == ()


def test_a_base_that_many_deltas_share_is_read_once_for_all_of_them(store: Store) -> None:
    base = put_pack(store, A)
    deltas = put_pack(store, *((a_chunk(seed), A, base) for seed in range(1, 30)))
    save_chunks(store, 0, A, *(a_chunk(seed) for seed in range(1, 30)))
    counting = FaultyBackend(store.backend)

    assert verify(Store.open_backend(counting), full=True).problems == ()
    assert deltas in packs_of(store.backend)
    assert counting.calls.count("read_into") < 12


def test_verify_keeps_a_bounded_amount_of_bases(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_deltas, "_HELD_BYTES", 3 * CHUNK_BYTES)
    base = put_pack(store, *(a_chunk(seed) for seed in range(10)))
    pack = put_pack(store, *((a_chunk(seed + 20), a_chunk(seed), base) for seed in range(10)))
    bases = _deltas.Bases(store.backend)
    tables = read_pack_table(store.backend, pack)
    first = [bytes(bases.of(entry) or b"") for entry in tables]
    again = [bytes(bases.of(entry) or b"") for entry in tables[::-1]][::-1]

    assert first == again == [a_chunk(seed) for seed in range(10)]
    assert sum(map(len, bases._held.values())) == bases._held_bytes == 3 * CHUNK_BYTES
