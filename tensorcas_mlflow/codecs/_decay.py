"""What weight decay alone makes of single precision numbers.

AdamW and its like multiply every weight by a number just below 1 at every step, those too that have no gradient: of an
embedding all rows whose tokens did not come up. As each step rounds to whole units in the last place, such a weight
loses the same few units again and again, and how many its mantissa tells.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.codecs._planes import stretches_of
from tensorcas_mlflow.codecs._sizes import BLOCK_WORDS

DECAYED_BYTES = 4
"""Size of the words that can be told to have decayed: coarser ones round the loss away."""
_SAMPLE_WORDS = 4096
_LEAST_TIMES = 8
"""How often a difference must come up in the sample that is not taken for chance."""
_LEAST_SHARE = 0.15
"""How many of the sampled words must have such differences."""
_MOST_UNITS = 1 << 20
_DECAY = struct.Struct("<IH")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decay:
    """How much smaller words become, as the format page says."""

    n_steps: int
    """Below 2^32."""
    rate: int
    """What a step takes from a number: so many 2^-32ths of it, below 2^16."""

    n_bytes = _DECAY.size
    """Size of what `pack` returns."""

    def pack(self) -> bytes:
        """Give it as it is stored."""
        return _DECAY.pack(self.n_steps, self.rate)

    @classmethod
    def unpack(cls, stored: memoryview) -> Decay:
        """Take it as it is stored; the reverse of `pack`."""
        n_steps, rate = _DECAY.unpack(stored)
        return cls(n_steps=n_steps, rate=rate)

    def apply(self, words: Any, out: Any) -> None:
        """Compute what becomes of words.

        Args:
            words: Single precision numbers as unsigned words, 1-d.
            out: As many, for the result.
        """
        for begin in range(0, len(words), BLOCK_WORDS):
            w, o = words[begin : begin + BLOCK_WORDS], out[begin : begin + BLOCK_WORDS]
            _mantissas(w, o)
            np.multiply(o, self.rate, out=o)
            np.add(o, 1 << 23, out=o)
            np.right_shift(o, 24, out=o)
            np.multiply(o, self.n_steps, out=o)
            np.subtract(w, o, out=o)


def fit_decay(words: Any, base: Any) -> Decay | None:
    """Find the decay that explains many of the differences of words to their base.

    Args:
        words: Unsigned words, 1-d; some 4,096 of them are looked at.
        base: As many of the same type.

    Returns:
        None if too few differences come up again and again, or the words are not of single precision.
    """
    if words.itemsize != DECAYED_BYTES:
        return None
    sample = stretches_of(base, _SAMPLE_WORDS)
    lost = (sample - stretches_of(words, _SAMPLE_WORDS)).view("<i4")
    values, places, counts = np.unique(lost, return_inverse=True, return_counts=True)
    counts[(values <= 0) | (values > _MOST_UNITS)] = 0
    is_common = counts >= max(_LEAST_TIMES, counts.max(initial=0) // 8)
    if counts[is_common].sum() < max(1, _LEAST_SHARE * len(lost)):
        return None
    n_steps = int(np.gcd.reduce(values[is_common]))
    # What rounds to k at each step tells the rate to half a unit either way; all together tell it well.
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
    """Give the first 16 bits of the mantissas, the one that is not stored among them."""
    np.right_shift(words, 8, out=out)
    np.bitwise_and(out, 0x7FFF, out=out)
    np.bitwise_or(out, 0x8000, out=out)
