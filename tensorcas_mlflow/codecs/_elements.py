"""How large the elements are that bytes consist of."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tensorcas_mlflow.codecs._codec import Buffer

MAX_TYPESIZE = 255


def typesize_of(itemsize: int) -> int:
    """Choose the element size for a codec: the dtype's own, or for long records their largest divisor that fits."""
    for size in range(min(itemsize, MAX_TYPESIZE), 0, -1):
        if itemsize % size == 0:
            return size
    return 1


def guess_itemsize(sample: Buffer) -> int:
    """Guess the size of the elements that bytes consist of, where nobody says it.

    Floating point numbers have bytes, those of the exponent, that are alike from one element to the next. So the size
    is taken at which the bytes in equal places differ least, by Shannon's entropy, if that is clearly less than it is
    for all bytes together.

    Args:
        sample: The beginning of the bytes; of a long one the first 16 KiB are looked at.

    Returns:
        1, 2, 4 or 8.
    """
    data = np.frombuffer(sample, np.uint8)[:_SAMPLE_BYTES]
    data = data[: len(data) - len(data) % 8]
    if len(data) < _LEAST_SAMPLE_BYTES:
        return 1
    best, least = 1, _entropy(data) - _CLEARLY_BITS
    for size in (2, 4, 8):
        entropy = sum(_entropy(data[place::size]) for place in range(size)) / size
        if entropy < least - _CLEARLY_BITS / 4:
            best, least = size, entropy
    return best


_SAMPLE_BYTES = 16 * 1024
_LEAST_SAMPLE_BYTES = 2048
_CLEARLY_BITS = 0.2


def _entropy(data: np.ndarray[Any, np.dtype[np.uint8]]) -> float:
    # In bits, with the correction of Miller and Madow: few bytes look more alike than they are.
    counts = np.bincount(data, minlength=256)
    counts = counts[counts > 0]
    shares = counts / len(data)
    return float((len(counts) - 1) / (2 * len(data) * math.log(2)) - (shares * np.log2(shares)).sum())
