"""Codecs: how a chunk's bytes are stored, and back. Their numbers are on disk and never change (``docs/format.md``).

A new codec is one `Codec` in `CODECS` and one row in the format page. Identity does not depend on the codec: chunks are
named by their decoded bytes, so packs may be rewritten with a better one.
"""

from __future__ import annotations

import math
import random
import struct
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import zstandard

from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.threads import Lock

Buffer = Any
"""Anything with contiguous bytes: bytes, memoryview, a 1-d uint8 array."""

MAX_TYPESIZE = 255
MOST_OVERHEAD_BYTES = 4096
"""No payload is longer than twice its chunk and this; what an entry says beyond it is damage, and costs no memory."""
_SMALL_BYTES = 64 * 1024
"""Below this a slower, tighter level costs less than the file that holds the result."""
_LEAST_SHUFFLED_BYTES = 512
"""In fewer bytes than these shuffling gains less than Blosc2's header takes (``docs/design/decisions.md``)."""
_MIXED_ITEMSIZE = 8
"""Elements of this size or more are often whole numbers or repeat, where plain zstd may be better."""
_BLOSC2_HEADER_BYTES = 32
_BLOSC2_FLAGS = frozenset([0x85, 0x87, 0x95, 0x97, 0x07, 0x17])
"""Byte 2: extended header; blocks split or not; zstd, or the bytes as they are."""
_BLOSC2_PIPELINE = bytes([1, 0, 0, 0, 0, 0, 5]) + bytes(8)
"""Bytes 16 to 30 of the header: byte shuffle and no other filter, zstd, no parameters."""
_BLOSC2_KINDS = (0x00, 0x10, 0x20, 0x30)
"""Byte 31: ordinary, or nothing but zeros, NaNs or one value. Not lazy, no dictionary, not left uninitialised."""


class Codec(ABC):
    """A reversible encoding of chunks. Stateless and safe to call from any thread."""

    number: ClassVar[int]
    name: ClassVar[str]

    @abstractmethod
    def encode(self, raw: Buffer, typesize: int) -> Buffer:
        """Encode a chunk.

        Args:
            raw: The chunk.
            typesize: Size of the elements it consists of, 1 to 255; a hint for the encoding, stored beside it.
        """

    @abstractmethod
    def decode_into(self, stored: Buffer, out: memoryview) -> None:
        """Decode a chunk into a buffer of exactly its size.

        Raises:
            FormatError: The bytes are not this codec's, or decode to another size.
        """


class _Raw(Codec):
    number = 0
    name = "raw"

    def encode(self, raw: Buffer, typesize: int) -> Buffer:
        return raw

    def decode_into(self, stored: Buffer, out: memoryview) -> None:
        if len(stored) != len(out):
            raise FormatError(f"a raw chunk of {len(out)} bytes is stored in {len(stored)}")
        out[:] = stored


class _Zstd(Codec):
    number = 1
    name = "zstd"

    def __init__(self) -> None:
        # A zstandard context must not be used by two threads at once.
        self._local = threading.local()

    def encode(self, raw: Buffer, typesize: int) -> Buffer:
        kind = "tight" if len(raw) <= _SMALL_BYTES else "fast"
        compressor = getattr(self._local, kind, None)
        if compressor is None:
            compressor = zstandard.ZstdCompressor(level=12 if kind == "tight" else 3)
            setattr(self._local, kind, compressor)
        return compressor.compress(raw)

    def decode_into(self, stored: Buffer, out: memoryview) -> None:
        try:
            # The frame must say its own size, or a small frame could be a bomb.
            if zstandard.frame_content_size(stored) != len(out):
                raise FormatError(f"a zstd frame does not hold the {len(out)} bytes it should")
            decompressor = getattr(self._local, "decompressor", None)
            if decompressor is None:
                decompressor = self._local.decompressor = zstandard.ZstdDecompressor()
            decoded = decompressor.decompress(stored, max_output_size=len(out))
        except zstandard.ZstdError as error:
            raise FormatError(f"not a zstd frame: {error}") from error
        if len(decoded) != len(out):
            raise FormatError(f"a zstd frame holds {len(decoded)} bytes, not {len(out)}")
        out[:] = decoded


class _ShuffleZstd(Codec):
    number = 2
    name = "shuffle-zstd"

    def encode(self, raw: Buffer, typesize: int) -> Buffer:
        blosc2 = _blosc2()
        return blosc2.compress2(
            raw,
            typesize=typesize,
            codec=blosc2.Codec.ZSTD,
            clevel=5 if len(raw) <= _SMALL_BYTES else 1,
            filters=[blosc2.Filter.SHUFFLE],
            filters_meta=[0],
            nthreads=1,
        )

    def decode_into(self, stored: Buffer, out: memoryview) -> None:
        if len(stored) < _BLOSC2_HEADER_BYTES:
            raise FormatError("a Blosc2 chunk is cut short")
        header = bytes(stored[:_BLOSC2_HEADER_BYTES])
        # Blosc2 trusts the sizes in a chunk's header, so they are checked first.
        n_raw, _, n_stored = struct.unpack_from("<iii", header, 4)
        if n_raw != len(out) or n_stored != len(stored):
            raise FormatError(f"a Blosc2 chunk does not hold the {len(out)} bytes it should")
        # A chunk may name a codec that is a plugin: Blosc2 then starts a Python that imports it. Nothing executes here.
        if header[2] not in _BLOSC2_FLAGS or header[16:31] != _BLOSC2_PIPELINE or header[31] not in _BLOSC2_KINDS:
            raise FormatError("a Blosc2 chunk is encoded in another way than by byte shuffle and zstd")
        blosc2 = _blosc2()
        try:
            decoded = blosc2.decompress2(stored, dst=out, nthreads=1)
        except (RuntimeError, ValueError, MemoryError) as error:
            raise FormatError(f"not a Blosc2 chunk: {error}") from error
        if isinstance(decoded, int) and decoded != len(out):
            raise FormatError(f"a Blosc2 chunk holds {decoded} bytes, not {len(out)}")


def load_codecs() -> None:
    """Import what the codecs need, which takes a while; a program's random numbers stay what they were.

    Packages that blosc2 imports draw from the global generator. A training that saved its state would go on otherwise
    than one that loads it. Called before work is handed to threads, where it could not be undone safely.
    """
    with _loading:
        if "blosc2" not in sys.modules:
            state = random.getstate()
            _blosc2()
            random.setstate(state)


_loading = Lock()


def _blosc2() -> Any:
    import blosc2

    # Without this the interpreter's lock is held while a chunk is encoded, and threads gain nothing.
    blosc2.set_releasegil(True)
    return blosc2


RAW = _Raw()
ZSTD = _Zstd()
SHUFFLE_ZSTD = _ShuffleZstd()
CODECS: Mapping[int, Codec] = {codec.number: codec for codec in (RAW, ZSTD, SHUFFLE_ZSTD)}


def codec_numbered(number: int) -> Codec:
    """Find a codec by the number a pack gives.

    Raises:
        FormatError: This release has no such codec.
    """
    codec = CODECS.get(number)
    if codec is None:
        raise FormatError(f"no codec has the number {number}: a later release of tensorcas-mlflow may read it")
    return codec


def typesize_of(itemsize: int) -> int:
    """Choose the element size for a codec: the dtype's own, or for long records their largest divisor that fits."""
    for size in range(min(itemsize, MAX_TYPESIZE), 0, -1):
        if itemsize % size == 0:
            return size
    return 1


def encode_best(raw: Buffer, itemsize: int) -> tuple[Codec, int, Buffer]:
    """Encode one chunk with the codec that fits its elements, or leave it raw where that gains less than 3 %.

    Args:
        raw: The chunk.
        itemsize: Size of one element; 1 for text and skeletons.

    Returns:
        The codec, the typesize it was told, and the payload.
    """
    if len(raw) < 32:
        return RAW, 1, raw
    typesize = typesize_of(itemsize)
    is_shuffled = typesize > 1 and len(raw) >= max(_LEAST_SHUFFLED_BYTES, 8 * typesize)
    codec: Codec = SHUFFLE_ZSTD if is_shuffled else ZSTD
    stored = codec.encode(raw, typesize)
    if is_shuffled and itemsize >= _MIXED_ITEMSIZE and len(raw) <= _SMALL_BYTES:
        plain = ZSTD.encode(raw, typesize)
        if len(plain) < len(stored):
            codec, stored = ZSTD, plain
    if len(stored) > 0.97 * len(raw):
        return RAW, 1, raw
    return codec, typesize, stored


def guess_itemsize(sample: Buffer) -> int:
    """Guess the size of the elements that bytes consist of, where nobody says it.

    Floating point numbers have bytes, those of the exponent, that are alike from one element to the next. So the size
    is taken at which the bytes in equal places differ least, by Shannon's entropy, if that is clearly less than it is
    for all bytes together.

    Args:
        sample: The beginning of the bytes; of a long one the first 16 KiB are looked at.

    Returns:
        1, 2, 4 or 8.
    """
    data = np.frombuffer(sample, np.uint8)[:_SAMPLE_BYTES]
    data = data[: len(data) - len(data) % 8]
    if len(data) < _LEAST_SAMPLE_BYTES:
        return 1
    best, least = 1, _entropy(data) - _CLEARLY_BITS
    for size in (2, 4, 8):
        entropy = sum(_entropy(data[place::size]) for place in range(size)) / size
        if entropy < least - _CLEARLY_BITS / 4:
            best, least = size, entropy
    return best


_SAMPLE_BYTES = 16 * 1024
_LEAST_SAMPLE_BYTES = 2048
_CLEARLY_BITS = 0.2


def _entropy(data: np.ndarray[Any, np.dtype[np.uint8]]) -> float:
    # In bits, with the correction of Miller and Madow: few bytes look more alike than they are.
    counts = np.bincount(data, minlength=256)
    counts = counts[counts > 0]
    shares = counts / len(data)
    return float((len(counts) - 1) / (2 * len(data) * math.log(2)) - (shares * np.log2(shares)).sum())
