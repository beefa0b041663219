"""DEFLATE as zlib writes it, bit for bit on every machine (``docs/format.md``, Deflate).

The library zlib itself would not do: its later releases, and other libraries under
its name, may write other streams of the same bytes.
"""

from __future__ import annotations

from typing import Any

from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.native import core

LEVELS = range(1, 10)
"""Levels of compression."""


def deflate(data: Buffer, level: int, out: Any) -> int | None:
    """Compress bytes into a raw stream (RFC 1951).

    Args:
        data: The bytes, fewer than 2 GiB.
        level: One of `LEVELS`.
        out: Writable buffer for the stream.

    Returns:
        The size of the stream; None if it does not fit. Then ``out`` has any bytes.
    """
    n_bytes: int = core.deflate(data, level, out)
    return None if n_bytes < 0 else n_bytes


def deflates_to(data: Buffer, level: int, stream: Buffer) -> bool:
    """Tell whether `deflate` makes a stream of some bytes; a wrong level mostly shows after some 16 KiB."""
    return bool(core.deflates_to(data, level, stream))
