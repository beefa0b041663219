"""Two checkpoints compared, wherever they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.reader import CheckpointDiff, diff
from tensorcas_mlflow.store import Store
from tests.reader.checkpoints import moe, opened

BEFORE = moe()
AFTER = {name: array for name, array in BEFORE.items() if "norm" not in name} | {
    "model.embed_tokens.weight": BEFORE["model.embed_tokens.weight"].copy(),
    "new.weight": np.ones(3),
}
AFTER["model.embed_tokens.weight"][:100] = 1
REMOVED = tuple(name for name in BEFORE if "norm" in name)


@pytest.fixture
def steps() -> Store:
    return Store.init_backend(MemoryBackend(), chunk_bytes=4096)


def compare(store: Store, before: dict[str, Any], after: dict[str, Any]) -> CheckpointDiff:
    return diff(opened(store, before, 0), opened(store, after, 1))


def test_every_tensor_is_added_removed_changed_or_equal(steps: Store) -> None:
    before = {"same": np.arange(2000), "gone": np.zeros(3), "other": np.zeros(10, "f4"), "empty": np.empty((0, 2))}
    after = {"new": np.ones(5, "f2"), "other": np.ones(10, "f4"), "same": np.arange(2000), "empty": np.empty((0, 2))}

    assert compare(steps, before, after) == CheckpointDiff(
        added=("new",),
        removed=("gone",),
        changed=("other",),
        equal=("same", "empty"),
        other=("order",),
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
def test_a_tensor_of_other_bits_or_another_kind_has_changed(steps: Store, after: Any) -> None:
    assert compare(steps, {"w": np.zeros(6)}, {"w": after}).changed == ("w",)


def test_a_nan_is_equal_to_itself(steps: Store) -> None:
    assert compare(steps, {"w": np.full(6, np.nan)}, {"w": np.full(6, np.nan)}).equal == ("w",)


def test_equal_tensors_have_one_identity_and_changed_ones_two(steps: Store) -> None:
    rng = np.random.default_rng(0)
    before = {str(n): rng.integers(0, 2, (n, 2)) for n in range(20)}
    after = {str(n): rng.integers(0, 2, (n, 2)) if n % 3 else before[str(n)] for n in range(20)}
    found = compare(steps, before, after)
    old, new = (steps.manifest(ref) for ref in steps.checkpoints())

    for name in before:
        assert (name in found.equal) == (old.row(name).identity == new.row(name).identity)


@pytest.mark.parametrize("chunk_bytes", [1 << 18, 4096])
def test_diff_works_across_stores_of_other_chunk_sizes(tmp_path: Path, chunk_bytes: int) -> None:
    before = opened(Store.init(tmp_path / "a"), BEFORE)
    after = opened(Store.init(tmp_path / "b", chunk_bytes=chunk_bytes), AFTER)

    found = diff(before, after)

    assert found.added == ("new.weight",)
    assert found.removed == REMOVED
    assert found.changed == ("model.embed_tokens.weight",)
    assert len(found.equal) == len(BEFORE) - len(REMOVED) - 1
    assert found.values == {}


def test_comparing_two_steps_reads_no_tensor(tmp_path: Path) -> None:
    store = Store.init(tmp_path)
    before, after = opened(store, BEFORE, 1), opened(store, AFTER, 2)
    n_bytes = before.stats.read_bytes + after.stats.read_bytes

    diff(before, after)

    assert before.stats.read_bytes + after.stats.read_bytes == n_bytes
    assert before.stats.mapped_bytes + after.stats.mapped_bytes == 0


def test_a_part_is_compared_with_a_whole(tmp_path: Path) -> None:
    store = Store.init(tmp_path)
    state = opened(store, {f"model.{name}": array for name, array in BEFORE.items()} | {"epoch": np.array(3)}, 1)

    found = diff(opened(store, BEFORE, 2), state.below("model"))

    assert found.equal == tuple(BEFORE)
    assert found.changed == found.added == found.removed == ()


def test_diff_says_how_far_the_numbers_of_a_changed_tensor_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorcas_mlflow.reader._contents.BATCH_BYTES", 10_000)
    old = {"a": np.linspace(0, 1, 9_000), "b": np.arange(6.0), "c": np.zeros(4, "f4"), "d": np.ones(3)}
    new = {"a": np.linspace(0, 1, 9_000), "b": np.arange(6.0).reshape(2, 3), "c": np.zeros(4, "f4"), "d": np.ones(3)}
    new["a"][8_500] += 2
    new["c"][1] = 0.5
    store = Store.init(tmp_path)

    found = diff(opened(store, old, 1), opened(store, new, 2), values=True)

    assert found.changed == ("a", "b", "c")
    assert set(found.values) == {"a", "c"}
    assert (found.values["a"].max_absolute, found.values["a"].n_equal) == (2.0, 8_999)
    assert found.values["c"].mean_absolute == 0.125


def test_time_that_a_comparison_takes_to_read_is_counted(tmp_path: Path) -> None:
    before = opened(Store.init(tmp_path / "a"), BEFORE)
    after = opened(Store.init(tmp_path / "b", chunk_bytes=4096), AFTER)

    seconds = after.stats.read_s

    diff(before, after)

    assert after.stats.read_s > seconds
    assert after.stats.read_bytes + after.stats.mapped_bytes > BEFORE["model.embed_tokens.weight"].nbytes
