"""A count of what is read, added to by whoever reads."""

from __future__ import annotations

from tensorcas_mlflow.threads import Lock


class Tally:
    """Counts of bytes and requests. For many threads at once."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self.n_requests = 0
        self.n_mapped_bytes = 0
        self.n_cached = 0
        self._lock = Lock()

    def add(self, n_bytes: int, n_requests: int = 1) -> None:
        """Count requests, and what they have brought."""
        with self._lock:
            self.n_bytes += n_bytes
            self.n_requests += n_requests

    def add_mapped(self, n_bytes: int) -> None:
        """Count what was mapped."""
        with self._lock:
            self.n_mapped_bytes += n_bytes

    def add_cached(self, n_chunks: int) -> None:
        """Count chunks that the chunk cache had."""
        with self._lock:
            self.n_cached += n_chunks
