"""Words in groups by the magnitude of their base.

A step of training changes more digits of small numbers than of large ones. Differences of numbers that are alike in
magnitude are alike in size, so that each group has its own and shorter Huffman codes. The decoder has the base, so it
knows the groups, and their order costs no room.

Words are not moved one by one but in units of neighbours, sorted by the groups of all their words: the words in one
place of units that are alike are of one group, and stand together. That takes a half or a quarter of the sorting, and
loses nothing of the grouping. What takes time here lets other threads go on, which `numpy.flatnonzero` does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, chain, cycle
from typing import Any

import numpy as np

from tensorcas_mlflow.codecs import _native
from tensorcas_mlflow.codecs._scratch import SCRATCH
from tensorcas_mlflow.codecs._sizes import BLOCK_WORDS, WORDS

MOST_CLASSES = 256
"""How many kinds of units there may be: a byte says which."""
UNIT_WORDS = {1: 4, 2: 4, 4: 2, 8: 1}
"""How many words are moved together, by their size."""
_SHARES = {1: (0.1, 0.35), 2: (0.1, 0.35), 4: (0.06, 0.15, 0.32, 0.6), 8: (0.06, 0.15, 0.32, 0.6)}
"""Where groups end, as shares of the words, by their size: small numbers differ most from each other in magnitude."""
_SAMPLE_WORDS = 4096


def thresholds_for(base: Any) -> list[int]:
    """Choose where groups end.

    Args:
        base: Unsigned words, 1-d; at least one.

    Returns:
        The largest magnitude of each group but the last, ascending; none twice.
    """
    step = max(1, len(base) // _SAMPLE_WORDS)
    below = np.bincount(_magnitudes(base[::step]), minlength=256).cumsum()
    ends = np.searchsorted(below, [share * below[-1] for share in _SHARES[base.itemsize]])
    top = int(np.flatnonzero(np.diff(below, prepend=0))[-1])
    return sorted({int(end) for end in ends if end < top})


class Groups:
    """How the words of a chunk are parted into groups, and put together again."""

    def __init__(self, base: Any, thresholds: Sequence[int], unit: int) -> None:
        """Sort units.

        Args:
            base: The words of the base, unsigned, 1-d; a whole number of units.
            thresholds: The largest magnitude of each group but the last, strictly ascending.
            unit: How many words are moved together: 1, 2, 4 or 8; the number of groups to the power of it is at most
                `MOST_CLASSES`.
        """
        self.n_groups = len(thresholds) + 1
        self.unit = unit
        self.lengths: list[int]
        """How many words each group has."""
        self.classes: Any
        """Of each unit; this thread's scratch memory."""
        self._order: Any = None
        """The units as they are sorted, once they are: compiled loops have no need of it."""
        if _native.KERNELS is not None:
            self.classes = SCRATCH.area("classes", len(base) // unit)
            said = bytes(thresholds)
            self.lengths = _native.KERNELS.number_units(base, base.itemsize, said, unit, self.classes)
        else:
            self.classes = _classes(base, thresholds, unit)
            self.lengths = self._sorted_lengths()

    def _sorted_lengths(self) -> list[int]:
        """Sort units; returns how many words each group has."""
        n_groups = self.n_groups
        self._order = np.argsort(self.classes, kind="stable")  # a radix sort
        numbers = _numbers(n_groups**self.unit)
        ends = np.searchsorted(self.classes, numbers, side="right", sorter=self._order).tolist()
        lengths = [0] * n_groups
        self._runs: list[list[tuple[int, int, int]]] = []
        """For each place in a unit what is of one group, as units are sorted: the group, the first, and one past."""
        for place in range(self.unit):
            n_together = n_groups**place
            stops = ends[n_together - 1 :: n_together]  # of the runs of classes whose words there are of one group
            starts = [0, *stops[:-1]]
            for group in range(n_groups):
                lengths[group] += sum(stops[group::n_groups]) - sum(starts[group::n_groups])
            runs = zip(cycle(range(n_groups)), starts, stops, strict=False)
            self._runs.append([run for run in runs if run[1] < run[2]])
        return lengths

    def part(self, words: Any) -> Any:
        """Give the words of all groups, one group behind the other, in the order of the format: scratch memory."""
        if self._order is None:
            self._sorted_lengths()
        units = SCRATCH.area("units", words.nbytes).view(words.dtype).reshape(-1, self.unit)
        unit_type = WORDS[words.itemsize * self.unit]
        # Told to check nothing, numpy writes straight into the buffer.
        np.take(words.view(unit_type), self._order, out=units.view(unit_type).reshape(-1), mode="clip")
        pieces: list[list[Any]] = [[] for _ in self.lengths]
        for place, runs in enumerate(self._runs):
            column = units[:, place]
            for group, begin, end in runs:
                pieces[group].append(column[begin:end])
        out = self.area(words.dtype)
        if len(out):
            np.concatenate(list(chain.from_iterable(pieces)), out=out)
        return out

    def join(self, groups: Sequence[Any], out: Any) -> None:
        """Put the words of all groups in their places; the reverse of `part`."""
        if self._order is None:
            self._sorted_lengths()
        units = SCRATCH.area("units", out.nbytes).view(out.dtype).reshape(-1, self.unit)
        taken = [0] * len(groups)
        for place, runs in enumerate(self._runs):
            pieces = []
            for group, begin, end in runs:
                first = taken[group]
                taken[group] = last = first + end - begin
                pieces.append(groups[group][first:last])
            if pieces:
                np.concatenate(pieces, out=units[:, place])
        unit_type = WORDS[out.itemsize * self.unit]
        out.view(unit_type)[self._order] = units.view(unit_type).reshape(-1)

    def area(self, dtype: Any) -> Any:
        """Give room for the words of all groups, one group behind the other; this thread's scratch memory."""
        return SCRATCH.area("grouped", sum(self.lengths) * dtype.itemsize).view(dtype)

    def split(self, words: Any) -> list[Any]:
        """Part what `area` gave among the groups."""
        ends = accumulate(self.lengths)
        return [words[end - length : end] for length, end in zip(self.lengths, ends, strict=True)]


def _classes(base: Any, thresholds: Sequence[int], unit: int) -> Any:
    """Number units by the groups of their words, which are the digits of the number, the first word's the last one."""
    n_words, n_groups = len(base), len(thresholds) + 1
    mine = _groups_of(_magnitudes(base), thresholds)
    together = 1
    while together < unit:
        # Of low + 256 * high, times n_groups + 256, the upper byte is low + n_groups * high.
        product = SCRATCH.area("products", n_words // together).view("<u2")
        np.multiply(mine.view("<u2"), n_groups + 256, out=product)
        np.right_shift(product, 8, out=product)
        mine = mine[: len(product)]
        np.copyto(mine, product, casting="unsafe")
        n_groups *= n_groups
        together *= 2
    return mine


def _magnitudes(base: Any) -> Any:
    """Give the eight bits below the top one of each word; this thread's scratch memory."""
    out = SCRATCH.area("magnitudes", len(base))
    if base.itemsize == 1:
        return np.left_shift(base, 1, out=out)
    shifted = SCRATCH.area("words", min(len(base), BLOCK_WORDS) * base.itemsize).view(base.dtype)
    for begin in range(0, len(base), BLOCK_WORDS):
        block = base[begin : begin + BLOCK_WORDS]
        # A cast to bytes leaves the top bit behind.
        bits = np.right_shift(block, 8 * base.itemsize - 9, out=shifted[: len(block)])
        np.copyto(out[begin : begin + len(block)], bits, casting="unsafe")
    return out


def _groups_of(magnitudes: Any, thresholds: Sequence[int]) -> Any:
    """Number words by their groups: how many thresholds they are above; this thread's scratch memory."""
    groups, is_above = SCRATCH.area("groups", len(magnitudes)), SCRATCH.area("above", len(magnitudes))
    if not thresholds:
        groups[:] = 0
    for number, threshold in enumerate(thresholds):
        np.greater(magnitudes, threshold, out=(is_above if number else groups).view(bool))
        if number:
            np.add(groups, is_above, out=groups)
    return groups


@cache
def _numbers(n_classes: int) -> Any:
    return np.arange(n_classes, dtype=np.uint8)
