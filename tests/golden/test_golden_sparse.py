"""Sparse and nudged deltas in deep chains that an earlier release wrote are read by every later one."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest

from tensorcas_mlflow.codecs import Transform
from tensorcas_mlflow.layout.packs import is_delta, pack_key
from tensorcas_mlflow.maintenance import plan_gc, plan_optimize, plan_repair, verify
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import list_packs, read_pack_table
from tests.golden.stores import copied

FOLDERS = {Transform.SPARSE: "v1_sparse", Transform.NUDGED: "v1_nudged"}


@pytest.fixture(params=FOLDERS, ids=lambda transform: transform.name.lower())
def transform(request: pytest.FixtureRequest) -> Transform:
    return Transform(request.param)


@pytest.fixture
def store(transform: Transform, tmp_path: Path) -> Store:
    return copied(FOLDERS[transform], "root", tmp_path)


def check_holds(store: Store, transform: Transform) -> None:
    """Check that every step loads bit for bit, and that every byte is sound."""
    wanted = json.loads((Path(__file__).parent / FOLDERS[transform] / "expected.json").read_text())
    assert {ref.key for ref in store.checkpoints()} == wanted.keys()
    for key, expected in wanted.items():
        ref = store.ref(key)
        assert ref is not None
        found = store.read_tensors(store.manifest(ref))
        assert {name: sha256(array.tobytes()).hexdigest() for name, array in found.items()} == expected
    assert verify(store, full=True).problems == ()


def test_every_golden_step_with_deltas_of_few_words_is_read_bit_for_bit(store: Store, transform: Transform) -> None:
    check_holds(store, transform)


def test_golden_store_holds_deltas_of_words_of_each_size_in_chains_of_seven(store: Store, transform: Transform) -> None:
    found = set()
    for name, _ in list_packs(store.backend):
        data = bytes(store.backend.get(pack_key(name)))
        table = read_pack_table(store.backend, name)
        for entry in table[is_delta(table)]:
            found.add((Transform(data[int(entry["offset"]) + 1] & 15), int(entry["typesize"]), int(entry["depth"])))

    assert {(transform, size, depth) for size in (2, 4, 8) for depth in range(1, 8)} <= found


def test_golden_store_of_deltas_of_few_words_is_optimized_and_collected(store: Store, transform: Transform) -> None:
    plan_optimize(store).execute()
    plan_gc(Store.open_backend(store.backend), grace_s=0, max_waste=0).execute()

    check_holds(Store.open_backend(store.backend), transform)


def test_repair_of_the_golden_store_of_deltas_of_few_words_finds_nothing_to_do(store: Store) -> None:
    assert plan_repair(store).is_empty
