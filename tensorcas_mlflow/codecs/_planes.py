"""Codec 4: the bytes of equal significance together, each such plane by itself through a Huffman coder, or as it is.

In floating point numbers the low bytes of the mantissa are noise, which nothing makes smaller, and the byte with the
exponent has few values in no order: a Huffman code is all it takes, and matches are chance. The codings are
Zstandard's; ``docs/design/codecs.md`` has the measurements.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np

from tensorcas_mlflow.codecs._codec import Buffer, Codec
from tensorcas_mlflow.codecs._sizes import WORDS
from tensorcas_mlflow.codecs._words import join, planes_in, room_for_planes, split
from tensorcas_mlflow.codecs._zstd import CONTEXTS, frames_into
from tensorcas_mlflow.errors import FormatError

_LEAST_GAIN = 0.985
"""A plane that shrinks to more than this share is left as it is: decoding it costs ten copies."""
_LEVELS = (1, 9)
"""What is tried besides where more effort is wanted; between these two, and above, there is next to nothing to gain."""
SAMPLE_WORDS = 4096
FEW_WORDS = 2 * SAMPLE_WORDS
"""Of so many there is no sample: both ways are tried on all of them."""
_N_SAMPLES = 4


class PlaneCoding(Enum):
    """How one plane is stored."""

    KEEP = "keep"
    """As it is."""
    ENTROPY = "entropy"
    """By Huffman codes; only long repetitions are looked for."""
    MATCH = "match"
    """By an ordinary level of Zstandard: for zeros, indices, and whatever else repeats."""


class Effort(Enum):
    """How long to look for a smaller encoding."""

    BALANCED = "balanced"
    SMALL = "small"
    """Every way is tried, and slow ones too: for what is encoded once and kept."""


class _Planes(Codec):
    number = 4
    name = "planes"

    def encode(self, raw: Buffer, typesize: int, base: Buffer | None = None) -> Buffer:
        return self.encode_as(raw, typesize, None)

    def encode_as(
        self, raw: Buffer, typesize: int, codings: Sequence[PlaneCoding] | None, effort: Effort = Effort.BALANCED
    ) -> bytes:
        """Encode a chunk whose planes have been looked at.

        Args:
            raw: The chunk.
            typesize: Size of its elements; for other sizes than 1, 2, 4 and 8 it is taken as 1.
            codings: Of each plane, the least significant bytes first; None to find out.
            effort: What to spend.
        """
        return b"".join(self.encode_in_parts(raw, typesize, codings, effort))

    @staticmethod
    def encode_in_parts(
        raw: Buffer, typesize: int, codings: Sequence[PlaneCoding] | None, effort: Effort
    ) -> list[Buffer]:
        """Encode a chunk: what `encode_as` returns, in parts, which may be this thread's scratch memory."""
        width = typesize if typesize in WORDS else 1
        data: Any = np.frombuffer(raw, np.uint8)
        n_words = len(data) // width
        words = data[: n_words * width].view(WORDS[width])
        if codings is None and n_words > FEW_WORDS:
            codings = codings_for(words)
        return [*encode_planes(split(words), codings, effort), data[n_words * width :]]

    def decode_into(self, stored: Buffer, out: memoryview, base: Buffer | None = None) -> None:
        stored = memoryview(stored)
        width = stored[0] if len(stored) else 0
        if width not in WORDS:
            raise FormatError("a chunk of byte planes does not begin as one")
        n_words = len(out) // width
        tail = len(stored) - len(out) % width
        join(
            decode_planes([stored[:tail]], [n_words], width),
            np.frombuffer(out, np.uint8)[: n_words * width].view(WORDS[width]),
        )
        out[n_words * width :] = stored[tail:]


def decode_planes(parts: Sequence[memoryview], lengths: Sequence[int], width: int) -> Any:
    """Decode the planes of several stretches of words, each into its place in the planes of all.

    Args:
        parts: What `encode_planes` returned for each, joined.
        lengths: How many words each has.
        width: Size of the words.

    Returns:
        The planes, one behind the other; this thread's scratch memory.

    Raises:
        FormatError: They are not the planes of so many words of that size.
    """
    room = room_for_planes(sum(lengths), width)
    planes = planes_in(room, width)
    head = 1 + 4 * width
    frames: list[Buffer] = []
    outs: list[memoryview] = []
    at = 0
    for part, length in zip(parts, lengths, strict=True):
        if len(part) < head or part[0] != width:
            raise FormatError(f"byte planes do not begin as those of words of {width} bytes")
        sizes = struct.unpack_from(f"<{width}I", part, 1)
        if head + sum(sizes) != len(part) or max(sizes) > length:
            raise FormatError(f"byte planes are not as long as {length} words say")
        begin = head
        for plane, size in zip(planes, sizes, strict=True):
            frame, mine = part[begin : begin + size], plane[at : at + length].data
            begin += size
            if size == length:
                mine[:] = frame
            else:
                frames.append(frame)
                outs.append(mine)
        at += length
    frames_into(frames, outs)
    return room


def codings_for(words: Any) -> list[PlaneCoding]:
    """Choose how to encode the planes of words, by trying both ways on some stretches of them.

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


def stretches_of(words: Any, n_words: int) -> Any:
    """Take about so many words out of more, in four stretches: of equally long arrays the same places."""
    if len(words) <= 2 * n_words:
        return words
    length = n_words // _N_SAMPLES
    starts = np.linspace(0, len(words) - length, _N_SAMPLES, dtype=np.int64)
    return np.concatenate([words[start : start + length] for start in starts.tolist()])


def encode_planes(planes: Sequence[Any], codings: Sequence[PlaneCoding] | None, effort: Effort) -> list[Buffer]:
    """Encode planes, of None by trying all ways on each.

    Returns:
        What says their sizes, and then each; some may be the planes themselves.
    """
    ways: Sequence[PlaneCoding | None] = codings or [None] * len(planes)
    parts = [_encode_plane(plane, coding, effort) for plane, coding in zip(planes, ways, strict=True)]
    width = len(parts)
    return [struct.pack(f"<B{width}I", width, *map(len, parts)), *parts]


def _encode_plane(plane: Any, coding: PlaneCoding | None, effort: Effort) -> Buffer:
    """Encode one plane in the way that was chosen, or, of None, in the better of both."""
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


PLANES = _Planes()
