"""Our own self-contained files, taken apart into the rows that any client would have stored."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.file_formats import PlainBytes, Skeleton, Tensor, _self_contained
from tensorcas_mlflow.store import PAYLOAD_FILE, Store, write_payload
from tests.file_formats.parts import damaged, joined, take_apart, tensors

ARRAYS = {
    "__skeleton__": np.frombuffer(b"what is left " * 500, np.uint8),
    "layer.weight": np.random.default_rng(0).normal(size=(300, 700)),
    "tiny": np.arange(3),
    "layer.bias": np.arange(700, dtype=np.float16),
    "trees": np.arange(3_000, dtype=np.int32).reshape(1_000, 3),
    "empty": np.zeros((0, 4)),
    "last": np.arange(5),
}
CUTS = {"trees": [100, 350, 1_000], "__skeleton__": [1_111, 6_500]}


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    write_payload(tmp_path, ARRAYS, cuts=CUTS, flavor="pytorch")
    return (tmp_path / PAYLOAD_FILE).read_bytes()


def test_every_row_of_64_bytes_or_more_is_a_tensor_as_its_manifest_says(data: bytes) -> None:
    found = tensors(data)

    assert list(found) == ["__skeleton__", "layer.weight", "layer.bias", "trees"]
    for name, (part, taken) in found.items():
        assert taken == ARRAYS[name].tobytes()
        assert part.shape == ARRAYS[name].shape
    assert [part.dtype for part, _ in found.values()] == [None, "float64", "float16", "int32"]
    assert [None if part.cuts is None else list(part.cuts) for part, _ in found.values()] == [
        [1_111, 6_500],
        None,
        None,
        [1_200, 4_200, 12_000],
    ]


def test_all_else_of_a_sound_file_is_skeleton_and_the_parts_are_the_file(data: bytes) -> None:
    parts = take_apart(data)

    assert joined(parts) == data
    assert all(isinstance(part, Skeleton | Tensor) for part, _ in parts)


def test_a_file_that_is_stored_brings_no_new_tensor_to_the_store_its_tensors_are_in(
    tmp_path: Path, data: bytes
) -> None:
    store = Store.init(tmp_path / "root")
    with store.write_checkpoint(ARRAYS, cuts=CUTS) as save:
        known = {row.spec.name: row.digests.tobytes() for row in save.manifest.rows}
        with store.write_file(tmp_path / PAYLOAD_FILE) as file:
            rows = {row.spec.name: row.digests.tobytes() for row in file.manifest.rows if row.spec.name in known}

    assert list(rows) == ["__skeleton__", "layer.weight", "layer.bias", "trees"]
    assert all(rows[name] == known[name] for name in rows)


@pytest.mark.long
def test_damaged_files_come_back_bit_for_bit(data: bytes) -> None:
    for damaged_data in damaged(data):
        assert joined(take_apart(damaged_data)) == damaged_data


def test_a_header_that_claims_a_long_manifest_costs_no_memory(data: bytes) -> None:
    claimed = data[:8] + (1 << 26).to_bytes(8, "little") + data[16:]
    tracemalloc.start()
    parts = take_apart(claimed)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert joined(parts) == claimed
    assert peak < 4 * len(claimed) + (8 << 20)


def test_a_file_of_a_later_version_is_plain_bytes(data: bytes) -> None:
    later = data[:7] + b"\2" + data[8:]

    assert joined(take_apart(later)) == later
    assert tensors(later) == {}


def test_a_file_of_more_rows_than_are_read_ahead_is_plain_bytes(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_self_contained, "_MAX_ROWS", 2)

    assert [type(part) for part, _ in take_apart(data)] == [PlainBytes]
