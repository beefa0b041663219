"""Words: elements of 1, 2, 4 or 8 bytes as unsigned numbers, and their zigzag differences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

WORDS: Mapping[int, Any] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
"""Unsigned words by size in bytes."""
WORD_BYTES = frozenset(WORDS)
"""Element sizes that codecs 3 and 4 treat as words."""
_SIGNED: Mapping[int, Any] = {1: np.dtype("<i1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}
_BLOCK_WORDS = 1 << 16
"""Words per step; so many stay in the processor's cache from one operation to the next."""


def subtract(words: Any, base: Any, out: Any) -> None:
    """Compute zigzag differences, which are small where two words are near each other.

    Args:
        words: Unsigned words, 1-d.
        base: As many of the same type.
        out: Output array of the same type and length; may be ``words``.
    """
    signed, top = _SIGNED[words.itemsize], 8 * words.itemsize - 1
    for begin in range(0, len(words), _BLOCK_WORDS):
        x, b, r = (each[begin : begin + _BLOCK_WORDS] for each in (words, base, out))
        np.subtract(x, b, out=r)
        signs = np.right_shift(r.view(signed), top).view(words.dtype)
        np.left_shift(r, 1, out=r)
        np.bitwise_xor(r, signs, out=r)


def add(words: Any, base: Any) -> None:
    """Turn zigzag differences back into words, in place; the reverse of `subtract`."""
    for begin in range(0, len(words), _BLOCK_WORDS):
        r, b = words[begin : begin + _BLOCK_WORDS], base[begin : begin + _BLOCK_WORDS]
        signs = np.negative(np.bitwise_and(r, 1))
        np.right_shift(r, 1, out=r)
        np.bitwise_xor(r, signs, out=r)
        np.add(r, b, out=r)
