"""Sketches of the tensors of one manifest, behind it in its blob (``docs/design/caches.md``, Sketches)."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.layout._rows import Columns

_MAGIC = b"\x89TCSKT\r\x01"
_FOOTER = struct.Struct("<I16s8s")
_DIGEST_BYTES = 16


def sketched_rows(columns: Columns) -> Any:
    """Return the numbers of the rows with sketches, ascending."""
    # Opening a checkpoint parts sketches from its manifest, and reads none of them.
    from tensorcas_mlflow.base.sketch import LEAST_SKETCHED_BYTES, is_sketched

    has_dtype = np.array([is_sketched(name) for name in columns.dtypes], dtype=bool)
    rows: Any = (has_dtype[columns.dtype] & (columns.n_bytes >= LEAST_SKETCHED_BYTES)).nonzero()[0]
    return rows


def sketch_bytes(words: Any) -> bytes:
    """Write sketches.

    Args:
        words: Their words, shape ``(n, 32)``: a row for each of `sketched_rows`.
    """
    data: bytes = words.astype("<u2").tobytes()
    return data + _FOOTER.pack(len(data), digest(data)[:_DIGEST_BYTES], _MAGIC)


def split_sketches(blob: bytes) -> tuple[bytes, bytes]:
    """Split a manifest's blob, without hints, into the manifest and its sketches; the sketches may be empty."""
    # This accepts any version: `read_sketches` skips versions unknown to this release.
    if blob[-len(_MAGIC) : -1] != _MAGIC[:-1] or len(blob) < _FOOTER.size:
        return blob, b""
    at = len(blob) - _FOOTER.size - _FOOTER.unpack_from(blob, len(blob) - _FOOTER.size)[0]
    return (blob, b"") if at < 0 else (blob[:at], blob[at:])


def read_sketches(data: bytes, columns: Columns) -> tuple[Any, Any] | None:
    """Read sketches: the numbers of the sketched rows, and their words, shape ``(n, 32)``.

    Args:
        data: Sketches from `split_sketches`.
        columns: The rows of their manifest.

    Returns:
        None if there are none, or they are damaged, of a later version, or for other rows.
    """
    from tensorcas_mlflow.base.sketch import N_WORDS, SKETCH_BYTES

    if len(data) < _FOOTER.size:
        return None
    words = data[: -_FOOTER.size]
    n_bytes, said, magic = _FOOTER.unpack(data[-_FOOTER.size :])
    if magic != _MAGIC or n_bytes != len(words) or digest(words)[:_DIGEST_BYTES] != said:
        return None
    rows = sketched_rows(columns)
    if len(rows) * SKETCH_BYTES != len(words):
        return None
    return rows, np.frombuffer(words, "<u2").reshape(-1, N_WORDS)
