"""Codecs 1 and 2: Zstandard frames.

Codec 1 compresses a chunk as it is. Codec 2 first puts the bytes of equal place in their records together, for records
and for elements of odd sizes.
"""

from __future__ import annotations

from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.codecs._codec import Codec
from tensorcas_mlflow.native import core

SMALL_BYTES = 64 * 1024
"""Chunks of at most this size are compressed at a slower, tighter level."""
MAX_RECORD_BYTES = 0xFFFF
"""Longest record that codec 2 shuffles."""


class _Zstd(Codec):
    number = 1
    name = "zstd"

    def encode(self, raw: Buffer, itemsize: int, base: Buffer | None = None) -> bytes:
        return self.encode_at(raw, 12 if len(raw) <= SMALL_BYTES else 3)

    def encode_at(self, raw: Buffer, level: int) -> bytes:
        """Encode a chunk at a level of Zstandard's, 1 to 22."""
        frame: bytes = core.compress(raw, level)
        return frame


class _ShuffleZstd(Codec):
    number = 2
    name = "shuffle-zstd"

    def encode(self, raw: Buffer, itemsize: int, base: Buffer | None = None) -> bytes:
        payload: bytes = core.encode_records(raw, itemsize)
        return payload


def check_zstd_has_memory(error: Exception) -> None:
    """Check that Zstandard failed because of its input.

    Raises:
        MemoryError: It failed because this machine has too little memory.
    """
    if "not enough memory" in str(error):
        raise MemoryError(f"Zstandard: {error}") from error


ZSTD = _Zstd()
SHUFFLE_ZSTD = _ShuffleZstd()
