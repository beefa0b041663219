"""Codecs by number, and the choice of one: by element size alone, or from a sample of the chunk."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.codecs._codec import RAW, Codec
from tensorcas_mlflow.codecs._delta import DELTA, Transform
from tensorcas_mlflow.codecs._planes import PLANES, PlaneCoding
from tensorcas_mlflow.codecs._words import WORDS
from tensorcas_mlflow.codecs._zstd import MAX_RECORD_BYTES, SHUFFLE_ZSTD, ZSTD
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.native import core

CODECS: Mapping[int, Codec] = {codec.number: codec for codec in (RAW, ZSTD, SHUFFLE_ZSTD, DELTA, PLANES)}


def codec_numbered(number: int) -> Codec:
    """Return the codec of a number in a pack.

    Raises:
        FormatError: This release has no such codec.
    """
    codec = CODECS.get(number)
    if codec is None:
        raise FormatError(f"no codec has the number {number}: a later release of tensorcas-mlflow may read it")
    return codec


_MAX_TYPESIZE = 255
_LEAST_SHUFFLED_BYTES = 512
"""In fewer bytes shuffling gains less than its header takes (``docs/design/codecs.md``)."""
_CODINGS = {coding.value: coding for coding in PlaneCoding}
"""Codings by number: the class of an enumeration takes two calls to find one."""
_GUESSED_BYTES = 16 * 1024
_LEAST_GUESSED_BYTES = 2048
_CLEARLY_BITS = 0.2


def typesize_of(itemsize: int) -> int:
    """Return the element size for the byte of a pack's table that holds it."""
    return min(itemsize, _MAX_TYPESIZE)


def can_shuffle(n_bytes: int, itemsize: int) -> bool:
    """Tell whether shuffling, or taking words apart, can gain room in a chunk."""
    return 1 < itemsize <= MAX_RECORD_BYTES and n_bytes >= max(_LEAST_SHUFFLED_BYTES, 8 * itemsize)


def encode_best(raw: Buffer, itemsize: int) -> tuple[Codec, int, Buffer]:
    """Encode one chunk with the codec that fits its elements, or leave it raw where that gains less than 3 %.

    Args:
        raw: The chunk.
        itemsize: Size of one element; 1 for text and skeletons.

    Returns:
        The codec, the element size for the pack's table, and the payload.
    """
    number, typesize, payload = core.encode_best(raw, itemsize)
    return (CODECS[number], typesize, payload) if number else (RAW, 1, raw)


def guess_itemsize(sample: Buffer) -> int:
    """Guess the element size of bytes whose dtype is unknown.

    The exponent bytes of floating point numbers are alike from one element to the next. So the guess is the size at
    which bytes in equal places have the least entropy, if that is clearly less than the entropy of all bytes together.

    Args:
        sample: The beginning of the bytes; at most the first 16 KiB are used.

    Returns:
        1, 2, 4 or 8.
    """
    data = np.frombuffer(sample, np.uint8)[:_GUESSED_BYTES]
    data = data[: len(data) - len(data) % 8]
    if len(data) < _LEAST_GUESSED_BYTES:
        return 1
    best, least = 1, _entropy_bits(data) / len(data) - _CLEARLY_BITS
    for size in (2, 4, 8):
        entropy = _entropy_bits(data.view(WORDS[size])) / len(data)
        if entropy < least - _CLEARLY_BITS / 4:
            best, least = size, entropy
    return best


def estimate_share(raw: Buffer, width: int, *, base: Buffer | None = None) -> float:
    """Estimate the share of its size that a chunk takes as `planes`, or as a `delta`.

    The estimate is the entropy of each plane's bytes (Shannon) with the correction of Miller and Madow, because few
    bytes look more alike than they are. It does not see repetitions: a chunk with many takes less.

    Args:
        raw: The chunk; four stretches of it, 2,048 words together, are sampled.
        width: Size of its words: 1, 2, 4 or 8.
        base: As long as the chunk; None for `planes`.

    Returns:
        0 to 1; 1 for no words at all.
    """
    share: float = core.estimate_share(raw, width, base)
    return share


def choose_codings(raw: Buffer, width: int, *, base: Buffer | None = None) -> tuple[PlaneCoding, ...]:
    """Choose codings for the planes of a chunk, or of its differences from a base; see `estimate_share`."""
    return tuple([_CODINGS[number] for number in core.choose_codings(raw, width, base)])


def choose_transform(
    raw: Buffer, width: int, base: Buffer, codings: Sequence[PlaneCoding], *, at_any_cost: bool = False
) -> tuple[Transform, int]:
    """Choose the transform of a chunk's differences from its base, by trying them on up to 64 KiB.

    Where rows or columns are zero, losing the order of the words may cost more than groups save: only a trial tells.

    Args:
        raw: The chunk, of floating point numbers.
        width: Size of its words: 1, 2, 4 or 8.
        base: As long as the chunk.
        codings: Codings of the planes of the differences.
        at_any_cost: Whether to accept slower decoding for any gain.

    Returns:
        The transform, and the words per unit.
    """
    transform, unit = core.choose_transform(raw, width, base, bytes(codings), at_any_cost)
    return Transform(transform), unit


def _entropy_bits(words: Any) -> float:
    """Return the bits that words take if each byte has the code of its plane; no plane takes more than its size."""
    n_words, width = len(words), words.itemsize
    numbered = words.view(np.uint8).reshape(n_words, width) + (256 * np.arange(width, dtype=np.uint16))
    counts = np.bincount(numbered.ravel(), minlength=256 * width).reshape(width, 256)
    used = np.count_nonzero(counts, axis=1)
    logs = np.log2(counts, where=counts > 0, out=np.zeros(counts.shape))
    entropy = math.log2(n_words) - (counts * logs).sum(axis=1) / n_words + (used - 1) / (2 * n_words * math.log(2))
    return float(np.clip(entropy, 0, 8).sum() * n_words)
