"""Write the golden store with nudged deltas. It was run once; a store that was written is never changed.

    python -m tests.golden.make_v1_nudged

Each step changes few words, most of them by one unit, so chains are as deep as a save makes them. ``expected.json`` has
the SHA-256 of the bytes of each tensor.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tests.golden.make_v1_sparse import HERE, write


def tensors(step: int) -> dict[str, np.ndarray]:
    """Return floats by the bits of whole numbers, by arithmetic that every release of numpy repeats."""
    n = 8 << 10
    words = (np.arange(2 * n, dtype=np.int64) * 2654435761 >> 7) % 65536
    for earlier in range(step):
        chance = (np.arange(2 * n, dtype=np.uint64) + np.uint64(1 + 2 * n * earlier)) * np.uint64(0x9E3779B97F4A7C15)
        chance = (chance ^ chance >> np.uint64(31)) * np.uint64(0xBF58476D1CE4E5B9) >> np.uint64(40)
        words[chance % 151 == 0] += 1
        words[chance % 1009 == 1] += 5
    return {
        "single": (words + 0x3F800000).astype("<u4").view(np.float32),
        "half": words.astype("<u2").view(ml_dtypes.bfloat16),
        "double": (words[:n] + 0x3FF0000000000000).astype("<u8").view(np.float64),
    }


if __name__ == "__main__":
    write(HERE / "v1_nudged", tensors)
