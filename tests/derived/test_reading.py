"""Derived tensors are read bit for bit, wherever tensors are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.base.dtypes import parse_dtype
from tensorcas_mlflow.codecs import Kind, evaluate
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.store import Store
from tests.derived.checkpoints import Made, save_derived

CHUNK_BYTES = 4096
TARGET = RefTarget(run_id="r", step=1)
rng = np.random.default_rng(0)
W = rng.normal(0, 0.05, (96, 128)).astype(np.float32)
V = (W + rng.normal(0, 0.001, W.shape)).astype(np.float32)
BF16 = W.astype(ml_dtypes.bfloat16)
Q8 = gguf.quantize(W, gguf.GGMLQuantizationType.Q8_0).reshape(-1)
CONV = rng.normal(size=(16, 8, 3, 3)).astype(np.float16)

TENSORS: dict[str, np.ndarray[Any, Any]] = {
    "w": W,
    "bf16": BF16,
    "transposed": np.ascontiguousarray(W.T),
    "shard.0": np.ascontiguousarray(W[:, :64]),
    "shard.1": np.ascontiguousarray(W[:, 64:]),
    "joined": np.concatenate([W, V]),
    "mean": (W + V) / 2,
    "q8": Q8,
    "hwio": np.ascontiguousarray(CONV.transpose(2, 3, 1, 0)),
    "other": rng.integers(0, 9, 5000),
    "none": np.empty((0, 4), np.float16),
}
MADE = {
    "bf16": Made("cast", ["w"]),
    "transposed": Made("permute", ["w"], {"axes": [1, 0]}),
    "shard.0": Made("slice", [V * 1, W][1:], {"axis": 1, "start": 0}),
    "shard.1": Made("slice", ["w"], {"axis": 1, "start": 64}),
    "joined": Made("assemble", ["w", V], {"offsets": [[0, 0], [len(W), 0]]}),
    "mean": Made("mean", ["w", V]),
    "q8": Made("q8_0", ["w"]),
    "hwio": Made("permute", [CONV], {"axes": [2, 3, 1, 0]}),
    "none": Made("cast", [np.empty((4, 0), np.float32)]),
}


def same(found: Any, wanted: Any) -> bool:
    return bool(found.dtype == wanted.dtype and found.shape == wanted.shape and found.tobytes() == wanted.tobytes())


@pytest.fixture(params=["files", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "memory":
        return Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)
    return Store.init(tmp_path / "root", chunk_bytes=CHUNK_BYTES)


@pytest.fixture
def ref(store: Store) -> Ref:
    return save_derived(store, TARGET, TENSORS, MADE, is_bytes=["q8"])


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("copy", [True, False])
def test_all_tensors_are_read_bit_for_bit(store: Store, ref: Ref, verify: bool, copy: bool) -> None:
    again = Store.open_backend(store.backend)
    found = again.read_tensors(again.manifest(ref), verify=verify, copy=copy)

    assert list(found) == list(TENSORS)
    for name, wanted in TENSORS.items():
        assert same(found[name], wanted), name


@pytest.mark.parametrize("name", list(TENSORS))
def test_one_tensor_is_read_alone_and_into_an_array(store: Store, ref: Ref, name: str) -> None:
    manifest = store.manifest(ref)
    out = np.empty_like(TENSORS[name])
    read = store.read_tensors(manifest, [name], out={name: out})

    assert read[name] is out
    assert same(out, TENSORS[name])
    assert same(store.read_tensors(manifest, [name])[name], TENSORS[name])


def test_arrays_are_aligned_and_writable(store: Store, ref: Ref) -> None:
    for name, array in store.read_tensors(store.manifest(ref)).items():
        assert array.flags.writeable, name
        assert array.nbytes == 0 or array.ctypes.data % 64 == 0, name


def test_chunks_of_derived_tensors_are_not_stored(store: Store, ref: Ref) -> None:
    manifest = store.manifest(ref)
    # Most of the joined tensor's chunks are those of its parts.
    made = np.concatenate([manifest.row(name).digests for name in MADE.keys() - {"joined"}])
    stored = np.concatenate([row.digests for row in manifest.inputs])

    assert not store.catalog.find(made).found.any()
    assert store.catalog.find(stored).found.all()


def test_a_plan_names_the_reads_of_the_inputs(store: Store, ref: Ref) -> None:
    plan = store.explain(store.manifest(ref), ["bf16", "transposed"])

    assert (plan.n_tensors, plan.n_bytes) == (2, BF16.nbytes + W.nbytes)


FLOATS = ["float16", "float32", "float64", "bfloat16", "float8_e4m3fn", ">float32"]
CASES = [
    (function, params, n_inputs, source, target)
    for function, params, n_inputs in (
        ("cast", {}, 1),
        ("permute", {"axes": [2, 0, 1]}, 1),
        ("slice", {"axis": 1, "start": 3}, 1),
        ("assemble", {"offsets": [[0, 0, 0], [0, 0, 7], [0, 0, 14]]}, 3),
        ("mean", {}, 3),
    )
    for source in FLOATS
    for target in FLOATS
] + [
    (function, params, n_inputs, dtype, dtype)
    for function, params, n_inputs in (
        ("permute", {"axes": [2, 0, 1]}, 1),
        ("slice", {"axis": 1, "start": 3}, 1),
        ("assemble", {"offsets": [[0, 0, 0], [0, 0, 7], [0, 0, 14]]}, 3),
    )
    for dtype in ("int8", "int64", "bool", "complex64", "uint16", "S3")
]


@pytest.mark.parametrize(("function", "params", "n_inputs", "source", "target"), CASES)
def test_each_function_is_read_for_each_dtype(
    function: str, params: dict[str, Any], n_inputs: int, source: str, target: str
) -> None:
    store = Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)
    shape = (13, 20, 7)
    made_shape = {
        "permute": (7, 13, 20),
        "slice": (13, 11, 7),
        "assemble": (13, 20, 21),
    }.get(function, shape)
    inputs = [rng.normal(0, 9, shape).astype(np.float32).astype(parse_dtype(source)) for _ in range(n_inputs)]
    wanted = evaluate(function, params, inputs, Kind(target, made_shape))
    made = {"x": Made(function, inputs, params)}
    tensors = {"x": wanted}
    ref = save_derived(store, TARGET, tensors, made)

    for name, array in store.read_tensors(store.manifest(ref)).items():
        assert same(array, tensors[name]), name
