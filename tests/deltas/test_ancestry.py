"""The bases behind deltas, and the cache of decoded bytes."""

from __future__ import annotations

import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.base.digest import DIGEST_BYTES, Digests, digest
from tensorcas_mlflow.chunk_io import _recent_chunks
from tensorcas_mlflow.chunk_io._recent_chunks import RecentChunks
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store._base_plans import Ancestry
from tests.deltas.made import (
    CHUNK_BYTES,
    a_chunk,
    base_packs,
    flip,
    lose,
    packs_of,
    put_pack,
    save,
    save_chunks,
    weights,
)

A = [a_chunk(seed) for seed in range(4)]
"""Each is stored against the one before, but for the first."""
NEW = a_chunk(9)
N = 60_000
"""Weights that are one chunk of a store as it is made by default."""


@pytest.fixture
def store() -> Store:
    return Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)


@pytest.fixture
def packs(store: Store) -> list[str]:
    """The packs of ``A``."""
    made = [put_pack(store, A[0])]
    for seed in range(1, len(A)):
        made.append(put_pack(store, (A[seed], A[seed - 1], made[-1])))
    store.catalog.refresh()
    return made


def digests_of(*chunks: bytes) -> Digests:
    return np.frombuffer(b"".join(map(digest, chunks)), np.uint8).reshape(-1, DIGEST_BYTES)


def chain(found: Ancestry, row: int) -> list[tuple[int, bytes]]:
    """Return the depths and digests of a chunk and the bases behind it."""
    return [(depth, found_digest) for depth, found_digest, _ in found.chain(row)]


def test_each_delta_of_a_chain_adds_its_cost(store: Store, packs: list[str]) -> None:
    found = Ancestry.of(store.catalog, digests_of(A[2]))

    assert [cost for _, _, cost in found.chain(0)] == [2.0, 1.0, 0.0]


def test_ancestry_goes_back_to_what_is_stored_in_full(store: Store, packs: list[str]) -> None:
    found = Ancestry.of(store.catalog, digests_of(A[2], NEW, A[0]))

    assert chain(found, 0) == [(2, digest(A[2])), (1, digest(A[1])), (0, digest(A[0]))]
    assert found.chain(1) == []
    assert chain(found, 2) == [(0, digest(A[0]))]
    assert found.packs == set(packs[:3])


@pytest.mark.parametrize(
    ("depth", "passes", "expected"),
    [(0, 0.0, [0, 0, 0, 0]), (1, 0.0, [0, 1, 1, 1]), (3, 0.0, [0, 1, 2, 2]), (3, 1.0, [0, 1, 1, 1])],
)
def test_nearest_base_within_depth_and_cost_replaces_a_chunk_beyond_them(
    store: Store, packs: list[str], depth: int, passes: float, expected: list[int]
) -> None:
    found = Ancestry.of(store.catalog, digests_of(*A, NEW)).up_to(depth, passes)

    assert [chain(found, row) for row in range(5)] == [
        *([(at, digest(A[at])) for at in range(last, -1, -1)] for last in expected),
        [],
    ]


def test_a_chain_lies_in_packs_only_if_all_of_it_does(store: Store, packs: list[str]) -> None:
    found = Ancestry.of(store.catalog, digests_of(A[0], A[2], NEW))

    assert found.lies_in(set(packs)).tolist() == [True, True, False]
    assert found.lies_in({packs[0], packs[2]}).tolist() == [True, False, False]


def test_a_chain_through_a_pack_that_is_left_out_is_not_found(store: Store, packs: list[str]) -> None:
    found = Ancestry.of(store.catalog, digests_of(A[0], A[2]), {packs[1]})

    assert [chain(found, row) for row in (0, 1)] == [[(0, digest(A[0]))], []]


def test_chunks_are_remembered_until_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_recent_chunks, "_MOST_BYTES", 3 * CHUNK_BYTES)
    recent = RecentChunks(MemoryBackend())
    recent.note(digests_of(*A[:3]), A[:3])
    asked_for = recent.find(digests_of(A[0]))
    recent.note(digests_of(A[3]), A[3:])

    assert asked_for == [A[0]]
    assert recent.find(digests_of(A[0], A[2], A[3])) == [A[0], A[2], A[3]]
    assert recent.find(digests_of(A[1])) is None


def test_remembered_bytes_that_have_changed_are_not_given_out() -> None:
    recent = RecentChunks(MemoryBackend())
    spoilt = bytearray(A[0])
    recent.note(digests_of(A[0]), [spoilt])
    spoilt[7] ^= 1

    assert recent.find(digests_of(A[0])) is None


@pytest.fixture
def steps() -> Store:
    """A store with a state that is remembered by who holds it, in one pack."""
    store = Store.init_backend(MemoryBackend())
    save(store, {"w": weights(0, N)}, 0)
    return store


def saved_again(store: Store) -> Store:
    """Save the next state and load it anew."""
    save(store, {"w": weights(1, N)}, 1)
    fresh = Store.open_backend(store.backend)
    ref = fresh.ref(RefTarget(run_id="run", step=1).key)
    assert ref is not None
    assert fresh.read_tensors(fresh.manifest(ref))["w"].tobytes() == weights(1, N).tobytes()
    return fresh


def test_a_remembered_base_of_which_the_stored_copy_is_damaged_is_no_base(steps: Store) -> None:
    [pack] = packs_of(steps.backend)
    flip(steps, pack, weights(0, N).tobytes())
    saved_again(steps)

    assert base_packs(steps.backend) == {}


def test_a_remembered_base_whose_pack_is_gone_is_no_base(steps: Store) -> None:
    [pack] = packs_of(steps.backend)
    lose(steps, pack)
    saved_again(steps)

    assert base_packs(steps.backend) == {}


def test_a_remembered_base_is_named_where_its_copy_is_whole(steps: Store) -> None:
    [pack] = packs_of(steps.backend)
    saved_again(steps)

    assert list(base_packs(steps.backend).values()) == [{pack}]


def test_packs_that_come_one_by_one_are_searched_in_few_tables(store: Store) -> None:
    for seed in range(20):
        save_chunks(store, seed, a_chunk(100 + seed))

    assert store.catalog.find(digests_of(*(a_chunk(100 + seed) for seed in range(20)))).found.all()
    assert len(store.catalog._tables) < 4
