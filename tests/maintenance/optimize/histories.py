"""Histories of checkpoints of many kinds, and the bytes of their stores on the disk.

Where few words change, a history has more steps than a chain of deltas may have.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store

Rng = np.random.Generator
State = dict[str, Any]


def sparse(rng: Rng, n_steps: int = 40) -> Iterator[State]:
    """Steps in bfloat16 that move few words by one unit."""
    words = rng.normal(0, 0.02, 40_000).astype(ml_dtypes.bfloat16).view(np.uint16)
    for _ in range(n_steps):
        yield {"w": words.view(ml_dtypes.bfloat16).copy()}
        at = rng.choice(len(words), 80, replace=False)
        words[at] += rng.choice(np.array([1, 65535], np.uint16), len(at))


def embedding(rng: Rng, n_steps: int = 40, n_changed: int = 2) -> Iterator[State]:
    """A table of which few rows change."""
    table = rng.normal(0, 1, (700, 64)).astype(np.float32)
    for _ in range(n_steps):
        yield {"emb": table.copy()}
        at = rng.choice(len(table), n_changed, replace=False)
        table[at] += rng.normal(0, 0.01, (n_changed, 64)).astype(np.float32)


def drifting(rng: Rng, n_steps: int = 6, scale: float = 1e-4, dtype: Any = np.float32) -> Iterator[State]:
    """Weights that all move."""
    weights = rng.normal(0, 0.02, 100_000)
    for _ in range(n_steps):
        yield {"w": weights.astype(dtype)}
        weights = weights + rng.normal(0, scale, len(weights))


def adam(rng: Rng, n_steps: int = 8) -> Iterator[State]:
    """Weights and their moments."""
    weights, first, second = rng.normal(0, 0.02, 40_000).astype(np.float32), *np.zeros((2, 40_000), np.float32)
    for step in range(n_steps):
        yield {"w": weights, "m": first, "v": second, "step": np.array(step)}
        gradient = rng.normal(0, 1, len(weights)).astype(np.float32)
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        weights = weights - np.float32(1e-4) * first / (np.sqrt(second) + np.float32(1e-8))


def trees(rng: Rng, n_steps: int = 30) -> Iterator[State]:
    """Columns of a boosted model that grow by some trees a step."""
    grown: dict[str, list[Any]] = {name: [] for name in ("left", "right", "feature", "threshold", "gain")}
    for _ in range(n_steps):
        for name, parts in grown.items():
            is_float = name in ("threshold", "gain")
            parts.append(rng.normal(0, 1, 60).astype(np.float32) if is_float else rng.integers(0, 40, 60, np.int32))
        yield {name: np.concatenate(parts) for name, parts in grown.items()}


def unrelated(rng: Rng, n_steps: int = 4) -> Iterator[State]:
    """Noise."""
    for _ in range(n_steps):
        yield {"w": rng.normal(0, 1, 50_000).astype(np.float32), "b": rng.integers(0, 256, 70_000, np.uint8)}


def quantized(rng: Rng, n_steps: int = 6) -> Iterator[State]:
    """A fine-tune in one byte a weight."""
    weights = rng.normal(0, 20, 150_000)
    for _ in range(n_steps):
        yield {"w": weights.clip(-128, 127).astype(np.int8)}
        weights = weights + rng.normal(0, 0.1, len(weights))


def equal(rng: Rng, n_steps: int = 4) -> Iterator[State]:
    """The same state again and again, and a constant."""
    weights = rng.normal(0, 1, 30_000).astype(np.float32)
    for step in range(n_steps):
        yield {"w": weights, "c": np.full(20_000, step, np.int64)}


def moving(rng: Rng, n_steps: int = 10) -> Iterator[State]:
    """A table that gets new rows in the middle of others."""
    table = rng.normal(0, 1, (8_000, 64)).astype(np.float32)
    for _ in range(n_steps):
        yield {"table": table.copy()}
        at = np.sort(rng.choice(len(table), 10, replace=False))
        table = np.insert(table, at, rng.normal(0, 1, (10, 64)).astype(np.float32), axis=0)


HISTORIES = {each.__name__: each for each in (sparse, embedding, drifting, adam, trees, unrelated, quantized, equal)}


def save_history(root: Path, states: Iterator[State], policy: str, *, database: bool = False) -> list[State]:
    """Save the steps of a history in a new store, and return them."""
    store, saved = Store.init(root, database=database), []
    for step, state in enumerate(states):
        saved.append({name: np.array(each) for name, each in state.items()})
        with store.write_checkpoint(state, series="run", policy=policy) as pending:
            pending.commit(RefTarget(run_id="run", step=step))
    return saved


def bytes_on_disk(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
