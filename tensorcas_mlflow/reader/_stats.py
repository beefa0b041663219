"""What a reader has read so far."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tensorcas_mlflow.backends import Tally
from tensorcas_mlflow.threads import Lock


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStats:
    """What was read, counted by the storage as it was read, and not reckoned from what was asked for."""

    bytes_read: int
    """Bytes that reads have brought: of tensors, and of manifests, the index and headers besides."""
    requests: int
    """Reads, listings and looks that the storage was asked for; in a local file, each read of a stretch."""
    mapped_bytes: int
    """Bytes that were mapped and not read: of these the system reads what is touched, which nobody counts."""
    cache_hits: int
    """Chunks that came from the chunk cache on local disk and not from the storage."""
    seconds: float
    """How long calls have taken that read."""


class Watch:
    """Counts the time that calls take, those that they make among themselves once."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._lock = Lock()
        self._seconds = 0.0
        self._depth = 0
        self._began = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count until the block ends; where several threads read at once their time counts once."""
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
        """Say what was read so far."""
        tally = self._tally
        return ReadStats(
            bytes_read=tally.n_bytes,
            requests=tally.n_requests,
            mapped_bytes=tally.n_mapped_bytes,
            cache_hits=tally.n_cached,
            seconds=self._seconds,
        )
