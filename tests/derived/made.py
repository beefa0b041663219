"""Models, and files and copies derived from them."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.maintenance import verify
from tensorcas_mlflow.store import Store

Tensors = dict[str, Any]


def model(seed: int, *, d: int = 256, n_layers: int = 2) -> Tensors:
    """Return the weights of a small transformer, with a tensor of several chunks."""
    rng = np.random.default_rng(seed)
    shapes = {"embed": (1500, d)}
    for layer in range(n_layers):
        shapes |= {f"layers.{layer}.{name}": (d, d) for name in "qkvo"}
        shapes |= {f"layers.{layer}.up": (4 * d, d), f"layers.{layer}.down": (d, 4 * d)}
    return {f"{name}.weight": rng.normal(0, 0.02, shape).astype(np.float32) for name, shape in shapes.items()}


def tuned(tensors: Mapping[str, Any], seed: int) -> Tensors:
    rng = np.random.default_rng(seed)
    return {
        name: (array + 1e-3 * rng.standard_normal(array.shape)).astype(array.dtype) for name, array in tensors.items()
    }


def as_dtype(tensors: Mapping[str, Any], dtype: Any) -> Tensors:
    return {name: array.astype(dtype) for name, array in tensors.items()}


def as_bfloat16(tensors: Mapping[str, Any]) -> Tensors:
    return as_dtype(tensors, ml_dtypes.bfloat16)


def renamed(tensors: Mapping[str, Any]) -> Tensors:
    """Return tensors under other names, which do not even sort like theirs."""
    return {f"tensor_{len(tensors) - at}": array for at, array in enumerate(tensors.values())}


def n_bytes(store: Store) -> int:
    """Return the size of all blobs of a store."""
    folders = ("packs", "manifests", "refs", "index")
    return sum(info.size for folder in folders for info in store.backend.list(folder))


def save(
    store: Store, tensors: Mapping[str, Any], step: int = 0, run_id: str = "run", series: str | None = None
) -> Ref:
    with store.write_checkpoint(tensors, series=series) as pending:
        return pending.commit(RefTarget(run_id=run_id, step=step))


def save_file(store: Store, data: bytes, path: str) -> Ref:
    with store.write_stream(io.BytesIO(data)) as pending:
        return pending.commit(RefTarget(path=path))


def manifest_of(store: Store, ref: Ref) -> Manifest:
    return Store.open_backend(store.backend).manifest(ref)


def functions_of(store: Store, ref: Ref) -> set[str]:
    """Return the functions of a checkpoint's derived rows."""
    return {each.function for each in manifest_of(store, ref).derived}


def share_taken(store: Store, tensors: Tensors, run_id: str = "other", step: int = 0) -> float:
    """Save tensors, check that they load, and return the share of their size by which the store grew."""
    before = n_bytes(store)
    ref = save(store, tensors, step, run_id)
    taken = n_bytes(store) - before
    check_loads(store, ref, tensors)
    return taken / sum(array.nbytes for array in tensors.values())


def share_taken_by_file(store: Store, data: bytes, path: str = "model") -> float:
    """Save a file like `share_taken`."""
    before = n_bytes(store)
    ref = save_file(store, data, path)
    taken = n_bytes(store) - before
    check_loads_file(store, ref, data)
    return taken / len(data)


def check_loads(store: Store, ref: Ref, tensors: Mapping[str, Any]) -> None:
    fresh = Store.open_backend(store.backend)
    found = fresh.read_tensors(fresh.manifest(ref))

    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        assert found[name].dtype == array.dtype
        assert found[name].tobytes() == array.tobytes()
    assert verify(Store.open_backend(store.backend), full=True).problems == ()


def check_loads_file(store: Store, ref: Ref, data: bytes) -> None:
    fresh = Store.open_backend(store.backend)

    assert b"".join(map(bytes, fresh.iter_file(ref))) == data
    assert verify(Store.open_backend(store.backend), full=True).problems == ()


_GGUF_TYPES = {"float32": 0, "float16": 1, "bfloat16": 30}


def gguf_file(tensors: Mapping[str, Any], kind: str | None = "Q8_0") -> bytes:
    """Write a GGUF file of version 3: matrices in quantized blocks of a kind, or all tensors in their own dtypes."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    infos, blocks, at = [], [], 0
    for name, array in tensors.items():
        number, data = _GGUF_TYPES[array.dtype.name], array.tobytes()
        if kind is not None and array.ndim > 1:
            number = gguf.GGMLQuantizationType[kind]
            data = gguf.quantize(array.astype(np.float32), number).tobytes()
        sides = array.shape[::-1]
        infos.append(text(name) + struct.pack(f"<I{len(sides)}QIQ", len(sides), *sides, number, at))
        blocks.append(data + bytes(-len(data) % 32))
        at += len(blocks[-1])
    key = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), 1) + key + b"".join(infos)
    return head + bytes(-len(head) % 32) + b"".join(blocks)
