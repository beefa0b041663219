"""Codec 3: what differs from a base."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from itertools import chain
from typing import Any

import numpy as np

from tensorcas_mlflow.codecs._codec import Buffer, Codec
from tensorcas_mlflow.codecs._decay import DECAYED_BYTES, Decay, fit_decay
from tensorcas_mlflow.codecs._groups import MOST_CLASSES, UNIT_WORDS, Groups, thresholds_for
from tensorcas_mlflow.codecs._planes import PLANES, WORDS, Effort, PlaneCoding, codings_for
from tensorcas_mlflow.codecs._raw import RAW
from tensorcas_mlflow.codecs._residual import residual, restore
from tensorcas_mlflow.codecs._scratch import SCRATCH
from tensorcas_mlflow.codecs._shuffle import SHUFFLE_ZSTD
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
        area = SCRATCH.area("residual", len(data))
        differences, rest = _words(area, width, unit)
        rest[:] = tail
        decay = fit_decay(words, base_words) if transform is Transform.DECAYED else None
        if transform is Transform.DECAYED and decay is None:
            transform = Transform.PLAIN
        residual(words, base_words if decay is None else _decayed(base_words, decay), differences)
        head = bytes([PLANES.number, transform | _log2(width) << 4])
        if decay is not None:
            return b"".join([head, decay.pack(), *PLANES.encode_in_parts(area, width, None, effort)])
        if transform is Transform.PLAIN:
            return b"".join([head, *PLANES.encode_in_parts(area, width, codings, effort)])
        codings = codings or codings_for(differences)
        thresholds = thresholds_for(base_words) if len(words) else []
        groups = Groups(base_words, thresholds, unit)
        parts = PLANES.encode_all_in_parts(groups.part(differences), groups.lengths, codings, effort)
        said = bytes([len(parts) | _log2(unit) << 4, *thresholds])
        lengths = struct.pack(f"<{len(parts)}I", *(sum(map(len, part)) for part in parts))
        return b"".join([head, said, lengths, *chain.from_iterable(parts), rest])

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
        words, _ = _words(np.frombuffer(out, np.uint8), width)
        base_words, _ = _words(np.frombuffer(base, np.uint8), width)
        begin = 2
        if transform is Transform.DECAYED:
            begin += Decay.n_bytes
            if width != DECAYED_BYTES or len(stored) < begin:
                raise FormatError("a delta does not say how its words decayed")
            base_words = _decayed(base_words, Decay.unpack(stored[2:begin]))
        inner.decode_into(stored[begin:], out)
        restore(words, base_words)


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
    grouped = groups.area(words.dtype)
    areas = groups.split(grouped)
    parts = []
    for length in lengths:
        parts.append(stored[begin : begin + length])
        begin += length
    if inner is PLANES and all(part[:1] == bytes([width]) for part in parts):
        PLANES.decode_all_into(parts, groups.lengths, grouped)
    else:
        for part, area in zip(parts, areas, strict=True):
            inner.decode_into(part, area.view(np.uint8).data)
    groups.join(areas, words)
    restore(words, base_words)
    tail[:] = stored[begin:]


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
