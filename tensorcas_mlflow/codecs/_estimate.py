"""How much room a chunk will take, from a sample and without encoding it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tensorcas_mlflow.codecs._codec import Buffer
from tensorcas_mlflow.codecs._decay import fit_decay
from tensorcas_mlflow.codecs._delta import DELTA, Transform
from tensorcas_mlflow.codecs._groups import UNIT_WORDS
from tensorcas_mlflow.codecs._planes import PlaneCoding, codings_for, stretches_of
from tensorcas_mlflow.codecs._sizes import WORDS
from tensorcas_mlflow.codecs._words import subtract

SAMPLE_WORDS = 2048
"""Words that are looked at: entropies of bytes are then right to about 1 %."""
_TRIED_BYTES = 64 << 10
_WORTH_SLOWER = 0.99
"""What takes longer to decode is only chosen if it takes less than this share of the room."""

_ENOUGH = 0.96
"""Where units take less than this share of what words in their order take, single words, which take the longest, are
not tried: that order counts is seen where little is gained."""


def estimate_share(raw: Buffer, width: int, *, base: Buffer | None = None) -> float:
    """Estimate what share of its size a chunk takes as `planes`, or as a `delta`.

    It is the entropy of each plane's bytes, after Shannon, with the correction of Miller and Madow: few bytes look more
    alike than they are. Repetitions are not seen, so of what has many the share is less.

    Args:
        raw: The chunk; four stretches of it, 2,048 words together, are looked at.
        width: Size of its words: 1, 2, 4 or 8.
        base: As long as the chunk; None for `planes`.

    Returns:
        0 to 1; 1 for no words at all.
    """
    words = _sample(raw, width)
    if len(words) == 0:
        return 1.0
    if base is not None:
        words = _differences(words, _sample(base, width))
    return _entropy_bits(words) / (8 * width * len(words))


def choose_codings(raw: Buffer, width: int, *, base: Buffer | None = None) -> tuple[PlaneCoding, ...]:
    """Choose how the planes of a chunk, or of its differences to a base, are best encoded; see `estimate_share`."""
    words = _sample(raw, width)
    if base is not None:
        words = _differences(words, _sample(base, width))
    return tuple(codings_for(words))


def choose_transform(
    raw: Buffer, width: int, base: Buffer, codings: Sequence[PlaneCoding], *, at_any_cost: bool = False
) -> tuple[Transform, int]:
    """Choose how the differences of a chunk to its base are best encoded, by trying it on up to 64 KiB.

    That differences in groups are not in order may cost more than groups spare, where there are rows or columns of
    zeros: only trying it tells.

    Args:
        raw: The chunk, of floating point numbers.
        width: Size of its words: 1, 2, 4 or 8.
        base: As long as the chunk.
        codings: Of the planes of the differences.
        at_any_cost: Whether even a little room is worth any time.

    Returns:
        The transform, and how many words are moved together.
    """
    piece = _middle(raw, _TRIED_BYTES), width, _middle(base, _TRIED_BYTES)
    worth = 1.0 if at_any_cost else _WORTH_SLOWER
    ways = [(Transform.GROUPED, UNIT_WORDS[width]), (Transform.GROUPED, 1)]
    if fit_decay(_sample(raw, width), _sample(base, width)) is not None:
        ways.insert(0, (Transform.DECAYED, 1))
    chosen, plain = (Transform.PLAIN, 1), len(DELTA.encode_as(*piece, Transform.PLAIN, codings=codings))
    least = plain
    for transform, unit in ways:
        if (transform, unit) == ways[-1] and least < _ENOUGH * plain and not at_any_cost:
            break
        size = len(DELTA.encode_as(*piece, transform, codings=codings, unit=unit))
        if size < worth * least:
            chosen, least = (transform, unit), size
    return chosen


def _middle(data: Buffer, n_bytes: int) -> Buffer:
    data = memoryview(data)
    begin = max(0, data.nbytes - n_bytes) // 16 * 8
    return data[begin : begin + n_bytes]


def _sample(raw: Buffer, width: int) -> Any:
    data: Any = np.frombuffer(raw, np.uint8)
    return stretches_of(data[: len(data) // width * width].view(WORDS[width]), SAMPLE_WORDS)


def _differences(words: Any, base: Any) -> Any:
    out = np.empty_like(words)
    subtract(words, base, out)
    return out


def _entropy_bits(words: Any) -> float:
    """Give the bits that words take if each byte has the code of its plane: no plane more than its own size."""
    n_words, width = len(words), words.itemsize
    if n_words == 0:
        return 0.0
    numbered = words.view(np.uint8).reshape(n_words, width) + (256 * np.arange(width, dtype=np.uint16))
    counts = np.bincount(numbered.ravel(), minlength=256 * width).reshape(width, 256)
    used = np.count_nonzero(counts, axis=1)
    logs = np.log2(counts, where=counts > 0, out=np.zeros(counts.shape))
    entropy = math.log2(n_words) - (counts * logs).sum(axis=1) / n_words + (used - 1) / (2 * n_words * math.log(2))
    return float(np.minimum(entropy, 8).sum() * n_words)
