from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.errors import BlobExistsError, BlobNotFoundError, FormatError, NotFoundError, TensorNotFoundError
from tensorcas_mlflow.store import MANIFEST_FILE, PAYLOAD_FILE, read_payload, write_payload

TENSORS = {
    "a": np.arange(100_000, dtype=np.float32),
    "b": np.random.default_rng(0).normal(size=(7, 9)),
    "twin": np.arange(100_000, dtype=np.float32),
    "empty": np.zeros((0, 2)),
    "raw": np.random.default_rng(0).integers(0, 256, 100).astype(np.uint8),
}


def test_a_payload_is_read_back_without_any_store_wherever_it_is(tmp_path: Path) -> None:
    write_payload(tmp_path / "here", TENSORS, flavor="pytorch", metadata={"n": 1})
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    shutil.rmtree(tmp_path / "here")
    loaded = read_payload(tmp_path / "there")

    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == sorted([MANIFEST_FILE, PAYLOAD_FILE])
    assert list(loaded) == list(TENSORS)
    for name, array in TENSORS.items():
        assert loaded[name].dtype == array.dtype
        assert loaded[name].tobytes() == array.tobytes()


def test_equal_tensors_of_a_payload_are_stored_once(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, 300_000).astype(np.uint8)
    write_payload(tmp_path, {"a": noise, "b": noise})

    assert (tmp_path / PAYLOAD_FILE).stat().st_size < 1.1 * noise.nbytes


def test_some_tensors_of_a_payload_are_read_by_name(tmp_path: Path) -> None:
    write_payload(tmp_path, TENSORS)

    assert list(read_payload(tmp_path, names=["raw", "b"])) == ["raw", "b"]
    with pytest.raises(TensorNotFoundError):
        read_payload(tmp_path, names=["absent"])


def test_a_payload_is_not_written_over_another(tmp_path: Path) -> None:
    write_payload(tmp_path, TENSORS)

    with pytest.raises(BlobExistsError):
        write_payload(tmp_path, {"a": np.zeros(3)})
    assert list(read_payload(tmp_path)) == list(TENSORS)


def test_a_folder_without_a_payload_says_so(tmp_path: Path) -> None:
    with pytest.raises(BlobNotFoundError, match=MANIFEST_FILE):
        read_payload(tmp_path)


def test_any_flipped_byte_of_a_payload_is_seen_or_without_effect(tmp_path: Path) -> None:
    small = {"a": np.arange(40.0), "raw": TENSORS["raw"], "zeros": np.zeros(500, np.float32)}
    write_payload(tmp_path, small)
    for file in (tmp_path / MANIFEST_FILE, tmp_path / PAYLOAD_FILE):
        whole = file.read_bytes()
        for at in range(0, len(whole), 3):
            damaged = bytearray(whole)
            damaged[at] ^= 0x04
            file.write_bytes(damaged)
            try:
                loaded = read_payload(tmp_path)
            except (FormatError, NotFoundError):
                continue
            if file.name == PAYLOAD_FILE:
                assert all(loaded[name].tobytes() == array.tobytes() for name, array in small.items())
        file.write_bytes(whole)
