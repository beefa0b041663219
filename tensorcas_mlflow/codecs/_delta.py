"""Codec 3: what differs from a base."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from tensorcas_mlflow.codecs._codec import Buffer, Codec
from tensorcas_mlflow.codecs._groups import MOST_GROUPS, magnitudes, places_of, thresholds_for
from tensorcas_mlflow.codecs._planes import PLANES, WORDS, Effort, PlaneCoding, codings_for
from tensorcas_mlflow.codecs._raw import RAW
from tensorcas_mlflow.codecs._residual import residual, restore
from tensorcas_mlflow.codecs._scratch import SCRATCH
from tensorcas_mlflow.codecs._shuffle import SHUFFLE_ZSTD
from tensorcas_mlflow.codecs._zstd import ZSTD
from tensorcas_mlflow.errors import FormatError

_INNER = {codec.number: codec for codec in (RAW, ZSTD, SHUFFLE_ZSTD, PLANES)}


class Transform(IntEnum):
    """How differences are made; numbers on disk."""

    MODULAR = 0
    """Of the words as whole numbers."""
    ORDERED = 1
    """Of words that are floating point numbers, in the order of the numbers."""
    GROUPED = 2
    """As `ORDERED`, and words with bases of like magnitude are encoded together."""


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
    ) -> bytes:
        """Encode a chunk in a way that was chosen for its tensor.

        Args:
            raw: The chunk.
            typesize: Size of the words; for other sizes than 1, 2, 4 and 8 it is taken as 1.
            base: As long as the chunk.
            transform: How the words are subtracted.
            effort: What to spend.
            codings: How to encode the planes of the differences, the least significant bytes first; None to find out.

        Raises:
            ValueError: The base is missing or of another size.
        """
        data = np.frombuffer(raw, np.uint8)
        if base is None or memoryview(base).nbytes != len(data):
            raise ValueError("a delta is encoded against a base of the chunk's size")
        width = typesize if typesize in WORDS else 1
        n_words = len(data) // width
        words, base_words = _words(data, width), _words(np.frombuffer(base, np.uint8), width)
        area = SCRATCH.area("residual", len(data))
        differences = _words(area, width)
        residual(words, base_words, differences, ordered=transform is not Transform.MODULAR)
        area[n_words * width :] = data[n_words * width :]
        head = bytes([PLANES.number, transform | width.bit_length() - 1 << 4])
        if transform is not Transform.GROUPED:
            return head + PLANES.encode_as(area, width, codings, effort)
        codings = codings or codings_for(differences)
        sizes = magnitudes(base_words)
        thresholds = thresholds_for(sizes) if n_words else []
        grouped = SCRATCH.area("grouped", n_words * width).view(differences.dtype)
        parts = []
        for places in places_of(sizes, thresholds):
            # Told to check nothing, numpy writes straight into the buffer.
            part = np.take(differences, places, out=grouped[: len(places)], mode="clip")
            parts.append(PLANES.encode_as(part, width, codings, effort))
        lengths = struct.pack(f"<{len(parts)}I", *map(len, parts))
        return b"".join([head, bytes([len(parts), *thresholds]), lengths, *parts, area[n_words * width :]])

    def decode_into(self, stored: Buffer, out: memoryview, base: Buffer | None = None) -> None:
        stored = memoryview(stored)
        if base is None or memoryview(base).nbytes != len(out):
            raise FormatError("a delta does not have a base of its size")
        if len(stored) < 2 or stored[0] not in _INNER or stored[1] & 15 > max(Transform) or stored[1] >> 4 > 3:
            raise FormatError("a delta is encoded in a way that this release does not know")
        inner, transform, width = _INNER[stored[0]], Transform(stored[1] & 15), 1 << (stored[1] >> 4)
        words = _words(np.frombuffer(out, np.uint8), width)
        base_words = _words(np.frombuffer(base, np.uint8), width)
        if transform is Transform.GROUPED:
            _decode_groups(inner, stored[2:], words, base_words, out)
        else:
            inner.decode_into(stored[2:], out)
        restore(words, base_words, ordered=transform is not Transform.MODULAR)


def _decode_groups(inner: Codec, stored: memoryview, words: Any, base_words: Any, out: memoryview) -> None:
    n_groups = stored[0] if len(stored) else 0
    begin = n_groups + 4 * n_groups
    if not 0 < n_groups <= MOST_GROUPS or len(stored) < begin:
        raise FormatError("a delta does not say its groups")
    thresholds = stored[1:n_groups].tolist()
    if sorted(set(thresholds)) != thresholds:
        raise FormatError("a delta's groups are not in order")
    lengths = struct.unpack_from(f"<{n_groups}I", stored, n_groups)
    tail = out[words.nbytes :]
    if begin + sum(lengths) + len(tail) != len(stored):
        raise FormatError(f"a delta is not as long as a chunk of {len(out)} bytes says")
    grouped = SCRATCH.area("grouped", words.nbytes)
    groups = places_of(magnitudes(base_words), thresholds)
    for length, places in zip(lengths, groups, strict=True):
        part = grouped[: len(places) * words.itemsize]
        inner.decode_into(stored[begin : begin + length], part.data)
        words[places] = part.view(words.dtype)
        begin += length
    tail[:] = stored[begin:]


def _words(data: Any, width: int) -> Any:
    return data[: len(data) // width * width].view(WORDS[width])


DELTA = _Delta()
