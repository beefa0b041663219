"""GGUF files, made by the `gguf` library of llama.cpp."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES

from tensorcas_mlflow.file_formats import PlainBytes, Skeleton, Tensor
from tensorcas_mlflow.file_formats._gguf import _TYPES
from tests.file_formats.parts import damaged, joined, take_apart, tensors

Make = Callable[..., bytes]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make(
        arrays: dict[str, Any],
        *,
        fill: Callable[[gguf.GGUFWriter], Any] = lambda _: None,
        types: dict[str, gguf.GGMLQuantizationType] | None = None,
        **settings: Any,
    ) -> bytes:
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", **settings)
        fill(writer)
        for name, array in arrays.items():
            writer.add_tensor(name, array.copy(), raw_dtype=(types or {}).get(name))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return (tmp_path / "model.gguf").read_bytes()

    return make


@pytest.fixture
def weights() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(6, 5, 64)).astype(np.float32)


def test_every_tensor_has_its_name_dtype_shape_and_bytes(make: Make, weights: np.ndarray) -> None:
    arrays = {
        f"blk.0.{name}": weights.astype(name)
        for name in ("float32", "float16", "float64", "int8", "int16", "int32", "int64")
    }
    data = make(arrays)

    found = tensors(data)

    assert joined(take_apart(data)) == data
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        part, taken = found[name]
        assert (part.dtype, part.shape, taken) == (array.dtype.name, (6, 5, 64), array.tobytes())


def test_bfloat16_is_known_by_its_name(make: Make, weights: np.ndarray) -> None:
    half = weights.astype(ml_dtypes.bfloat16)
    data = make({"w": half.view(np.uint8)}, types={"w": gguf.GGMLQuantizationType.BF16})

    part, taken = tensors(data)["w"]

    assert (part.dtype, part.shape, taken) == ("bfloat16", (6, 5, 64), half.tobytes())


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q6_K", "TQ2_0"])
def test_a_quantized_tensor_is_whole_and_of_no_dtype(make: Make, kind: str) -> None:
    quantized = gguf.GGMLQuantizationType[kind]
    blocks = np.random.default_rng(0).integers(0, 255, (3, 2 * GGML_QUANT_SIZES[quantized][1]), dtype=np.uint8)
    data = make({"q": blocks, "after": np.arange(100.0)}, types={"q": quantized})

    found = tensors(data)

    assert (found["q"][0].dtype, found["q"][0].shape) == (None, None)
    assert found["q"][1] == blocks.tobytes()
    assert found["after"][1] == np.arange(100.0).tobytes()


def test_block_sizes_are_those_of_the_library() -> None:
    ours = {kind: (n_elements, n_bytes) for kind, (_, _, n_bytes, n_elements) in _TYPES.items()}

    assert ours == {kind: GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)] for kind in ours}


def test_metadata_of_every_kind_is_passed(make: Make, weights: np.ndarray) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list([f"token {i} ä" for i in range(5000)])
        writer.add_token_scores([1.5] * 5000)
        writer.add_bool("a.bool", True)
        writer.add_uint8("a.byte", 1)
        writer.add_int16("a.short", -1)
        writer.add_float64("a.double", 1.0)
        writer.add_uint64("a.long", 1 << 40)
        writer.add_array("a.nested", [[1, 2], [3]])
        writer.add_string("a.long_text", "x" * 3_000_000)

    data = make({"w": weights}, fill=fill)

    assert joined(take_apart(data)) == data
    assert tensors(data)["w"][1] == weights.tobytes()


def test_tensors_begin_where_the_alignment_of_the_file_says(make: Make, weights: np.ndarray) -> None:
    data = make({"a": weights[0], "b": weights[1]}, fill=lambda writer: writer.add_custom_alignment(4096))

    found = tensors(data)

    assert found["a"][1] == weights[0].tobytes()
    assert found["b"][1] == weights[1].tobytes()


def test_a_big_endian_file_has_big_endian_dtypes(make: Make, weights: np.ndarray) -> None:
    data = make({"w": weights, "b": weights.astype(np.int8)}, endianess=gguf.GGUFEndian.BIG)

    found = tensors(data)

    assert (found["w"][0].dtype, found["w"][0].shape) == (">float32", weights.shape)
    assert found["w"][1] == weights.astype(">f4").tobytes()
    assert found["b"][0].dtype == "int8"


def test_version_2_is_read_as_version_3_is(make: Make, weights: np.ndarray) -> None:
    data = make({"w": weights})
    older = data[:4] + struct.pack("<I", 2) + data[8:]

    assert tensors(older)["w"][1] == weights.tobytes()


def test_small_tensors_stay_in_the_skeleton(make: Make, weights: np.ndarray) -> None:
    data = make({"bias": np.ones(15, np.float32), "weight": weights})

    assert list(tensors(data)) == ["weight"]
    assert joined(take_apart(data)) == data


def test_gguf_tensor_of_an_unknown_type_reaches_to_the_next_tensor(make: Make, weights: np.ndarray) -> None:
    data = make({"new": weights, "known": weights})
    at = data.index(b"new") + 3 + 4 + 3 * 8

    found = tensors(data[:at] + struct.pack("<I", 999) + data[at + 4 :])

    assert (found["new"][0].dtype, found["new"][1]) == (None, weights.tobytes())
    assert found["known"][1] == weights.tobytes()


def test_tensors_are_found_whatever_the_order_of_the_header(make: Make, weights: np.ndarray) -> None:
    data = make({"a": weights[0], "b": weights[1]})
    first, second = data.index(b"a\x02\0\0\0") - 8, data.index(b"b\x02\0\0\0") - 8
    n_bytes = second - first
    swapped = data[:first] + data[second : second + n_bytes] + data[first:second] + data[second + n_bytes :]

    found = tensors(swapped)

    assert found["a"][1] == weights[0].tobytes()
    assert found["b"][1] == weights[1].tobytes()


def test_overlapping_tensors_leave_the_rest_of_the_file_plain(make: Make, weights: np.ndarray) -> None:
    data = make({"a": weights, "b": weights})
    at = data.index(b"b\x03\0\0\0") + 1 + 4 + 3 * 8 + 4
    overlapping = data[:at] + struct.pack("<Q", 32) + data[at + 8 :]

    parts = take_apart(overlapping)

    assert joined(parts) == overlapping
    assert [type(part) for part, _ in parts][-2:] == [Tensor, PlainBytes]


@pytest.mark.parametrize("at", [8, 16])
def test_a_header_that_claims_too_much_is_believed_as_far_as_the_file_goes(make: Make, at: int) -> None:
    data = make({"w": np.ones(100, np.float32)})
    boasting = data[:at] + b"\xff" * 7 + b"\x7f" + data[at + 8 :]

    parts = take_apart(boasting)

    assert joined(parts) == boasting
    assert not any(isinstance(part, Tensor) for part, _ in parts)


def test_a_file_without_tensors_is_all_skeleton(make: Make) -> None:
    data = make({}, fill=lambda writer: writer.add_token_list(["a", "b"]))

    parts = take_apart(data)

    assert joined(parts) == data
    assert all(isinstance(part, Skeleton) for part, _ in parts)


@pytest.mark.parametrize("nesting", [0, 1])
def test_a_header_of_more_values_than_any_model_has_makes_plain_bytes(nesting: int) -> None:
    n_values = 100_000
    pair = struct.pack("<QIB", 0, 7, 1)
    pairs = pair * n_values
    arrays = struct.pack("<QIIQ", 0, 9, 9, n_values) + struct.pack("<IQ", 7, 0) * n_values
    data = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 if nesting else n_values) + (arrays if nesting else pairs)
    parts = take_apart(data)

    assert joined(parts) == data
    assert {type(part) for part, _ in parts} == {PlainBytes}


def test_damaged_files_come_back(make: Make, weights: np.ndarray) -> None:
    data = make({"w": weights[0], "b": weights[1, 0]}, fill=lambda writer: writer.add_token_list(["a"] * 20))

    for broken in damaged(data):
        assert joined(take_apart(broken)) == broken
