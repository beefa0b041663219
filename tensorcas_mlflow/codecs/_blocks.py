"""Quantized blocks of GGUF's Q8_0: a function of neighbouring elements (``docs/format.md``, Blocks of Q8_0).

The bytes are those of the reference in numpy, ``gguf.quants``. Programs that quantize with other code may write other
ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Q8_0 = "q8_0"
"""Name of the function."""
BLOCK_ELEMENTS = 32
"""Elements of a block."""
BLOCK_BYTES = 34
"""Size of a block in bytes: its scale as a float16, and its codes."""
_MOST = np.float32(127)


class Bounds(NamedTuple):
    """The numbers that the codes of blocks stand for, one row a block."""

    low: Any
    """The least number with this code, within the precision of the scale."""
    high: Any
    """The largest one."""


def quantize(values: Any, blocks: Any) -> None:
    """Quantize numbers.

    Args:
        values: Numbers in float32, one row a block.
        blocks: Rows of bytes for the result.
    """
    with np.errstate(all="ignore"):
        scale = np.abs(values).max(axis=1, keepdims=True) / _MOST
        stored = np.where(np.isnan(scale), np.float32(np.nan), scale)
        blocks[:, :2] = stored.astype("<f2").view(np.uint8)
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
        blocks[:, 2:] = _rounded(values * inverse).view(np.uint8)


def _rounded(numbers: Any) -> Any:
    """Return the nearest integers, halves away from zero; 0 for numbers out of range."""
    size = np.abs(numbers)
    floor = np.floor(size)
    nearest = np.copysign(floor + np.floor(2 * (size - floor)), numbers)
    nearest[~(np.abs(nearest) <= _MOST)] = 0  # of a NaN, an infinity, or a scale without an inverse
    return nearest.astype(np.int8)


def bounds(blocks: Any) -> Bounds:
    """Return the numbers that blocks, rows of bytes, stand for; numbers above the largest code have it too."""
    with np.errstate(all="ignore"):
        scale = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
        numbers = np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)
        one = (numbers - np.float32(0.5)) * scale
        other = (numbers + np.where(numbers == _MOST, np.float32(1), np.float32(0.5))) * scale
        slack = (np.abs(numbers) + 1) * (np.abs(scale) * np.float32(2**-10) + np.float32(2**-24))
        return Bounds(np.minimum(one, other) - slack, np.maximum(one, other) + slack)
