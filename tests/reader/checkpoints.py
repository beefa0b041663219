"""Helpers for tests of readers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.reader import CheckpointReader, open_ref
from tensorcas_mlflow.store import Store

N_LAYERS, N_EXPERTS = 3, 4


def moe(seed: int = 0, dtype: str = "float32") -> dict[str, Array]:
    """A small mixture of experts, as the frameworks name its tensors; of numbers that no codec makes smaller."""
    rng = np.random.default_rng(seed)

    def noise(*shape: int) -> Array:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return rng.integers(0, 256, size, dtype=np.uint8).view(dtype).reshape(shape)

    tensors = {"model.embed_tokens.weight": noise(1000, 64)}
    for layer in range(N_LAYERS):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.self_attn.q_proj.weight"] = noise(64, 64)
        tensors[f"{prefix}.mlp.gate.weight"] = noise(N_EXPERTS, 64)
        for expert in range(N_EXPERTS):
            tensors[f"{prefix}.mlp.experts.{expert}.up_proj.weight"] = noise(128, 64)
            tensors[f"{prefix}.mlp.experts.{expert}.down_proj.weight"] = noise(64, 128)
        tensors[f"{prefix}.norm.weight"] = noise(64)
    return tensors


def save(store: Store, tensors: Mapping[str, Array], step: int = 1, **options: object) -> Ref:
    with store.write_checkpoint(tensors, **options) as pending:  # type: ignore[arg-type]
        return pending.commit(RefTarget(run_id="run", step=step))


def opened(store: Store, tensors: Mapping[str, Array], step: int = 1, **options: object) -> CheckpointReader:
    return open_ref(store, save(store, tensors, step), **options)


def same(found: Mapping[str, Array], expected: Mapping[str, Array]) -> bool:
    """Tell whether arrays are the same to the bit, in the same order."""
    return list(found) == list(expected) and all(
        (array.dtype, array.shape, array.tobytes())
        == (expected[name].dtype, expected[name].shape, expected[name].tobytes())
        for name, array in found.items()
    )
