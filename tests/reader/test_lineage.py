"""Lineage: the relatives of a model in its store."""

from __future__ import annotations

import io
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


def find(store: Store, ref: Ref, most: int = 5) -> Lineage:
    with open_ref(store, ref) as reader:
        return lineage(reader, most=most)


EXPECTED = {"renamed": "fine-tune", "grandchild": "fine-tune"}


@pytest.mark.parametrize("n_stores", [1, pytest.param(10, marks=pytest.mark.long)])
def test_parents_and_kinds_of_differences_are_right_in_twenty_families_a_store(n_stores: int) -> None:
    n_kinds = 0
    n_false: list[str] = []
    wrong: list[str] = []
    for store_number in range(n_stores):
        store = Store.init_backend(MemoryBackend())
        rng = np.random.default_rng(store_number)
        families: list[tuple[str, Ref, Ref, Ref]] = []
        for number in range(20):
            kind = KINDS[(20 * store_number + number) % len(KINDS)]
            base = model(rng)
            first = save(store, base, 0, run_id=f"base {number}")
            # The sibling of the child is a relative, and its parent only in the families of grandchildren.
            sibling = tuned(base, rng)
            second = save(store, sibling, 0, run_id=f"sibling {number}")
            base, parent = (sibling, second) if kind == "grandchild" else (base, first)
            child = save(store, changed(kind, base, rng), 0, run_id=f"child {number}")
            families.append((kind, first, parent, child))
        for kind, first, parent, child in families:
            found = find(store, child, 2).parent
            if found is None or found.run_id != parent.run_id:
                wrong.append(f"{kind} of {parent.label}: {found}")
            else:
                n_kinds += found.kind == EXPECTED.get(kind, kind)
            alone = find(store, first, 1).parent
            if alone is not None:
                n_false.append(alone.label)

    assert n_false == []
    assert len(wrong) <= 0.01 * 20 * n_stores, wrong
    assert n_kinds >= 0.95 * 20 * n_stores


def test_lineage_of_a_file_names_the_checkpoint_it_was_made_from() -> None:
    store, rng = Store.init_backend(MemoryBackend()), np.random.default_rng(0)
    base = {name: array for name, array in model(rng).items() if name != "position"}
    save(store, base, 3, run_id="base")
    with store.write_stream(io.BytesIO(safetensors(**changed("renamed", base, rng)))) as pending:
        file = pending.commit(RefTarget(path="tuned.safetensors"))
    found = find(store, file)

    assert found.parent is not None
    assert (found.parent.run_id, found.parent.step, found.parent.kind) == ("base", 3, "fine-tune")
    assert found.parent.changed[0] == "base_model.model.embed.weight"
    assert found.parent.n_compared == len(base)
    assert str(found).startswith("tuned.safetensors:\n  fine-tune of run base step 3 (")
    assert "of numbers equal" in str(found)


def test_older_model_names_the_newer_one_and_has_no_parent() -> None:
    store, rng = Store.init_backend(MemoryBackend()), np.random.default_rng(0)
    base = model(rng)
    first = save(store, base, 0, run_id="base")
    save(store, changed("head", base, rng), 0, run_id="child")
    found = find(store, first)

    assert found.parent is None
    assert [(each.run_id, each.kind, each.is_older) for each in found.relatives] == [("child", "head", False)]
    assert found.relatives[0].added == ("head.weight",)
    assert bool(found)


def test_models_with_one_table_of_constants_in_common_are_no_relatives() -> None:
    store = Store.init_backend(MemoryBackend())
    at, frequency = np.arange(512)[:, None], np.exp(-np.arange(64) / 7)[None, :]
    table = np.sin(at * frequency).astype(np.float32)
    refs = [
        save(store, model(np.random.default_rng(seed)) | {"table": table}, 0, run_id=f"run {seed}") for seed in range(4)
    ]

    assert [find(store, ref).relatives for ref in refs] == [(), (), (), ()]
    assert str(find(store, refs[0])) == "run run 0 step 0: no relative in the store"


def tables(n_columns: int) -> Tensors:
    """Return rotary position tables."""
    angles = np.arange(512)[:, None] * np.exp(-9 * np.arange(n_columns) / n_columns)[None, :]
    return {"rope.cos": np.cos(angles).astype(np.float32), "rope.sin": np.sin(angles).astype(np.float32)}


@pytest.mark.parametrize("n_columns", [16, 256], ids=["small tables", "large tables"])
def test_models_with_several_tables_in_common_are_no_parents(n_columns: int) -> None:
    store = Store.init_backend(MemoryBackend())
    refs = [
        save(store, model(np.random.default_rng(seed)) | tables(n_columns), 0, run_id=f"run {seed}")
        for seed in range(3)
    ]
    found = [find(store, ref) for ref in refs]

    assert [each.parent for each in found] == [None] * 3
    assert {relation.kind for each in found for relation in each.relatives} == {"shared"}


def test_parent_comes_before_a_model_with_large_tables_in_common() -> None:
    store, rng = Store.init_backend(MemoryBackend()), np.random.default_rng(0)
    base = model(rng) | tables(256)
    save(store, base, 0, run_id="base")
    save(store, model(rng) | tables(256), 0, run_id="stranger")
    child = save(store, tuned(base, rng, 1e-4), 0, run_id="child")
    found = find(store, child)

    assert [(each.run_id, each.kind) for each in found.relatives] == [("base", "fine-tune"), ("stranger", "shared")]


def test_lineage_survives_a_damaged_relative() -> None:
    store, rng = Store.init_backend(MemoryBackend()), np.random.default_rng(0)
    base = model(rng)
    first = save(store, base, 0, run_id="base")
    child = save(store, changed("head", base, rng), 0, run_id="child")
    store.backend.delete(f"manifests/{first.manifest}")

    assert find(store, child).relatives == ()


def test_lineage_refuses_a_part_of_a_checkpoint() -> None:
    store = Store.init_backend(MemoryBackend())
    ref = save(store, model(np.random.default_rng(0)), 0)
    with open_ref(store, ref) as reader, pytest.raises(ValueError, match="open a whole one of a store"):
        lineage(reader.below("layers"))


RECORD = np.dtype([("left", "<i4"), ("threshold", "<f8")])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (np.zeros(3, RECORD), np.ones(3, RECORD)),
        (np.zeros(3, RECORD), np.ones(3, np.float32)),
        (np.array([b"a"]), np.array([b"b"])),
        (np.array([1j]), np.array([2j])),
        (np.array([True]), np.array([False])),
    ],
)
@pytest.mark.filterwarnings("error")
def test_arrays_of_other_than_real_numbers_are_compared_as_a_whole(before: Any, after: Any) -> None:
    store = Store.init_backend(MemoryBackend())
    weights = np.random.default_rng(0).normal(0, 0.02, 20_000).astype(np.float32)
    refs = [
        save(store, {"w": weights, "nodes": array, "none": np.empty((0, 3))}, step, run_id=f"run {step}")
        for step, array in enumerate([before, after])
    ]
    [relation] = find(store, refs[1]).relatives

    assert (relation.kind, relation.n_compared, relation.changed) == ("head", 3, ("nodes",))
