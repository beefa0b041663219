"""Files of bintensors and bhckpt, as they pass by."""

from __future__ import annotations

import bintensors.numpy
import numpy as np
import pytest

from tensorcas_mlflow.file_formats import PlainBytes, Skeleton, Tensor
from tests.file_formats.parts import damaged, joined, take_apart, tensors
from tests.file_formats.split_samples import ARRAYS, samples

FORMATS = ["bintensors", "bhckpt"]
LARGE = {name: array for name, array in ARRAYS.items() if array.nbytes >= 64}


@pytest.mark.parametrize("name", FORMATS)
def test_every_tensor_has_its_name_dtype_shape_and_bytes(name: str) -> None:
    data = samples()[name]
    found = tensors(data)

    assert joined(take_apart(data)) == data
    assert {*found} == {*LARGE}
    for key, array in LARGE.items():
        part, taken = found[key]
        assert (part.dtype, part.shape, taken) == (array.dtype.name, array.shape, array.tobytes())


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_behind_the_tensors_are_plain(name: str) -> None:
    data = samples()[name] + bytes(100)
    parts = take_apart(data)

    assert joined(parts) == data
    assert [type(part) for part, _ in parts[-1:]] == [PlainBytes]


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_come_back(name: str) -> None:
    for broken in damaged(samples()[name]):
        assert joined(take_apart(broken)) == broken


def test_a_bintensors_file_of_much_metadata_is_told_by_its_beginning() -> None:
    metadata = {f"key {i}": "value" * 20 for i in range(100)}
    data = bytes(bintensors.numpy.save({"w": np.arange(100.0)}, metadata))

    assert tensors(data)["w"][1] == np.arange(100.0).tobytes()


def test_a_bintensors_file_without_tensors_is_all_skeleton() -> None:
    data = bytes(bintensors.numpy.save({}))

    assert [type(part) for part, _ in take_apart(data)] == [Skeleton]


def test_numbers_are_not_taken_for_a_bintensors_file() -> None:
    for array in (np.arange(2000), np.zeros(2000), np.full(2000, 16), np.arange(2000, dtype=np.int32) * 8):
        assert not any(isinstance(part, Tensor) for part, _ in take_apart(array.tobytes()))
