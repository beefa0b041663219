"""Derived rows that an earlier release wrote are read by every later one."""

from __future__ import annotations

import io
import json
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.codecs._functions import _FUNCTIONS
from tensorcas_mlflow.maintenance import plan_gc, plan_optimize, plan_repair, verify
from tensorcas_mlflow.store import Store
from tests.golden.stores import copied

HERE = Path(__file__).parent / "v1_derived"
EXPECTED = json.loads((HERE / "expected.json").read_text())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return copied("v1_derived", "root", tmp_path)


def check_holds(store: Store) -> None:
    """Check that the checkpoint and the file are read bit for bit, and that every byte is sound."""
    expected = dict(EXPECTED["checkpoint"])
    ref, file = store.ref(expected.pop("key")), store.ref(EXPECTED["file"]["key"])
    assert ref is not None
    assert file is not None
    found = store.read_tensors(store.manifest(ref))
    assert {name: sha256(array.tobytes()).hexdigest() for name, array in found.items()} == expected
    out = io.BytesIO()
    out.writelines(store.iter_file(file))
    assert sha256(out.getvalue()).hexdigest() == EXPECTED["file"][""]
    assert verify(store, full=True).problems == ()


def test_every_golden_derived_row_is_read_bit_for_bit(store: Store) -> None:
    check_holds(store)


def test_golden_store_has_a_row_of_each_function(store: Store) -> None:
    refs = [store.ref(EXPECTED[kind]["key"]) for kind in ("checkpoint", "file")]
    manifests = [store.manifest(ref) for ref in refs if ref is not None]
    derived = [each for manifest in manifests for each in manifest.derived]

    # `test_golden_shards.py`, `_deflated.py` and `_hdf5.py` have the others.
    others = {"assemble", "deflate", "hdf5_chunks"}
    assert {each.function for each in derived} == _FUNCTIONS.keys() - others
    assert not store.catalog.find(np.ascontiguousarray(manifests[0].row("mean").digests)).found.any()


def test_golden_store_of_derived_rows_is_optimized_and_collected(store: Store) -> None:
    plan_optimize(store).execute()
    plan_gc(Store.open_backend(store.backend), grace_s=0, max_waste=0).execute()

    check_holds(Store.open_backend(store.backend))


def test_repair_of_the_golden_store_of_derived_rows_finds_nothing_to_do(store: Store) -> None:
    assert plan_repair(store).is_empty
