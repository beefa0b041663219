"""Codec 4: byte planes of words, each Huffman-coded, compressed or kept as it is.

The low bytes of a mantissa are noise, which nothing makes smaller. The byte with the exponent has few values in no
order: a Huffman code is all it takes, and matches in it are chance. Zstandard does the coding. The measurements are in
``docs/design/codecs.md``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.codecs import Codec, Effort, PlaneCoding
from tensorcas_mlflow.errors import FormatError
from tests.reference.words import WORDS, join, planes_in, room_for_planes, split, stretches_of, words_in
from tests.reference.zstd import CONTEXTS, frame_into

_LEAST_GAIN = 0.985
"""A plane that shrinks to more than this share is kept as it is: decoding it would take as long as ten copies."""
_LEVELS = (1, 9)
"""Levels that `Effort.SMALL` tries besides the Huffman coder; other levels gain next to nothing."""
SAMPLE_WORDS = 4096
FEW_WORDS = 2 * SAMPLE_WORDS
"""For so many words or fewer, both codings are tried on all of them instead of on a sample."""


_NOISE = 166, 346
"""Bounds of 256 times the number of equal pairs in noise, less the square of the length, in lengths: four standard
deviations around the mean."""


class _Planes(Codec):
    number = 4
    name = "planes"

    def encode(self, raw: Buffer, itemsize: int, base: Buffer | None = None) -> Buffer:
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
        words, tail = words_in(np.frombuffer(raw, np.uint8), itemsize if itemsize in WORDS else 1)
        if codings is None and len(words) > FEW_WORDS:
            codings = codings_for(words)
        return b"".join([*encode_planes(split(words), codings, effort), tail])

    def encode_alike(self, raw: Buffer, itemsize: int, alike: Sequence[Alike]) -> bytes:
        """Encode a small chunk of words of 2, 4 or 8 bytes like the samples of its group, as the compiled core does.

        Args:
            raw: The chunk.
            itemsize: Size of its elements.
            alike: Each plane of the samples.
        """
        words, tail = words_in(np.frombuffer(raw, np.uint8), itemsize)
        planes = split(words)
        parts = [_encode_alike(plane, each) for plane, each in zip(planes, alike, strict=True)]
        return b"".join([struct.pack(f"<B{itemsize}I", itemsize, *map(len, parts)), *parts, tail])

    def decode_into(self, stored: Buffer, out: memoryview, base: Buffer | None = None) -> None:
        stored = memoryview(stored)
        width = stored[0] if len(stored) else 0
        if width not in WORDS:
            raise FormatError("a chunk of byte planes does not begin as one")
        words, tail = words_in(np.frombuffer(out, np.uint8), width)
        end = len(stored) - len(tail)
        join(decode_planes([stored[:end]], [len(words)], width), words)
        tail[:] = stored[end:]


def decode_planes(parts: Sequence[memoryview], lengths: Sequence[int], width: int) -> Any:
    """Decode the planes of several stretches of words, each into its place in the planes of all.

    Args:
        parts: For each stretch, the joined result of `encode_planes`.
        lengths: Words in each stretch.
        width: Size of the words.

    Returns:
        The planes, one behind the other; scratch memory.

    Raises:
        FormatError: The parts are not the planes of so many words of that size.
    """
    room = room_for_planes(sum(lengths), width)
    planes = planes_in(room, width)
    head = 1 + 4 * width
    at = 0
    for part, length in zip(parts, lengths, strict=True):
        if len(part) < head or part[0] != width:
            raise FormatError(f"byte planes do not begin as those of words of {width} bytes")
        sizes = struct.unpack_from(f"<{width}I", part, 1)
        if head + sum(sizes) != len(part) or max(sizes) > length:
            raise FormatError(f"byte planes do not have the sizes of {length} words")
        begin = head
        for plane, size in zip(planes, sizes, strict=True):
            frame, mine = part[begin : begin + size], plane[at : at + length].data
            begin += size
            if size == length:
                mine[:] = frame
            else:
                frame_into(frame, mine)
        at += length
    return room


def codings_for(words: Any) -> list[PlaneCoding]:
    """Choose the codings of words' planes, by trying both on some stretches.

    Args:
        words: A 1-d array of unsigned words.

    Returns:
        A coding for each plane, the least significant bytes first.
    """
    chosen = []
    for plane in split(stretches_of(words, SAMPLE_WORDS)):
        kept, entropy = _LEAST_GAIN * len(plane), len(CONTEXTS.entropy().compress(plane))
        if entropy >= kept:
            chosen.append(PlaneCoding.KEEP)
        else:
            match = len(CONTEXTS.level(1).compress(plane))
            chosen.append(PlaneCoding.MATCH if match < entropy else PlaneCoding.ENTROPY)
    return chosen


@dataclass(slots=True)
class Alike:
    """One plane of some sampled chunks. Chunks of the same group need no trials that the samples show to be useless."""

    is_kept: bool = True
    """True if no sample's plane became smaller."""
    least: float = 2
    most: float = 0
    """Shares of their sizes that frames without matches take, a tenth wider; none if matches made one smaller."""

    def note(self, plane: Any) -> None:
        """Try the codings of a sample's plane."""
        entropy = len(CONTEXTS.entropy().compress(plane))
        if entropy >= _LEAST_GAIN * len(plane):
            return
        self.is_kept = False
        share = entropy / len(plane)
        if len(CONTEXTS.level(1).compress(plane)) < entropy:
            self.least, self.most = 2, -1
        if self.most >= 0:
            self.least, self.most = min(self.least, share * 0.9), max(self.most, share * 1.1)


def note_sample(alike: Sequence[Alike], raw: Buffer, itemsize: int) -> None:
    """Note a sample's planes, each in its place."""
    words, _ = words_in(np.frombuffer(raw, np.uint8), itemsize)
    for mine, plane in zip(alike, split(words), strict=True):
        mine.note(plane)


def is_noise(plane: Any) -> bool:
    """Tell whether the bytes of a plane are as different as those of noise, which no coding makes smaller.

    Chance makes some pairs of bytes equal. Fewer pairs are equal in a ramp of indices, and more in bytes that repeat or
    have a code. Counting takes less time than a trial.
    """
    n = len(plane)
    counts = np.bincount(np.frombuffer(plane, np.uint8), minlength=256)
    least, most = _NOISE
    return least * n <= 256 * int(np.dot(counts, counts)) - n * n <= most * n


def encode_planes(planes: Sequence[Any], codings: Sequence[PlaneCoding] | None, effort: Effort) -> list[Buffer]:
    """Encode planes; with no codings given, try all on each plane.

    Returns:
        The header with their sizes, and then each plane; some may be the given planes themselves.
    """
    ways: Sequence[PlaneCoding | None] = codings or [None] * len(planes)
    parts = [_encode_plane(plane, coding, effort) for plane, coding in zip(planes, ways, strict=True)]
    width = len(parts)
    return [struct.pack(f"<B{width}I", width, *map(len, parts)), *parts]


def _encode_plane(plane: Any, coding: PlaneCoding | None, effort: Effort) -> Buffer:
    """Encode one plane in the given coding, or, for None, in the better of both."""
    if coding is PlaneCoding.KEEP:
        return plane
    if effort is Effort.SMALL:
        made = [CONTEXTS.entropy().compress(plane), *(CONTEXTS.level(level).compress(plane) for level in _LEVELS)]
        frame = min(made, key=len)
    elif coding is None:
        frame = CONTEXTS.entropy().compress(plane)
        if len(frame) < _LEAST_GAIN * len(plane):
            frame = min(frame, CONTEXTS.level(1).compress(plane), key=len)
    elif coding is PlaneCoding.ENTROPY:
        frame = CONTEXTS.entropy().compress(plane)
    else:
        frame = CONTEXTS.level(1).compress(plane)
    return frame if len(frame) < _LEAST_GAIN * len(plane) else plane


def _encode_alike(plane: Any, alike: Alike) -> Buffer:
    """Encode one plane like those of the samples, without the trials they show to be useless."""
    if alike.is_kept and is_noise(plane):
        return plane
    frame = CONTEXTS.entropy().compress(plane)
    if alike.least * len(plane) <= len(frame) <= alike.most * len(plane) and len(frame) < _LEAST_GAIN * len(plane):
        return frame
    return _encode_plane(plane, None, Effort.BALANCED)


PLANES = _Planes()
