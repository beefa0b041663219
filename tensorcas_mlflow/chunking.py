"""Where chunks begin and end (``docs/format.md``, Chunks)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tensorcas_mlflow.errors import FormatError

DEFAULT_CHUNK_BYTES = 256 * 1024
MIN_CHUNK_BYTES = 4 * 1024
MAX_CHUNK_BYTES = 64 * 1024 * 1024

Offsets = np.ndarray[Any, np.dtype[np.int64]]


def chunk_ends(n_bytes: int, chunk_bytes: int, cuts: Sequence[int] | Offsets | None = None) -> Offsets:
    """Say where the chunks of one tensor end.

    Args:
        n_bytes: The tensor's size.
        chunk_bytes: The store's chunk size.
        cuts: Byte offsets at which a chunk ends in any case: ascending, above 0, the last one ``n_bytes``.

    Returns:
        Ascending byte offsets, the last one ``n_bytes``; empty for an empty tensor.

    Raises:
        FormatError: The cuts are not such offsets.
    """
    if n_bytes == 0:
        if cuts is not None and len(cuts):
            raise FormatError("an empty tensor has no cuts")
        return np.empty(0, dtype=np.int64)
    if cuts is None:
        ends = np.arange(chunk_bytes, n_bytes + chunk_bytes, chunk_bytes, dtype=np.int64)
        ends[-1] = n_bytes
        return ends
    at = np.asarray(cuts, dtype=np.int64)
    starts = np.concatenate(([0], at[:-1]))
    if len(at) == 0 or at[-1] != n_bytes or not np.all(at > starts):
        raise FormatError(f"cuts must ascend from above 0 to the tensor's size of {n_bytes} bytes")
    n_in_piece = -(-(at - starts) // chunk_bytes)
    piece = np.repeat(np.arange(len(at)), n_in_piece)
    nth = np.arange(len(piece)) - np.repeat(np.cumsum(n_in_piece) - n_in_piece, n_in_piece)
    return np.minimum(starts[piece] + (nth + 1) * chunk_bytes, at[piece])


def n_chunks(n_bytes: int, chunk_bytes: int) -> int:
    """Count the chunks of a tensor without cuts."""
    return -(-n_bytes // chunk_bytes)
