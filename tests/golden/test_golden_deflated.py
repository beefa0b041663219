"""Compressed files whose content an earlier release stored are read by every later one."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest

from tensorcas_mlflow.maintenance import plan_gc, plan_optimize, verify
from tensorcas_mlflow.store import Store
from tests.golden.stores import copied

EXPECTED = json.loads((Path(__file__).parent / "v1_deflated/expected.json").read_text())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return copied("v1_deflated", "root", tmp_path)


def check_holds(store: Store) -> None:
    """Check that both files are read bit for bit, that they are derived, and that every byte is sound."""
    levels: list[int] = []
    for key, digest in EXPECTED.items():
        ref = store.ref(key)
        assert ref is not None
        assert sha256(b"".join(map(bytes, store.iter_file(ref)))).hexdigest() == digest
        levels += [each.params["level"] for each in store.manifest(ref).derived]
    assert len(levels) == 10
    assert verify(store, full=True).problems == ()


def test_golden_compressed_files_are_read_bit_for_bit(store: Store) -> None:
    check_holds(store)


def test_golden_compressed_files_are_optimized_and_collected(store: Store) -> None:
    plan_optimize(store).execute()
    plan_gc(Store.open_backend(store.backend), grace_s=0, max_waste=0).execute()

    check_holds(Store.open_backend(store.backend))
