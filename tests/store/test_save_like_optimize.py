"""A save stores a series about as small as an optimization of the same store does, in every dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.base.dtypes import parse_dtype
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import plan_optimize
from tensorcas_mlflow.store import Store

N_STEPS = 5
INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
FLOATS = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e3m4"]
MOST = {
    **dict.fromkeys(["bool", *INTEGERS, "int4", "uint4"], 1.2),
    **dict.fromkeys(FLOATS, 1.1),
    # One word of eight bytes holds both parts, and only an optimization tries all transforms.
    **dict.fromkeys(["complex64", "complex128"], 1.25),
    # An optimization spends more on planes that are mostly zeros: upper bytes, which are few in all.
    **dict.fromkeys(["int32", "uint32"], 1.4),
    **dict.fromkeys(["int64", "uint64"], 1.8),
}
"""Bytes of the saved packs, as a multiple of those after an optimization."""


def steps(dtype: str, scale: float = 0.1) -> Iterator[Any]:
    """Yield steps of a fine-tune that is stored in some dtype."""
    draw = np.random.default_rng(0)
    weights = draw.normal(0, 20, 150_000)
    found = parse_dtype(dtype)
    for _ in range(N_STEPS):
        if dtype == "bool":
            yield weights > 5
        elif "complex" in dtype:
            yield (weights / 1000 + 1j * np.roll(weights, 7) / 1000).astype(found)
        elif "float" in dtype:
            yield (weights / (20 if "float8" in dtype else 1000)).astype(np.float32).astype(found)
        elif dtype in ("int4", "uint4"):
            low = 0 if dtype == "uint4" else -8
            yield (weights / 10 + low + 8).clip(low, low + 15).astype(np.int8).astype(found)
        else:
            low = 0 if dtype.startswith("u") else -128
            yield (weights + low + 128).clip(low, low + 255).astype(found)
        weights = weights + draw.normal(0, scale, len(weights))


def saved_bytes(states: Iterator[Any], policy: str) -> tuple[Store, int]:
    store = Store.init_backend(MemoryBackend())
    for step, state in enumerate(states):
        with store.write_checkpoint({"w": state}, series="run", policy=policy) as pending:
            pending.commit(RefTarget(run_id="run", step=step))
    return store, pack_bytes(store)


def pack_bytes(store: Store) -> int:
    return sum(info.size for info in store.backend.list("packs"))


# A dtype has one policy on every change, and one like it the other.
CASES = [
    pytest.param(dtype, policy, marks=() if (nth + mth) % 2 == 0 else pytest.mark.long)
    for nth, dtype in enumerate(MOST)
    for mth, policy in enumerate(("balanced", "small"))
]


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "policy"), CASES)
def test_save_takes_about_the_room_that_an_optimization_leaves(dtype: str, policy: str) -> None:
    store, saved = saved_bytes(steps(dtype), policy)
    plan_optimize(store).execute()

    assert pack_bytes(store) <= saved <= MOST[dtype] * pack_bytes(store)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int4"])
def test_unrelated_steps_of_bytes_take_no_more_room_than_each_alone(dtype: str) -> None:
    draw = np.random.default_rng(0)
    states = [draw.integers(0, 2, 150_000).astype(parse_dtype(dtype)) for _ in range(3)]
    together = saved_bytes(iter(states), "balanced")[1]
    alone = sum(saved_bytes(iter([state]), "balanced")[1] for state in states)

    assert together <= alone


def test_bytes_in_which_zstandard_finds_matches_keep_them() -> None:
    """Their entropy alone would tell that a delta of noise is smaller."""
    draw = np.random.default_rng(0)
    tile = draw.integers(0, 256, 4096, np.uint8)
    states = [np.tile(tile, 40), np.roll(np.tile(tile, 40), 1)]

    assert saved_bytes(iter(states), "balanced")[1] < 4 * len(tile)


def test_small_tensors_of_bytes_are_deltas_too() -> None:
    draw = np.random.default_rng(0)
    weights = draw.normal(0, 20, 20_000)
    states = [(weights + draw.normal(0, 0.1, len(weights))).clip(-128, 127).astype(np.int8) for _ in range(N_STEPS)]
    store, saved = saved_bytes(iter(states), "balanced")

    assert saved < 0.5 * sum(state.nbytes for state in states)
    assert store.checkpoints()
