"""Chunks with the chains that decode to them, and the tables of a batch, for the core's decoder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.chunk_io._decode import CHUNK, LINK, PART, READ
from tensorcas_mlflow.codecs import DELTA, PLANES, RAW, SHUFFLE_ZSTD, ZSTD, Codec, Transform


def floats(n_bytes: int, seed: int) -> bytes:
    """Return single precision numbers near those of another seed, cut to a size."""
    start = np.random.default_rng(1).normal(0, 0.02, n_bytes // 4 + 1)
    moved = np.random.default_rng(seed).normal(0, 1e-5, n_bytes // 4 + 1)
    return (start + moved).astype(np.float32).tobytes()[:n_bytes]


def decayed(n_bytes: int, n_steps: int) -> bytes:
    """Return numbers that have lost a little at every step."""
    words = np.random.default_rng(1).normal(0, 0.02, n_bytes // 4 + 1).astype(np.float32)
    for _ in range(n_steps):
        words *= np.float32(1 - 1e-6)
    return words.tobytes()[:n_bytes]


Chain = list[tuple[Codec, bytes]]
"""A chunk's codec and payload, then those of its base, and so on."""


def chains(n_bytes: int) -> Iterator[tuple[bytes, Chain]]:
    """Yield chunks with the chains that decode to them: every codec, transform, word, unit and inner codec."""
    base, chunk, following = floats(n_bytes, 2), floats(n_bytes, 3), floats(n_bytes, 4)
    full: Chain = [(RAW, base)]
    yield chunk, [(RAW, chunk)]
    yield chunk, [(ZSTD, bytes(ZSTD.encode(chunk, 4)))]
    yield from (
        (chunk, [(SHUFFLE_ZSTD, bytes(SHUFFLE_ZSTD.encode(chunk, width)))]) for width in (1, 3, 12, 700, 40_000)
    )
    yield from ((chunk, [(PLANES, bytes(PLANES.encode(chunk, width)))]) for width in (1, 2, 4, 8))
    yield bytes(n_bytes), [(PLANES, bytes(PLANES.encode(bytes(n_bytes), 4)))]
    for width in (1, 2, 4, 8):
        for transform in Transform:
            yield chunk, [(DELTA, bytes(DELTA.encode_as(chunk, width, base, transform))), *full]
        for unit in (1, 2, 4):
            if unit * width <= 8:
                grouped = bytes(DELTA.encode_as(chunk, width, base, Transform.GROUPED, unit=unit))
                yield chunk, [(DELTA, grouped), *full]
    for inner in (RAW, ZSTD, PLANES):
        payload = bytes([inner.number, 0x20]) + bytes(inner.encode(chunk, 4))
        made = bytearray(n_bytes)
        DELTA.decode_into(payload, memoryview(made), base)
        yield bytes(made), [(DELTA, payload), *full]
        for gap in (1, 3, 300):
            few = bytearray(base)
            for at in range(gap * width, n_bytes, (gap + 4) * width):
                few[at] = chunk[at] ^ 1
            yield bytes(few), [(DELTA, bytes(DELTA.encode_as(few, width, base, Transform.SPARSE))), *full]
    lost, before = decayed(n_bytes, 5), decayed(n_bytes, 0)
    yield lost, [(DELTA, bytes(DELTA.encode_as(lost, 4, before, Transform.DECAYED))), (RAW, before)]
    first = (DELTA, bytes(DELTA.encode(chunk, 4, base)))
    yield following, [(DELTA, bytes(DELTA.encode(following, 2, chunk))), first, (PLANES, bytes(PLANES.encode(base, 4)))]


def tables() -> tuple[list[Any], list[Any], list[Any]]:
    """Make the tables of two chunks in two parts, with their buffers and blocks."""
    chunk, base = floats(256, 3), floats(256, 2)
    payload = bytes(DELTA.encode(chunk, 4, base))
    made = [
        np.array([(0, len(payload), 0, 0), (0, 256, 1, 0), (0, 256, 1, 0)], READ),
        np.array(
            [
                (0, len(data), number, 256, codec, 0, np.frombuffer(digest(data)[:16], "u1"))
                for number, (codec, data) in enumerate([(3, payload), (0, base), (0, base)])
            ],
            LINK,
        ),
        np.array(
            [
                (0, 0, 256, 0, 2, np.frombuffer(digest(chunk), "u1")),
                (256, 0, 256, 2, 1, np.frombuffer(digest(base), "u1")),
            ],
            CHUNK,
        ),
        np.array([(0, 2, 0, 1), (2, 3, 1, 2)], PART),
    ]
    return made, [payload, base], [memoryview(bytearray(512))]
