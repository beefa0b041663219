"""Codecs 1 and 2, and the Zstandard contexts that all codecs share.

Codec 1 compresses a chunk as it is. Codec 2 first puts the bytes of equal place in their records together, for records
and for elements of odd sizes. Every thread has contexts of its own.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import zstandard

from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.codecs import Codec, check_zstd_has_memory
from tensorcas_mlflow.errors import FormatError
from tests.reference.words import SCRATCH

SMALL_BYTES = 64 * 1024
"""Chunks of at most this size are compressed at a slower, tighter level."""
MAX_RECORD_BYTES = 0xFFFF
"""Longest record that codec 2 shuffles."""
_SMALL_LEVEL = 12
_WITH_PLANES = range(4, 256)
"""Sizes of records compressed by `_Contexts.records`: the matches that help pixels are shorter, and the planes of long
records are short."""
_MOST_BLOCKS = 8
_LEAST_BLOCK_BYTES = 1024
"""A block's Huffman codes take about 100 bytes."""
_FEW_PLACES = 16
"""Up to this size numpy writes records faster place by place: 3 bytes in 75 us for 256 KiB, and in 260 row by row."""


class _Contexts(threading.local):
    """Contexts of one thread. Two threads must not use one context at once."""

    def __init__(self) -> None:
        self._compressors: dict[Any, Any] = {}
        self.decompressor = zstandard.ZstdDecompressor()

    def level(self, level: int) -> Any:
        made = self._compressors.get(level)
        if made is None:
            made = self._compressors[level] = zstandard.ZstdCompressor(level=level)
        return made

    def entropy(self) -> Any:
        """Return a compressor that is little more than a Huffman coder.

        Its table of 64 hashes of 7 bytes finds only matches that are long or frequent. The matches that level 1 finds
        in the bytes of floating point numbers are chance, and cost more room than they save.
        """
        return self._fast("entropy", window_log=17, hash_log=6)

    def records(self) -> Any:
        """Return a fast compressor for shuffled records.

        Level 1 takes matches of 6 bytes, which are mostly chance in the planes of numbers. Matches of 7 bytes take
        two thirds of its time, and less room.
        """
        return self._fast("records", window_log=18, hash_log=13)

    def _fast(self, use: str, *, window_log: int, hash_log: int) -> Any:
        made = self._compressors.get(use)
        if made is None:
            parameters = zstandard.ZstdCompressionParameters(
                strategy=zstandard.STRATEGY_FAST,
                window_log=window_log,
                hash_log=hash_log,
                chain_log=6,
                search_log=1,
                min_match=7,
                target_length=0,
            )
            made = self._compressors[use] = zstandard.ZstdCompressor(compression_params=parameters)
        return made


CONTEXTS = _Contexts()


def frame_into(frame: Buffer, out: memoryview) -> None:
    """Decompress one whole Zstandard frame, with nothing before or behind it, into a buffer of its content size.

    Raises:
        FormatError: The bytes are no such frame, or the frame does not state that size.
    """
    try:
        # A frame that does not state its size could be a bomb. Zstandard allocates no window beyond the stated size.
        if zstandard.frame_content_size(frame) != len(out):
            raise FormatError(f"a zstd frame does not hold the {len(out)} bytes it should")
        if bytes(frame[:4]) != zstandard.FRAME_HEADER:
            raise FormatError("not a zstd frame: it may be skipped")
        if len(out) == 0:  # the other call does not look at such a frame
            empty = CONTEXTS.decompressor.decompressobj()
            is_whole = empty.decompress(frame) == b"" and empty.eof and not empty.unused_data
            data = b"" if is_whole else None
        else:
            data = CONTEXTS.decompressor.decompress(frame, max_output_size=len(out), allow_extra_data=False)
    except zstandard.ZstdError as error:
        check_zstd_has_memory(error)
        raise FormatError(f"not a zstd frame: {error}") from error
    if data is None or len(data) != len(out):
        raise FormatError(f"a zstd frame is not whole, or does not hold the {len(out)} bytes it should")
    out[:] = data


class _Zstd(Codec):
    number = 1
    name = "zstd"

    def encode(self, raw: Buffer, itemsize: int, base: Buffer | None = None) -> Buffer:
        return self.encode_at(raw, level_for(len(raw)))

    def encode_at(self, raw: Buffer, level: int) -> bytes:
        """Encode a chunk at a level of Zstandard's, 1 to 22."""
        frame: bytes = CONTEXTS.level(level).compress(raw)
        return frame

    def decode_into(self, stored: Buffer, out: memoryview, base: Buffer | None = None) -> None:
        frame_into(stored, out)


class _ShuffleZstd(Codec):
    number = 2
    name = "shuffle-zstd"

    def encode(self, raw: Buffer, itemsize: int, base: Buffer | None = None) -> Buffer:
        return self._encode(raw, itemsize, _for_records(len(raw), itemsize))

    def encode_sample(self, sample: Buffer, itemsize: int) -> bytes:
        """Encode a part of a chunk in the time that a part of a large chunk takes."""
        return self._encode(sample, itemsize, _for_records(SMALL_BYTES + 1, itemsize))

    def encode_at(self, raw: Buffer, itemsize: int, level: int) -> bytes:
        """Encode a chunk at a level of Zstandard's, 1 to 22; a record longer than `MAX_RECORD_BYTES` counts as 1."""
        return self._encode(raw, itemsize, CONTEXTS.level(level))

    def _encode(self, raw: Buffer, itemsize: int, compressor: Any) -> bytes:
        width = itemsize if itemsize <= MAX_RECORD_BYTES else 1
        data: Any = np.frombuffer(raw, np.uint8)
        shuffled = SCRATCH.area("shuffled", len(data))
        by_record, by_place = _records(data, width), _places(shuffled, width)
        np.copyto(by_place, by_record.T)
        shuffled[by_place.size :] = data[by_place.size :]
        is_short = width < _WITH_PLANES.stop
        frame = _frame_in_blocks(compressor, shuffled, len(by_record)) if is_short else compressor.compress(shuffled)
        return width.to_bytes(2, "little") + frame

    def decode_into(self, stored: Buffer, out: memoryview, base: Buffer | None = None) -> None:
        stored = memoryview(stored)
        width = int.from_bytes(stored[:2], "little")
        if len(stored) < 2 or width == 0:
            raise FormatError("a chunk of shuffled records does not state the size of a record")
        shuffled = SCRATCH.area("shuffled", len(out))
        frame_into(stored[2:], shuffled.data)
        data = np.frombuffer(out, np.uint8)
        by_record, by_place = _records(data, width), _places(shuffled, width)
        if width <= _FEW_PLACES:
            for place in range(width):
                by_record[:, place] = by_place[place]
        else:
            np.copyto(by_record, by_place.T)
        data[by_place.size :] = shuffled[by_place.size :]


def level_for(n_bytes: int) -> int:
    """Choose the level of Zstandard's for a chunk."""
    return _SMALL_LEVEL if n_bytes <= SMALL_BYTES else 3


def _for_records(n_bytes: int, itemsize: int) -> Any:
    """Choose the compressor for a chunk of shuffled records."""
    if itemsize in _WITH_PLANES:
        return CONTEXTS.records()
    return CONTEXTS.level(1 if itemsize < _WITH_PLANES.start and n_bytes > SMALL_BYTES else level_for(n_bytes))


def _frame_in_blocks(compressor: Any, shuffled: Any, n_records: int) -> bytes:
    """Compress shuffled records into one frame, whose blocks end where the bytes of a place end.

    Each block has Huffman codes of its own. Zstandard's own blocks of 128 KiB give the bytes of an exponent and of a
    mantissa one code.
    """
    least = max(_LEAST_BLOCK_BYTES, len(shuffled) // _MOST_BLOCKS)
    step = n_records * -(-least // n_records) if n_records else least
    frame = compressor.compressobj(size=len(shuffled))
    parts: list[bytes] = []
    for at in range(0, len(shuffled), step):
        if at:
            parts.append(frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
        parts.append(frame.compress(shuffled[at : at + step]))
    return b"".join([*parts, frame.flush()])


def _records(data: Any, width: int) -> Any:
    """View bytes as whole records, a row each."""
    n_records = len(data) // width
    return data[: n_records * width].reshape(n_records, width)


def _places(data: Any, width: int) -> Any:
    """View shuffled bytes as a row for each place in a record."""
    n_records = len(data) // width
    return data[: n_records * width].reshape(width, n_records)


ZSTD = _Zstd()
SHUFFLE_ZSTD = _ShuffleZstd()
