"""What differs between a chunk and its base, as words that are small where the two are near; and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from tensorcas_mlflow.codecs._planes import BLOCK_WORDS
from tensorcas_mlflow.codecs._scratch import SCRATCH

_SIGNED = {1: np.dtype("<i1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}


def residual(words: Any, base: Any, out: Any, *, ordered: bool) -> None:
    """Compute zigzag differences.

    Args:
        words: Unsigned words, 1-d.
        base: As many of the same type.
        out: As many, for the differences; may be ``words``.
        ordered: Whether the words are floating point numbers, sign and magnitude. They are then made to follow one
            another as the numbers do, so that two near zero with different signs are near each other.
    """
    signed, top = _SIGNED[words.itemsize], 8 * words.itemsize - 1
    first, second = _scratch_words(words.dtype)
    for begin in range(0, len(words), BLOCK_WORDS):
        x, b, r = (each[begin : begin + BLOCK_WORDS] for each in (words, base, out))
        s, t = first[: len(x)], second[: len(x)]
        if ordered:
            _ordered(x, r, s)
            _ordered(b, t, s)
            np.subtract(r, t, out=r)
        else:
            np.subtract(x, b, out=r)
        np.right_shift(r.view(signed), top, out=s.view(signed))
        np.left_shift(r, 1, out=r)
        np.bitwise_xor(r, s, out=r)


def restore(words: Any, base: Any, *, ordered: bool) -> None:
    """Turn differences into the words they were made of, in place; the reverse of `residual`."""
    first, second = _scratch_words(words.dtype)
    for begin in range(0, len(words), BLOCK_WORDS):
        r, b = words[begin : begin + BLOCK_WORDS], base[begin : begin + BLOCK_WORDS]
        s, t = first[: len(r)], second[: len(r)]
        np.bitwise_and(r, 1, out=s)
        np.negative(s, out=s)
        np.right_shift(r, 1, out=r)
        np.bitwise_xor(r, s, out=r)
        if ordered:
            _ordered(b, t, s)
            np.add(r, t, out=r)
            _ordered(r, r, s)
        else:
            np.add(r, b, out=r)


def _ordered(words: Any, out: Any, scratch: Any) -> None:
    """Complement all bits but the top one of words in which that is set; the same again undoes it."""
    signed, top = _SIGNED[words.itemsize], 8 * words.itemsize - 1
    np.right_shift(words.view(signed), top, out=scratch.view(signed))
    np.right_shift(scratch, 1, out=scratch)
    np.bitwise_xor(words, scratch, out=out)


def _scratch_words(dtype: Any) -> tuple[Any, Any]:
    n_bytes = BLOCK_WORDS * dtype.itemsize
    return SCRATCH.area("first", n_bytes).view(dtype), SCRATCH.area("second", n_bytes).view(dtype)
