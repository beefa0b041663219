"""Words in groups by the magnitude of their base.

A step of training changes more digits of small numbers than of large ones. Differences of numbers that are alike in
magnitude are alike in size, so that each group has its own and shorter Huffman codes. The decoder has the base, so it
knows the groups, and their order costs no room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tensorcas_mlflow.codecs._planes import BLOCK_WORDS
from tensorcas_mlflow.codecs._scratch import SCRATCH

MOST_GROUPS = 8
_SHARES = (0.12, 0.3, 0.6)
"""Where groups end, as shares of the words: small numbers differ most from each other in magnitude."""
_SAMPLE_WORDS = 4096


def magnitudes(base: Any) -> Any:
    """Give the eight bits below the top bit of words: of single precision and bfloat16 the exponent.

    Returns:
        A uint8 array; this thread's scratch memory.
    """
    n_words, bits = len(base), 8 * base.itemsize
    out = SCRATCH.area("magnitudes", n_words)
    if bits == 8:
        return np.left_shift(base, 1, out=out)
    shifted = SCRATCH.area("words", BLOCK_WORDS * base.itemsize).view(base.dtype)
    for begin in range(0, n_words, BLOCK_WORDS):
        block = base[begin : begin + BLOCK_WORDS]
        part = np.right_shift(block, bits - 9, out=shifted[: len(block)])
        np.copyto(out[begin : begin + len(block)], part, casting="unsafe")  # the sign is cut off
    return out


def thresholds_for(sizes: Any) -> list[int]:
    """Choose where groups end.

    Args:
        sizes: What `magnitudes` gave.

    Returns:
        The largest magnitude of each group but the last, ascending; none twice.
    """
    step = max(1, len(sizes) // _SAMPLE_WORDS)
    below = np.bincount(sizes[::step], minlength=256).cumsum()
    ends = np.searchsorted(below, [share * below[-1] for share in _SHARES])
    top = int(np.flatnonzero(np.diff(below, prepend=0))[-1])
    return sorted({int(end) for end in ends if end < top})


def places_of(sizes: Any, thresholds: Sequence[int]) -> Iterator[Any]:
    """Yield for each group the places of its words, ascending: an intp array, which may be empty."""
    group = SCRATCH.area("group", len(sizes))
    group[:] = 0
    for threshold in thresholds:
        np.add(group, (sizes > threshold).view(np.uint8), out=group)
    for number in range(len(thresholds) + 1):
        yield np.flatnonzero(group == number)
