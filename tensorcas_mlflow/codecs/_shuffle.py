"""Codec 2: Blosc2's byte shuffle and zstd, for records; before there was `planes`, for all numbers."""

from __future__ import annotations

import random
import struct
import sys
from typing import Any

import numpy as np

from tensorcas_mlflow.codecs._codec import Buffer, Codec
from tensorcas_mlflow.codecs._sizes import WORDS
from tensorcas_mlflow.codecs._zstd import SMALL_BYTES
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.threads import Lock

_BLOSC2_HEADER_BYTES = 32
_BLOSC2_FLAGS = frozenset([0x85, 0x87, 0x95, 0x97, 0x07, 0x17])
"""Byte 2: extended header; blocks split or not; zstd, or the bytes as they are."""
_BLOSC2_PIPELINE = bytes([1, 0, 0, 0, 0, 0, 5]) + bytes(8)
"""Bytes 16 to 30 of the header: byte shuffle and no other filter, zstd, no parameters."""
_BLOSC2_KINDS = (0x00, 0x10, 0x20, 0x30)
"""Byte 31: ordinary, or nothing but zeros, NaNs or one value. Not lazy, no dictionary, not left uninitialised."""


class _ShuffleZstd(Codec):
    number = 2
    name = "shuffle-zstd"

    def encode(self, raw: Buffer, typesize: int, base: Buffer | None = None) -> Buffer:
        blosc2 = _blosc2()
        return blosc2.compress2(
            raw,
            typesize=typesize,
            codec=blosc2.Codec.ZSTD,
            clevel=5 if len(raw) <= SMALL_BYTES else 1,
            filters=[blosc2.Filter.SHUFFLE],
            filters_meta=[0],
            nthreads=1,
        )

    def decode_into(self, stored: Buffer, out: memoryview, base: Buffer | None = None) -> None:
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
        except (RuntimeError, ValueError) as error:
            raise FormatError(f"not a Blosc2 chunk: {error}") from error
        if isinstance(decoded, int) and decoded != len(out):
            raise FormatError(f"a Blosc2 chunk holds {decoded} bytes, not {len(out)}")


def load_codecs() -> None:
    """Import what the codecs need, which takes half a second; a program's random numbers stay what they were.

    Packages that blosc2 imports draw from the global generator. A training that saved its state would go on otherwise
    than one that loads it. Called before work is handed to threads, where it could not be undone safely.
    """
    if "blosc2" in sys.modules:
        return
    with _loading:
        if "blosc2" not in sys.modules:
            state = random.getstate()
            _blosc2()
            random.setstate(state)


def load_codecs_to_decode(codecs: Any) -> None:
    """Do as `load_codecs` if one of some numbers of codecs needs it."""
    if (codecs == SHUFFLE_ZSTD.number).any():
        load_codecs()


def load_codecs_to_encode(itemsizes: Any) -> None:
    """Do as `load_codecs` if elements of one of some sizes need it: those that are no words."""
    if not np.logical_or.reduce([itemsizes == width for width in WORDS]).all():
        load_codecs()


_loading = Lock()


def _blosc2() -> Any:
    import blosc2

    # Without this the interpreter's lock is held while a chunk is encoded, and threads gain nothing.
    blosc2.set_releasegil(True)
    return blosc2


SHUFFLE_ZSTD = _ShuffleZstd()
