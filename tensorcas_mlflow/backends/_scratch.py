"""Reusable buffers for reads on their way to the caller's memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from tensorcas_mlflow.backends._file import aligned_buffer
from tensorcas_mlflow.threads import Lock

SCRATCH_BYTES = 1 << 20
"""Length of an ordinary buffer."""
_SMALL_BYTES = 256 << 10
_HUGE_PAGE_BYTES = 2 << 20
_PAGES_AT_ONCE = 2
"""Numpy asks the system for huge pages from 4 MiB on."""


class Scratch:
    """Buffers reused by the next read: fresh memory costs more than a read.

    They lie in huge pages, if the system has them. Each ordinary page is a segment of its own, so the disk's driver
    splits a direct read into ordinary pages into many requests, and the read takes three times as long.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._small: list[Any] = []
        self._idle: list[Any] = []

    def take(self, n_bytes: int) -> Any:
        """Return a buffer of at least so many bytes, aligned to a page; nobody else has it until it is given back."""
        idle = self._small if n_bytes <= _SMALL_BYTES else self._idle
        with self._lock:
            while idle:
                buffer = idle.pop()
                if len(buffer) >= n_bytes:
                    return buffer
            if n_bytes <= _SMALL_BYTES:
                return aligned_buffer(_SMALL_BYTES)
            if n_bytes > SCRATCH_BYTES:
                return _in_huge_pages(n_bytes)
            slab = _in_huge_pages(_PAGES_AT_ONCE * _HUGE_PAGE_BYTES)
            idle += [slab[at : at + SCRATCH_BYTES] for at in range(SCRATCH_BYTES, len(slab), SCRATCH_BYTES)]
            return slab[:SCRATCH_BYTES]

    def give_back(self, buffer: Any) -> None:
        """Return a buffer for reuse; None is none."""
        if buffer is not None:
            with self._lock:
                (self._small if len(buffer) <= _SMALL_BYTES else self._idle).append(buffer)


def _in_huge_pages(n_bytes: int) -> Any:
    whole = np.empty(max(n_bytes, _PAGES_AT_ONCE * _HUGE_PAGE_BYTES) + _HUGE_PAGE_BYTES, dtype=np.uint8)
    begin = -whole.ctypes.data % _HUGE_PAGE_BYTES
    return whole[begin : begin + n_bytes]
