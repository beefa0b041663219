"""Blobs that were fetched, kept for a while: a carrier can give no part of a blob without the whole."""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from tensorcas_mlflow.threads import Lock

MAX_BYTES = 2 << 30
"""What is kept at most, the blob last fetched aside."""
MAX_FILES = 128


class Download:
    """A fetched blob, in an open file without a name: it is gone when nobody has this object any more."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._descriptor).st_size

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def read_into(self, start: int, out: memoryview) -> bool:
        """Fill a buffer with bytes from ``start`` on; returns False if the blob ends before it is full."""
        at = 0
        while at < len(out):
            n_read = os.preadv(self._descriptor, [out[at:]], start + at)
            if n_read == 0:
                return False
            at += n_read
        return True


class Downloads:
    """Fetched blobs by key, those used last kept longest. Shared by threads."""

    def __init__(self, *, max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES) -> None:
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._lock = Lock()
        self._kept: OrderedDict[str, Download] = OrderedDict()
        self._turns: dict[str, Lock] = {}

    def get(self, key: str, fetch: Callable[[Path], None]) -> Download:
        """Give a blob, fetching it if it is not here; two threads do not fetch the same one.

        Args:
            key: Which; its content never changes.
            fetch: Writes it to the path it is given.
        """
        with self._lock:
            kept = self._find(key)
            if kept is not None:
                return kept
            turn = self._turns.setdefault(key, Lock())
        with turn:
            with self._lock:
                kept = self._find(key)
            if kept is None:
                kept = _download(fetch)
                with self._lock:
                    self._kept[key] = kept
                    self._turns.pop(key, None)
                    self._drop_old()
            return kept

    def _find(self, key: str) -> Download | None:
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
        return kept

    def _drop_old(self) -> None:
        # Who is reading one that goes keeps it open for as long as that takes.
        total = sum(kept.size for kept in self._kept.values())
        while len(self._kept) > 1 and (total > self._max_bytes or len(self._kept) > self._max_files):
            total -= self._kept.popitem(last=False)[1].size


def _download(fetch: Callable[[Path], None]) -> Download:
    # The name goes at once, so nothing stays behind, however this process ends.
    with tempfile.TemporaryDirectory(prefix="tensorcas-") as folder:
        path = Path(folder, "blob")
        fetch(path)
        return Download(path)
