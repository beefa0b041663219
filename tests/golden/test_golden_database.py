"""A database that an earlier release wrote is read by every later one.

What must come out is said in ``v2/expected.json``, by hashes that none of our code has made.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tensorcas_mlflow.codecs import DELTA
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout.packs import pack_key
from tensorcas_mlflow.maintenance import plan_gc, plan_repair, verify
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import list_packs, read_pack_table
from tests.golden.golden_v1_deltas import sha_of
from tests.golden.make_v2 import small
from tests.golden.stores import copied

EXPECTED = json.loads((Path(__file__).parent / "v2" / "expected.json").read_text())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return copied("v2", "root", tmp_path)


def assert_holds(store: Store) -> None:
    """See that all of it loads bit for bit to somebody who opens the store now."""
    fresh = Store.open(store.uri)
    assert {info.key for info in fresh.backend.list("refs")} == set(EXPECTED)
    for key, said in EXPECTED.items():
        ref = fresh.ref(key)
        assert ref is not None, key
        assert sha_of(fresh.read_tensors(fresh.manifest(ref))) == said
    assert verify(fresh, full=True).problems == ()


@pytest.mark.long
def test_every_golden_step_in_a_database_is_read_bit_for_bit(store: Store) -> None:
    assert_holds(store)


def test_golden_database_holds_plain_and_grouped_deltas(store: Store) -> None:
    found = set()
    for name, _ in list_packs(store.backend):
        blob = store.backend.get(pack_key(name))
        rows = read_pack_table(store.backend, name)
        found |= {blob[int(entry["offset"]) + 1] & 15 for entry in rows[rows["codec"] == DELTA.number]}

    assert {0, 1} <= found


def test_golden_database_needs_no_repair(store: Store) -> None:
    assert plan_repair(store).is_empty


@pytest.mark.long
def test_golden_database_is_written_to_and_collected(store: Store) -> None:
    with store.write_checkpoint(small(2000)) as pending:
        ref = pending.commit(RefTarget(run_id="new", step=1))
    fresh = Store.open(store.uri)
    assert sha_of(fresh.read_tensors(fresh.manifest(ref))) == sha_of(small(2000))
    store.drop(ref)
    plan_gc(Store.open(store.uri), grace_s=0).execute()

    assert_holds(store)
