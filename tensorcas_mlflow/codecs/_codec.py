"""The contract of a codec, codec 0, which stores a chunk as it is, and the compiled encoder of all others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import ModuleType
from typing import ClassVar

from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.native import core, has_zstd

_ENCODER: ModuleType | None = core if has_zstd else None


def compiled_encoder() -> ModuleType | None:
    """Return the functions of the compiled core that encode chunks; None if the core lacks them.

    They make the decisions of the Python code in this room, and payloads of the same format. Zstandard may be of
    another release there, so the bytes may differ.
    """
    return _ENCODER


MOST_OVERHEAD_BYTES = 4096
"""A payload is at most this much longer than twice its chunk. A reader refuses a longer one and allocates nothing."""


class Codec(ABC):
    """A reversible encoding of chunks. Stateless; safe to call from any thread."""

    number: ClassVar[int]
    name: ClassVar[str]
    takes_base: ClassVar[bool] = False
    """True if the codec encodes a chunk as its difference from a base, which is another chunk of the same size."""

    def __reduce__(self) -> str:
        """Send it to another process by the name of its variable: there is one object of each codec."""
        return self.name.replace("-", "_").upper()

    @abstractmethod
    def encode(self, raw: Buffer, itemsize: int, base: Buffer | None = None) -> Buffer:
        """Encode a chunk.

        Args:
            raw: The chunk.
            itemsize: Size of its elements in bytes, at least 1. A wrong size costs room and nothing else.
            base: The decoded base, as long as the chunk. Codecs that take no base ignore it.
        """

    @abstractmethod
    def decode_into(self, stored: Buffer, out: memoryview, base: Buffer | None = None) -> None:
        """Decode a chunk into a buffer of exactly its size.

        Args:
            stored: A payload. It may be damaged or forged.
            out: Buffer for the chunk. A failed call may leave any bytes in it.
            base: As for `encode`.

        Raises:
            FormatError: The payload is malformed or decodes to another size, or the base is missing or of another
                size.
        """


class _Raw(Codec):
    number = 0
    name = "raw"

    def encode(self, raw: Buffer, itemsize: int, base: Buffer | None = None) -> Buffer:
        return raw

    def decode_into(self, stored: Buffer, out: memoryview, base: Buffer | None = None) -> None:
        if len(stored) != len(out):
            raise FormatError(f"a raw chunk of {len(out)} bytes is stored in {len(stored)}")
        out[:] = stored


RAW = _Raw()
