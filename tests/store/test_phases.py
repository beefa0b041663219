"""A save in its phases: what is new is known first, copied if the caller wants to go on, and written later."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.errors import BackendError, ConflictError, FencedError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout.packs import pack_name
from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.store import Store
from tests.faulty import FaultyBackend
from tests.stored_bytes import bytes_below

rng = np.random.default_rng(0)


@pytest.fixture
def store() -> Store:
    return Store.init_backend(MemoryBackend(), chunk_bytes=4096)


def target(step: int) -> RefTarget:
    return RefTarget(run_id="run", step=step)


def read(store: Store, step: int) -> np.ndarray:
    ref = store.ref(target(step).key)
    assert ref is not None
    return store.read_tensors(store.manifest(ref))["w"]


def packs(store: Store) -> set[str]:
    return {info.key for info in store.backend.list("packs")}


def give_up(store: Store) -> None:
    for intent in list(store.backend.list("intents")):
        assert store.backend.withdraw(intent.key, intent.token)


def test_beginning_a_save_writes_no_chunk_and_knows_what_is_new(store: Store) -> None:
    weights = rng.normal(size=5_000)
    with store.begin_checkpoint({"w": weights, "again": weights}) as save:
        assert packs(store) == set()
        assert save.n_new_bytes == weights.nbytes
        save.commit(target(1))

    assert np.array_equal(read(store, 1), weights)


@pytest.mark.parametrize(("n_mib", "is_before"), [(1, True), (9, False)])
def test_save_of_up_to_eight_mib_is_encoded_before_the_backend_writes(n_mib: int, is_before: bool) -> None:
    events: list[str] = []

    class Noting(MemoryBackend):
        def put_all(self, blobs: Iterable[tuple[str, Iterable[Buffer]]]) -> None:
            events.append("put")
            super().put_all(blobs)

    weights = rng.normal(size=n_mib << 17)
    with Store.init_backend(Noting(), chunk_bytes=1 << 16).begin_checkpoint({"w": weights}) as save:
        save.write(watch=lambda _: events.append("encoded"))

    assert (events.index("encoded") < events.index("put")) == is_before


def test_begun_save_counts_no_stored_chunk_as_new(store: Store) -> None:
    weights = rng.normal(size=5_000)
    with store.begin_checkpoint({"w": weights}) as save:
        save.commit(target(1))
    weights[0] = 0
    with store.begin_checkpoint({"w": weights}) as save:
        assert save.n_new_bytes == 4096
    with store.begin_checkpoint({"w": weights[:0]}) as save:
        assert save.n_new_bytes == 0


def test_arrays_may_change_once_they_are_copied(store: Store) -> None:
    weights = rng.normal(size=5_000)
    expected = weights.copy()
    copy = store.copy({"w": weights})
    weights += 1
    with store.begin_checkpoint(copy) as save:
        save.commit(target(1))

    assert np.array_equal(read(store, 1), expected)


def test_an_unchanged_state_is_not_copied_again_and_committed(store: Store) -> None:
    weights = rng.normal(size=5_000)
    before = None
    for step in (1, 2):
        before = store.copy({"w": weights}, before=before)
        with store.begin_checkpoint(before) as save:
            save.commit(target(step))
        before.note_stored()

    assert np.array_equal(read(store, 2), weights)
    assert len(packs(store)) == 1


def test_stored_copy_is_relied_on_until_a_read_finds_one_of_its_chunks_damaged(store: Store) -> None:
    copy = store.copy({"w": rng.normal(size=5_000)})
    assert not store.relies_on(copy)
    doubts = store.catalog.doubts()
    with store.begin_checkpoint(copy) as save:
        save.commit(target(1))
    copy.note_stored(doubts)
    assert store.relies_on(copy)
    [pack] = packs(store)
    store.catalog.distrust(pack_name(pack), copy.columns.digests[0].tobytes())

    assert not store.relies_on(copy)


def test_arrays_that_change_before_they_are_written_are_refused(store: Store) -> None:
    weights = rng.normal(size=5_000)
    with store.begin_checkpoint({"w": weights}) as save:
        weights += 1
        with pytest.raises(ConflictError, match="was changed while it was saved"):
            save.commit(target(1))

    assert store.checkpoints() == []


def test_a_save_of_a_copy_that_was_given_up_begins_again_with_what_it_copied(store: Store) -> None:
    weights = rng.normal(size=5_000)
    expected = weights.copy()
    with store.begin_checkpoint(store.copy({"w": weights})) as save:
        weights += 1
        give_up(store)
        save.commit(target(1))

    assert np.array_equal(read(store, 1), expected)


def test_a_save_of_a_copy_fails_rather_than_store_what_it_did_not_copy(store: Store) -> None:
    weights = rng.normal(size=5_000)
    first = store.copy({"w": weights})
    with store.begin_checkpoint(first) as save:
        save.commit(target(1))
    first.note_stored()
    weights[0] = 7
    with store.begin_checkpoint(store.copy({"w": weights}, before=first)) as save:
        give_up(store)
        store.backend.delete(target(1).key)
        plan_gc(store, grace_s=0).execute()
        with pytest.raises(FencedError):
            save.commit(target(2))

    assert store.checkpoints() == []
    assert list(store.backend.list("intents")) == []


@pytest.mark.usefixtures("store_of_files")
def test_bytes_stored_are_all_that_the_store_has_grown_by(tmp_path: Path) -> None:
    store = Store.init(tmp_path)
    before = bytes_below(tmp_path)
    with store.begin_checkpoint({"w": rng.normal(size=5_000)}) as save:
        save.commit(target(1))
    after = bytes_below(tmp_path)

    assert save.n_stored_bytes == after - before


@pytest.mark.parametrize("nth", [0, 1, 2], ids=["pack", "index", "manifest"])
def test_a_save_of_a_copy_whose_storage_fails_can_be_committed_later(nth: int) -> None:
    backend = FaultyBackend(MemoryBackend())
    store = Store.init_backend(backend, chunk_bytes=4096)
    weights = rng.normal(size=5_000)
    with store.begin_checkpoint(store.copy({"w": weights})) as save:
        backend.fail(nth, operations=["put_new"])
        with pytest.raises(BackendError):
            save.write()
        save.commit(target(1))

    assert np.array_equal(read(store, 1), weights)
