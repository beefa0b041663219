"""Contents of the golden stores with deltas, by arithmetic that no release of numpy changes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from tests.golden.golden_v1 import noise


def sha_of(tensors: Mapping[str, np.ndarray]) -> dict[str, str]:
    return {
        name: hashlib.sha256(f"{a.dtype.str}{a.shape}".encode() + np.ascontiguousarray(a).tobytes()).hexdigest()
        for name, a in tensors.items()
    }


def _uniform(n: int, seed: int) -> np.ndarray:
    return (noise(n, seed) >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23) - np.float32(1)


def _weights(n: int, step: int, *, seed: int, moved: float) -> np.ndarray:
    """Weights of many exponents that a step moves by little. They begin on a grid, so that they take little room."""
    weights = np.rint(_uniform(n, seed) * _uniform(n, seed + 1) * np.float32(1_000)) / np.float32(1 << 14)
    for before in range(step):
        weights = weights + _uniform(n, 1_000 * seed + before) * np.float32(moved)
    return weights


def far(step: int) -> dict[str, np.ndarray]:
    """Weights that a step moves by more."""
    return {"far": _weights(16_384, step, seed=50, moved=1e-3).astype(ml_dtypes.bfloat16)}


def counts(step: int) -> np.ndarray:
    start = (noise(2_048, 5) % np.uint64(1_000)).astype(np.int64)
    return start + step * (noise(2_048, 6) % np.uint64(3)).astype(np.int64)


def tensors(step: int) -> dict[str, np.ndarray]:
    return {
        "single": _weights(4_099, step, seed=10, moved=2e-7),
        "half": _weights(16_384, step, seed=30, moved=1e-5).astype(ml_dtypes.bfloat16),
        "counts": counts(step),
        "complex": (np.arange(1_024) // 7 + 1j * step).astype(np.complex128),
        "noise": noise(200, 7),
        "__skeleton__": np.frombuffer(b'{"kind": "golden"}' * 20 + str(step).encode(), np.uint8),
    }
