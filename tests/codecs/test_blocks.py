"""Quantized blocks of Q8_0 against the package gguf."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tensorcas_mlflow.base.dtypes import dtype_name, parse_dtype
from tensorcas_mlflow.codecs import BLOCK_BYTES, BLOCK_ELEMENTS, Q8_0, Kind, bounds, check, evaluate
from tensorcas_mlflow.errors import FormatError

rng = np.random.default_rng(0)


def blocks_of(values: Any) -> Any:
    """Return the blocks of numbers, one a row."""
    output = Kind(None, (values.size // BLOCK_ELEMENTS * BLOCK_BYTES,))
    kind = Kind(dtype_name(values.dtype), values.shape)
    check(Q8_0, {}, [kind], output)
    return evaluate(Q8_0, {}, [values], output).reshape(-1, BLOCK_BYTES)


def reference(values: Any) -> Any:
    with np.errstate(all="ignore"):
        made = gguf.quantize(np.ascontiguousarray(values, np.float32), gguf.GGMLQuantizationType.Q8_0)
    return made.reshape(-1, BLOCK_BYTES)


def check_gives_the_reference(values: Any) -> None:
    np.testing.assert_array_equal(blocks_of(values), reference(values))


def test_sizes_are_those_of_gguf() -> None:
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_0] == (BLOCK_ELEMENTS, BLOCK_BYTES)


@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16", ">float32", ">float16"])
def test_blocks_of_weights_are_those_of_gguf(source: str) -> None:
    values = rng.normal(0, 0.02, (64, 4096)).astype(np.float32).astype(parse_dtype(source))

    check_gives_the_reference(values)


def test_blocks_of_zeros_and_ties_are_those_of_gguf() -> None:
    check_gives_the_reference(np.zeros((2, 512), np.float32))
    check_gives_the_reference(-np.zeros((2, 512), np.float32))
    check_gives_the_reference(np.full((2, 512), -0.5, np.float32))
    check_gives_the_reference(rng.integers(-40, 41, (256, 512)).astype(np.float32) / 2)
    check_gives_the_reference(rng.integers(-1, 2, (256, 512)).astype(np.float32))


def test_blocks_of_every_magnitude_are_those_of_gguf() -> None:
    values = rng.normal(0, 1, (4, 512)).astype(np.float32)
    for exponent in range(-149, 125, 2):  # subnormal numbers and scales without an inverse among them
        check_gives_the_reference(np.ldexp(values, exponent))


def test_blocks_just_below_powers_of_two_are_those_of_gguf() -> None:
    values = rng.uniform(-0.9, 0.9, (100, 256)).astype(np.float32)
    values[:, 7] = 1 - np.arange(100) * np.float32(2**-24)
    for exponent in range(-126, 126, 3):
        check_gives_the_reference(np.ldexp(values, exponent))


@settings(max_examples=60)
@given(hnp.arrays(np.uint32, (4, 256), elements=st.integers(0, (1 << 32) - 1)), st.integers(0, 31))
def test_blocks_of_any_finite_numbers_are_those_of_gguf(bits: Any, place: int) -> None:
    values = bits.view(np.float32)
    values[~np.isfinite(values)] = 0
    values[0, place] = 3e38

    check_gives_the_reference(values)


def test_blocks_with_infinities_and_nans_are_defined() -> None:
    values = np.ones((4, BLOCK_ELEMENTS), np.float32)
    values[0, 5], values[1, 5], values[2, 5] = np.inf, -np.inf, np.nan
    values[3, 5] = -np.nan

    found = [block.tobytes().hex() for block in blocks_of(values)]

    assert found == ["007c" + 32 * "00"] * 2 + ["007e" + 32 * "00"] * 2


@pytest.mark.parametrize("exponent", [-14, -6, 0, 6])
def test_bounds_hold_the_quantized_numbers(exponent: int) -> None:
    values = np.ldexp(rng.normal(0, 1, (64, 512)).astype(np.float32), exponent).reshape(-1, BLOCK_ELEMENTS)
    found = bounds(blocks_of(values))

    assert (found.low <= values).all()
    assert (values <= found.high).all()
    assert (found.high - found.low < 2.1 * np.abs(values).max(axis=1, keepdims=True)).all()


def test_bounds_of_any_bytes_are_numbers_or_nans() -> None:
    found = bounds(rng.integers(0, 256, (1000, BLOCK_BYTES), dtype=np.uint8))

    assert found.low.shape == found.high.shape == (1000, BLOCK_ELEMENTS)
    assert not (found.low > found.high).any()


def test_rows_that_are_no_blocks_are_refused() -> None:
    n, size = BLOCK_ELEMENTS, BLOCK_BYTES
    for params, kind, output in (
        ({}, Kind("float32", (4, n + 1)), Kind(None, (4 * size,))),
        ({}, Kind("float32", (n, 1)), Kind(None, (size,))),
        ({}, Kind("float64", (4, n)), Kind(None, (4 * size,))),
        ({}, Kind("int32", (4, n)), Kind(None, (4 * size,))),
        ({}, Kind(None, (4, n)), Kind(None, (4 * size,))),
        ({}, Kind("float32", (4, n)), Kind(None, (4 * size + 1,))),
        ({}, Kind("float32", (4, n)), Kind("int8", (4 * size,))),
        ({}, Kind("float32", ()), Kind(None, (size,))),
        ({"type": 2}, Kind("float32", (4, n)), Kind(None, (4 * size,))),
    ):
        with pytest.raises(FormatError):
            check(Q8_0, params, [kind], output)
    with pytest.raises(FormatError, match="inputs"):
        check(Q8_0, {}, [Kind("float32", (4, n))] * 2, Kind(None, (8 * size,)))
