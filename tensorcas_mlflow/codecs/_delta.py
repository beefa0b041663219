"""Codec 3: differences from a base or a part of it, in order, in groups, after weight decay, or of the changed words.

*Groups*: a training step changes more digits of small numbers than of large ones. Differences of numbers of like
magnitude are alike in size, so each group gets shorter Huffman codes of its own. The decoder has the base and computes
the groups from it, so the order costs no room. Words move in *units* of neighbours, sorted by the groups of all their
words. The words in one place of like units belong to one group and stand together. Units take a half or a quarter of
the sorting and lose nothing of the grouping.

*Weight decay*: AdamW and its like multiply every weight by a number just below 1 at every step, weights without a
gradient too. In an embedding these are all rows whose tokens did not occur. Each step rounds to whole units in the last
place, so such a weight loses the same few units again and again, and its mantissa determines how many.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.codecs._codec import RAW, Codec
from tensorcas_mlflow.codecs._planes import Effort, PlaneCoding
from tensorcas_mlflow.codecs._words import WORDS
from tensorcas_mlflow.native import core

_UNIT_WORDS = {1: 4, 2: 4, 4: 2, 8: 1}
"""Words per unit, by word size."""
_MOVED = struct.Struct("<2sI")
_MOVED_MARK = bytes([RAW.number, 5])
"""The first bytes of a delta that is one against a part of its base."""
_LEAST_SPARSE_WORDS = 2
"""Changed words are stored alone if at most one word in so many differs."""


class Transform(IntEnum):
    """Kind and order of the differences; numbers on disk."""

    PLAIN = 0
    """In the order of the words."""
    GROUPED = 1
    """Grouped by the magnitude of the base; for floating point numbers."""
    DECAYED = 2
    """Differences from the base after weight decay, in the order of the words; for single precision."""
    SPARSE = 3
    """Places and differences of the changed words alone; for steps that change few."""
    NUDGED = 4
    """As `SPARSE`, in bits of fixed fields; for steps that change few words, and most of them by one unit."""


def is_sparse(raw: Buffer, width: int, base: Buffer, one_in: int = _LEAST_SPARSE_WORDS) -> bool:
    """Tell whether at most one word in so many of a chunk differs from its base.

    By default whether `Transform.SPARSE` applies.
    """
    words, base_words = (np.frombuffer(data, WORDS[width], len(data) // width) for data in (raw, base))
    return bool(np.count_nonzero(words != base_words) <= len(words) // one_in)


class _Delta(Codec):
    number = 3
    name = "delta"
    takes_base = True

    def encode(self, raw: Buffer, itemsize: int, base: Buffer | None = None) -> bytes:
        return self.encode_as(raw, itemsize, base, Transform.GROUPED)

    def encode_as(
        self,
        raw: Buffer,
        itemsize: int,
        base: Buffer | None,
        transform: Transform,
        effort: Effort = Effort.BALANCED,
        codings: Sequence[PlaneCoding] | None = None,
        unit: int | None = None,
    ) -> bytes:
        """Encode a chunk with a transform that was chosen for its tensor.

        Args:
            raw: The chunk.
            itemsize: Size of the words; other sizes than 1, 2, 4 and 8 count as 1.
            base: As long as the chunk.
            transform: Kind and order of the differences. A chunk that shows no decay gets `Transform.PLAIN` in place of
                `Transform.DECAYED`. One with many changed words gets `Transform.SPARSE` in place of `Transform.NUDGED`,
                and one with still more `Transform.GROUPED` in place of both.
            effort: Time to spend.
            codings: Codings of the planes of the differences, the least significant bytes first; None to choose them
                here. `Transform.DECAYED` and `Transform.SPARSE` always choose them here; `Transform.NUDGED` has none.
            unit: Words per unit of a grouping; None for a fast one, and 1 for the smallest result.

        Raises:
            ValueError: The base is missing or of another size.
        """
        if base is None or memoryview(base).nbytes != memoryview(raw).nbytes:
            raise ValueError("a delta is encoded against a base of the chunk's size")
        width = itemsize if itemsize in WORDS else 1
        unit = unit or _UNIT_WORDS[width] if transform is Transform.GROUPED else 1
        payload: bytes = core.encode_delta(raw, width, base, transform, unit, codings and bytes(codings), effort)
        return payload

    def encode_moved(self, raw: Buffer, itemsize: int, base: Buffer, offset: int) -> bytes:
        """Encode a chunk against a part of its base.

        Args:
            raw: The chunk.
            itemsize: See `encode_as`.
            base: The base.
            offset: Place in it of the chunk's bytes, or of most of them.

        Raises:
            ValueError: The base ends before the chunk does.
        """
        n_bytes = memoryview(raw).nbytes
        delta = self.encode_as(raw, itemsize, memoryview(base)[offset : offset + n_bytes], Transform.SPARSE)
        return _MOVED.pack(_MOVED_MARK, offset) + delta


DELTA = _Delta()
