"""BLAKE3 digests of chunks, in bulk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import blake3
import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.base import config
from tensorcas_mlflow.native import core

DIGEST_BYTES = 32

Buffer = Any
"""Anything with contiguous bytes: bytes, memoryview, a 1-d uint8 array."""

Digests = np.ndarray[Any, np.dtype[np.uint8]]
"""Digests of many chunks: shape ``(n, 32)``, C order."""


def digest(data: Buffer) -> bytes:
    """Hash a buffer of contiguous bytes."""
    hashed: bytes = core.digest(data)
    return hashed


def digest_of(parts: Iterable[Any]) -> bytes:
    """Hash buffers of contiguous bytes as if they were one."""
    hasher = blake3.blake3()
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def digest_each(pieces: Iterable[Any]) -> Digests:
    """Hash buffers of contiguous bytes in the calling thread.

    Returns:
        One row a buffer, in order.
    """
    return _digest_by(list(pieces), n_threads=1)


def digest_all(pieces: Sequence[memoryview]) -> Digests:
    """Hash many buffers, on all threads if there is enough to hash.

    Returns:
        One row a buffer, in order.
    """
    return _digest_by(pieces, n_threads=config.n_threads())


def _digest_by(pieces: Sequence[Any], *, n_threads: int) -> Digests:
    out = np.empty((len(pieces), DIGEST_BYTES), dtype=np.uint8)
    core.hash_each(pieces, out, n_threads)
    return out


def copy_and_digest(
    rows: Sequence[Array], chunk_at: Any, sizes: Any, *, known: Digests | None = None
) -> tuple[Any, Any, Digests]:
    """Copy arrays chunk by chunk, and hash the copies.

    So a digest is that of its copy, even if the array changes meanwhile.

    Args:
        rows: The arrays.
        chunk_at: The number of the first chunk of each row, and the number of all chunks.
        sizes: Sizes of all chunks.
        known: A digest for each chunk. The copy of a chunk with this digest is not kept.

    Returns:
        An area of bytes with the copies of the chunks at the sums of the sizes before them; flags for the chunks
        with another digest than the known one, whose copies are there; and the digests.
    """
    digests = np.empty((len(sizes), DIGEST_BYTES), dtype=np.uint8)
    area = np.empty(int(sizes.sum()), dtype=np.uint8)  # the system provides a page at its first write
    is_copied = np.empty(len(sizes), dtype=bool)
    columns = (np.ascontiguousarray(column, dtype=np.int64) for column in (chunk_at, sizes))
    contiguous = [row if row.flags.c_contiguous else np.ascontiguousarray(row) for row in rows]
    if known is not None:
        known = np.ascontiguousarray(known)
    core.copy_rows(contiguous, *columns, known, area, is_copied, digests, config.n_threads())
    return area, is_copied, digests


def hex_of(row: Any) -> str:
    """Write one digest as 64 hex digits."""
    return bytes(row).hex()


def as_keys(digests: Digests) -> Any:
    """View each digest as one value."""
    return np.ascontiguousarray(digests).reshape(-1, DIGEST_BYTES).view(f"V{DIGEST_BYTES}").ravel()


def distinct_digests(parts: Iterable[Digests]) -> Digests:
    """Return the distinct digests of some arrays, ascending."""
    return unique_rows(np.concatenate([np.empty((0, DIGEST_BYTES), np.uint8), *parts]))[0]


def unique_rows(digests: Digests) -> tuple[Digests, Any, Any]:
    """Find the distinct digests.

    Returns:
        The distinct digests, ascending; the first row of each; and for each row the index of its digest.
    """
    if len(digests) == 0:
        none = np.empty(0, dtype=np.intp)
        return digests, none, none
    order, is_new = sorted_rows(digests)
    first = order[is_new]
    inverse = np.empty(len(digests), dtype=np.intp)
    inverse[order] = is_new.cumsum() - 1
    return np.ascontiguousarray(digests[first]), first, inverse


def prefixes(digests: Digests) -> Any:
    """Read the first eight bytes of many digests as big-endian numbers."""
    return np.ascontiguousarray(digests[:, :8]).view(">u8").ravel().astype(np.uint64)


def sorted_rows(digests: Digests) -> tuple[Any, Any]:
    """Sort digests, by their numeric prefixes if these tell them apart.

    Returns:
        The row numbers in sorted order, equal digests in their original order; and flags for those that differ from
        their predecessor.
    """
    prefix = prefixes(digests)
    order = prefix.argsort(kind="stable")
    ranked = prefix[order]
    is_new = np.empty(len(order), dtype=bool)
    is_new[:1] = True
    is_new[1:] = ranked[1:] != ranked[:-1]
    again = (~is_new).nonzero()[0]
    if len(again) and (digests[order[again]] != digests[order[again - 1]]).any():
        # Different digests with equal prefixes: not a product of chance, but anybody may write them into a manifest.
        keys = np.ascontiguousarray(digests).view(f"V{DIGEST_BYTES}").ravel()
        order = np.argsort(keys, kind="stable")
        is_new[1:] = keys[order][1:] != keys[order][:-1]
    return order, is_new
