"""Codec 3: what differs from a base."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import accumulate, chain
from typing import Any

import numpy as np

from tensorcas_mlflow.codecs._codec import Buffer, Codec
from tensorcas_mlflow.codecs._decay import DECAYED_BYTES, Decay, fit_decay
from tensorcas_mlflow.codecs._groups import MOST_CLASSES, UNIT_WORDS, Groups, thresholds_for
from tensorcas_mlflow.codecs._planes import (
    FEW_WORDS,
    PLANES,
    SAMPLE_WORDS,
    Effort,
    PlaneCoding,
    codings_for,
    decode_planes,
    encode_planes,
    stretches_of,
)
from tensorcas_mlflow.codecs._raw import RAW
from tensorcas_mlflow.codecs._scratch import SCRATCH
from tensorcas_mlflow.codecs._shuffle import SHUFFLE_ZSTD
from tensorcas_mlflow.codecs._sizes import WORDS
from tensorcas_mlflow.codecs._words import add, join, split, subtract
from tensorcas_mlflow.codecs._zstd import ZSTD
from tensorcas_mlflow.errors import FormatError

_INNER = {codec.number: codec for codec in (RAW, ZSTD, SHUFFLE_ZSTD, PLANES)}


class Transform(IntEnum):
    """Of what differences are taken, and in what order they are encoded; numbers on disk."""

    PLAIN = 0
    """In the order of the words."""
    GROUPED = 1
    """Those of words with bases of like magnitude are encoded together: for floating point numbers."""
    DECAYED = 2
    """To what weight decay alone makes of the base, in the order of the words: for single precision."""


class _Delta(Codec):
    number = 3
    name = "delta"
    takes_base = True

    def encode(self, raw: Buffer, typesize: int, base: Buffer | None = None) -> Buffer:
        return self.encode_as(raw, typesize, base, Transform.GROUPED)

    def encode_as(
        self,
        raw: Buffer,
        typesize: int,
        base: Buffer | None,
        transform: Transform,
        effort: Effort = Effort.BALANCED,
        codings: Sequence[PlaneCoding] | None = None,
        unit: int | None = None,
    ) -> bytes:
        """Encode a chunk in a way that was chosen for its tensor.

        Args:
            raw: The chunk.
            typesize: Size of the words; for other sizes than 1, 2, 4 and 8 it is taken as 1.
            base: As long as the chunk.
            transform: Of what differences are taken, and in what order they are encoded. For what does not look as if
                it had decayed `Transform.PLAIN` takes the place of `Transform.DECAYED`.
            effort: What to spend.
            codings: How to encode the planes of the differences, the least significant bytes first; None to find out,
                which is done for decayed words in any case.
            unit: How many words are put in groups together: 1, or what `UNIT_WORDS` says, which is faster and None.

        Raises:
            ValueError: The base is missing or of another size.
        """
        data: Any = np.frombuffer(raw, np.uint8)
        if base is None or memoryview(base).nbytes != len(data):
            raise ValueError("a delta is encoded against a base of the chunk's size")
        width = typesize if typesize in WORDS else 1
        unit = unit or UNIT_WORDS[width] if transform is Transform.GROUPED else 1
        words, tail = _words(data, width, unit)
        base_words, _ = _words(np.frombuffer(base, np.uint8), width, unit)
        decay = fit_decay(words, base_words) if transform is Transform.DECAYED else None
        if transform is Transform.DECAYED and decay is None:
            transform = Transform.PLAIN
        head = bytes([PLANES.number, transform | _log2(width) << 4])
        if transform is Transform.GROUPED:
            codings = codings or _codings(words, base_words)
            return b"".join([head, *_encode_groups(words, base_words, unit, codings, effort), tail])
        if decay is not None:
            head += decay.pack()
            base_words, codings = _decayed(base_words, decay), None
        if codings is None and len(words) > FEW_WORDS:
            codings = _codings(words, base_words)
        return b"".join([head, *encode_planes(split(words, base_words), codings, effort), tail])

    def decode_into(self, stored: Buffer, out: memoryview, base: Buffer | None = None) -> None:
        stored = memoryview(stored)
        if base is None or memoryview(base).nbytes != len(out):
            raise FormatError("a delta does not have a base of its size")
        if len(stored) < 2 or stored[0] not in _INNER or stored[1] & 15 > max(Transform) or stored[1] >> 4 > 3:
            raise FormatError("a delta is encoded in a way that this release does not know")
        inner, transform, width = _INNER[stored[0]], Transform(stored[1] & 15), 1 << (stored[1] >> 4)
        if transform is Transform.GROUPED:
            _decode_groups(inner, stored[2:], width, out, base)
            return
        words, tail = _words(np.frombuffer(out, np.uint8), width)
        base_words, _ = _words(np.frombuffer(base, np.uint8), width)
        begin = 2
        if transform is Transform.DECAYED:
            begin += Decay.n_bytes
            if width != DECAYED_BYTES or len(stored) < begin:
                raise FormatError("a delta does not say how its words decayed")
            base_words = _decayed(base_words, Decay.unpack(stored[2:begin]))
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
    """Yield what follows the two bytes at the beginning, but for the tail."""
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
        raise FormatError("a delta does not say its groups")
    thresholds = stored[1:n_groups].tolist()
    if sorted(set(thresholds)) != thresholds:
        raise FormatError("a delta's groups are not in order")
    lengths = struct.unpack_from(f"<{n_groups}I", stored, n_groups)
    words, tail = _words(np.frombuffer(out, np.uint8), width, unit)
    base_words, _ = _words(np.frombuffer(base, np.uint8), width, unit)
    if begin + sum(lengths) + len(tail) != len(stored):
        raise FormatError(f"a delta is not as long as a chunk of {len(out)} bytes says")
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


def _codings(words: Any, base: Any) -> list[PlaneCoding]:
    """Choose how to encode the planes of differences, from some of them."""
    words, base = (stretches_of(each, SAMPLE_WORDS) for each in (words, base))
    differences = np.empty_like(words)
    subtract(words, base, differences)
    return codings_for(differences)


def _decayed(words: Any, decay: Decay) -> Any:
    """Give what becomes of words; this thread's scratch memory."""
    out = SCRATCH.area("decayed", words.nbytes).view(words.dtype)
    decay.apply(words, out)
    return out


def _log2(number: int) -> int:
    return number.bit_length() - 1


def _words(data: Any, width: int, unit: int = 1) -> tuple[Any, Any]:
    """Take bytes as whole units of words, and the bytes behind them."""
    n_bytes = len(data) // (width * unit) * (width * unit)
    return data[:n_bytes].view(WORDS[width]), data[n_bytes:]


DELTA = _Delta()
