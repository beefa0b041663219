"""Bytes as somebody who means harm would change them: sizes claim anything, parts are moved and repeated."""

from __future__ import annotations

import random

CLAIMS = [0, 1, 2, 3, 5, 7, 8, 16, 31, 63, 64, 127, 128, 255, 1 << 15, 1 << 16, (1 << 31) - 1, 1 << 31]
CLAIMS += [(1 << 32) - 1, 1 << 32, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
"""Forged values of a length, a count or an offset."""

_MAX_BYTES = 1 << 20


def damaged(data: bytes, seed: int) -> bytes:
    """Change some bytes one to three times, mostly where whole numbers stand; the same for the same seed."""
    rng = random.Random(seed)
    blob = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _change(blob, rng)
    return bytes(blob[:_MAX_BYTES])


def _change(blob: bytearray, rng: random.Random) -> None:
    width = rng.choice((1, 2, 4, 4, 8, 8))
    at = rng.randrange(max(1, len(blob) - width + 1))
    if rng.random() < 0.8:
        at -= at % width
    old = int.from_bytes(blob[at : at + width], "little")
    how = rng.random()
    if how < 0.5:
        new = rng.choice([*CLAIMS, len(blob), len(blob) - 1, len(blob) + 1])
    elif how < 0.7:
        new = old + rng.choice((-64, -8, -1, 1, 8, 64))
    elif how < 0.75:
        new = old ^ 1 << rng.randrange(8 * width)
    elif how < 0.85:
        source = rng.randrange(max(1, len(blob) - width))
        new = int.from_bytes(blob[source : source + width], "little")
    elif how < 0.93:
        source = rng.randrange(len(blob) or 1)
        blob[at:at] = blob[source : source + rng.choice((1, 8, 64))] * rng.choice((1, 1, 40))
        return
    else:
        del blob[at : at + rng.choice((1, 8, 64, len(blob)))]
        return
    blob[at : at + width] = (new & ((1 << 8 * width) - 1)).to_bytes(width, "little")
