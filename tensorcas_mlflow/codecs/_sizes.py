"""Words by their size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

WORDS: Mapping[int, Any] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
"""Unsigned words by size in bytes."""
WORD_BYTES = frozenset(WORDS)
"""Sizes of elements that are taken apart, and subtracted, as words."""
BLOCK_WORDS = 1 << 16
"""Loops of numpy's go over so many words at a time, which stay in the processor's cache from one step to the next."""
