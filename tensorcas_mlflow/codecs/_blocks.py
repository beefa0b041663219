"""Quantized blocks of GGUF: functions of neighbouring elements (``docs/format.md``, Blocks of GGUF).

The bytes are those of the reference in numpy, ``gguf.quants``. Programs that quantize with other code, such as
``llama-quantize`` with compiled loops or an importance matrix, may write other ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

_SINGLE = np.float32


class Bounds(NamedTuple):
    """The numbers that the codes of blocks stand for, one row a block."""

    low: Any
    """The least number with this code, within the precision of the scale."""
    high: Any
    """The largest one."""


class BlockFormat(NamedTuple):
    """A format of blocks."""

    n_elements: int
    """Elements of a block."""
    n_bytes: int
    """Size of a block in bytes."""
    quantize: Callable[[Any, Any], None]
    """Makes blocks: of numbers in float32, one row a block, into rows of bytes."""
    bounds: Callable[[Any], Bounds]
    """Returns the numbers that blocks stand for: of rows of bytes."""


def quantize(form: BlockFormat, values: Any, blocks: Any) -> None:
    """Quantize numbers.

    Args:
        form: The format.
        values: Numbers in float32, one row a block.
        blocks: Rows of bytes for the result.
    """
    with np.errstate(all="ignore"):
        form.quantize(values, blocks)


def bounds(form: BlockFormat, blocks: Any) -> Bounds:
    """Return the numbers that blocks, rows of bytes, stand for."""
    with np.errstate(all="ignore"):
        return form.bounds(blocks)


# --- parts of blocks


def _halves(scale: Any) -> Any:
    """Return numbers, one a row, as the two bytes of a float16."""
    scale = np.where(np.isnan(scale), _SINGLE(np.nan), scale)
    return scale.astype("<f2").view(np.uint8)


def _singles(halves: Any) -> Any:
    return np.ascontiguousarray(halves).view("<f2").astype(np.float32)


def _inverse(scale: Any) -> Any:
    return np.where(scale == 0, _SINGLE(0), _SINGLE(1) / scale)


def _cut(numbers: Any, most: int) -> Any:
    """Return numbers as codes: infinities and NaNs are 0."""
    numbers[~np.isfinite(numbers)] = 0
    return np.minimum(np.trunc(numbers), most).astype(np.uint8)


def _rounded(numbers: Any, most: int) -> Any:
    """Return the nearest integers, halves away from zero; 0 for numbers out of range."""
    size = np.abs(numbers)
    floor = np.floor(size)
    nearest = np.copysign(floor + np.floor(2 * (size - floor)), numbers)
    nearest[~(np.abs(nearest) <= most)] = 0  # of a NaN, an infinity, or a scale without an inverse
    return nearest.astype(np.int8)


def _at(numbers: Any, places: Any) -> Any:
    return np.take_along_axis(numbers, places[:, None], axis=1)


def _pack_pairs(codes: Any, into: Any) -> None:
    """Put codes of four bits into bytes, and ignore their higher bits."""
    into[...] = codes[:, :16] & 15 | codes[:, 16:] << 4


def _pairs(packed: Any) -> Any:
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _around(codes: Any, scale: Any, offset: Any, most: int) -> Bounds:
    """Return the bounds of ``codes × scale + offset``; numbers above the largest code have it too."""
    numbers = codes.astype(np.float32)
    one = (numbers - _SINGLE(0.5)) * scale + offset
    other = (numbers + np.where(codes == most, _SINGLE(1), _SINGLE(0.5))) * scale + offset
    slack = (np.abs(numbers) + 1) * (np.abs(scale) * _SINGLE(2**-10) + _SINGLE(2**-24))
    slack += np.abs(offset) * _SINGLE(2**-10)
    return Bounds(np.minimum(one, other) - slack, np.maximum(one, other) + slack)


# --- q4_0, q4_1, q5_0, q5_1


def _pack_codes(codes: Any, n_bits: int, into: Any) -> None:
    if n_bits == 5:
        into[:, :4] = np.packbits(codes >> 4, axis=1, bitorder="little")
        into = into[:, 4:]
    _pack_pairs(codes, into)


def _codes(packed: Any, n_bits: int) -> Any:
    if n_bits == 4:
        return _pairs(packed)
    return _pairs(packed[:, 4:]) | np.unpackbits(packed[:, :4], axis=1, bitorder="little") << 4


def _quantize_symmetric(values: Any, blocks: Any, *, n_bits: int) -> None:
    half = 1 << (n_bits - 1)
    scale = _at(values, np.abs(values).argmax(axis=1)) / _SINGLE(-half)
    blocks[:, :2] = _halves(scale)
    _pack_codes(_cut(values * _inverse(scale) + _SINGLE(half + 0.5), 2 * half - 1), n_bits, blocks[:, 2:])


def _symmetric_bounds(blocks: Any, *, n_bits: int) -> Bounds:
    half = 1 << (n_bits - 1)
    codes = _codes(blocks[:, 2:], n_bits).astype(np.int8) - np.int8(half)
    return _around(codes, _singles(blocks[:, :2]), _SINGLE(0), half - 1)


def _quantize_shifted(values: Any, blocks: Any, *, n_bits: int) -> None:
    most = (1 << n_bits) - 1
    least = _at(values, values.argmin(axis=1))
    scale = (_at(values, values.argmax(axis=1)) - least) / _SINGLE(most)
    blocks[:, :2], blocks[:, 2:4] = _halves(scale), _halves(least)
    _pack_codes(_cut((values - least) * _inverse(scale) + _SINGLE(0.5), most), n_bits, blocks[:, 4:])


def _shifted_bounds(blocks: Any, *, n_bits: int) -> Bounds:
    codes = _codes(blocks[:, 4:], n_bits)
    return _around(codes, _singles(blocks[:, :2]), _singles(blocks[:, 2:4]), (1 << n_bits) - 1)


# --- q8_0


def _quantize_q8_0(values: Any, blocks: Any) -> None:
    scale = np.abs(values).max(axis=1, keepdims=True) / _SINGLE(127)
    blocks[:, :2] = _halves(scale)
    blocks[:, 2:] = _rounded(values * _inverse(scale), 127).view(np.uint8)


def _q8_0_bounds(blocks: Any) -> Bounds:
    codes = np.ascontiguousarray(blocks[:, 2:]).view(np.int8)
    return _around(codes, _singles(blocks[:, :2]), _SINGLE(0), 127)


# --- tq1_0, tq2_0

_POWERS = np.array([81, 27, 9, 3, 1], dtype=np.uint8)[:, None]


def _ternary(values: Any) -> tuple[Any, Any]:
    scale = np.abs(values).max(axis=1, keepdims=True)
    return scale, (_rounded(values * _inverse(scale), 1) + 1).view(np.uint8)


def _quantize_tq1_0(values: Any, blocks: Any) -> None:
    scale, codes = _ternary(values)
    n = len(codes)
    parts = (codes[:, :160].reshape(n, 5, 32), codes[:, 160:240].reshape(n, 5, 16), codes[:, 240:].reshape(n, 4, 4))
    # Five ternary digits are at most 242.
    numbers = [(part * _POWERS[: part.shape[1]]).sum(axis=1, dtype=np.uint8) for part in parts]
    blocks[:, :52] = (np.concatenate(numbers, axis=1).astype(np.uint16) * 256 + 242) // 243
    blocks[:, 52:] = _halves(scale)


def _tq1_0_bounds(blocks: Any) -> Bounds:
    n = len(blocks)
    parts = [
        (part[:, None, :] * _POWERS[::-1][:n_codes]).reshape(n, -1)
        for part, n_codes in ((blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4))
    ]
    codes = np.concatenate(parts, axis=1).astype(np.uint16) * 3 >> 8
    return _around(codes.astype(np.int8) - np.int8(1), _singles(blocks[:, 52:]), _SINGLE(0), 1)


_SHIFTS = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]


def _quantize_tq2_0(values: Any, blocks: Any) -> None:
    scale, codes = _ternary(values)
    n = len(codes)
    blocks[:, :64] = np.bitwise_or.reduce(codes.reshape(n, 2, 4, 32) << _SHIFTS, axis=2).reshape(n, 64)
    blocks[:, 64:] = _halves(scale)


def _tq2_0_bounds(blocks: Any) -> Bounds:
    n = len(blocks)
    codes = (blocks[:, :64].reshape(n, 2, 1, 32) >> _SHIFTS & 3).reshape(n, 256)
    return _around(codes.astype(np.int8) - np.int8(1), _singles(blocks[:, 64:]), _SINGLE(0), 1)


# --- mxfp4

_LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12], dtype=np.float32)
_EDGES = (_LEVELS[:-1] + _LEVELS[1:]) / 2
"""Larger magnitudes have the next code."""
_LOWEST = np.concatenate([[0], _EDGES]).astype(np.float32)
_HIGHEST = np.concatenate([_EDGES, [16]]).astype(np.float32)


def _floor_of_log2(sizes: Any) -> Any:
    """Return the largest integers not above the logarithms, rounded to float32 first.

    Libraries compute logarithms in several ways, so this one compares integers.
    """
    mantissas, exponents = np.frexp(sizes)
    # 2^E × (1 - j × 2^-24) has the logarithm E - j × 2^-24 / ln 2. It is rounded to E if it differs by at most half of
    # the distance of two numbers there, 2^(n - 24) with the bits n + 1 of the nearer side's integer part.
    nearer = np.where(exponents > 0, exponents - 1, -exponents)
    n = np.frexp(nearer.astype(np.float32))[1] - 1
    reach = np.floor(np.ldexp(np.float64(np.log(2)), n))
    is_rounded_up = (nearer > 0) & ((1 - mantissas) * _SINGLE(1 << 24) <= reach)
    return np.where(is_rounded_up, exponents, exponents - 1)


def _quantize_mxfp4(values: Any, blocks: Any) -> None:
    largest = np.abs(values).max(axis=1, keepdims=True)
    is_finite = np.isfinite(largest)
    has_scale = is_finite & (largest > 0)
    floor = _floor_of_log2(np.where(has_scale, largest, _SINGLE(1)))
    exponents = np.where(has_scale, (floor + 125) & 255, 0)
    # A product of two powers: one may be out of range.
    half = exponents // 2
    scaled = np.abs(values) * np.ldexp(_SINGLE(1), 64 - half) * np.ldexp(_SINGLE(1), 64 - (exponents - half))
    codes = np.zeros(values.shape, dtype=np.uint8)
    for edge in _EDGES:
        codes += scaled > edge
    codes |= ((values < 0) & (codes > 0)).astype(np.uint8) << 3
    blocks[:, :1] = exponents
    _pack_pairs(np.where(is_finite, codes, np.uint8(0)), blocks[:, 1:])


def _mxfp4_bounds(blocks: Any) -> Bounds:
    scale = np.ldexp(_SINGLE(1), blocks[:, :1].astype(np.int32) - 128)
    codes = _pairs(blocks[:, 1:])
    lowest, highest = _LOWEST[codes & 7] * scale, _HIGHEST[codes & 7] * scale
    is_negative = codes > 7
    low = np.where(is_negative, -highest, np.where(codes == 0, -highest, lowest))
    return Bounds(low, np.where(is_negative, -lowest, highest))


BLOCK_FORMATS: Mapping[str, BlockFormat] = {
    "q4_0": BlockFormat(32, 18, partial(_quantize_symmetric, n_bits=4), partial(_symmetric_bounds, n_bits=4)),
    "q4_1": BlockFormat(32, 20, partial(_quantize_shifted, n_bits=4), partial(_shifted_bounds, n_bits=4)),
    "q5_0": BlockFormat(32, 22, partial(_quantize_symmetric, n_bits=5), partial(_symmetric_bounds, n_bits=5)),
    "q5_1": BlockFormat(32, 24, partial(_quantize_shifted, n_bits=5), partial(_shifted_bounds, n_bits=5)),
    "q8_0": BlockFormat(32, 34, _quantize_q8_0, _q8_0_bounds),
    "mxfp4": BlockFormat(32, 17, _quantize_mxfp4, _mxfp4_bounds),
    "tq1_0": BlockFormat(256, 54, _quantize_tq1_0, _tq1_0_bounds),
    "tq2_0": BlockFormat(256, 66, _quantize_tq2_0, _tq2_0_bounds),
}
"""The formats by their functions. Each has another ratio of bytes to elements."""
