"""An optimization takes no more room than the saves took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import _optimize, plan_optimize, verify
from tensorcas_mlflow.store import Store, protocol
from tests.maintenance.optimize.histories import HISTORIES, bytes_on_disk, drifting, moving, save_history
from tests.maintenance.optimize.trainings import n_bytes_of, optimize, same
from tests.pairs import pairs_of


def training(scale: float, n_steps: int, dtype: Any) -> list[dict[str, Any]]:
    """Return steps of a training whose weights move by about some amount a step."""
    draw = np.random.default_rng(0)
    weights = {f"layers.{at}.weight": draw.normal(0, 0.02, (128, 256)) for at in range(3)}
    steps: list[dict[str, Any]] = []
    for _ in range(n_steps):
        steps.append({name: each.astype(dtype) for name, each in weights.items()})
        weights = {name: each + scale * draw.standard_normal(each.shape) for name, each in weights.items()}
    return steps


@pytest.mark.long
@pytest.mark.parametrize(
    ("scale", "dtype", "n_steps"),
    pairs_of([1e-7, 3e-7, 1e-6, 1e-5, 1e-4], [np.float32, ml_dtypes.bfloat16], [8, 12]),
)
def test_an_optimized_training_takes_no_more_room_than_a_saved_one(scale: float, dtype: Any, n_steps: int) -> None:
    store, steps = Store.init_backend(MemoryBackend(), chunk_bytes=64 << 10), training(scale, n_steps, dtype)
    for number, step in enumerate(steps):
        with store.write_checkpoint(step, series="run") as save:
            save.commit(RefTarget(run_id="run", step=number))
    before = n_bytes_of(store.backend)
    optimize(store)
    fresh = Store.open_backend(store.backend)

    assert n_bytes_of(store.backend) <= before
    for number, step in enumerate(steps):
        ref = fresh.ref(RefTarget(run_id="run", step=number).key)
        assert ref is not None
        assert same(fresh.read_tensors(fresh.manifest(ref)), step)
    assert optimize(store).written_bytes == 0


def test_fine_tunes_saved_before_their_model_and_its_copies_take_no_more_room() -> None:
    """The transposed copy has the names and, of square weights, the shapes of the model."""
    draw = np.random.default_rng(0)
    base = {f"layers.{at}.q": draw.normal(0, 0.02, (128, 128)).astype(np.float32) for at in range(8)}
    tuned = [
        {name: each + (1e-6 * draw.standard_normal(each.shape)).astype(np.float32) for name, each in base.items()}
        for _ in range(4)
    ]
    store = Store.init_backend(MemoryBackend(), chunk_bytes=64 << 10)
    models = [
        {name: (one + other) / 2 for (name, one), other in zip(tuned[0].items(), tuned[1].values(), strict=True)},
        {name: np.ascontiguousarray(each.T) for name, each in base.items()},
        *({f"base_model.model.{name}": each for name, each in one.items()} for one in tuned),
        base,
    ]
    for number, each in enumerate(models):
        with store.write_checkpoint(each) as save:
            save.commit(RefTarget(run_id=f"run {number}", step=0))
    before = n_bytes_of(store.backend)
    optimize(store)

    assert n_bytes_of(store.backend) <= before
    for number, each in enumerate(models):
        fresh = Store.open_backend(store.backend)
        ref = fresh.ref(RefTarget(run_id=f"run {number}", step=0).key)
        assert ref is not None
        assert same(fresh.read_tensors(fresh.manifest(ref)), each)


def optimize_on_disk(root: Path) -> tuple[int, int]:
    """Optimize a store; return the bytes of its files before and after."""
    before = bytes_on_disk(root)
    plan_optimize(Store.open(root)).execute()
    return before, bytes_on_disk(root)


def check_steps(root: Path, saved: Sequence[Mapping[str, Any]]) -> None:
    store = Store.open(root)
    assert not verify(store, full=True).problems
    for step, state in enumerate(saved):
        ref = store.ref(RefTarget(run_id="run", step=step).key)
        assert ref is not None
        assert same(store.read_tensors(store.manifest(ref)), state)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["fast", "balanced", "small"])
@pytest.mark.parametrize("kind", HISTORIES)
def test_an_optimized_history_takes_no_more_room_on_the_disk(kind: str, policy: str, tmp_path: Path) -> None:
    saved = save_history(tmp_path, HISTORIES[kind](np.random.default_rng(0)), policy)
    before, after = optimize_on_disk(tmp_path)

    assert after <= before
    check_steps(tmp_path, saved)
    assert plan_optimize(Store.open(tmp_path)).n_chunks == 0
    assert optimize_on_disk(tmp_path) == (after, after)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.int16, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float64])
def test_an_optimized_drift_of_each_dtype_takes_no_more_room_on_the_disk(dtype: Any, tmp_path: Path) -> None:
    scale = 1.0 if np.dtype(dtype).kind == "i" else 1e-4
    saved = save_history(tmp_path, drifting(np.random.default_rng(0), scale=scale, dtype=dtype), "balanced")
    before, after = optimize_on_disk(tmp_path)

    assert after <= before
    check_steps(tmp_path, saved)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sparse", "embedding", "drifting", "quantized"])
def test_a_history_that_goes_on_after_each_optimization_never_takes_more_room(kind: str, tmp_path: Path) -> None:
    """Some steps are optimized already, and others are deltas against them."""
    states = list(HISTORIES[kind](np.random.default_rng(0)))
    store, n = Store.init(tmp_path), max(2, len(states) // 4)
    for step, state in enumerate(states):
        with store.write_checkpoint(state, series="run") as pending:
            pending.commit(RefTarget(run_id="run", step=step))
        if step % n == n - 1:
            before, after = optimize_on_disk(tmp_path)
            assert after <= before, step
    check_steps(tmp_path, states)


@pytest.mark.long
@pytest.mark.parametrize("pack_bytes", [256 << 10, 1 << 30])
def test_rows_that_move_stay_deltas_though_their_bases_are_encoded_in_other_blocks(
    pack_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With large tables, a chunk and its base are far from each other, and old packs are collected on the way."""
    monkeypatch.setattr(_optimize, "BLOCK_BYTES", 256 << 10)
    monkeypatch.setattr(_optimize, "TARGET_BYTES", pack_bytes)
    monkeypatch.setattr(_optimize, "COLLECT_BYTES", 1 << 20)
    saved = save_history(tmp_path, moving(np.random.default_rng(0)), "balanced")
    before, after = optimize_on_disk(tmp_path)

    assert after <= before + (8 << 10)  # files of more packs
    check_steps(tmp_path, saved)
    assert plan_optimize(Store.open(tmp_path)).n_chunks == 0


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sparse", "embedding", "adam"])
def test_a_history_with_dropped_steps_takes_no_more_room_when_optimized(kind: str, tmp_path: Path) -> None:
    states = list(HISTORIES[kind](np.random.default_rng(0)))
    save_history(tmp_path, iter(states), "balanced")
    store = Store.open(tmp_path)
    for step in range(0, len(states), 2):
        ref = store.ref(RefTarget(run_id="run", step=step).key)
        assert ref is not None
        store.drop(ref)
    before, after = optimize_on_disk(tmp_path)

    assert after <= before
    assert not verify(Store.open(tmp_path), full=True).problems


@pytest.mark.long
@pytest.mark.parametrize("kind", HISTORIES)
def test_an_optimized_history_in_a_database_takes_no_more_room_on_the_disk(kind: str, tmp_path: Path) -> None:
    saved = save_history(tmp_path, HISTORIES[kind](np.random.default_rng(0)), "balanced", database=True)
    before, after = optimize_on_disk(tmp_path)

    assert after <= before + 1024  # pages that new rows have split stay half empty when the rows go
    check_steps(tmp_path, saved)


def test_new_packs_go_again_if_others_need_the_old_ones(tmp_path: Path) -> None:
    saved = save_history(tmp_path, drifting(np.random.default_rng(0), scale=1.0), "balanced")
    before, store = bytes_on_disk(tmp_path), Store.open(tmp_path)
    packs = {name for name, _ in protocol.list_packs(store.backend)}
    with protocol.protected(store.backend, np.empty((0, 32), np.uint8), packs):
        report = plan_optimize(Store.open(tmp_path)).execute()

    assert report.is_undone
    assert "so they are gone again" in str(report)
    assert bytes_on_disk(tmp_path) <= before
    check_steps(tmp_path, saved)
