"""Memory that a thread uses again and again: fresh memory is filled by the kernel at a third of a copy's speed."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

_MOST_KEPT_BYTES = 2 << 20
"""What is larger is not kept: chunks are rarely as large, and every thread would hold on to it for ever."""


class _Scratch(threading.local):
    def __init__(self) -> None:
        self._areas: dict[str, Any] = {}

    def area(self, use: str, n_bytes: int) -> Any:
        """Give an uninitialised 1-d uint8 array that is this thread's until it asks for the same use again."""
        if n_bytes > _MOST_KEPT_BYTES:
            return np.empty(n_bytes, np.uint8)
        area = self._areas.get(use)
        if area is None or len(area) < n_bytes:
            area = self._areas[use] = np.empty(max(n_bytes, 1 << 16), np.uint8)
        return area[:n_bytes]


SCRATCH = _Scratch()
