"""Hostile arguments for digests (``hash.c``)."""

from __future__ import annotations

from types import ModuleType

import blake3
import numpy as np

from tests.native.fuzz import bytes_of, number


def use_some_kernel(core: ModuleType, rng: np.random.Generator) -> None:
    names = sorted(core.hash_kernels())
    core.use_hash_kernel(names[rng.integers(0, len(names))])


def fuzz_digest(core: ModuleType, rng: np.random.Generator) -> None:
    use_some_kernel(core, rng)
    data = memoryview(bytes_of(rng, 600_000))[int(rng.integers(0, 9)) :]

    assert core.digest(data) == blake3.blake3(data).digest()


def fuzz_hash_each(core: ModuleType, rng: np.random.Generator) -> None:
    use_some_kernel(core, rng)
    most = (0, 64, 1_025, 9_000, 300_000)[rng.integers(0, 5)]
    pieces = [bytes_of(rng, most) for _ in range(rng.integers(0, 40))]
    out = bytearray(32 * len(pieces) + int(rng.integers(0, 20) == 0))
    core.hash_each(pieces, out, number(rng, (1, 2, 3)))

    assert bytes(out) == b"".join(blake3.blake3(piece).digest() for piece in pieces)


def fuzz_hash_spans(core: ModuleType, rng: np.random.Generator) -> None:
    use_some_kernel(core, rng)
    data = bytes_of(rng, 9_000)
    ends = np.sort(rng.integers(-1 if rng.integers(0, 9) == 0 else 0, len(data) + 1, (rng.integers(0, 40), 2)), axis=1)
    if rng.integers(0, 9) == 0 and ends.size:
        ends.flat[rng.integers(0, ends.size)] = number(rng, (0,))
    starts, stops = (np.ascontiguousarray(column, dtype="i8") for column in ends.T)
    out = bytearray(32 * len(starts))
    core.hash_spans(data, starts, stops, out, number(rng, (1, 2)))

    pieces = [data[start:stop] for start, stop in ends]
    assert bytes(out) == b"".join(blake3.blake3(piece).digest() for piece in pieces)
