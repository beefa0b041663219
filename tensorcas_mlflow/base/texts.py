"""Many texts as two arrays: the names of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from tensorcas_mlflow.base.tensors import Offsets, offsets_of, ranges


class Texts:
    """Texts, one after the other in UTF-8, as Arrow lays them out. A lookup of one builds no Python string."""

    __slots__ = ("at", "data")

    def __init__(self, at: Any, data: Any) -> None:
        """View texts.

        Args:
            at: Start of each text among the bytes, ascending from 0, and, last, the end of the last one.
            data: The bytes of all texts, valid UTF-8 each.
        """
        self.at = at
        self.data = data

    @classmethod
    def of(cls, texts: Iterable[str]) -> Texts:
        """Encode texts.

        Raises:
            UnicodeEncodeError: A text cannot be encoded.
            ValueError: They have 2 GiB or more.
        """
        encoded = [text.encode() for text in texts]
        at = offsets_of(np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded)))
        if at[-1] >= 1 << 31:
            raise ValueError("texts of 2 GiB or more do not go into one array")
        return cls(at, np.frombuffer(b"".join(encoded), np.uint8))

    def __len__(self) -> int:
        return len(self.at) - 1

    def __getitem__(self, row: int) -> str:
        data: bytes = self.data[self.at[row] : self.at[row + 1]].tobytes()
        return data.decode()

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_list())

    def to_list(self) -> list[str]:
        """Return all texts."""
        ends = pairwise(self.at.tolist())
        data = self.data.tobytes()
        if data.isascii():
            text = data.decode("ascii")
            return [text[start:stop] for start, stop in ends]
        return [data[start:stop].decode() for start, stop in ends]

    def take(self, rows: Any) -> Texts:
        """Return some texts, by number, in the given order."""
        at = np.asarray(self.at, dtype=np.int64)
        begins = at[rows]
        counts = at[np.asarray(rows) + 1] - begins
        return Texts(offsets_of(counts), self.data[ranges(begins, counts)])

    def find(self, text: str) -> Offsets:
        """Return the numbers of the texts equal to one, ascending."""
        try:
            wanted = text.encode()
        except UnicodeEncodeError:
            return np.empty(0, dtype=np.int64)
        rows = np.flatnonzero(np.diff(self.at) == len(wanted))
        begins = np.asarray(self.at[rows], dtype=np.int64)
        # Names of one length differ near their ends most often. Each step looks at one byte of those left, so a search
        # looks at no byte twice.
        for place in range(len(wanted) - 1, -1, -1):
            if len(rows) == 0:
                break
            is_equal = self.data[begins + place] == wanted[place]
            if not is_equal.all():
                rows, begins = rows[is_equal], begins[is_equal]
        return rows

    def distinct(self) -> tuple[list[str], list[int]]:
        """Return the distinct texts in the order of their first occurrence, and for each text the number of its own."""
        numbers: dict[str, int] = {}
        of_text = [numbers.setdefault(text, len(numbers)) for text in self.to_list()]
        return list(numbers), of_text
