"""Collectors of stores with deltas, beside collectors and savers that are alive or dead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.errors import BackendError
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.maintenance import Census, GcReport, plan_gc
from tensorcas_mlflow.maintenance._gc_survey import survey
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import condemned_bytes, declare
from tests.deltas.made import CHUNK_BYTES, BadSectors, a_chunk, base_packs, flip, lose, packs_of, put_pack, save_chunks

A, B, C, D, E = (a_chunk(seed) for seed in range(5))


@pytest.fixture
def store() -> Store:
    return Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)


def fresh(store: Store) -> Store:
    return Store.open_backend(store.backend)


def collect(store: Store, *, max_waste: float = 0.3, grace_s: float = 0) -> GcReport:
    return plan_gc(fresh(store), grace_s=grace_s, max_waste=max_waste).execute()


def is_right(store: Store, ref: Ref, *chunks: bytes) -> bool:
    found = fresh(store).read_tensors(fresh(store).manifest(ref))
    return [each.tobytes() for each in found.values()] == list(chunks)


def condemn(store: Store, *packs: str) -> str:
    """Leave the list of a collector that is dead, or about to delete."""
    key = "condemned/" + "d" * 32
    store.backend.put_new(key, [condemned_bytes(frozenset(packs), frozenset())])
    return key


def test_a_pack_that_a_save_may_write_deltas_against_keeps_the_bases_of_its_own_deltas(store: Store) -> None:
    first = put_pack(store, A)
    second = put_pack(store, (B, A, first))
    ref = save_chunks(store, 1, A, B)
    store.drop(ref)
    declare(store.backend, "0" * 64, np.empty((0, 32), np.uint8), [second])
    collect(store, grace_s=3600)

    assert {first, second} <= packs_of(store.backend)


def test_pack_that_a_save_begun_after_the_plan_may_use_keeps_its_bases(store: Store) -> None:
    first = put_pack(store, A)
    second = put_pack(store, (B, A, first))
    ref = save_chunks(store, 1, A, B)
    store.drop(ref)
    plan = plan_gc(fresh(store), grace_s=3600)
    declare(store.backend, "0" * 64, np.empty((0, 32), np.uint8), [second])
    plan.execute()

    assert {first, second} <= packs_of(store.backend)


def test_a_dead_collectors_list_with_bases_on_it_is_finished(store: Store) -> None:
    bases = put_pack(store, A)
    put_pack(store, (B, A, bases))
    ref = save_chunks(store, 1, B)
    list_ = condemn(store, bases)
    collect(store)

    assert store.backend.stat(list_) is None
    assert bases not in packs_of(store.backend)
    assert is_right(store, ref, B)


def test_dead_collectors_list_with_the_middle_of_a_chain_is_finished(store: Store) -> None:
    packs = [put_pack(store, A)]
    for chunk, base in ((B, A), (C, B), (D, C)):
        packs.append(put_pack(store, (chunk, base, packs[-1])))
    refs = [save_chunks(store, 1, B), save_chunks(store, 2, D)]
    list_ = condemn(store, packs[1])
    collect(store)

    assert store.backend.stat(list_) is None
    assert packs[1] not in packs_of(store.backend)
    assert is_right(store, refs[0], B)
    assert is_right(store, refs[1], D)


def test_collector_keeps_a_readable_copy_of_a_chunk_stored_in_full_and_as_a_delta(store: Store) -> None:
    bases = put_pack(store, A)
    put_pack(store, (B, A, bases))
    put_pack(store, B)
    ref = save_chunks(store, 1, B)
    collect(store)
    collect(store)

    assert is_right(store, ref, B)


@pytest.mark.parametrize("theirs", ["bases", "deltas", "full"])
def test_two_collectors_that_keep_different_copies_leave_one_that_can_be_read(store: Store, theirs: str) -> None:
    packs = {"bases": put_pack(store, A), "full": put_pack(store, B)}
    packs["deltas"] = put_pack(store, (B, A, packs["bases"]))
    ref = save_chunks(store, 1, B)
    plan = plan_gc(fresh(store), grace_s=3600)
    list_ = condemn(store, packs[theirs])
    plan.execute()
    other = plan_gc(fresh(store), grace_s=0)
    store.backend.delete(list_)
    other.execute()

    assert is_right(store, ref, B)


def test_deltas_and_bases_on_one_list_are_written_in_full(store: Store) -> None:
    bases = put_pack(store, A)
    lone = put_pack(store, (B, A, bases), (C, A, bases), D)
    ref = save_chunks(store, 1, B)
    condemn(store, lone, bases)
    collect(store, max_waste=0)

    assert not {lone, bases} & packs_of(store.backend)
    assert base_packs(store.backend) == {}
    assert is_right(store, ref, B)


def test_a_delta_whose_base_is_lost_is_left_where_it_is(store: Store) -> None:
    """If the pack comes back, from a backup of the folder, the chunk is whole again."""
    bases = put_pack(store, A)
    deltas = put_pack(store, (B, A, bases))
    ref = save_chunks(store, 1, B)
    data = store.backend.get(f"packs/{bases}.pack")
    lose(store, bases)
    plan = plan_gc(fresh(store), grace_s=0, max_waste=0)
    plan.execute()

    assert deltas not in {*plan.packs, *plan.rewrites}
    store.backend.put_new(f"packs/{bases}.pack", [data])
    assert is_right(store, ref, B)


def test_a_pack_is_not_rewritten_if_a_base_of_it_is_damaged(store: Store) -> None:
    bases = put_pack(store, A)
    deltas = put_pack(store, (B, A, bases), C, D)
    save_chunks(store, 1, B)
    flip(store, bases, A)
    condemn(store, bases, deltas)
    collect(store, max_waste=0)

    assert {bases, deltas} <= packs_of(store.backend)


def test_a_pack_with_bases_that_cannot_be_read_stops_a_collection(store: Store) -> None:
    bases = put_pack(store, A)
    put_pack(store, (B, A, bases))
    save_chunks(store, 1, B)
    condemn(store, bases)
    bad = BadSectors(store.backend, bases)
    plan = plan_gc(Store.open_backend(bad), grace_s=0)
    bad.is_bad = True
    with pytest.raises(BackendError):
        plan.execute()

    assert bases in packs_of(store.backend)


# --- censuses


def rows_of(state: Any) -> set[tuple[str, bytes, str, bytes]]:
    """For each row its pack and digest, and those of its base."""
    digests, rows = state.inventory.digests, state.rows
    packs, bases = rows.packs, rows.links.base
    said = set()
    for pack, chunk, base in zip(rows.pack.tolist(), rows.chunk.tolist(), bases.tolist(), strict=True):
        of_base = (packs[rows.pack[base]], digests[rows.chunk[base]].tobytes()) if base >= 0 else (str(base), b"")
        said.add((packs[pack], digests[chunk].tobytes(), *of_base))
    return said


def test_a_survey_with_a_census_sees_the_bases_that_one_without_sees(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorcas_mlflow.maintenance._census.LEAST_NEW", 1)
    monkeypatch.setattr("tensorcas_mlflow.maintenance._census._NEW_PART", 1 << 40)
    monkeypatch.setattr("tensorcas_mlflow.maintenance._census._MOST_PARTS", 1)
    draw = np.random.default_rng(3)
    chunks = [a_chunk(seed) for seed in range(12)]
    where: dict[bytes, str] = {}
    refs: list[Ref] = []
    for step in range(12):
        chunk = chunks[step]
        known = [each for each in where if where[each] in packs_of(store.backend)]
        base = known[int(draw.integers(len(known)))] if known and draw.random() < 0.8 else None
        where[chunk] = put_pack(store, chunk if base is None else (chunk, base, where[base]))
        refs.append(save_chunks(store, step, chunk))
        if draw.random() < 0.4:
            store.drop(refs[int(draw.integers(len(refs)))])
        collect(store)
        census = Census(store.backend)
        census.load()
        known_state = survey(store.backend, 0, count_stale=True, census=census)
        bare_state = survey(store.backend, 0, count_stale=True)

        assert rows_of(known_state) == rows_of(bare_state)
    for ref in fresh(store).checkpoints():
        assert ref.step is not None
        assert is_right(store, ref, chunks[ref.step])


def test_a_census_tells_of_bases_in_packs_that_went(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorcas_mlflow.maintenance._census.LEAST_NEW", 1)
    monkeypatch.setattr("tensorcas_mlflow.maintenance._census._NEW_PART", 1 << 40)
    bases = put_pack(store, A)
    put_pack(store, (B, A, bases), C)
    put_pack(store, B)
    ref = save_chunks(store, 1, B, C)
    lose(store, bases)
    collect(store, max_waste=1)
    census = Census(store.backend)
    census.load()

    assert bases in census.inventory.base_packs
    collect(store)
    assert is_right(store, ref, B, C)
