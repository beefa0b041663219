from __future__ import annotations

import numpy as np
import pytest

from tensorcas_mlflow.adapter import SKELETON
from tensorcas_mlflow.base.tensors import (
    ALIGNMENT,
    MAX_NAME_BYTES,
    Spec,
    aligned_bytes,
    bytes_of,
    pieces_of,
)
from tensorcas_mlflow.errors import FormatError


def test_an_array_is_described_by_name_dtype_and_shape() -> None:
    spec = Spec.of("layer.weight", np.zeros((3, 4), np.float16))

    assert (spec.name, spec.dtype, spec.shape, spec.n_bytes) == ("layer.weight", "float16", (3, 4), 24)
    assert spec.numpy_dtype == np.float16


def test_the_skeleton_is_plain_bytes() -> None:
    spec = Spec.of(SKELETON, np.zeros(5, np.uint8))

    assert (spec.dtype, spec.shape, spec.n_bytes) == (None, (5,), 5)


@pytest.mark.parametrize("array", [np.zeros(5), np.zeros((5, 1), np.uint8)])
def test_a_skeleton_of_another_kind_is_refused(array: np.ndarray) -> None:
    with pytest.raises(ValueError, match="1-d uint8"):
        Spec.of(SKELETON, array)


@pytest.mark.parametrize(
    "name", ["", "a\0b", "a\nb", "a\rb", "x" * (MAX_NAME_BYTES + 1), "\udc80", "é" * MAX_NAME_BYTES]
)
def test_a_name_that_cannot_be_stored_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a tensor's name"):
        Spec.of(name, np.zeros(3))


@pytest.mark.parametrize("name", ["a b", "模型", "../../x", "a/b", "%", "x" * MAX_NAME_BYTES])
def test_tensor_can_have_any_other_name(name: str) -> None:
    assert Spec.of(name, np.zeros(3)).name == name


def test_an_array_of_objects_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be stored"):
        Spec.of("x", np.array([object()]))


def test_a_string_too_long_to_be_read_back_is_refused_when_it_is_written() -> None:
    with pytest.raises(ValueError, match="cannot be stored"):
        Spec.of("x", np.array([b"x" * (2 << 20)]))


@pytest.mark.parametrize(
    "shape", [(-1,), (2, -3), (1 << 60,), (1 << 31, 1 << 31), (0, 1 << 62), (1 << 62, 0, 5), (1,) * 65]
)
def test_a_hostile_shape_is_a_format_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(FormatError):
        Spec(name="x", dtype="float32", shape=shape)


def test_plain_bytes_of_two_dimensions_are_a_format_error() -> None:
    with pytest.raises(FormatError):
        Spec(name="x", dtype=None, shape=(2, 3))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0).reshape(3, 4),
        np.arange(12.0).reshape(3, 4).T,
        np.arange(12)[::-2],
        np.float32(3.5),
        np.array(7),
        np.zeros((0, 3)),
        np.broadcast_to(np.arange(3), (4, 3)),
        np.array(["2020-01-01"], "datetime64[s]"),
        np.array([(1, 2.0)], [("a", "<i4"), ("b", "<f8")]),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_the_bytes_of_an_array_are_its_elements_in_c_order(array: np.ndarray) -> None:
    array = np.asarray(array)

    assert bytes(bytes_of(array)) == array.tobytes()


def test_bytes_in_c_order_are_not_copied() -> None:
    array = np.arange(6.0)
    view = bytes_of(array)
    array[0] = 99

    assert bytes(view) == array.tobytes()


def test_pieces_are_cut_at_the_ends() -> None:
    pieces = pieces_of(memoryview(b"abcdef"), np.array([2, 3, 6]))

    assert [bytes(piece) for piece in pieces] == [b"ab", b"c", b"def"]


@pytest.mark.parametrize("n_bytes", [1, 4096, 2_097_151, 9_999_999])
def test_aligned_bytes_are_writable_and_aligned_at_every_size(n_bytes: int) -> None:
    block = aligned_bytes(n_bytes)
    block[:] = 7

    assert len(block) == n_bytes
    assert block.ctypes.data % ALIGNMENT == 0
    assert (block == 7).all()


def test_block_that_no_memory_can_hold_is_a_memory_error() -> None:
    for n_bytes in (1 << 60, 1 << 62):
        with pytest.raises(MemoryError):
            aligned_bytes(n_bytes)
