"""The contract of a codec, and codec 0, which stores a chunk as it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.native import core

MOST_OVERHEAD_BYTES = 4096
"""A payload is at most this much longer than twice its chunk. A reader refuses a longer one and allocates nothing."""
_NO_MEMORY = 4
"""A status of the core; 0 is a good chunk."""


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

    def decode_into(self, stored: Buffer, out: memoryview, base: Buffer | None = None) -> None:
        """Decode a chunk into a buffer of exactly its size, at least one byte.

        Args:
            stored: A payload. It may be damaged or forged.
            out: Buffer for the chunk, which a failed call leaves untouched.
            base: As for `encode`.

        Raises:
            FormatError: The payload is malformed or decodes to another size, or the base is missing or of another
                size.
            MemoryError: This machine has too little memory.
        """
        status = core.decode_payload(self.number, stored, out, base if self.takes_base else None)
        if status == _NO_MEMORY:
            raise MemoryError(f"no memory to decode a chunk of {len(out)} bytes")
        if status:
            of = (
                ""
                if not self.takes_base
                else " without a base"
                if base is None
                else f" with a base of {len(base)} bytes"
            )
            raise FormatError(f"its {len(stored)} bytes do not decode by codec {self.name}{of} to {len(out)} bytes")


class _Raw(Codec):
    number = 0
    name = "raw"

    def encode(self, raw: Buffer, itemsize: int, base: Buffer | None = None) -> Buffer:
        return raw


RAW = _Raw()
