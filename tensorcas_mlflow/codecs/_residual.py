"""What differs between a chunk and its base, as words that are small where the two are near; and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from tensorcas_mlflow.codecs._planes import BLOCK_WORDS
from tensorcas_mlflow.codecs._scratch import SCRATCH

_SIGNED = {1: np.dtype("<i1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}


def residual(words: Any, base: Any, out: Any) -> None:
    """Compute zigzag differences.

    Args:
        words: Unsigned words, 1-d.
        base: As many of the same type.
        out: As many, for the differences; may be ``words``.
    """
    signed, top = _SIGNED[words.itemsize], 8 * words.itemsize - 1
    signs = _scratch_words(words.dtype)
    for begin in range(0, len(words), BLOCK_WORDS):
        x, b, r = (each[begin : begin + BLOCK_WORDS] for each in (words, base, out))
        s = signs[: len(x)]
        np.subtract(x, b, out=r)
        np.right_shift(r.view(signed), top, out=s.view(signed))
        np.left_shift(r, 1, out=r)
        np.bitwise_xor(r, s, out=r)


def restore(words: Any, base: Any) -> None:
    """Turn differences into the words they were made of, in place; the reverse of `residual`."""
    signs = _scratch_words(words.dtype)
    for begin in range(0, len(words), BLOCK_WORDS):
        r, b = words[begin : begin + BLOCK_WORDS], base[begin : begin + BLOCK_WORDS]
        s = signs[: len(r)]
        np.bitwise_and(r, 1, out=s)
        np.negative(s, out=s)
        np.right_shift(r, 1, out=r)
        np.bitwise_xor(r, s, out=r)
        np.add(r, b, out=r)


def _scratch_words(dtype: Any) -> Any:
    return SCRATCH.area("signs", BLOCK_WORDS * dtype.itemsize).view(dtype)
