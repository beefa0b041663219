"""Codec 4: the bytes of equal significance together, each such plane by itself through a Huffman coder, or as it is.

In floating point numbers the low bytes of the mantissa are noise, which nothing makes smaller, and the byte with the
exponent has few values in no order: a Huffman code is all it takes, and matches are chance. The codings are
Zstandard's; ``docs/design/codecs.md`` has the measurements.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import accumulate
from typing import Any

import numpy as np

from tensorcas_mlflow.codecs._codec import Buffer, Codec
from tensorcas_mlflow.codecs._scratch import SCRATCH
from tensorcas_mlflow.codecs._zstd import CONTEXTS, frame_into
from tensorcas_mlflow.errors import FormatError

WORDS: Mapping[int, Any] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
"""Unsigned words by size in bytes."""
WORD_BYTES = frozenset(WORDS)
"""Sizes of elements that are taken apart, and subtracted, as words."""
BLOCK_WORDS = 1 << 16
"""Kernels go over so many words at a time, which stay in the processor's cache from one step to the next."""
_LEAST_GAIN = 0.985
"""A plane that shrinks to more than this share is left as it is: decoding it costs ten copies."""
_LEVELS = (1, 9)
"""What is tried besides where more effort is wanted; between these two, and above, there is next to nothing to gain."""
_SAMPLE_WORDS = 4096
_FEW_WORDS = 2 * _SAMPLE_WORDS
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
        if codings is None and n_words > _FEW_WORDS:
            codings = codings_for(words)
        return [*_encode_planes(_split(words), codings, effort), data[n_words * width :]]

    @staticmethod
    def encode_all_in_parts(
        words: Any, lengths: Sequence[int], codings: Sequence[PlaneCoding], effort: Effort
    ) -> list[list[Buffer]]:
        """Encode several chunks without tails; the reverse of `decode_all_into`.

        Args:
            words: Unsigned words, 1-d, of all chunks, one behind the other.
            lengths: How many words each has.
            codings: As of `encode_as`.
            effort: What to spend.

        Returns:
            The parts of each, as of `encode_in_parts`.
        """
        planes = _split(words)
        ends = accumulate(lengths)
        each = ([plane[end - length : end] for plane in planes] for length, end in zip(lengths, ends, strict=True))
        return [_encode_planes(mine, codings, effort) for mine in each]

    def decode_into(self, stored: Buffer, out: memoryview, base: Buffer | None = None) -> None:
        width, frames, tail = _parsed(memoryview(stored), len(out))
        n_words = len(out) // width
        area = SCRATCH.area("planes", n_words * width)
        planes = []
        for place, frame in enumerate(frames):
            if len(frame) == n_words:
                planes.append(np.frombuffer(frame, np.uint8))
            else:
                plane = area[place * n_words : (place + 1) * n_words]
                frame_into(frame, plane.data)
                planes.append(plane)
        _join(planes, np.frombuffer(out, np.uint8)[: n_words * width].view(WORDS[width]))
        out[n_words * width :] = tail

    @staticmethod
    def decode_all_into(parts: Sequence[memoryview], lengths: Sequence[int], words: Any) -> None:
        """Decode several chunks without tails, of words of one size, one behind the other: planes are joined at once.

        Args:
            parts: What `encode` returned for each.
            lengths: How many words each has.
            words: Unsigned words, 1-d, as many as the chunks have together.

        Raises:
            FormatError: As of `decode_into`, or they are of words of another size.
        """
        n_words, width, begin = len(words), words.itemsize, 0
        area = SCRATCH.area("planes", n_words * width)
        planes = [area[place * n_words : (place + 1) * n_words] for place in range(width)]
        for part, length in zip(parts, lengths, strict=True):
            said, frames, _ = _parsed(part, length * width)
            if said != width:
                raise FormatError(f"byte planes are of words of {said} bytes, not {width}")
            for frame, plane in zip(frames, planes, strict=True):
                mine = plane[begin : begin + length]
                if len(frame) == length:
                    mine[:] = np.frombuffer(frame, np.uint8)
                else:
                    frame_into(frame, mine.data)
            begin += length
        _join(planes, words)


def _parsed(stored: memoryview, n_bytes: int) -> tuple[int, list[memoryview], memoryview]:
    """Take apart what stands for a chunk: the size of its words, its planes as stored, and its tail."""
    width = stored[0] if len(stored) else 0
    begin = 1 + 4 * width
    if width not in WORDS or len(stored) < begin:
        raise FormatError("a chunk of byte planes does not begin as one")
    sizes = struct.unpack_from(f"<{width}I", stored, 1)
    n_words, n_tail = divmod(n_bytes, width)
    if begin + sum(sizes) + n_tail != len(stored):
        raise FormatError(f"byte planes are not as long as a chunk of {n_bytes} bytes says")
    if max(sizes) > n_words:
        raise FormatError("a byte plane is stored in more bytes than it has")
    frames = []
    for size in sizes:
        frames.append(stored[begin : begin + size])
        begin += size
    return width, frames, stored[begin:]


def codings_for(words: Any) -> list[PlaneCoding]:
    """Choose how to encode the planes of words, by trying both ways on some stretches of them.

    Args:
        words: A 1-d array of unsigned words.

    Returns:
        A coding for each plane, the least significant bytes first.
    """
    chosen = []
    for plane in _split(stretches_of(words, _SAMPLE_WORDS)):
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


def _encode_planes(planes: Sequence[Any], codings: Sequence[PlaneCoding] | None, effort: Effort) -> list[Buffer]:
    """Encode planes, of None by trying all ways on each, and put before them what says their sizes."""
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


def _split(words: Any) -> list[Any]:
    """Take words apart into planes, the least significant bytes first; they are this thread's scratch memory."""
    n_words, width = len(words), words.itemsize
    if width == 1:
        return [words]
    area = SCRATCH.area("planes", n_words * width)
    planes = [area[place * n_words : (place + 1) * n_words] for place in range(width)]
    shifted = SCRATCH.area("words", BLOCK_WORDS * width).view(words.dtype)
    for begin in range(0, n_words, BLOCK_WORDS):
        block = words[begin : begin + BLOCK_WORDS]
        part = shifted[: len(block)]
        for place, plane in enumerate(planes):
            # A cast to a narrower type keeps the low byte, and is several times as fast as a copy with strides.
            np.copyto(plane[begin : begin + len(block)], np.right_shift(block, 8 * place, out=part), casting="unsafe")
    return planes


def _join(planes: Sequence[Any], words: Any) -> None:
    """Put words together from planes."""
    # Differences are small: their top planes are often nothing but zeros.
    while len(planes) > 1 and not planes[-1].any():
        planes = planes[:-1]
    for begin in range(0, len(words), BLOCK_WORDS):
        block = words[begin : begin + BLOCK_WORDS]
        end = begin + len(block)
        np.copyto(block, planes[-1][begin:end])
        for plane in planes[-2::-1]:
            np.left_shift(block, 8, out=block)
            np.bitwise_or(block, plane[begin:end], out=block)


PLANES = _Planes()
