"""Names of tensors by what they have in common: ``layers.0.w`` and ``layers.1.w`` are one pattern with a number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tensorcas_mlflow._arrow import array_of_texts, text_buffers, values_of
from tensorcas_mlflow.chunking import Offsets, offsets_of

NUMBER = "\n"
"""Stands for a number in a pattern; no name has a line break."""

_MOST_DIGITS = 18
"""Longer ones are text: they do not fit into 64 bits."""
_ZERO, _NINE, _DOT = ord("0"), ord("9"), ord(".")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patterns:
    """Names, each as a pattern and the numbers in it. A number is a whole part of a name, between dots."""

    texts: Sequence[str]
    """The different patterns, in the order in which they first occur, `NUMBER` in the place of each number."""
    pattern: Offsets
    """For each name which of them it has."""
    numbers: Offsets
    """The numbers of all names, one after the other."""
    number_at: Offsets
    """Where those of each name begin among ``numbers`` and, last, where those of the last one end."""

    @classmethod
    def of(cls, names: Any) -> Patterns:
        """Find the patterns of names.

        100,000 names take some tens of milliseconds: their bytes are looked at all at once.

        Args:
            names: A pyarrow array of utf8, its offsets sound.
        """
        at, data = text_buffers(names)
        at = at.astype(np.int64)
        begins, ends = _numbers_in(at, data)
        of_name = np.searchsorted(at, begins, side="right") - 1
        counts = np.bincount(of_name, minlength=len(names)) if len(names) else np.empty(0, np.int64)
        texts, pattern = _patterns(at, data, begins, ends)
        return cls(texts=texts, pattern=pattern, numbers=_values(data, begins, ends), number_at=offsets_of(counts))

    def slot(self, rows: Any, nth: Any) -> Offsets:
        """Give one of the numbers of some names.

        Args:
            rows: Which names.
            nth: Which of its numbers, for each or for all.
        """
        values: Offsets = self.numbers[self.number_at[rows] + nth]
        return values

    def rows_by_pattern(self) -> list[Offsets]:
        """For each pattern the names that have it, ascending."""
        order = np.argsort(self.pattern, kind="stable")
        borders = np.searchsorted(self.pattern[order], np.arange(1, len(self.texts)))
        return list(np.split(order, borders)) if self.texts else []


def _numbers_in(at: Offsets, data: Any) -> tuple[Offsets, Offsets]:
    """Find the parts of names that are numbers: where each begins, and one past its end."""
    n_bytes = len(data)
    is_border = np.zeros(n_bytes + 1, dtype=bool)
    is_border[at] = True  # a name begins here, and the one before has ended
    is_digit = (data >= _ZERO) & (data <= _NINE)
    is_dot = data == _DOT
    starts = is_digit & is_border[:-1]
    starts[1:] |= is_digit[1:] & is_dot[:-1]
    begins = np.flatnonzero(starts)
    # The end of the digits that begin there: the first place after it that is no digit, or that another name begins at.
    stops = is_border.copy()
    stops[:-1] |= ~is_digit
    places = np.flatnonzero(stops)
    ends = places[np.searchsorted(places, begins, side="right")] if len(begins) else begins
    is_whole = is_border[ends]
    inside = np.flatnonzero(~is_whole)
    is_whole[inside] = is_dot[ends[inside]]
    is_whole &= ends - begins <= _MOST_DIGITS
    return begins[is_whole], ends[is_whole]


def _values(data: Any, begins: Offsets, ends: Offsets) -> Offsets:
    values = np.zeros(len(begins), dtype=np.int64)
    for nth in range(int((ends - begins).max(initial=0))):
        longer = np.flatnonzero(ends - begins > nth)
        values[longer] = values[longer] * 10 + (data[begins[longer] + nth] - _ZERO)
    return values


def _patterns(at: Offsets, data: Any, begins: Offsets, ends: Offsets) -> tuple[list[str], Offsets]:
    written = data.copy()
    written[begins] = ord(NUMBER)
    steps = np.zeros(len(data) + 1, dtype=np.int8)
    steps[begins + 1] += 1
    steps[ends] -= 1
    is_kept = steps[:-1].cumsum(dtype=np.int8) == 0
    written = written[is_kept]
    kept_before = np.concatenate(([0], is_kept.cumsum()))
    offsets = kept_before[at].astype(np.int32)
    if len(at) == 1:
        return [], np.empty(0, np.int64)
    texts = pa.Array.from_buffers(
        pa.utf8(), len(at) - 1, [None, pa.py_buffer(offsets.data), pa.py_buffer(written.data)]
    ).dictionary_encode()
    different: list[str] = [str(text) for text in texts.dictionary.to_pylist()]
    return different, values_of(texts.indices).astype(np.int64)


def array_of_names(names: Sequence[str]) -> Any:
    """Put names into an array as `Patterns.of` takes it."""
    return array_of_texts(names)
