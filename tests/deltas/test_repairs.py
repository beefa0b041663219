"""Repairs of stores with deltas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.errors import ChunkNotFoundError
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.maintenance import RepairReport, plan_repair
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import condemned_bytes, declare, full_payload
from tests.deltas.made import (
    CHUNK_BYTES,
    BadSectors,
    a_chunk,
    flip,
    lose,
    packs_of,
    put_pack,
    put_payloads,
    save_chunks,
)
from tests.maintenance.repair.damaging import flip_ignored_bit

A, B, C, D, E = (a_chunk(seed) for seed in range(5))


@pytest.fixture
def store() -> Store:
    return Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)


def fresh(store: Store) -> Store:
    return Store.open_backend(store.backend)


def repair(store: Store, *sources: Store) -> RepairReport:
    return plan_repair(fresh(store), sources=sources).execute()


def is_right(store: Store, ref: Ref, *chunks: bytes) -> bool:
    found = fresh(store).read_tensors(fresh(store).manifest(ref))
    return [each.tobytes() for each in found.values()] == list(chunks)


def backup_of(store: Store, *chunks: bytes) -> Store:
    other = Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES, store_id=store.id)
    save_chunks(other, 1, *chunks)
    return other


def test_a_delta_that_a_collection_has_left_without_its_base_is_no_damage(store: Store) -> None:
    bases = put_pack(store, A)
    put_pack(store, (B, A, bases), C)
    put_pack(store, B)
    ref = save_chunks(store, 1, B, C)
    lose(store, bases)
    store.backend.delete(f"index/{bases}.loose")
    before = packs_of(store.backend)

    assert not plan_repair(fresh(store)).findings
    assert repair(store).is_whole
    assert packs_of(store.backend) == before
    assert is_right(store, ref, B, C)


def test_deltas_on_a_base_that_decodes_although_its_bytes_have_changed_are_not_lost(store: Store) -> None:
    packs = [put_payloads(store, [full_payload(digest(A), A, 4, begins_row=False)])]
    packs.append(put_pack(store, (B, A, packs[0])))
    put_pack(store, (C, B, packs[1]))
    refs = {chunk: save_chunks(store, step, chunk) for step, chunk in enumerate((A, B, C))}
    flip_ignored_bit(store.backend, packs[0], A)
    report = repair(store)

    assert report.packs_gone == (f"packs/{packs[0]}.pack",)
    assert report.is_whole
    assert all(is_right(store, refs[chunk], chunk) for chunk in (A, B, C))


def test_delta_without_its_base_stays_until_the_base_comes_back(store: Store) -> None:
    bases = put_pack(store, A)
    put_pack(store, (B, A, bases))
    ref = save_chunks(store, 1, B)
    data = store.backend.get(f"packs/{bases}.pack")
    lose(store, bases)
    report = repair(store)

    assert [loss.checkpoint for loss in report.losses] == [ref.label]
    store.backend.put_new(f"packs/{bases}.pack", [data])
    assert is_right(store, ref, B)


@pytest.mark.parametrize("how", [flip, lambda store, pack, chunk: lose(store, pack)], ids=["damaged", "lost"])
def test_repair_decodes_a_delta_with_another_copy_of_its_base(store: Store, how: Any) -> None:
    bases = put_pack(store, A)
    put_pack(store, (B, A, bases))
    put_pack(store, A)
    ref = save_chunks(store, 1, B)
    how(store, bases, A)
    plan = plan_repair(fresh(store))

    assert plan.execute().is_whole
    assert is_right(store, ref, B)


@pytest.mark.parametrize("how", [flip, lambda store, pack, chunk: lose(store, pack)], ids=["damaged", "lost"])
def test_a_backup_with_the_first_base_of_a_chain_brings_back_all_of_it(store: Store, how: Any) -> None:
    packs = [put_pack(store, A)]
    for chunk, base in ((B, A), (C, B), (D, C), (E, D)):
        packs.append(put_pack(store, (chunk, base, packs[-1])))
    refs = [save_chunks(store, 1, E), save_chunks(store, 2, C)]
    how(store, packs[0], A)
    plan = plan_repair(fresh(store), sources=[backup_of(store, A)])

    assert len(plan.losses) == 2
    assert plan.execute().is_whole
    assert is_right(store, refs[0], E)
    assert is_right(store, refs[1], C)


def test_damage_in_the_middle_of_a_chain_takes_no_more_with_it_than_it_must(store: Store) -> None:
    packs = [put_pack(store, A)]
    for chunk, base in ((B, A), (C, B), (D, C)):
        packs.append(put_pack(store, (chunk, base, packs[-1])))
    refs = {chunk: save_chunks(store, step, chunk) for step, chunk in enumerate((A, B, C, D))}
    flip(store, packs[1], B)
    report = repair(store)

    assert {loss.checkpoint for loss in report.losses} == {refs[chunk].label for chunk in (B, C, D)}
    assert is_right(store, refs[A], A)
    save_chunks(store, 9, B)
    assert repair(store).is_whole
    assert all(is_right(store, refs[chunk], chunk) for chunk in (A, B, C, D))


def test_the_base_of_a_delta_that_could_not_be_read_stays(store: Store) -> None:
    """It lies in a pack with damage, which would go if everything in it that is good had another copy."""
    bases = put_pack(store, A, C)
    deltas = put_pack(store, (B, A, bases))
    ref = save_chunks(store, 1, B)
    flip(store, bases, C)
    bad = BadSectors(store.backend, deltas, chunk=B)
    bad.is_bad = True
    plan = plan_repair(Store.open_backend(bad))
    report = plan.execute()

    assert [finding.is_mended for finding in plan.findings if finding.key.startswith("packs/")] == [False, False]
    assert set(report.left) == {f"packs/{bases}.pack", f"packs/{deltas}.pack"}
    assert is_right(store, ref, B)


def test_repair_deletes_no_base_beside_an_unreadable_pack(store: Store) -> None:
    bases = put_pack(store, A, C)
    deltas = put_pack(store, (B, A, bases))
    put_pack(store, (D, A, bases))
    ref = save_chunks(store, 1, B)
    flip(store, bases, C)
    bad = BadSectors(store.backend, deltas, all_of_it=True)
    bad.is_bad = True
    plan_repair(Store.open_backend(bad)).execute()

    assert is_right(store, ref, B)


def test_a_base_that_cannot_be_read_is_given_up_on_request_and_its_deltas_with_it(store: Store) -> None:
    bases = put_pack(store, A, C)
    put_pack(store, (B, A, bases))
    refs = [save_chunks(store, 1, B), save_chunks(store, 2, C)]
    bad = BadSectors(store.backend, bases, chunk=A)
    bad.is_bad = True
    left = plan_repair(Store.open_backend(bad)).execute().left

    assert f"packs/{bases}.pack" in left
    plan_repair(Store.open_backend(bad), abandon=[f"packs/{bases}.pack"]).execute()
    assert bases not in packs_of(store.backend)
    assert is_right(store, refs[1], C)
    with pytest.raises(ChunkNotFoundError):
        is_right(store, refs[0], B)


def test_a_delta_against_a_chunk_of_a_later_codec_is_left_where_it_is(store: Store) -> None:
    bases = put_pack(store, A)
    key = f"packs/{bases}.pack"
    data = bytearray(store.backend.get(key))
    table_offset = int.from_bytes(data[-48:-40], "little")
    deltas = put_pack(store, (B, A, bases))
    data[table_offset + 64] = 9
    data[-32:] = digest(bytes(data[table_offset:-32]))
    store.backend.delete(key)
    store.backend.put_new(key, [bytes(data)])
    repair(store)

    assert packs_of(store.backend) == {bases, deltas}


def test_a_save_that_relies_on_a_delta_whose_base_is_damaged_begins_again(store: Store) -> None:
    bases = put_pack(store, A)
    put_pack(store, (B, A, bases))
    flip(store, bases, A)
    relied_on = np.frombuffer(digest(B), np.uint8).reshape(1, -1)
    key, _ = declare(store.backend, "0" * 64, relied_on)
    report = repair(store)

    assert report.n_fenced == 1
    assert store.backend.stat(key) is None


def test_a_save_that_may_store_deltas_and_is_half_committed_keeps_what_it_wrote(store: Store) -> None:
    bases = put_pack(store, A, C)
    put_pack(store, (B, A, bases))
    ref = save_chunks(store, 1, B)
    data = store.backend.get(ref.key)
    key, _ = declare(store.backend, ref.manifest, np.zeros((40, 32), np.uint8), [bases])
    intent = store.backend.get(key)
    store.backend.delete(key)
    store.backend.delete(ref.key)
    store.backend.put_new(key, [data + intent[len(data) :]])  # its process died as it wrote the ref over it
    flip(store, bases, C)
    repair(store)
    store.backend.put_new(ref.key, [data])

    assert is_right(store, ref, B)


def test_a_repair_beside_a_collector_that_keeps_the_deltas_leaves_a_copy(store: Store) -> None:
    bases = put_pack(store, A, C)
    deltas = put_pack(store, (B, A, bases))
    ref = save_chunks(store, 1, B)
    flip(store, bases, C)
    store.backend.put_new("condemned/" + "d" * 32, [condemned_bytes(frozenset([deltas]), frozenset())])
    repair(store)
    if deltas in packs_of(store.backend):
        lose(store, deltas)

    assert is_right(store, ref, B)


def test_quarantined_delta_is_no_copy(store: Store) -> None:
    bases = put_pack(store, A)
    deltas = put_pack(store, (B, A, bases), C)
    save_chunks(store, 1, B, C)
    flip(store, deltas, C)
    lose(store, bases)
    repair(store)
    again = save_chunks(store, 2, B, C)

    assert deltas not in packs_of(store.backend)
    assert is_right(store, again, B, C)
