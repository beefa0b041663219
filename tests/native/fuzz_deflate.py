"""DEFLATE (``deflate.c``)."""

from __future__ import annotations

import zlib
from types import ModuleType

import numpy as np

from tests.native.fuzz import bytes_of, number


def fuzz_deflate(core: ModuleType, rng: np.random.Generator) -> None:
    data = bytes_of(rng, 300)
    for _ in range(int(rng.integers(0, 12))):
        data += data[int(rng.integers(0, len(data) + 1)) :] if rng.integers(0, 2) else bytes_of(rng, 3000)
    data, level = data[:200_000], number(rng, range(1, 10))
    # Copies of exactly their size: a sanitizer sees each access behind them.
    engine = zlib.compressobj(max(1, min(level, 9)), zlib.DEFLATED, -15)
    stream = bytearray(engine.compress(data) + engine.flush())
    out = bytearray(len(stream) - int(rng.integers(0, 2)))
    n_bytes = core.deflate(bytearray(data), level, out)
    assert n_bytes == (len(stream) if len(out) == len(stream) else -1)
    assert n_bytes < 0 or out == stream
    assert core.deflates_to(bytearray(data), level, stream)
    if stream:
        stream[int(rng.integers(0, len(stream)))] ^= 1 << int(rng.integers(0, 8))
        assert not core.deflates_to(bytearray(data), level, stream)
