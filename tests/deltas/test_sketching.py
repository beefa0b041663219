"""Sketches of saves: what they hold, and what they cost."""

from __future__ import annotations

from types import CodeType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.base.sketch import HEAD_ELEMENTS, positions, words_of
from tensorcas_mlflow.chunk_io import ChunkReader
from tensorcas_mlflow.layout.manifests import Columns, read_sketches, sketched_rows
from tensorcas_mlflow.store import Store, _sketches, _sketching
from tensorcas_mlflow.store._sources import TensorCopy, TensorSource
from tests.deltas.made import save
from tests.python_calls import calls_of

Tensors = dict[str, Any]
CHUNK_BYTES = 64 << 10


def arrays() -> Tensors:
    numbers = np.random.default_rng(0).normal(size=(3, 90, 100))
    dtypes = ["f2", "f4", "f8", ">f4", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, "i1", "u2", "i8"]
    tensors = {f"tensor {at}": (100 * numbers).astype(dtype) for at, dtype in enumerate(dtypes)}
    tensors |= {"columns": np.asfortranarray(numbers), "steps": numbers[:, ::2], "zeros": np.zeros(30_000, np.float32)}
    return tensors | {"small": np.ones(10), "text": np.array(["a" * 60] * 600), "flags": numbers > 0}


def expected(tensors: Tensors, columns: Columns) -> Any:
    """Return the words of all sketched tensors, one tensor at a time."""
    sketched = [tensors[columns.name(row)] for row in sketched_rows(columns).tolist()]
    return np.stack([words_of(array.ravel()[positions(array.size)]) for array in sketched])


@pytest.mark.parametrize("has_cuts", [False, True])
@pytest.mark.parametrize("kind", [TensorSource, TensorCopy])
def test_all_sketches_at_once_are_those_of_single_tensors(kind: type, has_cuts: bool) -> None:
    tensors = arrays()
    cuts = {f"tensor {at}": [1, 3] for at in range(5)} if has_cuts else {}
    source = kind(tensors, cuts, CHUNK_BYTES)
    rows = sketched_rows(source.columns)

    assert len(rows) == 12
    assert np.array_equal(_sketching.sketch_rows(source, rows), expected(tensors, source.columns))


def test_save_writes_the_sketches_of_all_tensors() -> None:
    tensors = arrays()
    store = Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)
    manifest = store.manifest(save(store, tensors, 0))
    found = read_sketches(manifest.sketches, manifest.columns)

    assert found is not None
    assert np.array_equal(found[1], expected(tensors, manifest.columns))


def test_save_sketches_its_tensors_once_and_all_together() -> None:
    store = Store.init_backend(MemoryBackend())
    tensors = {f"w{at}": np.random.default_rng(at).normal(size=8192).astype(np.float32) for at in range(50)}
    with calls_of("TensorSource.elements") as calls:
        ref = save(store, tensors, 0)

    assert len(store.manifest(ref).sketches) > 50 * 64
    assert len(calls) == 1


def test_sketches_of_a_stored_manifest_are_read_in_batches_of_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)
    tensors = arrays() | {f"w{at}": np.random.default_rng(at).normal(size=9000).astype("f4") for at in range(40)}
    manifest = store.manifest(save(store, tensors, 0))
    sizes: list[int] = []
    read = ChunkReader.read

    def noted(self: ChunkReader, digests: Any, outs: Any, **options: Any) -> None:
        sizes.append(sum(len(out) for out in outs))
        read(self, digests, outs, **options)

    monkeypatch.setattr(ChunkReader, "read", noted)
    monkeypatch.setattr(_sketches, "_BATCH_BYTES", 1 << 20)
    found = _sketches.compute_sketches(store, "", manifest)

    assert found is not None
    assert np.array_equal(found.words, expected(tensors, manifest.columns))
    assert sum(sizes) > 2 << 20
    assert max(sizes) <= (1 << 20) + 8 * HEAD_ELEMENTS


def test_no_python_function_runs_for_each_sketched_tensor() -> None:
    def calls_for(n: int) -> list[CodeType]:
        tensors = {f"w{at}": np.random.default_rng(at).normal(size=8192).astype(np.float32) for at in range(n)}
        source = TensorSource(tensors, {}, CHUNK_BYTES)
        rows = sketched_rows(source.columns)
        with calls_of() as calls:
            _sketching.sketch_rows(source, rows)
        return calls

    calls_for(1)

    assert len(calls_for(300)) == len(calls_for(3)) < 60
