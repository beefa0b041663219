"""Quantized blocks of GGUF against the package gguf."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tensorcas_mlflow.base.dtypes import dtype_name, parse_dtype
from tensorcas_mlflow.codecs import BLOCK_FORMATS, Kind, bounds, check, evaluate
from tensorcas_mlflow.errors import FormatError

rng = np.random.default_rng(0)
every_format = pytest.mark.parametrize("function", sorted(BLOCK_FORMATS))


def blocks_of(function: str, values: Any) -> Any:
    """Return the blocks of numbers, one a row."""
    form = BLOCK_FORMATS[function]
    output = Kind(None, (values.size // form.n_elements * form.n_bytes,))
    kind = Kind(dtype_name(values.dtype), values.shape)
    check(function, {}, [kind], output)
    return evaluate(function, {}, [values], output).reshape(-1, form.n_bytes)


def reference(function: str, values: Any) -> Any:
    with np.errstate(all="ignore"):
        made = gguf.quantize(np.ascontiguousarray(values, np.float32), gguf.GGMLQuantizationType[function.upper()])
    return made.reshape(-1, BLOCK_FORMATS[function].n_bytes)


def check_gives_the_reference(function: str, values: Any) -> None:
    np.testing.assert_array_equal(blocks_of(function, values), reference(function, values))


@every_format
def test_sizes_are_those_of_gguf(function: str) -> None:
    form = BLOCK_FORMATS[function]

    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[function.upper()]] == (form.n_elements, form.n_bytes)


def test_every_format_that_gguf_quantizes_has_a_function() -> None:
    values, can = np.zeros(256, np.float32), set()
    for kind in gguf.GGMLQuantizationType:
        try:
            gguf.quantize(values, kind)
        except (NotImplementedError, gguf.quants.QuantError):
            continue
        can.add(kind.name.lower())

    assert can == {*BLOCK_FORMATS, "f32", "f16", "bf16"}  # the others are casts


@every_format
@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16", ">float32", ">float16"])
def test_blocks_of_weights_are_those_of_gguf(function: str, source: str) -> None:
    values = rng.normal(0, 0.02, (64, 4096)).astype(np.float32).astype(parse_dtype(source))

    check_gives_the_reference(function, values)


@every_format
def test_blocks_of_zeros_and_ties_are_those_of_gguf(function: str) -> None:
    check_gives_the_reference(function, np.zeros((2, 512), np.float32))
    check_gives_the_reference(function, -np.zeros((2, 512), np.float32))
    check_gives_the_reference(function, np.full((2, 512), -0.5, np.float32))
    check_gives_the_reference(function, rng.integers(-40, 41, (256, 512)).astype(np.float32) / 2)
    check_gives_the_reference(function, rng.integers(-1, 2, (256, 512)).astype(np.float32))


@every_format
def test_blocks_of_every_magnitude_are_those_of_gguf(function: str) -> None:
    values = rng.normal(0, 1, (4, 512)).astype(np.float32)
    for exponent in range(-149, 125, 2):  # subnormal numbers and scales without an inverse among them
        check_gives_the_reference(function, np.ldexp(values, exponent))


@every_format
def test_blocks_just_below_powers_of_two_are_those_of_gguf(function: str) -> None:
    values = rng.uniform(-0.9, 0.9, (100, 256)).astype(np.float32)
    values[:, 7] = 1 - np.arange(100) * np.float32(2**-24)
    for exponent in range(-126, 126, 3):
        check_gives_the_reference(function, np.ldexp(values, exponent))


@every_format
@settings(deadline=None, max_examples=60)
@given(hnp.arrays(np.uint32, (4, 256), elements=st.integers(0, (1 << 32) - 1)), st.integers(0, 31))
def test_blocks_of_any_finite_numbers_are_those_of_gguf(function: str, bits: Any, place: int) -> None:
    values = bits.view(np.float32)
    # numpy leaves open which of two equal zeros is the least element.
    values[~np.isfinite(values) | (values == 0)] = 0
    values[0, place] = 3e38

    check_gives_the_reference(function, values)


@every_format
def test_blocks_with_infinities_and_nans_are_defined(function: str) -> None:
    form = BLOCK_FORMATS[function]
    values = np.ones((4, form.n_elements), np.float32)
    values[0, 5], values[1, 5], values[2, 5] = np.inf, -np.inf, np.nan
    values[3, 5] = -np.nan
    blocks = blocks_of(function, values)
    expected = {
        "q4_0": ["00fc" + 16 * "88", "007c" + 16 * "88", "007e" + 16 * "00", "007e" + 16 * "00"],
        "mxfp4": [17 * "00"] * 4,
        "q8_0": ["007c" + 32 * "00"] * 2 + ["007e" + 32 * "00"] * 2,
        "tq2_0": [64 * "55" + "007c"] * 2 + [64 * "55" + "007e"] * 2,
    }.get(function)

    if function == "q4_0":  # the code of the infinity itself is 0
        expected = [each[:14] + "80" + each[16:] if each.endswith("88") else each for each in expected or []]
    if expected is not None:
        assert [block.tobytes().hex() for block in blocks] == expected
    np.testing.assert_array_equal(blocks[2], blocks[3])


@pytest.mark.parametrize("function", ["q4_1", "q5_1"])
def test_the_first_of_two_zeros_is_the_least_element(function: str) -> None:
    values = np.ones((2, 32), np.float32)
    values[0, 3], values[0, 20] = 0.0, -0.0
    values[1, 3], values[1, 20] = -0.0, 0.0

    assert blocks_of(function, values)[:, 2:4].copy().view("<u2")[:, 0].tolist() == [0, 0x8000]


@every_format
@pytest.mark.parametrize("exponent", [-14, -6, 0, 6])
def test_bounds_hold_the_quantized_numbers(function: str, exponent: int) -> None:
    values = np.ldexp(rng.normal(0, 1, (64, 512)).astype(np.float32), exponent).reshape(
        -1, BLOCK_FORMATS[function].n_elements
    )
    found = bounds(BLOCK_FORMATS[function], blocks_of(function, values))

    assert (found.low <= values).all()
    assert (values <= found.high).all()
    assert (found.high - found.low < 2.1 * np.abs(values).max(axis=1, keepdims=True)).all()


@every_format
def test_bounds_of_any_bytes_are_numbers_or_nans(function: str) -> None:
    form = BLOCK_FORMATS[function]
    found = bounds(form, rng.integers(0, 256, (1000, form.n_bytes), dtype=np.uint8))

    assert found.low.shape == found.high.shape == (1000, form.n_elements)
    assert not (found.low > found.high).any()


@every_format
def test_rows_that_are_no_blocks_are_refused(function: str) -> None:
    form = BLOCK_FORMATS[function]
    n, size = form.n_elements, form.n_bytes
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
            check(function, params, [kind], output)
    with pytest.raises(FormatError, match="inputs"):
        check(function, {}, [Kind("float32", (4, n))] * 2, Kind(None, (8 * size,)))
