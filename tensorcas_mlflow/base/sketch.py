"""Sketches: 32 sampled words of a tensor, which show its relation to others (``docs/design/caches.md``, Sketches)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.base.dtypes import DType, parse_dtype
from tensorcas_mlflow.errors import FormatError

N_WORDS = 32
SKETCH_BYTES = 2 * N_WORDS
HEAD_ELEMENTS = 32_768
"""The words are about the first elements of a tensor: the beginning of a tensor is one chunk, or few."""
LEAST_SKETCHED_BYTES = 16 << 10
"""A smaller tensor has no sketch."""

_FRACTION_BITS = 24
_FRACTIONS = np.array(
    [((k + 1) * 0x9E3779B97F4A7C15 % (1 << 64)) >> (64 - _FRACTION_BITS) for k in range(N_WORDS)], dtype=np.int64
)
"""Multiples of the golden ratio: they spread evenly, and share no period with the rows of a matrix."""

_ORDER = _FRACTIONS.argsort().argsort()
"""Rank of each word by its position."""

_NEGATIVE_ZERO = 0x8000
_NEAR = 4
"""Words that differ by at most this count as near: some 3 percent of a number."""
_LOG_CHOICES = np.array([[math.log2(max(1, math.comb(n, m))) for m in range(N_WORDS + 1)] for n in range(N_WORDS + 1)])
_N_FIRST = 8
SURE_BITS = 40.0
"""Evidence enough for two tensors on their own."""
LIKELY_BITS = 12.0
"""Evidence enough for tensors of two models that are related."""


def positions(n_elements: Any) -> Any:
    """Return the positions of the sampled elements: for tensors of these numbers of elements one row each."""
    heads = np.minimum(np.asarray(n_elements, dtype=np.int64), HEAD_ELEMENTS)
    return (_FRACTIONS * heads[..., None]) >> _FRACTION_BITS


def is_sketched(dtype: str | None) -> bool:
    """Tell whether tensors of a dtype, given by its name, have sketches."""
    if dtype is None:
        return False
    try:
        numpy_dtype = parse_dtype(dtype)
    except FormatError:
        return False
    return numpy_dtype.kind in "iuf" or _is_short_float(numpy_dtype)


def _is_short_float(dtype: DType) -> bool:
    return dtype.type.__module__ == "ml_dtypes" and (dtype.name == "bfloat16" or dtype.name.startswith("float8"))


def words_of(numbers: Any) -> Any:
    """Return the words of sampled numbers.

    Args:
        numbers: An array of a dtype that `is_sketched` accepts.
    """
    if numbers.dtype.kind in "iu":
        return numbers.astype(np.int64).astype(np.uint16)
    with np.errstate(over="ignore", invalid="ignore"):
        single = np.ascontiguousarray(numbers, dtype=np.float32)
    words = (single.view(np.uint32) >> 16).astype(np.uint16)
    words[words == _NEGATIVE_ZERO] = 0  # as a product with a mask has it
    return words


def chance_of(words: Any) -> float:
    """Return the chance that a word of another tensor with such numbers is near one of these, from these words alone.

    It is about 1 for constants and for ascending numbers, 1/100 for normally distributed weights.
    """
    told = words[words != 0]
    rises = told[_ORDER[words != 0].argsort()].astype(np.int64)
    if (np.diff(rises) >= 0).all() or (np.diff(rises) <= 0).all():
        return 1.0  # a table of positions is equal in models that have nothing else in common
    n_pairs = len(told) * (len(told) - 1)
    n_near = int(_are_near(told[:, None], told[None, :]).sum()) - len(told)
    return (n_near + 2) / (n_pairs + 2) if n_pairs else 1.0


def can_tell(words: Any) -> bool:
    """Tell whether the words of a tensor can tell it from unrelated ones; those of constants cannot."""
    return -math.log2(chance_of(words)) * N_WORDS >= SURE_BITS


class Likeness(NamedTuple):
    """Comparison of one sketch with many."""

    evidence: Any
    """For each of them the evidence of a relation, in bits: unrelated ones reach n bits by chance once in 2^n."""
    share: Any
    """For each the likeness: 1 if all words are equal, and less if they are near or far."""


def compare(words: Any, others: Any, chance: float | None = None) -> Likeness:
    """Compare a sketch with others.

    Args:
        words: The words of one tensor.
        others: The words of others, one column a tensor.
        chance: The chance that a word of an unrelated tensor is near; by default `chance_of` the words.
    """
    n = others.shape[1]
    evidence, share = np.zeros(n), np.zeros(n)
    if not n:
        return Likeness(evidence=evidence, share=share)
    bits = -math.log2(chance_of(words) if chance is None else chance)
    if bits * N_WORDS < SURE_BITS:
        return Likeness(evidence=evidence, share=share)
    # Of unrelated tensors, few have one of the first words in common.
    is_likely = np.zeros(n, dtype=bool)
    for word, other in zip(words[:_N_FIRST].tolist(), others, strict=False):
        if word:
            is_likely |= _are_near(other, np.uint16(word))
    likely = is_likely.nonzero()[0]
    some, mine = others[:, likely], words[:, None]
    told = (some != 0) & (mine != 0)
    n_near = (_are_near(some, mine) & told).sum(axis=0)
    n_equal = ((some == mine) & told).sum(axis=0)
    # Of n words, m or more are near by chance with a probability of at most p^m times the choices of m from n.
    evidence[likely] = n_near * bits - _LOG_CHOICES[told.sum(axis=0), n_near]
    share[likely] = (n_near + n_equal) / (2 * N_WORDS)
    return Likeness(evidence=evidence, share=share)


def evidence_of(words: Any, others: Any, chance: float) -> Any:
    """Return the evidence for a sketch of which some words are unknown, and zero; see `compare`."""
    # A comparison looks at the first words to rule most tensors out.
    order = np.argsort(words == 0, kind="stable")
    return compare(words[order], others[order], chance).evidence


def _are_near(one: Any, other: Any) -> Any:
    # Unsigned numbers wrap around, so one comparison serves both directions.
    return one - other + np.uint16(_NEAR) <= 2 * _NEAR
