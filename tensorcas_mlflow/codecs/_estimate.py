"""How much room a chunk will take, from a sample and without encoding it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tensorcas_mlflow.codecs._codec import Buffer
from tensorcas_mlflow.codecs._delta import Transform
from tensorcas_mlflow.codecs._groups import magnitudes, places_of, thresholds_for
from tensorcas_mlflow.codecs._planes import WORDS, PlaneCoding, codings_for, stretches_of
from tensorcas_mlflow.codecs._residual import residual

SAMPLE_WORDS = 2048
"""Words that are looked at: entropies of bytes are then right to about 1 %."""


def estimate_share(
    raw: Buffer, width: int, *, base: Buffer | None = None, transform: Transform = Transform.ORDERED
) -> float:
    """Estimate what share of its size a chunk takes as `planes`, or as a `delta`.

    It is the entropy of each plane's bytes, after Shannon, with the correction of Miller and Madow: few bytes look more
    alike than they are. Repetitions are not seen, so of what has many the share is less.

    Args:
        raw: The chunk; four stretches of it, 2,048 words together, are looked at.
        width: Size of its words: 1, 2, 4 or 8.
        base: As long as the chunk; None for `planes`.
        transform: Of a delta.

    Returns:
        0 to 1; 1 for no words at all.
    """
    words = _sample(raw, width)
    if len(words) == 0:
        return 1.0
    if base is None:
        return _entropy_bits(words) / (8 * width * len(words))
    base_words = _sample(base, width)
    differences = _differences(words, base_words, transform)
    if transform is Transform.GROUPED:
        sizes = magnitudes(base_words)
        parts = [differences[places] for places in places_of(sizes, thresholds_for(sizes))]
    else:
        parts = [differences]
    return sum(_entropy_bits(part) for part in parts) / (8 * width * len(words))


def choose_codings(
    raw: Buffer, width: int, *, base: Buffer | None = None, transform: Transform = Transform.ORDERED
) -> tuple[PlaneCoding, ...]:
    """Choose how the planes of a chunk, or of its differences to a base, are best encoded; see `estimate_share`."""
    words = _sample(raw, width)
    if base is not None:
        words = _differences(words, _sample(base, width), transform)
    return tuple(codings_for(words))


def _sample(raw: Buffer, width: int) -> Any:
    data: Any = np.frombuffer(raw, np.uint8)
    return stretches_of(data[: len(data) // width * width].view(WORDS[width]), SAMPLE_WORDS)


def _differences(words: Any, base: Any, transform: Transform) -> Any:
    out = np.empty_like(words)
    residual(words, base, out, ordered=transform is not Transform.MODULAR)
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
