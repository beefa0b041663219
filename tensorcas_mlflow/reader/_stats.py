"""Figures of what a reader has read."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tensorcas_mlflow.backends import Tally
from tensorcas_mlflow.threads import Lock


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStats:
    """Figures of all reads of a reader, counted where the storage returned the bytes."""

    read_bytes: int
    """Bytes that were read: tensors, manifests, the index and headers."""
    n_requests: int
    """Reads, listings and look-ups at the storage; in a local file, each read of a stretch."""
    mapped_bytes: int
    """Bytes that were memory-mapped. The system reads the touched pages of them, which nobody counts."""
    n_cache_hits: int
    """Chunks that came from the chunk cache on local disk."""
    read_s: float
    """Seconds in which at least one call was reading."""


class Watch:
    """Clock of the calls that read; nested calls count once."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._lock = Lock()
        self._seconds = 0.0
        self._depth = 0
        self._began = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of a block; threads that read at once count once."""
        with self._lock:
            if self._depth == 0:
                self._began = time.perf_counter()
            self._depth += 1
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                if self._depth == 0:
                    self._seconds += time.perf_counter() - self._began

    def stats(self) -> ReadStats:
        """Return the figures so far."""
        tally = self._tally
        return ReadStats(
            read_bytes=tally.n_bytes,
            n_requests=tally.n_requests,
            mapped_bytes=tally.n_mapped_bytes,
            n_cache_hits=tally.n_cached,
            read_s=self._seconds,
        )
