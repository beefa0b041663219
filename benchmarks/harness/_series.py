"""Repeated measurements, and their statistics."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Series:
    """One figure, measured once a round."""

    values: tuple[float, ...]
    """By round; never empty."""

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("nothing was measured")

    @property
    def median(self) -> float:
        """Half of the values are at most this."""
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Bounds of the middle half; of a single value, that value twice."""
        if len(self.values) == 1:
            return self.values[0], self.values[0]
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high

    @property
    def least(self) -> float:
        """The least of the values."""
        return min(self.values)

    def percentile(self, percent: int) -> float:
        """Return the least value that so many per cent of the values do not exceed."""
        return sorted(self.values)[max(0, math.ceil(len(self.values) * percent / 100) - 1)]

    def over(self, other: Series) -> Series:
        """Divide by another series, round by round.

        A disturbance of the machine slows both sides of a round, so the median of these ratios varies less than the
        ratio of the medians.

        Raises:
            ValueError: The other one has another number of rounds.
        """
        return Series(tuple(mine / theirs for mine, theirs in zip(self.values, other.values, strict=True)))

    def plus(self, other: Series) -> Series:
        """Add another series, round by round; raises as `over`."""
        return Series(tuple(mine + theirs for mine, theirs in zip(self.values, other.values, strict=True)))

    def minus(self, other: Series) -> Series:
        """Subtract another series, round by round; raises as `over`."""
        return Series(tuple(mine - theirs for mine, theirs in zip(self.values, other.values, strict=True)))

    def times(self, factor: float) -> Series:
        """Multiply each value."""
        return Series(tuple(value * factor for value in self.values))
