"""Deltas that an earlier release wrote are read by every later one.

What must come out is said in ``v1_deltas/expected.json``, by hashes that none of our code has made.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.codecs import DELTA
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout.packs import bases_of, is_delta, pack_key
from tensorcas_mlflow.maintenance import Census, plan_gc, plan_optimize, plan_repair, verify
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import list_packs, parse_intent, read_pack_table
from tests.golden import golden_v1_deltas as golden
from tests.golden.stores import copied

HERE = Path(__file__).parent
EXPECTED = json.loads((HERE / "v1_deltas" / "expected.json").read_text())


@pytest.fixture(params=["root", "objects"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(kind: str, tmp_path: Path) -> Store:
    return copied("v1_deltas", kind, tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Store:
    """The one of files."""
    return copied("v1_deltas", "root", tmp_path)


def assert_holds(store: Store, kind: str) -> None:
    """See that all of it loads bit for bit to somebody who opens the store now."""
    fresh = Store.open_backend(store.backend)
    for key, said in EXPECTED[kind].items():
        if key.startswith("refs/"):
            ref = fresh.ref(key)
            assert ref is not None, key
            assert golden.sha_of(fresh.read_tensors(fresh.manifest(ref))) == said
    assert verify(fresh, full=True).problems == ()


def tables(store: Store) -> dict[str, Any]:
    return {name: read_pack_table(store.backend, name) for name, _ in list_packs(store.backend)}


def test_every_golden_step_with_deltas_is_read_bit_for_bit(store: Store, kind: str) -> None:
    assert {key for key in EXPECTED[kind] if key.startswith("refs/")} == {ref.key for ref in store.checkpoints()}
    assert_holds(store, kind)


def test_every_step_is_read_where_it_lies_and_nothing_is_written() -> None:
    def blobs() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in (HERE / "v1_deltas").rglob("*") if path.is_file()}

    before = blobs()
    assert_holds(Store.open(HERE / "v1_deltas" / "root"), "root")

    assert blobs() == before


def test_a_save_shares_what_is_there_and_is_stored_against_it(root: Store) -> None:
    before = tables(root)
    with root.write_checkpoint(golden.tensors(3)) as same:
        same.commit(RefTarget(run_id="other", step=3))
    with root.write_checkpoint({"half": golden.tensors(4)["half"]}) as next_one:
        next_one.commit(RefTarget(run_id="other", step=4))
    [new] = tables(root).keys() - before.keys()

    assert same.n_new_bytes == 0
    assert is_delta(tables(root)[new]).all()
    assert {base.pack for base in bases_of(tables(root)[new])} <= before.keys()
    assert_holds(root, "root")


def test_a_collection_keeps_what_steps_and_a_save_under_way_rely_on(root: Store) -> None:
    plan_gc(root, grace_s=3600, max_waste=0).execute()
    stored = np.concatenate([rows["digest"] for rows in tables(root).values()])

    assert digest(golden.counts(9).tobytes()) in {each.tobytes() for each in stored}
    assert_holds(root, "root")


def test_a_collection_that_gives_the_save_up_keeps_the_steps(store: Store, kind: str) -> None:
    plan_gc(store, grace_s=0, max_waste=0).execute()

    assert list(store.backend.list("intents")) == []
    assert_holds(store, kind)


def test_an_optimization_goes_on_from_where_the_earlier_one_ended(store: Store, kind: str) -> None:
    plan = plan_optimize(store)
    report = plan.execute()

    assert [label[-6:] for label in plan.labels] == {"root": ["step 2", "step 3"], "objects": ["step 2"]}[kind]
    # The saved copies in "root" take less room than new packs would.
    assert report.is_undone == (kind == "root")
    assert (plan_optimize(Store.open_backend(store.backend)).n_chunks == 0) != report.is_undone
    assert_holds(store, kind)


def test_repair_of_the_golden_store_of_deltas_finds_nothing_to_do(store: Store) -> None:
    assert plan_repair(store).is_empty


def test_a_delta_of_which_the_base_is_lost_is_told_apart_from_what_is_whole(root: Store) -> None:
    [first] = [name for name, rows in tables(root).items() if (rows["effort"] > 0).any()]
    root.backend.delete(pack_key(first))

    problems = verify(Store.open(root.uri), full=True).problems

    assert {problem.checkpoint for problem in problems} == {f"run run step {step}" for step in range(4)}


def test_golden_store_of_deltas_holds_codecs_and_chains_of_two(root: Store) -> None:
    rows = np.concatenate(list(tables(root).values()))
    bases = {name: {base.pack for base in bases_of(of[is_delta(of)])} for name, of in tables(root).items()}

    assert set(rows["codec"].tolist()) == {0, 1, 3, 4}
    assert set(rows["depth"].tolist()) == {0, 1, 2}
    assert set(rows["effort"].tolist()) == {0, 2}
    assert set(rows["typesize"][is_delta(rows)].tolist()) == {2, 4, 8}
    assert any(name in of for name, of in bases.items())
    assert any(len(of - {name}) > 1 for name, of in bases.items())


def test_golden_deltas_are_plain_and_nudged_against_full_chunks_and_deltas(root: Store) -> None:
    found = set()
    for name, rows in tables(root).items():
        blob = root.backend.get(pack_key(name))
        for entry in rows[rows["codec"] == DELTA.number]:
            found.add((blob[int(entry["offset"]) + 1] & 15, int(entry["depth"])))

    assert found == {(0, 1), (0, 2), (4, 1), (4, 2)}


def test_golden_store_of_deltas_has_packs_and_intent_of_version_2_and_a_census(root: Store) -> None:
    footers = {root.backend.get(pack_key(name))[-64:-56] for name, _ in list_packs(root.backend)}
    census = Census(root.backend)
    census.load()
    intents = [parse_intent(info, root.backend.get(info.key)) for info in root.backend.list("intents")]

    assert b"TCPTBL\r\2" in footers
    assert b'"format": 3' in root.backend.get(next(iter(root.backend.list("census"))).key)[64:]
    assert census.manifests
    assert census.packs
    assert [len(intent.bases) > 1 for intent in intents] == [True]
