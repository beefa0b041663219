"""Counter of reads, filled by the readers."""

from __future__ import annotations

from tensorcas_mlflow.threads import Lock


class Tally:
    """Counts of bytes and requests, for many threads at once."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self.n_requests = 0
        self.n_mapped_bytes = 0
        self.n_cached = 0
        self._lock = Lock()

    def add(self, n_bytes: int, n_requests: int = 1) -> None:
        """Count requests and the bytes read."""
        with self._lock:
            self.n_bytes += n_bytes
            self.n_requests += n_requests

    def add_mapped(self, n_bytes: int) -> None:
        """Count memory-mapped bytes."""
        with self._lock:
            self.n_mapped_bytes += n_bytes

    def add_cached(self, n_chunks: int) -> None:
        """Count chunks found in the chunk cache."""
        with self._lock:
            self.n_cached += n_chunks
