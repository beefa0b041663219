"""Limits of a save: every reader reads an accepted save, and a save refuses content that no reader could read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.errors import TensorCasError
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.maintenance import find_shares, plan_gc, plan_repair, store_stats, verify
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.tensorcas_store import TensorCasStore

CHUNK_BYTES = 4096
TENSORS = {"w": np.arange(2000, dtype=np.float32)}
OFTEN = settings(max_examples=60, suppress_health_check=list(HealthCheck))

edges = st.sampled_from([0, 1, -1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**30])
texts = st.one_of(
    st.sampled_from(
        ["", ".", "..", "@", "~", "~x", "%", "%41", "a/b", "a\nb", "ä", "\ud800", "\udcff", "x" * 5000, "\0"]
    ),
    st.text(max_size=300),
)
numbers = st.one_of(
    st.floats(),
    st.sampled_from(
        [10**400, -(10**30), np.float32("nan"), np.float64("inf"), np.int64(-5), np.bool_(True), True, 2**64]
    ),
)


def everything_reads(store: Store) -> list[Ref]:
    """Do all that reads every ref and manifest, and return the refs."""
    store = Store.open_backend(store.backend)
    refs = store.checkpoints()
    for ref in refs:
        store.read_tensors(store.manifest(ref))
    store_stats(store)
    find_shares(store, "steps")
    assert plan_gc(store, grace_s=0).unread_refs == {}
    assert verify(store, full=True).problems == ()
    assert str(plan_repair(store)) == "nothing is damaged"
    return refs


def fresh() -> Store:
    return Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)


@pytest.mark.long
@OFTEN
@given(
    said=st.fixed_dictionaries(
        {},
        optional={
            "run_id": texts,
            "step": edges | st.booleans(),
            "name": texts,
            "parent_step": edges,
            "path": texts,
            "copy_path": texts,
            "uri": texts,
            "model_id": texts,
            "metrics": st.dictionaries(texts, numbers, max_size=3),
        },
    )
)
@example({"run_id": "r", "step": -(2**63), "parent_step": -(2**63)})
@example({"run_id": "r", "step": True})
@example({"run_id": "r", "step": 2**63})
@example({"run_id": "r", "step": 1, "metrics": {"loss": 10**400}})
@example({"run_id": "r", "step": 1, "metrics": {"x" * 70_000: 1.0}})
def test_a_ref_that_a_save_commits_is_read_by_everything(said: dict[str, Any]) -> None:
    store = fresh()
    with store.write_checkpoint(TENSORS) as pending:
        try:
            written = pending.commit(RefTarget(**said))
        except ValueError:
            written = None
    refs = everything_reads(store)

    assert [ref.write for ref in refs] == ([] if written is None else [written.write])
    for ref in refs:
        assert (ref.run_id, ref.step, ref.name) == (said.get("run_id"), said.get("step"), said.get("name"))
        assert store.ref(ref.key) is not None
        for name, value in said.get("metrics", {}).items():
            got = dict(ref.metrics or {})[name]
            assert got == float(value) or (math.isnan(got) and math.isnan(value))


dtypes = st.sampled_from(
    [
        *("f4", "bool", "S1", "S7", "U3", ">f8", ">U2", "M8[25s]", "m8[as]", "M8", "i1", "c16"),
        *("S0", "U0", "V3", "O", "g", ">M8[s]"),
        [("a", "f4"), ("b", "i8", (2, 3))],
        [("a", "f4"), ("ä", "i8")],
        [],
    ]
)
shapes = st.one_of(
    st.sampled_from([(), (0,), (0, 2**40), (2**54, 0), (2**55, 0), (0,) * 32, (1,) * 32, (1, 0, 3)]),
    st.lists(st.integers(0, 3), max_size=5).map(tuple),
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
    max_leaves=5,
)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.long
@OFTEN
@given(name=texts, dtype=dtypes, shape=shapes, metadata=st.dictionaries(texts, plain, max_size=2), flavor=texts)
@example("w", "f4", (3,), {"n": 10**5000}, "f")
@example("w", "f4", (3,), {1: 2}, "f")
@example("w", "f4", (3,), {"n": np.float32(3)}, "f")
@example("w", "f4", (3,), {"n": (1, 2)}, "f")
@example("w", "f4", (3,), {}, "x" * 201)
def test_a_checkpoint_that_a_save_commits_is_read_by_everything(
    name: str, dtype: Any, shape: tuple[int, ...], metadata: Any, flavor: str
) -> None:
    store = fresh()
    array = np.zeros(shape, dtype=dtype)
    is_committed = False
    try:
        with store.write_checkpoint({name: array}, metadata=metadata, flavor=flavor) as pending:
            pending.commit(RefTarget(run_id="run", step=1))
            is_committed = True
    except (ValueError, TensorCasError):
        pass
    refs = everything_reads(store)

    assert len(refs) == is_committed
    for ref in refs:
        got = store.read_tensors(store.manifest(ref))[name]
        assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_metadata_that_are_nested_too_deeply_are_refused() -> None:
    store = fresh()
    with store.write_checkpoint(TENSORS, metadata={"n": nested(100)}) as pending:
        pending.commit(RefTarget(run_id="run", step=1))

    with pytest.raises(ValueError, match="plain JSON"):
        store.write_checkpoint(TENSORS, metadata={"n": nested(5000)})
    assert len(everything_reads(store)) == 1


@pytest.mark.parametrize("chunk_bytes", [0, 1, 2048, 4096, 5000, 2**26, 2**27, -4096, 2**70])
def test_a_store_of_any_chunk_size_that_is_made_is_read(chunk_bytes: int) -> None:
    backend = MemoryBackend()
    try:
        Store.init_backend(backend, chunk_bytes=chunk_bytes)
    except ValueError:
        assert backend.stat("format") is None
        return

    with Store.open_backend(backend).write_checkpoint(TENSORS) as pending:
        pending.commit(RefTarget(run_id="run", step=1))
    assert len(everything_reads(Store.open_backend(backend))) == 1


@pytest.mark.parametrize("step", [True, False, 2**63, -(2**63) - 1, 1.0, "1", None, np.float32(1)])
def test_a_step_that_mlflow_cannot_hold_is_refused_before_anything_is_written(step: Any, tmp_path: Any) -> None:
    store = TensorCasStore(tmp_path, "run")

    with pytest.raises(ValueError, match="step"):
        store.save({"w": np.zeros(3)}, step=step)
    assert list(store.store.backend.list("packs")) == []


@pytest.mark.parametrize("step", [0, -1, -(2**63), 2**63 - 1, np.int64(-(2**63)), np.uint8(7)])
def test_any_other_step_is_saved_and_read(step: Any, tmp_path: Any) -> None:
    store = TensorCasStore(tmp_path, "run")
    store.save({"w": np.arange(300.0)}, step=step, metrics={"loss": np.float32(0.5)})

    assert store.list_checkpoints() == [int(step)]
    assert store.store_stats(tmp_path).checkpoints == 1
    assert everything_reads(store.store)[0].step == int(step)
