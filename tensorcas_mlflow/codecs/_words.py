"""Words: elements of 1, 2, 4 or 8 bytes as unsigned numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

WORDS: Mapping[int, Any] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
"""Unsigned words by size in bytes."""
WORD_BYTES = frozenset(WORDS)
"""Element sizes that codecs 3 and 4 treat as words."""
