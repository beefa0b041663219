"""Collections of stores with deltas: no delta loses its base."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.errors import ChunkNotFoundError
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.maintenance import plan_gc, verify
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import declare
from tests.deltas.made import CHUNK_BYTES, base_packs, packs_of, save, weights, write_deltas


@pytest.fixture
def store() -> Store:
    return Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)


def collect(store: Store, max_waste: float = 0.3) -> None:
    plan_gc(Store.open_backend(store.backend), grace_s=0, max_waste=max_waste).execute()


def is_whole(store: Store, ref: Ref, tensors: dict[str, Any]) -> bool:
    fresh = Store.open_backend(store.backend)
    loaded = fresh.read_tensors(fresh.manifest(ref))
    sound = verify(fresh, full=True).problems == ()
    return sound and all(loaded[name].tobytes() == array.tobytes() for name, array in tensors.items())


def two_steps(store: Store, *, beside: int = 0) -> tuple[Ref, Ref, str]:
    """A step, and another one all of whose chunks are deltas against the first; and the pack of those."""
    first = save(store, {"w": weights(1), "beside": np.random.default_rng(1).bytes(beside)}, 1)
    deltas = write_deltas(store, (weights(2), weights(1)))
    return first, save(store, {"w": weights(2)}, 2), deltas


def test_a_checkpoint_of_deltas_is_read_and_verified(store: Store) -> None:
    _, second, deltas = two_steps(store)

    assert is_whole(store, second, {"w": weights(2)})
    assert deltas in base_packs(store.backend)


def test_bases_that_only_live_deltas_need_are_kept(store: Store) -> None:
    first, second, _ = two_steps(store)
    before = packs_of(store.backend)
    store.drop(first)
    collect(store)

    assert packs_of(store.backend) == before
    assert is_whole(store, second, {"w": weights(2)})


def test_a_pack_of_bases_is_not_rewritten_however_little_of_it_is_needed(store: Store) -> None:
    first, second, deltas = two_steps(store, beside=1 << 20)
    store.drop(first)
    collect(store, max_waste=0)

    assert deltas in packs_of(store.backend)
    assert is_whole(store, second, {"w": weights(2)})


def test_bases_go_with_the_last_delta_that_needs_them(store: Store) -> None:
    first, second, _ = two_steps(store)
    store.drop(first)
    store.drop(second)
    collect(store)

    assert packs_of(store.backend) == set()


def test_copied_delta_stays_a_delta_while_its_base_stays(store: Store) -> None:
    first, second, _ = two_steps(store)
    save(store, {"w": weights(1), "more": weights(3)}, 3)
    both = write_deltas(store, (weights(4), weights(1)), (weights(5), weights(1)))
    kept = save(store, {"w": weights(4)}, 4)
    collect(store, max_waste=0)
    now = base_packs(store.backend)

    assert both not in packs_of(store.backend)
    assert len(now) == 2
    assert is_whole(store, kept, {"w": weights(4)})
    assert is_whole(store, second, {"w": weights(2)})
    assert is_whole(store, first, {"w": weights(1)})


def test_a_delta_whose_base_is_gone_is_no_copy_for_a_save(store: Store) -> None:
    _, _, deltas = two_steps(store)
    [base_pack] = base_packs(store.backend)[deltas]
    store.backend.delete(f"packs/{base_pack}.pack")
    again = save(store, {"w": weights(2)}, 3)

    assert is_whole(store, again, {"w": weights(2)}) or verify(store).problems
    fresh = Store.open_backend(store.backend)
    assert fresh.read_tensors(fresh.manifest(again))["w"].tobytes() == weights(2).tobytes()


def test_a_pack_that_a_save_under_way_may_write_deltas_against_is_kept(store: Store) -> None:
    first = save(store, {"w": weights(1)}, 1)
    [pack] = packs_of(store.backend)
    declare(store.backend, "0" * 64, np.empty((0, 32), np.uint8), [pack])
    store.drop(first)
    plan_gc(Store.open_backend(store.backend), grace_s=3600).execute()

    assert packs_of(store.backend) == {pack}


def test_a_pack_named_as_one_of_bases_between_plan_and_deletion_is_spared(store: Store) -> None:
    first = save(store, {"w": weights(1)}, 1)
    [pack] = packs_of(store.backend)
    store.drop(first)
    plan = plan_gc(Store.open_backend(store.backend), grace_s=3600)
    declare(store.backend, "0" * 64, np.empty((0, 32), np.uint8), [pack])
    report = plan.execute()

    assert report.n_spared == 1
    assert packs_of(store.backend) == {pack}


def test_error_of_a_checkpoint_names_its_lost_base(store: Store) -> None:
    _, second, deltas = two_steps(store)
    [base_pack] = base_packs(store.backend)[deltas]
    store.backend.delete(f"packs/{base_pack}.pack")
    fresh = Store.open_backend(store.backend)
    with pytest.raises(ChunkNotFoundError) as caught:
        fresh.read_tensors(fresh.manifest(second))

    assert f"packs/{base_pack}.pack" in caught.value.suspects
    assert {problem.checkpoint for problem in verify(fresh).problems} >= {second.label}


def a_chain(store: Store, n_steps: int) -> list[Ref]:
    """Steps each of which is stored as deltas against the one before."""
    refs = [save(store, {"w": weights(0)}, 0)]
    for step in range(1, n_steps):
        write_deltas(store, (weights(step), weights(step - 1)))
        refs.append(save(store, {"w": weights(step)}, step))
    return refs


def test_the_last_step_of_a_chain_keeps_all_that_it_takes(store: Store) -> None:
    refs = a_chain(store, 5)
    for ref in refs[:-1]:
        store.drop(ref)
    collect(store, max_waste=0)

    assert len(packs_of(store.backend)) == 5
    assert is_whole(store, refs[-1], {"w": weights(4)})


def test_collections_delete_a_chain_from_its_end(store: Store) -> None:
    refs = a_chain(store, 5)
    for ref in refs[2:]:
        store.drop(ref)
    collect(store)

    assert len(packs_of(store.backend)) == 2
    assert is_whole(store, refs[1], {"w": weights(1)})


def test_save_writes_the_chunks_of_a_broken_chain_again(store: Store) -> None:
    refs = a_chain(store, 4)
    table = {name: len(packs) for name, packs in base_packs(store.backend).items()}
    assert len(table) == 3
    frozen = store.manifest(refs[1]).digests
    places = store.catalog.find(frozen)
    store.backend.delete(f"packs/{places.packs[int(places.pack[0])]}.pack")
    again = save(Store.open_backend(store.backend), {"w": weights(3)}, 9)
    fresh = Store.open_backend(store.backend)

    assert fresh.read_tensors(fresh.manifest(again))["w"].tobytes() == weights(3).tobytes()
