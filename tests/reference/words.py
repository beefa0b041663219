"""Words, their byte planes, and their order in groups: the loops that codecs 3 and 4 share.

A *plane* holds the bytes of one significance of all words. The planes are those of the words themselves, or of their
differences from a base, and the words may be ordered in groups. numpy does here, in one step for each part of the work,
what the core's loops do in one pass over memory.

Groups: a training step changes more digits of small numbers than of large ones. Differences of numbers of like
magnitude are alike in size, so each group gets shorter Huffman codes of its own. The decoder has the base and computes
the groups from it, so the order costs no room. Words move in *units* of neighbours, sorted by the groups of all their
words. The words in one place of like units belong to one group and stand together. Units take a half or a quarter of
the sorting and lose nothing of the grouping.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate, chain, cycle
from typing import Any

import numpy as np

WORDS: Mapping[int, Any] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
"""Unsigned words by size in bytes."""
WORD_BYTES = frozenset(WORDS)
"""Element sizes that codecs 3 and 4 treat as words."""
BLOCK_WORDS = 1 << 16
"""Words per step of a numpy loop; so many stay in the processor's cache from one step to the next."""
MOST_CLASSES = 256
"""Most classes of units, because one byte holds a class."""
UNIT_WORDS = {1: 4, 2: 4, 4: 2, 8: 1}
"""Words per unit, by word size."""

_SIGNED: Mapping[int, Any] = {1: np.dtype("<i1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}
_SHARES = {1: (0.1, 0.35), 2: (0.1, 0.35), 4: (0.06, 0.15, 0.32, 0.6), 8: (0.06, 0.15, 0.32, 0.6)}
"""Ends of the groups as shares of the words, by word size. Small numbers differ most from each other in magnitude."""
_SAMPLE_WORDS = 4096
_N_STRETCHES = 4
_MOST_KEPT_BYTES = 2 << 20
"""Larger areas are not kept: chunks are rarely as large, and every thread would hold on to its area for ever."""


class _Scratch(threading.local):
    """Memory that a thread reuses: the kernel fills fresh memory at a third of the speed of a copy."""

    def __init__(self) -> None:
        self._areas: dict[str, Any] = {}

    def area(self, use: str, n_bytes: int) -> Any:
        """Return an uninitialised 1-d uint8 array, which is valid until this thread asks for the same use again."""
        if n_bytes > _MOST_KEPT_BYTES:
            return np.empty(n_bytes, np.uint8)
        area = self._areas.get(use)
        if area is None or len(area) < n_bytes:
            area = self._areas[use] = np.empty(max(n_bytes, 1 << 16), np.uint8)
        return area[:n_bytes]


SCRATCH = _Scratch()


def words_in(data: Any, width: int, unit: int = 1) -> tuple[Any, Any]:
    """View bytes as whole units of words, and the tail behind them."""
    n_bytes = len(data) // (width * unit) * (width * unit)
    return data[:n_bytes].view(WORDS[width]), data[n_bytes:]


def stretches_of(words: Any, n_words: int) -> Any:
    """Take about ``n_words`` words in four stretches; arrays of equal length give words of the same places."""
    if len(words) <= 2 * n_words:
        return words
    length = n_words // _N_STRETCHES
    starts = np.linspace(0, len(words) - length, _N_STRETCHES, dtype=np.int64)
    return np.concatenate([words[start : start + length] for start in starts.tolist()])


# --- planes


def room_for_planes(n_words: int, width: int) -> Any:
    """Return scratch memory for the planes of words, one behind the other."""
    return SCRATCH.area("planes", n_words * width)


def planes_in(room: Any, width: int) -> list[Any]:
    """View the memory of `room_for_planes` as planes, the least significant bytes first."""
    n_words = len(room) // width
    return [room[place * n_words : (place + 1) * n_words] for place in range(width)]


def split(words: Any, base: Any = None, groups: Groups | None = None) -> list[Any]:
    """Take words apart into planes.

    Args:
        words: Unsigned words, 1-d.
        base: As many words of the same type, for the planes of the zigzag differences; None for those of the words.
        groups: Groups of the base, for planes in the order of the groups; None for the order of the words.

    Returns:
        The planes, the least significant bytes first; views of ``words`` or scratch memory.
    """
    n_words, width = len(words), words.itemsize
    if n_words == 0 or (width == 1 and base is None):
        return [words.view(np.uint8)] * width
    room = room_for_planes(n_words, width)
    if base is not None:
        out = SCRATCH.area("differences", words.nbytes).view(words.dtype)
        subtract(words, base, out)
        words = out
    _split(words if groups is None else groups.part(words), planes_in(room, width))
    return planes_in(room, width)


def join(room: Any, words: Any, base: Any = None, groups: Groups | None = None) -> None:
    """Put words together from planes; the reverse of `split`.

    Args:
        room: The planes, the least significant bytes first, one behind the other.
        words: Output array.
        base: As for `split`; must not overlap ``words``.
        groups: As for `split`.
    """
    if len(words) == 0:
        return
    grouped = words if groups is None else groups.area(words.dtype)
    _join(planes_in(room, words.itemsize), grouped)
    if groups is not None:
        groups.join(groups.split(grouped), words)
    if base is not None:
        add(words, base)


def subtract(words: Any, base: Any, out: Any) -> None:
    """Compute zigzag differences, which are small where two words are near each other.

    Args:
        words: Unsigned words, 1-d.
        base: As many of the same type.
        out: Output array of the same type and length; may be ``words``.
    """
    signed, top = _SIGNED[words.itemsize], 8 * words.itemsize - 1
    signs = _block("signs", words.dtype)
    for begin in range(0, len(words), BLOCK_WORDS):
        x, b, r = (each[begin : begin + BLOCK_WORDS] for each in (words, base, out))
        s = signs[: len(x)]
        np.subtract(x, b, out=r)
        np.right_shift(r.view(signed), top, out=s.view(signed))
        np.left_shift(r, 1, out=r)
        np.bitwise_xor(r, s, out=r)


def add(words: Any, base: Any) -> None:
    """Turn zigzag differences back into words, in place; the reverse of `subtract`."""
    signs = _block("signs", words.dtype)
    for begin in range(0, len(words), BLOCK_WORDS):
        r, b = words[begin : begin + BLOCK_WORDS], base[begin : begin + BLOCK_WORDS]
        s = signs[: len(r)]
        np.bitwise_and(r, 1, out=s)
        np.negative(s, out=s)
        np.right_shift(r, 1, out=r)
        np.bitwise_xor(r, s, out=r)
        np.add(r, b, out=r)


def _block(use: str, dtype: Any) -> Any:
    return SCRATCH.area(use, BLOCK_WORDS * dtype.itemsize).view(dtype)


def _split(words: Any, planes: Sequence[Any]) -> None:
    shifted = _block("words", words.dtype)
    for begin in range(0, len(words), BLOCK_WORDS):
        block = words[begin : begin + BLOCK_WORDS]
        part = shifted[: len(block)]
        for place, plane in enumerate(planes):
            # A cast to a narrower type keeps the low byte, and is several times as fast as a copy with strides.
            np.copyto(plane[begin : begin + len(block)], np.right_shift(block, 8 * place, out=part), casting="unsafe")


def _join(planes: Sequence[Any], words: Any) -> None:
    # Differences are small: their top planes often hold only zeros.
    while len(planes) > 1 and not planes[-1].any():
        planes = planes[:-1]
    for begin in range(0, len(words), BLOCK_WORDS):
        block = words[begin : begin + BLOCK_WORDS]
        end = begin + len(block)
        np.copyto(block, planes[-1][begin:end])
        for plane in planes[-2::-1]:
            np.left_shift(block, 8, out=block)
            np.bitwise_or(block, plane[begin:end], out=block)


# --- groups


def thresholds_for(base: Any) -> list[int]:
    """Choose the ends of the groups.

    Args:
        base: Unsigned words, 1-d; at least one.

    Returns:
        The largest magnitude of each group but the last, strictly ascending.
    """
    step = max(1, len(base) // _SAMPLE_WORDS)
    below = np.bincount(_magnitudes(base[::step]), minlength=256).cumsum()
    ends = np.searchsorted(below, [share * below[-1] for share in _SHARES[base.itemsize]])
    top = int(np.flatnonzero(np.diff(below, prepend=0))[-1])
    return sorted({int(end) for end in ends if end < top})


class Groups:
    """The order of a chunk's words in groups, and the way back."""

    def __init__(self, base: Any, thresholds: Sequence[int], unit: int) -> None:
        """Classify the units of a base.

        Args:
            base: The words of the base, unsigned, 1-d; a whole number of units.
            thresholds: The largest magnitude of each group but the last, strictly ascending.
            unit: Words per unit: 1, 2, 4 or 8. The number of groups to the power of it is at most `MOST_CLASSES`.
        """
        self.n_groups = len(thresholds) + 1
        self.unit = unit
        self.lengths: list[int]
        """Words per group."""
        self.classes: Any
        """Class of each unit; scratch memory."""
        self._order: Any = None
        """Units sorted by class."""
        self.classes = _classes(base, thresholds, unit)
        self.lengths = self._sorted_lengths()

    def _sorted_lengths(self) -> list[int]:
        """Sort the units, and return the number of words in each group."""
        n_groups = self.n_groups
        self._order = np.argsort(self.classes, kind="stable")  # a radix sort
        numbers = _numbers(n_groups**self.unit)
        ends = np.searchsorted(self.classes, numbers, side="right", sorter=self._order).tolist()
        lengths = [0] * n_groups
        self._runs: list[list[tuple[int, int, int]]] = []
        """For each place in a unit, the runs of sorted units of one group: the group, the first, and one past."""
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
        """Return the words of all groups, one group behind the other, in the order of the format; scratch memory."""
        units = SCRATCH.area("units", words.nbytes).view(words.dtype).reshape(-1, self.unit)
        unit_type = WORDS[words.itemsize * self.unit]
        # With mode="clip" numpy checks nothing and writes straight into the buffer.
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
        """Put the words of all groups back in their places; the reverse of `part`."""
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
        """Return scratch memory for the words of all groups, one group behind the other."""
        return SCRATCH.area("grouped", sum(self.lengths) * dtype.itemsize).view(dtype)

    def split(self, words: Any) -> list[Any]:
        """View the memory of `area` as groups."""
        ends = accumulate(self.lengths)
        return [words[end - length : end] for length, end in zip(self.lengths, ends, strict=True)]


def _classes(base: Any, thresholds: Sequence[int], unit: int) -> Any:
    """Compute the classes of units: numbers whose digits are the groups of the words, the first word's the last one."""
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
    """Return the eight bits below the top one of each word; scratch memory."""
    out = SCRATCH.area("magnitudes", len(base))
    if base.itemsize == 1:
        return np.left_shift(base, 1, out=out)
    shifted = SCRATCH.area("words", min(len(base), BLOCK_WORDS) * base.itemsize).view(base.dtype)
    for begin in range(0, len(base), BLOCK_WORDS):
        block = base[begin : begin + BLOCK_WORDS]
        # A cast to bytes drops the top bit.
        bits = np.right_shift(block, 8 * base.itemsize - 9, out=shifted[: len(block)])
        np.copyto(out[begin : begin + len(block)], bits, casting="unsafe")
    return out


def _groups_of(magnitudes: Any, thresholds: Sequence[int]) -> Any:
    """Return the group of each word, which is the number of thresholds below its magnitude; scratch memory."""
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
