"""BLAKE3 digests of chunks, in bulk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import blake3
import numpy as np

from tensorcas_mlflow import threads

DIGEST_BYTES = 32

Digests = np.ndarray[Any, np.dtype[np.uint8]]
"""Digests of many chunks: shape ``(n, 32)``, C order."""

_BATCH_BYTES = 4 << 20
"""Bytes one thread hashes before it asks for more: large enough that handing over work costs nothing."""


def digest(data: Any) -> bytes:
    """Hash a buffer of contiguous bytes."""
    return blake3.blake3(data).digest()


def digest_all(pieces: Sequence[memoryview]) -> Digests:
    """Hash many buffers, on all threads when there is enough to hash.

    Returns:
        One row a buffer, in order.
    """
    out = np.empty((len(pieces), DIGEST_BYTES), dtype=np.uint8)
    batches: list[tuple[int, int]] = []
    start = 0
    weight = 0
    for at, piece in enumerate(pieces):
        weight += piece.nbytes
        if weight >= _BATCH_BYTES:
            batches.append((start, at + 1))
            start, weight = at + 1, 0
    if start < len(pieces):
        batches.append((start, len(pieces)))

    def hash_batch(batch: tuple[int, int]) -> None:
        begin, end = batch
        joined = b"".join([blake3.blake3(piece).digest() for piece in pieces[begin:end]])
        out[begin:end] = np.frombuffer(joined, dtype=np.uint8).reshape(-1, DIGEST_BYTES)

    if len(batches) <= 1:
        for batch in batches:
            hash_batch(batch)
    else:
        threads.run_all(hash_batch, batches)
    return out


def hex_of(row: Any) -> str:
    """Write one digest as 64 hex digits."""
    return bytes(row).hex()


def unique_rows(digests: Digests) -> tuple[Digests, Any, Any]:
    """Find the different digests among many.

    Returns:
        The different digests, ascending; for each of them the row it first stands in; for each row which it is.
    """
    if len(digests) == 0:
        none = np.empty(0, dtype=np.intp)
        return digests, none, none
    keys = np.ascontiguousarray(digests).view(f"V{DIGEST_BYTES}").ravel()
    unique, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    return unique.view(np.uint8).reshape(-1, DIGEST_BYTES), first, inverse.ravel()
