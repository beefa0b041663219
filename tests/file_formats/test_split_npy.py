from __future__ import annotations

import io

import numpy as np
import pytest

from tensorcas_mlflow.base.dtypes import dtype_name
from tensorcas_mlflow.file_formats import PlainBytes, Skeleton, Tensor, _numpy
from tests.file_formats.parts import damaged, joined, take_apart, tensors

ARRAYS = {
    "float32": np.arange(60, dtype="<f4").reshape(3, 4, 5),
    "bool": np.arange(100) % 3 == 0,
    "complex128": np.arange(20) * 1j,
    "int16, big-endian": np.arange(50, dtype=">i2"),
    "text": np.array(["a", "Ünïcode", "three"] * 4),
    "bytes": np.array([b"four"] * 16),
    "times": np.arange(20).astype("M8[ns]"),
    "records": np.zeros(9, [("left", "<i8"), ("value", "<f8", (2,)), ("go", "?")]),
}


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_an_array_is_one_tensor_with_its_dtype_and_shape(array: np.ndarray) -> None:
    data = npy(array)
    parts = take_apart(data)

    assert joined(parts) == data
    assert [type(part) for part, _ in parts] == [Skeleton, Tensor]
    tensor, content = parts[1]
    assert (tensor.dtype, tensor.shape) == (dtype_name(array.dtype), array.shape)
    assert content == array.tobytes()


def test_the_shape_of_an_array_in_fortran_order_is_that_of_its_transpose() -> None:
    array = np.asfortranarray(np.arange(60.0).reshape(3, 4, 5))
    [(tensor, content)] = tensors(npy(array)).values()

    assert tensor.shape == (5, 4, 3)
    assert content == array.T.tobytes()


def test_records_with_padding_are_a_tensor_without_a_dtype() -> None:
    array = np.ones(9, np.dtype([("go", "u1"), ("value", "<f8")], align=True))
    [(tensor, content)] = tensors(npy(array)).values()

    assert (tensor.dtype, tensor.shape) == (None, None)
    assert content == array.tobytes()


def test_an_array_of_objects_is_all_skeleton() -> None:
    data = npy(np.array([{"os": "system"}] * 100))
    parts = take_apart(data)

    assert joined(parts) == data
    assert {type(part) for part, _ in parts} == {Skeleton}


@pytest.mark.parametrize("array", [np.float64(3), np.zeros((0, 5)), np.arange(7.0)], ids=["scalar", "empty", "small"])
def test_tensors_too_small_for_a_row_stay_in_the_skeleton(array: np.ndarray) -> None:
    data = npy(np.asarray(array))
    parts = take_apart(data)

    assert joined(parts) == data
    assert {type(part) for part, _ in parts} == {Skeleton}


def test_arrays_saved_one_after_the_other_are_a_tensor_each() -> None:
    data = npy(np.arange(100.0)) + npy(np.arange(50))
    parts = take_apart(data)

    assert joined(parts) == data
    assert [part.dtype for part, _ in parts if isinstance(part, Tensor)] == ["float64", "int64"]


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_the_format_is_read(version: tuple[int, int]) -> None:
    out = io.BytesIO()
    np.lib.format.write_array(out, np.arange(32.0), version=version)

    [(tensor, _)] = tensors(out.getvalue()).values()

    assert (tensor.dtype, tensor.shape) == ("float64", (32,))


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999999999, 99999999999999999), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (-1, 8), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (True, 8), }",
        "{'descr': [('a', '<f4', (9999999, 9999999))], 'fortran_order': False, 'shape': (8,), }",
        "{'descr': [('a', 'V999999999')], 'fortran_order': False, 'shape': (99999999999999999,), }",
        "{'descr': [('a', '<f4'), ('a', '<f4')], 'fortran_order': False, 'shape': (8,), }",
        "{'descr': 'M8[zz]', 'fortran_order': False, 'shape': (8,), }",
        "{'descr': __import__('os').system('true'), 'fortran_order': False, 'shape': (8,), }",
        "{'descr': " + "[" * 4000 + "]" * 4000 + ", 'fortran_order': False, 'shape': (8,), }",
        "{'descr': " + "-" * 9000 + "1, 'fortran_order': False, 'shape': (8,), }",
        "{'shape': (8,), }",
        "[1, 2]",
        "",
    ],
)
def test_a_header_of_nonsense_makes_plain_bytes(header: str) -> None:
    text = header.encode() + b"\n"
    data = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(range(200))
    parts = take_apart(data)

    assert joined(parts) == data
    assert {type(part) for part, _ in parts} == {PlainBytes}


def test_a_header_that_claims_gigabytes_costs_nothing() -> None:
    data = b"\x93NUMPY\x02\x00" + (2**32 - 1).to_bytes(4, "little") + b"{" * 100

    assert joined(take_apart(data)) == data


def test_arrays_of_records_are_found_up_to_so_many_bytes_of_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_numpy, "_MAX_LITERAL_BYTES", 1000)
    one = npy(ARRAYS["records"])
    data = one * 50
    parts = take_apart(data)

    assert joined(parts) == data
    assert sum(isinstance(part, Tensor) for part, _ in parts) == 1000 // (len(one) - ARRAYS["records"].nbytes - 10)
    assert isinstance(parts[-1][0], PlainBytes)
    assert list(tensors(one)) == [""]


def test_files_with_simple_headers_may_have_any_number_of_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_numpy, "_MAX_LITERAL_BYTES", 0)
    parts = take_apart(npy(ARRAYS["float32"]) * 50)

    assert sum(isinstance(part, Tensor) for part, _ in parts) == 50


@pytest.mark.parametrize("name", ["float32", "records"])
def test_a_damaged_file_comes_back_bit_for_bit(name: str) -> None:
    for data in damaged(npy(ARRAYS[name])):
        assert joined(take_apart(data)) == data
