"""Lower bounds for a save: hashing the content, and writing the new part."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import blake3

from tensorcas_mlflow.base import config


class Hashing:
    """BLAKE3 of some buffers in pieces of a chunk, on as many threads as the store uses.

    Each thread takes one stretch of pieces of about the same size, so there is no cost of distributing work.
    """

    def __init__(self, buffers: Iterable[Any], chunk_bytes: int) -> None:
        pieces = [
            memoryview(buffer)[start : start + chunk_bytes]
            for buffer in buffers
            for start in range(0, memoryview(buffer).nbytes, chunk_bytes)
        ]
        n_bytes, n_threads, done = sum(map(len, pieces)), config.n_threads(), 0
        self._shares: list[list[memoryview]] = [[] for _ in range(n_threads)]
        for piece in pieces:
            self._shares[done * n_threads // n_bytes].append(piece)
            done += len(piece)
        # A pool's threads cost more than hashing a megabyte does.
        self._pool = ThreadPoolExecutor(n_threads) if n_bytes > 1 << 20 else None

    def __call__(self) -> None:
        """Hash everything once."""
        if self._pool is None:
            for share in self._shares:
                _hash_all(share)
        else:
            list(self._pool.map(_hash_all, self._shares))


def write_durably(path: Path, buffers: Sequence[Any]) -> None:
    """Write a new file as durably as a commit: sync the bytes, rename the file to its name, sync the folder."""
    staging = path.with_name("staging")
    descriptor = os.open(staging, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    try:
        for buffer in buffers:
            left = memoryview(buffer)
            while left:
                left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    staging.rename(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Sync a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash_all(pieces: Sequence[memoryview]) -> None:
    for piece in pieces:
        blake3.blake3(piece).digest()
