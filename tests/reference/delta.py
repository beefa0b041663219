"""Codec 3: differences from a base or a part of it, in order, in groups, after weight decay, or of the changed words.

*Weight decay*: AdamW and its like multiply every weight by a number just below 1 at every step, weights without a
gradient too. In an embedding these are all rows whose tokens did not occur. Each step rounds to whole units in the last
place, so such a weight loses the same few units again and again, and its mantissa determines how many.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np

from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.codecs import RAW, Codec, Effort, PlaneCoding, Transform
from tensorcas_mlflow.errors import FormatError
from tests.reference.nudged import decode_nudged, encode_nudged
from tests.reference.planes import (
    FEW_WORDS,
    PLANES,
    SAMPLE_WORDS,
    codings_for,
    decode_planes,
    encode_planes,
)
from tests.reference.words import (
    BLOCK_WORDS,
    MOST_CLASSES,
    SCRATCH,
    UNIT_WORDS,
    WORDS,
    Groups,
    add,
    join,
    split,
    stretches_of,
    subtract,
    thresholds_for,
    words_in,
)
from tests.reference.zstd import ZSTD

DECAYED_BYTES = 4
"""Word size for which decay can be found: coarser words round the loss away."""
_INNER = {codec.number: codec for codec in (RAW, ZSTD, PLANES)}

_DECAY_SAMPLE_WORDS = 4096
_LEAST_TIMES = 8
"""A difference that occurs less often in the sample counts as chance."""
_LEAST_SHARE = 0.15
"""Least share of the sampled words that must have such frequent differences."""
_MOST_UNITS = 1 << 20
_DECAY = struct.Struct("<IH")
_SPARSE = struct.Struct("<III")
_MOVED = struct.Struct("<2sI")
_MOVED_MARK = bytes([RAW.number, 5])
"""The first bytes of a delta that is one against a part of its base."""
_LEAST_SPARSE_WORDS = 2
"""Changed words are stored alone if at most one word in so many differs."""
_LONG_GAP = 255
"""A byte of a gap with this value says that the gap goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decay:
    """The loss of words by weight decay, as the format page defines it."""

    n_steps: int
    """Below 2^32."""
    rate: int
    """The 2^-32ths of a number that one step takes from it; below 2^16."""

    n_bytes = _DECAY.size
    """Size of the result of `pack`."""

    def pack(self) -> bytes:
        """Encode the decay for a payload."""
        return _DECAY.pack(self.n_steps, self.rate)

    @classmethod
    def unpack(cls, stored: memoryview) -> Decay:
        """Decode the decay of a payload; the reverse of `pack`."""
        n_steps, rate = _DECAY.unpack(stored)
        return cls(n_steps=n_steps, rate=rate)

    def apply(self, words: Any) -> Any:
        """Compute the decayed words.

        Args:
            words: Single precision numbers as unsigned words, 1-d.

        Returns:
            As many words; scratch memory.
        """
        out = SCRATCH.area("decayed", words.nbytes).view(words.dtype)
        for begin in range(0, len(words), BLOCK_WORDS):
            w, o = words[begin : begin + BLOCK_WORDS], out[begin : begin + BLOCK_WORDS]
            _mantissas(w, o)
            np.multiply(o, self.rate, out=o)
            np.add(o, 1 << 23, out=o)
            np.right_shift(o, 24, out=o)
            np.multiply(o, self.n_steps, out=o)
            np.subtract(w, o, out=o)
        return out


def fit_decay(words: Any, base: Any) -> Decay | None:
    """Find the decay that explains many differences of words from their base.

    Args:
        words: Unsigned words, 1-d; about 4,096 of them are sampled.
        base: As many of the same type.

    Returns:
        None if too few differences are frequent, or the words are not of single precision.
    """
    if words.itemsize != DECAYED_BYTES:
        return None
    sample = stretches_of(base, _DECAY_SAMPLE_WORDS)
    lost = (sample - stretches_of(words, _DECAY_SAMPLE_WORDS)).view("<i4")
    values, places, counts = np.unique(lost, return_inverse=True, return_counts=True)
    counts[(values <= 0) | (values > _MOST_UNITS)] = 0
    is_common = counts >= max(_LEAST_TIMES, counts.max(initial=0) // 8)
    if counts[is_common].sum() < max(1, _LEAST_SHARE * len(lost)):
        return None
    n_steps = int(np.gcd.reduce(values[is_common]))
    # A word that loses k units a step tells the rate to half a unit either way; all words together tell it well.
    explained = is_common[places]
    mantissas = np.array(sample[explained])
    _mantissas(mantissas, mantissas)
    k = lost[explained] / n_steps
    least, most = np.quantile((k - 0.5) / mantissas, 0.99), np.quantile((k + 0.5) / mantissas, 0.01)
    rate = (least + most) / 2 * 2**24
    # The factor is a single precision number too: 1 less a multiple of 2^-24.
    rounded = round(rate / 256) * 256
    rate = rounded if least * 2**24 <= rounded <= most * 2**24 else round(rate)
    return Decay(n_steps=n_steps, rate=rate) if 0 < rate < 1 << 16 else None


def _mantissas(words: Any, out: Any) -> None:
    """Compute the first 16 bits of the mantissas, the implicit bit included."""
    np.right_shift(words, 8, out=out)
    np.bitwise_and(out, 0x7FFF, out=out)
    np.bitwise_or(out, 0x8000, out=out)


class _Delta(Codec):
    number = 3
    name = "delta"
    takes_base = True

    def encode(self, raw: Buffer, itemsize: int, base: Buffer | None = None) -> Buffer:
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
            unit: Words per unit of a grouping; None for `UNIT_WORDS`, which is fast, and 1 for the smallest result.

        Raises:
            ValueError: The base is missing or of another size.
        """
        data: Any = np.frombuffer(raw, np.uint8)
        if base is None or memoryview(base).nbytes != len(data):
            raise ValueError("a delta is encoded against a base of the chunk's size")
        width = itemsize if itemsize in WORDS else 1
        unit = unit or UNIT_WORDS[width] if transform is Transform.GROUPED else 1
        if transform in (Transform.SPARSE, Transform.NUDGED):
            of_base = np.frombuffer(base, np.uint8)
            few = encode_nudged(data, of_base, width) if transform is Transform.NUDGED else None
            if few is not None:
                return bytes([RAW.number, Transform.NUDGED | _log2(width) << 4]) + few
            few = _encode_sparse(data, of_base, width, effort)
            if few is not None:
                return bytes([PLANES.number, Transform.SPARSE | _log2(width) << 4]) + few
            transform, unit = Transform.GROUPED, UNIT_WORDS[width]
        words, tail = words_in(data, width, unit)
        base_words, _ = words_in(np.frombuffer(base, np.uint8), width, unit)
        decay = fit_decay(words, base_words) if transform is Transform.DECAYED else None
        if transform is Transform.DECAYED and decay is None:
            transform = Transform.PLAIN
        head = bytes([PLANES.number, transform | _log2(width) << 4])
        if transform is Transform.GROUPED:
            codings = codings or _codings(words, base_words)
            return b"".join([head, *_encode_groups(words, base_words, unit, codings, effort), tail])
        if decay is not None:
            head += decay.pack()
            base_words, codings = decay.apply(base_words), None
        if codings is None and len(words) > FEW_WORDS:
            codings = _codings(words, base_words)
        return b"".join([head, *encode_planes(split(words, base_words), codings, effort), tail])

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

    def decode_into(self, stored: Buffer, out: memoryview, base: Buffer | None = None) -> None:
        stored = memoryview(stored)
        if base is not None and len(stored) >= _MOVED.size and stored[:2] == _MOVED_MARK:
            _, offset = _MOVED.unpack_from(stored)
            base, stored = memoryview(base)[offset : offset + len(out)], stored[_MOVED.size :]
        if base is None or memoryview(base).nbytes != len(out):
            raise FormatError("a delta does not have a base of its size")
        if len(stored) < 2 or stored[0] not in _INNER or stored[1] & 15 > max(Transform) or stored[1] >> 4 > 3:
            raise FormatError("a delta is encoded in a way that this release does not know")
        inner, transform, width = _INNER[stored[0]], Transform(stored[1] & 15), 1 << (stored[1] >> 4)
        if transform is Transform.GROUPED:
            _decode_groups(inner, stored[2:], width, out, base)
            return
        if transform is Transform.SPARSE:
            _decode_sparse(inner, stored[2:], width, out, base)
            return
        if transform is Transform.NUDGED:
            if inner is not RAW:
                raise FormatError("a nudged delta has no inner codec")
            decode_nudged(stored[2:], width, out, base)
            return
        words, tail = words_in(np.frombuffer(out, np.uint8), width)
        base_words, _ = words_in(np.frombuffer(base, np.uint8), width)
        begin = 2
        if transform is Transform.DECAYED:
            begin += Decay.n_bytes
            if width != DECAYED_BYTES or len(stored) < begin:
                raise FormatError("a delta does not state how its words decayed")
            base_words = Decay.unpack(stored[2:begin]).apply(base_words)
        if inner is PLANES and stored[begin : begin + 1] == bytes([width]):
            end = len(stored) - len(tail)
            join(decode_planes([stored[begin:end]], [len(words)], width), words, base_words)
            tail[:] = stored[end:]
        else:
            inner.decode_into(stored[begin:], out)
            add(words, base_words)


def _encode_groups(
    words: Any, base: Any, unit: int, codings: Sequence[PlaneCoding], effort: Effort
) -> Iterator[Buffer]:
    """Yield the parts of a grouped delta between its first two bytes and its tail."""
    thresholds = thresholds_for(base) if len(words) else []
    groups = Groups(base, thresholds, unit)
    planes = split(words, base, groups)
    ends = accumulate(groups.lengths)
    parts = [
        encode_planes([plane[end - length : end] for plane in planes], codings, effort)
        for length, end in zip(groups.lengths, ends, strict=True)
    ]
    yield bytes([len(parts) | _log2(unit) << 4, *thresholds])
    yield struct.pack(f"<{len(parts)}I", *(sum(map(len, part)) for part in parts))
    yield from chain.from_iterable(parts)


def _decode_groups(inner: Codec, stored: memoryview, width: int, out: memoryview, base: Buffer) -> None:
    n_groups, unit = (stored[0] & 15, 1 << (stored[0] >> 4)) if len(stored) else (0, 1)
    begin = n_groups + 4 * n_groups
    if n_groups == 0 or len(stored) < begin or unit * width > max(WORDS) or n_groups**unit > MOST_CLASSES:
        raise FormatError("a delta does not state its groups")
    thresholds = stored[1:n_groups].tolist()
    if sorted(set(thresholds)) != thresholds:
        raise FormatError("a delta's groups are not in order")
    lengths = struct.unpack_from(f"<{n_groups}I", stored, n_groups)
    words, tail = words_in(np.frombuffer(out, np.uint8), width, unit)
    base_words, _ = words_in(np.frombuffer(base, np.uint8), width, unit)
    if begin + sum(lengths) + len(tail) != len(stored):
        raise FormatError(f"a delta does not have the size of a chunk of {len(out)} bytes")
    groups = Groups(base_words, thresholds, unit)
    ends = accumulate(lengths, initial=begin)
    parts = [stored[end : end + length] for length, end in zip(lengths, ends, strict=False)]
    if inner is PLANES and all(part[:1] == bytes([width]) for part in parts):
        join(decode_planes(parts, groups.lengths, width), words, base_words, groups)
    else:
        grouped = groups.area(words.dtype)
        areas = groups.split(grouped)
        for part, area in zip(parts, areas, strict=True):
            inner.decode_into(part, area.view(np.uint8).data)
        groups.join(areas, words)
        add(words, base_words)
    tail[:] = stored[len(stored) - len(tail) :]


def _encode_sparse(data: Any, base: Any, width: int, effort: Effort) -> bytes | None:
    """Return a sparse delta from behind its first two bytes on.

    None if many words differ, or if they and their places could take more than the chunk.
    """
    words, tail = words_in(data, width)
    base_words, _ = words_in(base, width)
    places = np.flatnonzero(words != base_words)
    if len(places) > len(words) // _LEAST_SPARSE_WORDS:
        return None
    differences = np.empty(len(places), words.dtype)
    subtract(words[places], base_words[places], differences)
    gaps = np.diff(places, prepend=-1) - 1
    ends = np.cumsum(gaps // _LONG_GAP + 1)
    in_bytes = np.full(ends[-1] if len(ends) else 0, _LONG_GAP, np.uint8)
    in_bytes[ends - 1] = gaps % _LONG_GAP
    if len(in_bytes) + differences.nbytes > words.nbytes:
        return None
    of_gaps = PLANES.encode_as(in_bytes.data, 1, None, effort)
    of_words = PLANES.encode_as(differences.view(np.uint8).data, width, None, effort)
    return b"".join([_SPARSE.pack(len(places), len(in_bytes), len(of_gaps)), of_gaps, of_words, tail])


def _decode_sparse(inner: Codec, stored: memoryview, width: int, out: memoryview, base: Buffer) -> None:
    begin = _SPARSE.size
    if len(stored) < begin:
        raise FormatError("a sparse delta does not state its sizes")
    n_stored, n_gap_bytes, n_of_gaps = _SPARSE.unpack_from(stored)
    words, tail = words_in(np.frombuffer(out, np.uint8), width)
    base_words, _ = words_in(np.frombuffer(base, np.uint8), width)
    middle, end = begin + n_of_gaps, len(stored) - len(tail)
    if n_stored > len(words) or n_gap_bytes > len(out) or middle > end:
        raise FormatError(f"a sparse delta does not have the sizes of a chunk of {len(out)} bytes")
    gaps, differences = np.empty(n_gap_bytes, np.uint8), np.empty(n_stored, words.dtype)
    inner.decode_into(stored[begin:middle], gaps.data)
    inner.decode_into(stored[middle:end], differences.view(np.uint8).data)
    is_end = gaps != _LONG_GAP
    places = np.cumsum(gaps, dtype=np.int64)[is_end] + np.arange(np.count_nonzero(is_end))
    if len(places) != n_stored or not is_end[-1:].all() or (places[-1:] >= len(words)).any():
        raise FormatError("a sparse delta does not place its words in the chunk")
    words[:] = base_words
    add(differences, base_words[places])
    words[places] = differences
    tail[:] = stored[end:]


def _codings(words: Any, base: Any) -> list[PlaneCoding]:
    """Choose the codings of the differences' planes from a sample."""
    words, base = (stretches_of(each, SAMPLE_WORDS) for each in (words, base))
    differences = np.empty_like(words)
    subtract(words, base, differences)
    return codings_for(differences)


def _log2(number: int) -> int:
    return number.bit_length() - 1


DELTA = _Delta()
