"""Zstandard frames by the package `zstandard`, for a core that was built without libzstd.

The core calls these functions. ``src/frames.c`` does the same with libzstd, and says why these parameters.
"""

from __future__ import annotations

import threading
from typing import Any

import zstandard

_ENTROPY, _RECORDS = 0, 23
"""Ways to compress that are no levels of Zstandard's."""


class _Contexts(threading.local):
    """Contexts of one thread. Two threads must not use one context at once."""

    def __init__(self) -> None:
        self._ways: dict[int, Any] = {}
        self.reader = zstandard.ZstdDecompressor()

    def way(self, way: int) -> Any:
        if way not in self._ways:
            self._ways[way] = (
                _fast(window_log=17, hash_log=6)
                if way == _ENTROPY
                else _fast(window_log=18, hash_log=13)
                if way == _RECORDS
                else zstandard.ZstdCompressor(level=way)
            )
        return self._ways[way]


def _fast(*, window_log: int, hash_log: int) -> Any:
    parameters = zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST,
        window_log=window_log,
        hash_log=hash_log,
        chain_log=6,
        search_log=1,
        min_match=7,
        target_length=0,
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


_contexts = _Contexts()


def compress(way: int, data: memoryview, step: int) -> bytes:
    """Compress into one frame, whose blocks end at each multiple of ``step`` bytes; 0 leaves that to Zstandard."""
    compressor = _contexts.way(way)
    if not step:
        return compressor.compress(data)  # type: ignore[no-any-return]
    frame = compressor.compressobj(size=len(data))
    parts: list[bytes] = []
    for at in range(0, len(data), step):
        if at:
            parts.append(frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
        parts.append(frame.compress(data[at : at + step]))
    return b"".join([*parts, frame.flush()])


def decompress(frame: memoryview, out: memoryview) -> bool:
    """Decompress the one whole frame that some bytes are, if it states the size of the buffer; else return False.

    Raises:
        MemoryError: This machine has too little memory.
    """
    try:
        # A frame that does not state its size could be a bomb. Zstandard allocates no window beyond the stated size.
        if bytes(frame[:4]) != zstandard.FRAME_HEADER or zstandard.frame_content_size(frame) != len(out):
            return False
        if len(out) == 0:  # the other call does not look at such a frame
            empty = _contexts.reader.decompressobj()
            return empty.decompress(frame) == b"" and bool(empty.eof) and not empty.unused_data
        data = _contexts.reader.decompress(frame, max_output_size=len(out), allow_extra_data=False)
    except zstandard.ZstdError as error:
        if "not enough memory" in str(error):
            raise MemoryError(f"Zstandard: {error}") from error
        return False
    if len(data) != len(out):
        return False
    out[:] = data
    return True
