"""Codec 1, and what other codecs need of Zstandard: one context of each kind for each thread."""

from __future__ import annotations

import threading
from typing import Any

import zstandard

from tensorcas_mlflow.codecs._codec import Buffer, Codec
from tensorcas_mlflow.errors import FormatError

SMALL_BYTES = 64 * 1024
"""Below this a slower, tighter level costs less than the file that holds the result."""


class _Contexts(threading.local):
    """Contexts of one thread: none may be used by two at once."""

    def __init__(self) -> None:
        self._compressors: dict[Any, Any] = {}
        self.decompressor = zstandard.ZstdDecompressor()

    def level(self, level: int) -> Any:
        made = self._compressors.get(level)
        if made is None:
            made = self._compressors[level] = zstandard.ZstdCompressor(level=level)
        return made

    def entropy(self) -> Any:
        """A compressor that gives all but its Huffman coder next to nothing to do.

        With a table of 64 hashes of 7 bytes it finds repetitions that are long or many, and no others. Those that
        level 1 finds in the bytes of floating point numbers are chance, and cost more than they spare.
        """
        made = self._compressors.get("entropy")
        if made is None:
            parameters = zstandard.ZstdCompressionParameters(
                strategy=zstandard.STRATEGY_FAST,
                window_log=17,
                hash_log=6,
                chain_log=6,
                search_log=1,
                min_match=7,
                target_length=0,
            )
            made = self._compressors["entropy"] = zstandard.ZstdCompressor(compression_params=parameters)
        return made


CONTEXTS = _Contexts()


def frame_into(frame: Buffer, out: memoryview) -> None:
    """Decompress a Zstandard frame that states its size into a buffer of exactly that, without a second copy.

    Raises:
        FormatError: It is no such frame.
    """
    try:
        # The frame must say its own size, or a small frame could be a bomb. Then no window larger than it is made.
        if zstandard.frame_content_size(frame) != len(out):
            raise FormatError(f"a zstd frame does not hold the {len(out)} bytes it should")
        n_bytes = CONTEXTS.decompressor.stream_reader(frame).readinto(out) if len(out) else 0
    except zstandard.ZstdError as error:
        raise FormatError(f"not a zstd frame: {error}") from error
    if n_bytes != len(out):
        raise FormatError(f"a zstd frame holds {n_bytes} bytes, not {len(out)}")


class _Zstd(Codec):
    number = 1
    name = "zstd"

    def encode(self, raw: Buffer, typesize: int, base: Buffer | None = None) -> Buffer:
        return self.encode_at(raw, 12 if len(raw) <= SMALL_BYTES else 3)

    def encode_at(self, raw: Buffer, level: int) -> bytes:
        """Encode a chunk at a level of Zstandard's, 1 to 22."""
        frame: bytes = CONTEXTS.level(level).compress(raw)
        return frame

    def decode_into(self, stored: Buffer, out: memoryview, base: Buffer | None = None) -> None:
        frame_into(stored, out)


ZSTD = _Zstd()
