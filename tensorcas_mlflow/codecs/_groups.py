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
from typing import Any

import numpy as np

from tensorcas_mlflow.codecs._planes import WORDS
from tensorcas_mlflow.codecs._scratch import SCRATCH

MOST_CLASSES = 256
"""How many kinds of units there may be: a byte says which."""
UNIT_WORDS = {1: 4, 2: 4, 4: 2, 8: 1}
"""How many words are moved together, by their size."""
_SHARES = {1: (0.1, 0.35), 2: (0.1, 0.35), 4: (0.06, 0.15, 0.32, 0.6), 8: (0.06, 0.15, 0.32, 0.6)}
"""Where groups end, as shares of the words, by their size: small numbers differ most from each other in magnitude."""
_SAMPLE_WORDS = 4096
_BLOCK_WORDS = 1 << 15


def thresholds_for(base: Any) -> list[int]:
    """Choose where groups end.

    Args:
        base: Unsigned words, 1-d; at least one.

    Returns:
        The largest magnitude of each group but the last, ascending; none twice.
    """
    step = max(1, len(base) // _SAMPLE_WORDS)
    bits = 8 * base.itemsize
    sizes = (base[::step] << 1) >> (bits - 8)  # the eight bits below the top one
    below = np.bincount(sizes.astype(np.uint8), minlength=256).cumsum()
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
        self._n_groups = len(thresholds) + 1
        self._unit = unit
        classes = _classes(base, thresholds, unit)
        self._order = np.argsort(classes, kind="stable")  # a radix sort
        numbers = np.arange(self._n_groups**unit, dtype=np.uint8)
        ends = np.searchsorted(classes, numbers, side="right", sorter=self._order).tolist()
        self._runs: list[list[tuple[int, int, int]]] = []
        """For each place in a unit what is of one group, as units are sorted: the group, the first, and one past."""
        self.lengths = [0] * self._n_groups
        """How many words each group has."""
        for kinds in _kinds(self._n_groups, unit):
            runs, begin = [], 0
            for group, kind in kinds:
                end = ends[kind]
                if end > begin:
                    runs.append((group, begin, end))
                    self.lengths[group] += end - begin
                    begin = end
            self._runs.append(runs)

    def part(self, words: Any) -> list[Any]:
        """Give the words of each group, in the order of the format: contiguous arrays; this thread's scratch memory."""
        units = SCRATCH.area("units", words.nbytes).view(words.dtype).reshape(-1, self._unit)
        unit_type = WORDS[words.itemsize * self._unit]
        # Told to check nothing, numpy writes straight into the buffer.
        np.take(words.view(unit_type), self._order, out=units.view(unit_type).reshape(-1), mode="clip")
        pieces: list[list[Any]] = [[] for _ in self.lengths]
        for place, runs in enumerate(self._runs):
            column = units[:, place]
            for group, begin, end in runs:
                pieces[group].append(column[begin:end])
        groups = self.areas(words.dtype)
        for group, members in zip(groups, pieces, strict=True):
            if members:
                np.concatenate(members, out=group)
        return groups

    def join(self, groups: Sequence[Any], out: Any) -> None:
        """Put the words of all groups in their places; the reverse of `part`."""
        units = SCRATCH.area("units", out.nbytes).view(out.dtype).reshape(-1, self._unit)
        taken = [0] * self._n_groups
        for place, runs in enumerate(self._runs):
            pieces = []
            for group, begin, end in runs:
                first = taken[group]
                taken[group] = last = first + end - begin
                pieces.append(groups[group][first:last])
            if pieces:
                np.concatenate(pieces, out=units[:, place])
        unit_type = WORDS[out.itemsize * self._unit]
        out.view(unit_type)[self._order] = units.view(unit_type).reshape(-1)

    def areas(self, dtype: Any) -> list[Any]:
        """Give room for the words of each group; this thread's scratch memory."""
        words = SCRATCH.area("grouped", sum(self.lengths) * dtype.itemsize).view(dtype)
        ends = np.cumsum(self.lengths).tolist()
        return [words[end - length : end] for length, end in zip(self.lengths, ends, strict=True)]


def _classes(base: Any, thresholds: Sequence[int], unit: int) -> Any:
    """Number units by the groups of their words, which are the digits of the number, the first word's the last one."""
    bits = 8 * base.itemsize
    # Without their sign, words are above a magnitude if they are above all that begin with it.
    limits = [base.dtype.type((threshold + 1 << bits - 8) - 1) for threshold in thresholds]
    classes = SCRATCH.area("classes", len(base) // unit)
    unsigned = SCRATCH.area("words", _BLOCK_WORDS * base.itemsize).view(base.dtype)
    groups, is_above = SCRATCH.area("groups", _BLOCK_WORDS), SCRATCH.area("above", _BLOCK_WORDS)
    products = SCRATCH.area("products", _BLOCK_WORDS).view("<u2")
    for begin in range(0, len(base), _BLOCK_WORDS):
        block = base[begin : begin + _BLOCK_WORDS]
        n_words, n_groups = len(block), len(limits) + 1
        words = np.left_shift(block, 1, out=unsigned[:n_words])
        mine, above = groups[:n_words], is_above[:n_words]
        if not limits:
            mine[:] = 0
        for number, limit in enumerate(limits):
            np.greater(words, limit, out=(above if number else mine).view(bool))
            if number:
                np.add(mine, above, out=mine)
        together = 1
        while together < unit:
            # Of low + 256 * high, times n_groups + 256, the upper byte is low + n_groups * high.
            product = np.multiply(mine.view("<u2"), n_groups + 256, out=products[: len(mine) // 2])
            mine = mine[: len(product)]
            np.right_shift(product, 8, out=mine, casting="unsafe")
            n_groups *= n_groups
            together *= 2
        classes[begin // unit : (begin + n_words) // unit] = mine
    return classes


@cache
def _kinds(n_groups: int, unit: int) -> list[list[tuple[int, int]]]:
    """For each place in a unit the runs of classes whose words there are of one group: the group and the last class."""
    places = []
    for place in range(unit):
        n_together = n_groups**place
        lasts = range(n_together - 1, n_groups**unit, n_together)
        places.append([(last // n_together % n_groups, last) for last in lasts])
    return places
