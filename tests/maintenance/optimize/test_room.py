"""An optimization takes no more room than the saves took."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
from tests.maintenance.optimize.trainings import n_bytes_of, optimize, same


def training(scale: float, n_steps: int, dtype: Any) -> list[dict[str, Any]]:
    """Return steps of a training whose weights move by about some amount a step."""
    draw = np.random.default_rng(0)
    weights = {f"layers.{at}.weight": draw.normal(0, 0.02, (128, 256)) for at in range(3)}
    steps: list[dict[str, Any]] = []
    for _ in range(n_steps):
        steps.append({name: each.astype(dtype) for name, each in weights.items()})
        weights = {name: each + scale * draw.standard_normal(each.shape) for name, each in weights.items()}
    return steps


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("n_steps", [8, 12])
@pytest.mark.parametrize("scale", [1e-7, 3e-7, 1e-6, 1e-5, 1e-4])
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
