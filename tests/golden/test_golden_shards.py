"""Checkpoints of many ranks that an earlier release wrote are read by every later one."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest

from tensorcas_mlflow.maintenance import plan_gc, plan_optimize, plan_repair, verify
from tensorcas_mlflow.store import Store
from tests.golden.stores import copied

EXPECTED = json.loads((Path(__file__).parent / "v1_shards/expected.json").read_text())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return copied("v1_shards", "root", tmp_path)


def check_holds(store: Store) -> None:
    """Check that every tensor is read bit for bit, and that every byte is sound."""
    expected = dict(EXPECTED)
    ref = store.ref(expected.pop("key"))
    assert ref is not None
    found = store.read_tensors(store.manifest(ref))
    assert {name: sha256(array.tobytes()).hexdigest() for name, array in found.items()} == expected
    assert verify(store, full=True).problems == ()


def test_golden_store_of_shards_is_read_bit_for_bit(store: Store) -> None:
    ref = store.ref(EXPECTED["key"])
    assert ref is not None
    manifest = store.manifest(ref)

    assert [each.function for each in manifest.derived] == ["assemble", "assemble"]
    assert manifest.row("rows").cuts is not None
    check_holds(store)


def test_golden_store_of_shards_is_optimized_and_collected(store: Store) -> None:
    plan_optimize(store).execute()
    plan_gc(Store.open_backend(store.backend), grace_s=0, max_waste=0).execute()

    check_holds(Store.open_backend(store.backend))


def test_repair_of_the_golden_store_of_shards_finds_nothing_to_do(store: Store) -> None:
    assert plan_repair(store).is_empty
