"""Codec 1, and what other codecs need of Zstandard: one context of each kind for each thread."""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import Any

import zstandard

from tensorcas_mlflow.codecs._codec import Buffer, Codec
from tensorcas_mlflow.errors import FormatError

SMALL_BYTES = 64 * 1024
"""Below this a slower, tighter level costs less than the file that holds the result."""

HAS_MANY = "multi_decompress_to_buffer" in zstandard.backend_features
"""Whether several frames can be decompressed by one call: with the binding in C, and not with that of cffi."""
_LEAST_TOGETHER = 8


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


def check_zstd_has_memory(error: Exception) -> None:
    """See that an error of Zstandard's is of what it was given.

    Raises:
        MemoryError: It is of this machine: there is not enough memory.
    """
    if "not enough memory" in str(error):
        raise MemoryError(f"Zstandard: {error}") from error


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
        check_zstd_has_memory(error)
        raise FormatError(f"not a zstd frame: {error}") from error
    if n_bytes != len(out):
        raise FormatError(f"a zstd frame holds {n_bytes} bytes, not {len(out)}")


def frames_into(frames: Sequence[Buffer], outs: Sequence[memoryview]) -> None:
    """Decompress several frames, each into a buffer of exactly its size, none of which is empty.

    The interpreter's lock is given up once for all of them, where they are many: with two threads, waiting for it took
    longer than to decompress twenty small frames. Of few, to copy what comes of them takes longer.

    Raises:
        FormatError: One is no such frame, as of `frame_into`.
    """
    if len(frames) < _LEAST_TOGETHER or not HAS_MANY:
        for frame, out in zip(frames, outs, strict=True):
            frame_into(frame, out)
        return
    sizes = list(map(len, outs))
    decompressor: Any = CONTEXTS.decompressor
    try:
        # As in `frame_into`: what is made is never larger than what was asked for.
        if [zstandard.frame_content_size(frame) for frame in frames] != sizes:
            raise FormatError("a zstd frame does not hold the bytes it should")
        said = struct.pack(f"={len(sizes)}Q", *sizes)
        parts = decompressor.multi_decompress_to_buffer(frames, decompressed_sizes=said, threads=1)
    except zstandard.ZstdError as error:
        check_zstd_has_memory(error)
        raise FormatError(f"not a zstd frame: {error}") from error
    for part, out in zip(parts, outs, strict=True):
        if len(part) != len(out):
            raise FormatError(f"a zstd frame holds {len(part)} bytes, not {len(out)}")
        out[:] = memoryview(part)


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
