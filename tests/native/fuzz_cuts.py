"""The search for content-defined cuts (``cuts.c``)."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from tests.native.fuzz import bytes_of, number

WINDOW_BYTES = 32


def fuzz_find_cut(core: ModuleType, rng: np.random.Generator) -> None:
    gears = rng.integers(0, 1 << 32, 256, np.uint64).astype(np.uint32)
    before, data = bytes_of(rng, 40), bytes_of(rng, 3000)
    first, stop = number(rng, [1, 2, 31, 32, 33, 100]), number(rng, [0, len(data), len(data) // 2, len(data) + 1])
    small = number(rng, [0, 1 << 20, 1 << 26, (1 << 32) - 1])
    # Copies of exactly their size: a sanitizer sees each read behind them.
    found = core.find_cut(bytearray(before), bytearray(data), first, stop, small, gears)
    hashed, known, wanted = 0, before + data, 0
    for at, byte in enumerate(known[len(before) + first - 1 : len(before) + max(stop, 0)], len(before) + first):
        if at == len(before) + first:
            for earlier in known[max(0, at - WINDOW_BYTES) : at - 1]:
                hashed = (2 * hashed + int(gears[earlier])) % (1 << 32)
        hashed = (2 * hashed + int(gears[byte])) % (1 << 32)
        if hashed < small % (1 << 32):
            wanted = at - len(before)
            break
    assert found == wanted
