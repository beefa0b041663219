"""What every codec is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

Buffer = Any
"""Anything with contiguous bytes: bytes, memoryview, a 1-d uint8 array."""

MOST_OVERHEAD_BYTES = 4096
"""No payload is longer than twice its chunk and this; what an entry says beyond it is damage, and costs no memory."""


class Codec(ABC):
    """A reversible encoding of chunks. Stateless and safe to call from any thread."""

    number: ClassVar[int]
    name: ClassVar[str]
    takes_base: ClassVar[bool] = False
    """Whether a chunk is encoded as what differs from a base, another chunk of its size."""

    @abstractmethod
    def encode(self, raw: Buffer, typesize: int, base: Buffer | None = None) -> Buffer:
        """Encode a chunk.

        Args:
            raw: The chunk.
            typesize: Size of the elements it consists of, 1 to 255; a hint for the encoding, stored beside it.
            base: For a codec that takes one, the decoded base, as long as the chunk. Others do not look at it.
        """

    @abstractmethod
    def decode_into(self, stored: Buffer, out: memoryview, base: Buffer | None = None) -> None:
        """Decode a chunk into a buffer of exactly its size.

        Args:
            stored: What `encode` returned, or what damage or an enemy made of it.
            out: Where the chunk goes; what was in it before is gone whether or not this succeeds.
            base: As `encode` was given it.

        Raises:
            FormatError: The bytes are not this codec's, or decode to another size, or the base is missing or of
                another size.
        """
