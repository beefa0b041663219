"""Parts of tensors and files that are larger than memory."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.file_formats import open_listing
from tensorcas_mlflow.reader import open_path
from tensorcas_mlflow.store import Store
from tests.file_formats.samples import safetensors_of
from tests.reader.checkpoints import opened

ROW = 1 << 20
"""Elements of a row."""
MIB = 1 << 20


@pytest.fixture
def larger(tmp_path: Path) -> Path:
    """A file of one tensor that is twice as large as the machine's memory; of zeros that take no room."""
    n_rows = 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ROW
    path = tmp_path / "larger.safetensors"
    path.write_bytes(
        safetensors_of({"w": {"dtype": "U8", "shape": [n_rows, ROW], "data_offsets": [0, n_rows * ROW]}}, 0)
    )
    try:
        os.truncate(path, path.stat().st_size + n_rows * ROW)
    except OSError:
        pytest.skip("no file can be so large here")
    return path


@pytest.mark.parametrize(
    "index", [0, slice(5, 5), [0, -1], slice(None, None, 3000), (slice(None, None, 500), 7), (3, slice(0, 9))], ids=str
)
def test_reader_reads_parts_of_a_file_larger_than_memory(larger: Path, index: Any) -> None:
    reader = open_path(larger)
    shape = np.broadcast_to(np.uint8(0), reader.spec("w").shape)[index].shape

    found = reader.get_slice("w")[index]

    assert found.shape == shape
    assert not found.any()


def test_a_tensor_that_is_larger_than_memory_is_given_as_it_is_mapped(larger: Path) -> None:
    reader = open_path(larger)
    tensor = reader.tensor("w")
    tensor[-1, -1] = 1

    assert tensor[-1, -2:].tolist() == [0, 1]
    assert reader.rows("w", -1)[-2:].tolist() == [0, 0]


def test_a_file_that_cannot_be_mapped_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    np.save(tmp_path / "a.npy", np.arange(1000.0))
    monkeypatch.setattr("tensorcas_mlflow.file_formats._source.map_privately", refuse)

    assert open_listing(tmp_path / "a.npy").array("array").tolist() == list(range(1000))


@pytest.mark.parametrize("index", [(slice(None), 5), (slice(None, None, -97), slice(0, 4)), ([1, 1999, 1], 3)], ids=str)
def test_reading_a_part_holds_little_memory_besides_it(monkeypatch: pytest.MonkeyPatch, index: Any) -> None:
    monkeypatch.setattr("tensorcas_mlflow.reader._contents.SPARSE_BYTES", MIB)
    tensor = np.random.default_rng(0).integers(0, 256, (2000, 8 << 10), dtype=np.uint8)
    reader = opened(Store.init_backend(MemoryBackend()), {"w": tensor})
    reader.rows("w", 0)
    tracemalloc.start()
    try:
        found = reader.get_slice("w")[index]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert found.tobytes() == tensor[index].tobytes()
    assert peak < 6 * MIB


def test_slices_hold_little_memory_besides_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorcas_mlflow.reader._contents.SPARSE_BYTES", MIB)
    tensors = {f"w{number}": np.full((2000, 1 << 10), number, np.uint8) for number in range(12)}
    tensors = {name: array + np.arange(1 << 10, dtype=np.uint8) for name, array in tensors.items()}
    reader = opened(Store.init_backend(MemoryBackend()), tensors)
    reader.rows("w0", 0)
    tracemalloc.start()
    try:
        found = reader.slices([(name, (slice(None), 5)) for name in tensors])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert all((part == array[:, 5]).all() for part, array in zip(found, tensors.values(), strict=True))
    assert peak < 8 * MIB


def test_slices_of_parts_of_one_chunk_hold_little_memory_besides_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorcas_mlflow.reader._contents.SPARSE_BYTES", MIB)
    tensor = np.random.default_rng(0).integers(0, 256, 400_000, dtype=np.uint8)
    reader = opened(Store.init_backend(MemoryBackend()), {"w": tensor})
    reader.rows("w", 0)
    tracemalloc.start()
    try:
        found = reader.slices([("w", slice(at, at + 8)) for at in range(0, 8 * 200, 8)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert b"".join(part.tobytes() for part in found) == tensor[: 8 * 200].tobytes()
    assert peak < 6 * MIB
