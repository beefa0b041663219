"""Hostile arguments for the words of chunks (``words.c``)."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from tests.native.fuzz import bytes_of, number

WIDTHS = (1, 2, 4, 8)


def fuzz_number_units(core: ModuleType, rng: np.random.Generator) -> None:
    width, unit = number(rng, WIDTHS), number(rng, WIDTHS)
    base = bytes_of(rng, 9_000)
    n_units = len(base) // max(1, abs(width * unit)) + int(rng.integers(0, 20) == 0)
    core.number_units(base, width, bytes_of(rng, 20), unit, bytearray(min(n_units, 1 << 20)))


def fuzz_conversion(core: ModuleType, rng: np.random.Generator) -> None:
    width, unit = number(rng, WIDTHS), number(rng, WIDTHS)
    words = bytearray(bytes_of(rng, 9_000))
    other = len(words) + int(rng.integers(0, 20) == 0)
    base: Any = bytes_of(rng, other, exactly=True) if rng.integers(0, 4) else None
    n_groups = number(rng, (1, 2, 3, 5))
    n_units = len(words) // max(1, abs(width * unit)) + int(rng.integers(0, 20) == 0)
    most = n_groups**unit if 0 < n_groups < 20 and 0 < unit <= 8 else 256
    classes: Any = (rng.integers(0, max(1, min(256, most)), min(n_units, 1 << 20))).astype("u1").tobytes()
    if rng.integers(0, 3) == 0:
        classes = None
    function = core.split if rng.integers(0, 2) else core.join
    function(words, bytearray(bytes_of(rng, other, exactly=True)), width, base, classes, n_groups, unit)
