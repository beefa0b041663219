"""Functions of derived tensors against numpy, ml_dtypes, torch and gguf."""

from __future__ import annotations

import ctypes
import math
import platform
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tensorcas_mlflow.base.dtypes import dtype_name, parse_dtype
from tensorcas_mlflow.codecs import Kind, check, computes_exactly, evaluate
from tensorcas_mlflow.codecs._functions import _tiles
from tensorcas_mlflow.errors import FormatError

rng = np.random.default_rng(0)
FLOATS = ("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2", ">float32", ">float16")


def kind_of(array: np.ndarray[Any, Any]) -> Kind:
    return Kind(dtype_name(array.dtype), array.shape)


def made(function: str, params: dict[str, Any], inputs: list[np.ndarray[Any, Any]], output: Kind) -> Any:
    check(function, params, [kind_of(each) for each in inputs], output)
    result = evaluate(function, params, inputs, output)

    assert result.flags.c_contiguous
    assert result.shape == output.shape
    assert result.dtype == output.numpy_dtype
    return result


def same_bytes(one: Any, other: Any) -> bool:
    return bool(np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes())


def floats(n: int, dtype: str) -> Any:
    return rng.normal(0, 1, n).astype(np.float32).astype(parse_dtype(dtype))


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_cast_gives_the_bytes_of_numpy_and_ml_dtypes(source: str, target: str) -> None:
    values = floats(200_000, source).reshape(200, 1000)
    result = made("cast", {}, [values], Kind(target, (200, 1000)))

    through = values.astype(np.float32) if "8" in source + target or "bf" in source + target else values

    assert same_bytes(result, through.astype(parse_dtype(target)))


def test_cast_to_bfloat16_rounds_every_tie_to_even() -> None:
    bits = (np.arange(1 << 16, dtype=np.uint32) << 16)[:, None] + np.array([0x7FFF, 0x8000, 0x8001], np.uint32)
    values = bits.view(np.float32)
    values = values[~np.isnan(values)]

    result = made("cast", {}, [values], Kind("bfloat16", values.shape))

    assert same_bytes(result, torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy())


@pytest.mark.parametrize("target", ["float16", "bfloat16", "float64", ">float16", ">float64"])
def test_cast_gives_one_nan_for_all_nans(target: str) -> None:
    bits = np.array([0x7F800001, 0x7FC00000, 0x7FC12345, 0xFF800001, 0xFFC00000], np.uint32)
    result = made("cast", {}, [bits.view(np.float32)], Kind(target, (5,)))

    quiet = {2: {"float16": 0x7E00, "bfloat16": 0x7FC0}.get(target.lstrip(">"), 0), 8: 0x7FF8 << 48}
    word = result.dtype.itemsize
    words = result.astype(result.dtype.newbyteorder("=")).view(f"u{word}").tolist()
    top = 1 << (8 * word - 1)

    assert words == [quiet[word]] * 3 + [top | quiet[word]] * 2


def test_swapping_bytes_keeps_the_bits_of_nans() -> None:
    bits = np.array([0x7F800001, 0xFFC12345], np.uint32)

    assert same_bytes(made("cast", {}, [bits.view(np.float32)], Kind(">float32", (2,))), bits.astype(">u4"))


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((300, 500), (1, 0)),
        ((8, 16, 3, 3), (2, 3, 1, 0)),
        ((8, 16, 3, 3), (0, 2, 3, 1)),
        ((3, 3, 64, 130), (3, 2, 0, 1)),
        ((5, 70_000), (1, 0)),
        ((2, 1, 70_000), (2, 1, 0)),
        ((0, 4), (1, 0)),
        ((), ()),
        ((7,), (0,)),
    ],
)
@pytest.mark.parametrize("source", ["float32", "int8", "complex128"])
def test_permute_gives_the_bytes_of_a_transposed_array(
    shape: tuple[int, ...], axes: tuple[int, ...], source: str
) -> None:
    values = rng.normal(0, 50, shape).astype(source)
    wanted = np.ascontiguousarray(values.transpose(axes)).reshape(tuple(shape[axis] for axis in axes))

    assert same_bytes(made("permute", {"axes": list(axes)}, [values], kind_of(wanted)), wanted)
    if source == "float32":
        bf16 = wanted.astype(ml_dtypes.bfloat16)
        assert same_bytes(made("permute", {"axes": list(axes)}, [values], kind_of(bf16)), bf16)


@pytest.mark.parametrize(("axis", "start", "stop"), [(0, 0, 10), (0, 7, 40), (1, 300, 700), (2, 1, 2), (1, 5, 5)])
@pytest.mark.parametrize("target", ["float32", "float16"])
def test_slice_gives_the_bytes_of_a_part(axis: int, start: int, stop: int, target: str) -> None:
    values = rng.normal(0, 1, (40, 700, 3)).astype(np.float32)
    wanted = values[(*[slice(None)] * axis, slice(start, stop))].astype(target)

    assert same_bytes(made("slice", {"axis": axis, "start": start}, [values], kind_of(wanted)), wanted)


def test_assemble_puts_boxes_in_their_places_and_converts_each() -> None:
    wanted = np.arange(7 * 5, dtype=np.float32).reshape(7, 5)
    boxes = {(0, 0): wanted[:3, :2], (3, 0): wanted[3:, :2], (0, 2): wanted[:, 2:], (7, 0): wanted[7:, :2]}
    arrays = [np.ascontiguousarray(box).astype(np.float64) for box in boxes.values()]
    params = {"offsets": [list(offsets) for offsets in boxes]}

    assert same_bytes(made("assemble", params, arrays, kind_of(wanted)), wanted)


def test_slice_and_assemble_take_plain_bytes() -> None:
    data = rng.integers(0, 256, 1000).astype(np.uint8)
    kind = Kind(None, (1000,))
    check("slice", {"axis": 0, "start": 10}, [kind], Kind(None, (50,)))
    check("assemble", {"offsets": [[0], [1000]]}, [kind, kind], Kind(None, (2000,)))

    assert same_bytes(evaluate("slice", {"axis": 0, "start": 10}, [data], Kind(None, (50,))), data[10:60])
    twice = evaluate("assemble", {"offsets": [[0], [1000]]}, [data, data], Kind(None, (2000,)))
    assert same_bytes(twice, np.tile(data, 2))


@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
def test_mean_of_two_is_computed_as_torch_does(target: str) -> None:
    one, two = floats(100_000, "float32"), floats(100_000, "float32")
    mean = (torch.from_numpy(one) + torch.from_numpy(two)) / 2
    wanted = mean.numpy().astype(parse_dtype(target))

    assert same_bytes(made("mean", {}, [one, two], Kind(target, one.shape)), wanted)


def test_mean_adds_in_the_order_of_its_inputs_in_single_precision() -> None:
    arrays = [floats(10_000, dtype) for dtype in ("float32", "bfloat16", "float64")]
    weight = np.float32(1 / 3)
    wanted = np.zeros(10_000, np.float32)
    for number in range(10_000):
        total = weight * np.float32(arrays[0][number])
        for array in arrays[1:]:
            total = np.float32(total + np.float32(weight * np.float32(array[number])))
        wanted[number] = total

    assert same_bytes(made("mean", {}, arrays, kind_of(wanted)), wanted)


def test_mean_gives_one_nan_for_all_nans() -> None:
    one = np.array([np.inf, np.nan, -np.nan, 1], np.float32)
    two = np.array([-np.inf, -np.nan, 1, np.nan], np.float32)
    result = made("mean", {}, [one, two], Kind("float32", (4,)))

    assert result.view(np.uint32).tolist() == [0x7FC00000] * 4


@pytest.mark.long
@settings(max_examples=50)
@given(hnp.arrays(np.uint32, st.integers(0, 200)), st.randoms())
def test_results_do_not_depend_on_blocks(bits: Any, random: Any) -> None:
    values = np.resize(bits, 70_000).view(np.float32) if len(bits) else bits.view(np.float32)
    for function, params, inputs in (("cast", {}, 1), ("mean", {}, 2)):
        whole = made(function, params, [values] * inputs, Kind("bfloat16", values.shape))
        at = random.randrange(len(values) + 1)
        parts = [
            made(function, params, [part] * inputs, Kind("bfloat16", part.shape)) for part in (values[:at], values[at:])
        ]
        assert same_bytes(whole, np.concatenate(parts))


F32 = Kind("float32", (4, 64))


@pytest.mark.parametrize(
    ("function", "params", "inputs", "output"),
    [
        ("sine", {}, [F32], F32),
        (["cast"], {}, [F32], F32),
        ("cast", {"to": "float16"}, [F32], F32),
        ("cast", [], [F32], F32),
        ("cast", {}, [], F32),
        ("cast", {}, [F32, F32], F32),
        ("cast", {}, [F32], Kind("float16", (4, 63))),
        ("cast", {}, [F32], Kind("int32", (4, 64))),
        ("cast", {}, [F32], Kind(None, (256,))),
        ("cast", {}, [Kind("int8", (4, 64))], F32),
        ("permute", {"axes": [0]}, [F32], F32),
        ("permute", {"axes": [0, 0]}, [F32], Kind("float32", (4, 4))),
        ("permute", {"axes": [0, -1]}, [F32], F32),
        ("permute", {"axes": [1, 0]}, [F32], F32),
        ("permute", {"axes": [False, True]}, [F32], F32),
        ("permute", {"axes": "01"}, [F32], F32),
        ("permute", {"axes": 1}, [F32], F32),
        ("permute", {"axes": [[0], [1]]}, [F32], F32),
        ("slice", {"axis": 2, "start": 0}, [F32], F32),
        ("slice", {"axis": 0, "start": 1}, [F32], F32),
        ("slice", {"axis": 0, "start": -1}, [F32], Kind("float32", (1, 64))),
        ("slice", {"axis": 0, "start": 0}, [F32], Kind("float32", (5, 64))),
        ("slice", {"axis": 0, "start": 0.0}, [F32], F32),
        ("slice", {"axis": 0, "start": 0}, [F32], Kind("float32", (4, 63))),
        ("slice", {"axis": 0, "start": 0}, [F32], Kind("float32", (4,))),
        ("assemble", {"offsets": [[0, 0]]}, [F32, F32], F32),
        ("assemble", {"offsets": [[0]]}, [F32], F32),
        ("assemble", {"offsets": [[0, 1]]}, [F32], F32),
        ("assemble", {"offsets": [[0, -1]]}, [F32], F32),
        ("assemble", {"offsets": [[0, 0.0]]}, [F32], F32),
        ("assemble", {"offsets": [[0, 0], [0, 0]]}, [F32, F32], Kind("float32", (2 * F32.shape[0], F32.shape[1]))),
        ("assemble", {"offsets": "ab"}, [F32, F32], F32),
        ("assemble", {"offsets": [[0, 0], [4, 0]]}, [F32, Kind("float32", (256,))], Kind("float32", (8, 64))),
        ("assemble", {"offsets": [[4 * n, 0] for n in range(1025)]}, [F32] * 1025, Kind("float32", (4100, 64))),
        ("mean", {"weights": [0.5, 0.5]}, [F32, F32], F32),
        ("mean", {}, [F32, Kind("int32", (4, 64))], F32),
        ("mean", {}, [F32, F32], Kind("int32", (4, 64))),
        ("mean", {}, [F32, Kind("float32", (4, 65))], F32),
        ("cast", {}, [Kind("float32", (1 << 30,))], Kind("bfloat16", (1 << 30,))),
    ],
)
def test_an_impossible_function_is_refused(function: Any, params: Any, inputs: list[Kind], output: Kind) -> None:
    with pytest.raises(FormatError):
        check(function, params, inputs, output)


@pytest.mark.parametrize(
    ("function", "params", "n_inputs", "output"),
    [
        ("cast", {}, 1, Kind("bfloat16", (2048, 2048))),
        ("permute", {"axes": [1, 0]}, 1, Kind("float16", (2048, 2048))),
        ("slice", {"axis": 1, "start": 10}, 1, Kind("bfloat16", (2048, 1024))),
        ("assemble", {"offsets": [[0, 0], [0, 2048]]}, 2, Kind("bfloat16", (2048, 4096))),
        ("mean", {}, 2, Kind("float32", (2048, 2048))),
        ("q8_0", {}, 1, Kind(None, (2048 * 64 * 34,))),
    ],
)
def test_evaluation_needs_the_memory_of_its_result_and_a_few_blocks(
    function: str, params: dict[str, Any], n_inputs: int, output: Kind
) -> None:
    inputs = [floats(2048 * 2048, "float32").reshape(2048, 2048)] * n_inputs
    made(function, params, inputs, output)
    tracemalloc.start()
    made(function, params, inputs, output)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < output.n_bytes + (3 << 20)


def test_thread_computes_exactly_unless_it_flushes_subnormals() -> None:
    assert computes_exactly()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor always keeps subnormal numbers")
    try:
        assert not computes_exactly()
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("mode", ["up", "down", "zero"])
def test_thread_that_rounds_otherwise_does_not_compute_exactly(mode: str) -> None:
    libm = ctypes.CDLL(None)
    modes = {"x86_64": {"down": 0x400, "up": 0x800, "zero": 0xC00}}.get(platform.machine(), {})
    if mode not in modes or libm.fesetround(modes[mode]) != 0:
        pytest.skip("this processor's rounding modes have other numbers")
    try:
        assert not computes_exactly()
    finally:
        libm.fesetround(0)


@pytest.mark.parametrize("shape", [(2, 1 << 18), (1 << 18, 2), (1 << 19, 1)])
def test_permutation_of_a_thin_array_takes_few_steps(shape: tuple[int, int]) -> None:
    tiles = list(_tiles(np.empty(shape, np.float32).T, is_bounded=True))

    assert len(tiles) <= 1 << 8
    assert sum(math.prod(side.stop - side.start for side in tile) for tile in tiles) >= 1 << 19
