"""Two checkpoints compared by their manifests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.diff import Diff, diff
from tensorcas_mlflow.store import RefTarget, Store
from tensorcas_mlflow.testing import FaultyBackend


@pytest.fixture
def store() -> Store:
    return Store.init_backend(FaultyBackend(MemoryBackend()), chunk_bytes=4096)


def compare(store: Store, before: dict[str, Any], after: dict[str, Any], cuts: Any = None) -> Diff:
    manifests = []
    for step, tensors in enumerate((before, after)):
        with store.write_checkpoint(tensors, cuts=cuts if step else None) as pending:
            manifests.append(store.manifest(pending.commit(RefTarget(run_id="run", step=step))))
    return diff(*manifests)


def test_every_tensor_is_added_removed_changed_or_equal(store: Store) -> None:
    before = {"same": np.arange(2000), "gone": np.zeros(3), "other": np.zeros(10, "f4"), "empty": np.empty((0, 2))}
    after = {"new": np.ones(5, "f2"), "other": np.ones(10, "f4"), "same": np.arange(2000), "empty": np.empty((0, 2))}

    assert compare(store, before, after) == Diff(
        added=("new",),
        removed=("gone",),
        changed=("other",),
        equal=("same", "empty"),
        added_bytes=10,
        removed_bytes=24,
        changed_bytes=40,
        equal_bytes=16_000,
    )


@pytest.mark.parametrize(
    "after",
    [np.zeros((2, 3)), np.zeros(6, "i8"), np.full(6, -0.0), np.zeros(7), np.zeros((6, 0)), np.zeros(())],
    ids=["shape", "dtype", "sign of zero", "length", "empty", "scalar"],
)
def test_a_tensor_of_other_bits_or_another_kind_has_changed(store: Store, after: Any) -> None:
    assert compare(store, {"w": np.zeros(6)}, {"w": after}).changed == ("w",)


def test_a_nan_is_equal_to_itself(store: Store) -> None:
    assert compare(store, {"w": np.full(6, np.nan)}, {"w": np.full(6, np.nan)}).equal == ("w",)


def test_what_is_equal_has_one_identity_and_what_changed_has_two(store: Store) -> None:
    rng = np.random.default_rng(0)
    before = {str(n): rng.integers(0, 2, (n, 2)) for n in range(20)}
    after = {str(n): rng.integers(0, 2, (n, 2)) if n % 3 else before[str(n)] for n in range(20)}
    found = compare(store, before, after)
    old, new = (store.manifest(ref) for ref in store.checkpoints())

    for name in before:
        assert (name in found.equal) == (old.row(name).identity == new.row(name).identity)


def test_comparing_reads_no_data(store: Store) -> None:
    with store.write_checkpoint({"w": np.arange(10_000)}) as pending:
        manifest = store.manifest(pending.commit(RefTarget(run_id="run", step=1)))
    store.backend.calls.clear()
    diff(manifest, manifest)

    assert store.backend.calls == []
