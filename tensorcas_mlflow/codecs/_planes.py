"""Codec 4: byte planes of words, each Huffman-coded, compressed or kept as it is.

The low bytes of a mantissa are noise, which nothing makes smaller. The byte with the exponent has few values in no
order: a Huffman code is all it takes, and matches in it are chance. Zstandard does the coding. The measurements are in
``docs/design/codecs.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.codecs._codec import Codec
from tensorcas_mlflow.native import core


class PlaneCoding(IntEnum):
    """Encoding of one plane; the core knows the numbers."""

    KEEP = 0
    """None: the bytes as they are."""
    ENTROPY = 1
    """Huffman codes, and matches only where they are long."""
    MATCH = 2
    """An ordinary level of Zstandard, for zeros, indices and whatever else repeats."""


class Effort(IntEnum):
    """Time to spend on a smaller encoding.

    The numbers are on disk, in the entries of optimized chunks; a save writes 0.
    """

    BALANCED = 1
    SMALL = 2
    """Try every coding, slow ones too; for chunks that are encoded once and kept."""


class _Planes(Codec):
    number = 4
    name = "planes"

    def encode(self, raw: Buffer, itemsize: int, base: Buffer | None = None) -> bytes:
        return self.encode_as(raw, itemsize, None)

    def encode_as(
        self, raw: Buffer, itemsize: int, codings: Sequence[PlaneCoding] | None, effort: Effort = Effort.BALANCED
    ) -> bytes:
        """Encode a chunk with codings that were chosen for its tensor.

        Args:
            raw: The chunk.
            itemsize: Size of its elements; other sizes than 1, 2, 4 and 8 count as 1.
            codings: Coding of each plane, the least significant bytes first; None to choose them here.
            effort: Time to spend.
        """
        payload: bytes = core.encode_planes(raw, itemsize, codings and bytes(codings), effort)
        return payload


PLANES = _Planes()
