from __future__ import annotations

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save as save_arrays
from safetensors.torch import save

from tensorcas_mlflow.file_formats import PlainBytes, Skeleton, Tensor
from tests.file_formats.parts import damaged, joined, take_apart, tensors

NETWORK = {
    "encoder.weight": torch.arange(600, dtype=torch.float32).reshape(20, 30),
    "encoder.bias": torch.ones(40, dtype=torch.bfloat16),
    'Größe \\ "2"': torch.ones(9, 9, dtype=torch.float8_e4m3fn),
    "scale": torch.ones(()),
    "nothing": torch.ones(0, 5),
    "mask": torch.ones(100, dtype=torch.bool),
}


def written(header: Any, n_bytes: int) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(i % 251 for i in range(n_bytes))


def entry(begin: int, end: int, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def test_every_tensor_has_its_name_dtype_shape_and_bytes() -> None:
    data = save(NETWORK, metadata={"format": "pt", "note": 'braces } and "quotes"'})
    found = tensors(data)

    assert joined(take_apart(data)) == data
    assert {name: (tensor.dtype, tensor.shape) for name, (tensor, _) in found.items()} == {
        "encoder.weight": ("float32", (20, 30)),
        "encoder.bias": ("bfloat16", (40,)),
        'Größe \\ "2"': ("float8_e4m3fn", (9, 9)),
        "mask": ("bool", (100,)),
    }
    assert found["encoder.weight"][1] == NETWORK["encoder.weight"].numpy().tobytes()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16"])
def test_numpy_dtypes_keep_their_names(dtype: str) -> None:
    [(tensor, _)] = tensors(save_arrays({"a": np.zeros(64, dtype)})).values()

    assert (tensor.dtype, tensor.shape) == (dtype, (64,))


def test_a_header_of_another_writer_is_read() -> None:
    header = {
        "first": {"data_offsets": [64, 192], "extra": None, "shape": [16], "dtype": "F64"},
        "__metadata__": {},
        "s\u00e9cond": entry(0, 64),
    }
    data = written(json.dumps(header, indent=3).encode() + b"   ", 192)
    found = tensors(data)

    assert list(found) == ["sécond", "first"]
    assert (found["first"][0].dtype, found["first"][0].shape) == ("float64", (16,))


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "Q8_9"])
def test_packed_and_unknown_dtypes_make_tensors_without_a_dtype(dtype: str) -> None:
    data = written({"a": entry(0, 96, dtype, [128])}, 96)
    [(tensor, _)] = tensors(data).values()

    assert (tensor.name, tensor.dtype, tensor.shape) == ("a", None, None)


def test_a_header_whose_length_looks_like_a_pickle_is_read() -> None:
    header = json.dumps({"a": entry(0, 200)}).encode().ljust(0x950480)
    data = written(header, 200)

    assert data.startswith(b"\x80\x04\x95")
    assert tensors(data).keys() == {"a"}


def test_a_file_without_tensors_is_all_skeleton() -> None:
    data = save({})

    assert joined(take_apart(data)) == data
    assert {type(part) for part, _ in take_apart(data)} == {Skeleton}


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry(0, 100), "b": entry(101, 200)},
        {"a": entry(0, 100), "b": entry(99, 200)},
        {"a": entry(1, 200)},
        {"a": entry(0, 100), "b": entry(100, 200, "F32", [26])},
        {"a": entry(0, 100), "b": entry(100, 50, "U8", [0])},
        {"a": entry(0, 200, "U8", [-10, -20])},
        {"a": entry(0, 200, "U8", [1] * 70 + [200])},
        {"a": {"dtype": "U8", "shape": [2**70, 0], "data_offsets": [0, 2**70]}},
        {"a": {"dtype": "U8", "shape": [200.0], "data_offsets": [0, 200]}},
        {"a": {"dtype": ["U8"], "shape": [200], "data_offsets": [0, 200]}},
        {"a": {"dtype": "U8", "shape": [200]}},
        {"a": 7},
        b'{"a":{"dtype":"U8","shape":[100],"data_offsets":[0,100]},"\\u0061":'
        + json.dumps(entry(100, 200)).encode()
        + b"}",
        b'{"__metadata__":{},"__metadata__":{}}',
        b'{"__metadata__":{"a":{}}}',
        b'{"a":{"dtype":"U8","shape":[200],"data_offsets":[0,200]}',
        b'{"a":{"dtype":"U8","shape":[200],"data_offsets":[0,200]}}}',
        b"{" + b'"a":{' * 5000,
        b'{"\xff":' + json.dumps(entry(0, 200)).encode() + b"}",
    ],
)
def test_a_header_that_is_not_sound_makes_plain_bytes(header: Any) -> None:
    data = written(header, 200)
    parts = take_apart(data)

    assert joined(parts) == data
    assert {type(part) for part, _ in parts} == {PlainBytes}


def test_bytes_behind_the_last_tensor_are_plain() -> None:
    data = written({"a": entry(0, 200)}, 300)
    parts = take_apart(data)

    assert joined(parts) == data
    assert [(type(part), len(taken)) for part, taken in parts[1:]] == [(Tensor, 200), (PlainBytes, 100)]


def test_a_damaged_file_comes_back_bit_for_bit() -> None:
    for data in damaged(save(NETWORK)):
        assert joined(take_apart(data)) == data


def test_thousands_of_tensors_are_found() -> None:
    text = b",".join(
        b'"layers.%d.weight":{"dtype":"F32","shape":[8,2],"data_offsets":[%d,%d]}' % (i, 64 * i, 64 * i + 64)
        for i in range(20_000)
    )
    parts = take_apart(len(text + b"{}").to_bytes(8, "little") + b"{" + text + b"}" + bytes(64 * 20_000))

    assert len(parts) == 20_001
    assert parts[-1][0].name == "layers.19999.weight"


@pytest.mark.long
@pytest.mark.parametrize(
    "header",
    [
        b'{"a":[' + b"[]," * 700_000,
        b'{"":{' + b'"":0,' * 400_000,
        b"{" + b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},' * 10_000,
    ],
    ids=["lists", "an object", "tensors"],
)
def test_a_hostile_header_does_not_cost_many_times_its_size(header: bytes) -> None:
    data = written(header, 0)
    tracemalloc.start()
    try:
        take_apart(data)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak_bytes < 5 * len(data) + (4 << 20)
