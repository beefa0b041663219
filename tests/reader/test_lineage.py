"""Lineage: the relatives of a model in its store."""

from __future__ import annotations

import io
from collections import Counter
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.reader import Lineage, lineage, open_ref
from tensorcas_mlflow.store import Store
from tests.deltas.made import save
from tests.deltas.test_files import safetensors

Tensors = dict[str, Any]
D = 64
KINDS = ("fine-tune", "head", "lora", "pruned", "cast", "renamed", "grandchild")


def model(rng: np.random.Generator) -> Tensors:
    names = ["embed", "layers.0.q", "layers.0.up", "layers.1.q", "layers.1.up", "head"]
    shapes = [(300, D), (D, D), (4 * D, D), (D, D), (4 * D, D), (70, D)]
    tensors = {
        f"{name}.weight": rng.normal(0, 0.02, shape).astype(np.float32)
        for name, shape in zip(names, shapes, strict=True)
    }
    return tensors | {"norm.weight": np.ones(4096, np.float32), "position": np.arange(4096)}


def weights(tensors: Tensors) -> list[str]:
    return [name for name in tensors if name.endswith(".weight") and not name.endswith("norm.weight")]


def tuned(tensors: Tensors, rng: np.random.Generator, scale: float | None = None) -> Tensors:
    scale = 10 ** rng.uniform(-6, -3) if scale is None else scale
    new = {
        name: tensors[name] + np.float32(scale) * rng.standard_normal(tensors[name].shape) for name in weights(tensors)
    }
    return tensors | {name: array.astype(tensors[name].dtype) for name, array in new.items()}


def changed(kind: str, tensors: Tensors, rng: np.random.Generator) -> Tensors:
    if kind == "head":
        return tensors | {"head.weight": rng.normal(0, 0.02, (int(rng.integers(64, 200)), D)).astype(np.float32)}
    if kind == "lora":
        rank, names = int(rng.integers(1, 9)), [name for name in weights(tensors) if "layers" in name]
        updates = {
            name: (rng.standard_normal((len(tensors[name]), rank)) @ rng.standard_normal((rank, D))) * 1e-4
            for name in names
        }
        return tensors | {name: (tensors[name] + update).astype(np.float32) for name, update in updates.items()}
    if kind == "pruned":
        share = rng.uniform(0.2, 0.7)
        least = {name: np.quantile(np.abs(tensors[name]), share) for name in weights(tensors)}
        return tensors | {name: tensors[name] * (np.abs(tensors[name]) >= each) for name, each in least.items()}
    if kind == "cast":
        dtype = (ml_dtypes.bfloat16, np.float16)[int(rng.integers(2))]
        return tensors | {name: tensors[name].astype(dtype) for name in weights(tensors)}
    if kind == "renamed":
        return {f"base_model.model.{name}": array for name, array in tuned(tensors, rng).items()}
    return tuned(tensors, rng)


def find(store: Store, ref: Ref) -> Lineage:
    with open_ref(store, ref) as reader:
        return lineage(reader)


EXPECTED = {"renamed": "fine-tune", "grandchild": "fine-tune"}


def test_parents_and_differences_of_two_hundred_families_are_right() -> None:
    n_right = n_kinds = n_families = 0
    n_false: list[str] = []
    wrong: Counter[str] = Counter()
    for store_number in range(10):
        store = Store.init_backend(MemoryBackend())
        rng = np.random.default_rng(store_number)
        families: list[tuple[str, Ref, Ref, Ref]] = []
        for number in range(20):
            kind = KINDS[(20 * store_number + number) % len(KINDS)]
            base = model(rng)
            first = save(store, base, 0, run_id=f"base {number}")
            # A sibling of the next model: it is a relative, and not the parent.
            sibling = tuned(base, rng)
            parent = save(store, sibling, 0, run_id=f"sibling {number}")
            if kind == "grandchild":
                base = sibling
            else:
                parent = first
            child = save(store, changed(kind, base, rng), 0, run_id=f"child {number}")
            families.append((kind, first, parent, child))
        for kind, first, parent, child in families:
            n_families += 1
            found = find(store, child).parent
            is_right = found is not None and found.run_id == parent.run_id
            n_right += is_right
            wrong[kind] += not is_right
            if not is_right: print(store_number, kind, parent.run_id, find(store, child))
            n_kinds += found is not None and found.kind == EXPECTED.get(kind, kind)
            alone = find(store, first).parent
            if alone is not None:
                n_false.append(alone.label)

    assert n_families == 200
    assert n_false == []
    assert n_right >= 198, wrong
    assert n_kinds >= 190
