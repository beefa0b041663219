"""Some of the tensors of a checkpoint, under names of their own: the model within a training state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from tensorcas_mlflow._arrow import array_of_texts
from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.chunking import Offsets
from tensorcas_mlflow.reader._contents import Contents
from tensorcas_mlflow.reader._slices import Selection


class PartContents(Contents):
    """Some tensors of other contents."""

    def __init__(self, whole: Contents, rows: Offsets, names: list[str], *, label: str) -> None:
        """Choose tensors.

        Args:
            whole: What they are among.
            rows: Which, by number.
            names: What they are called here.
            label: Whose they are, in words.
        """
        self.whole = whole
        self.row_of = rows
        self.label = label
        self.metadata = whole.metadata
        self.tally = whole.tally
        self.specs = dataclasses.replace(whole.specs.some(rows), names=array_of_texts(names))

    def arrays(self, rows: Offsets, outs: Mapping[int, Array] | None = None) -> list[Array]:
        return self.whole.arrays(self.row_of[rows], outs)

    def fill(self, row: int, starts: Offsets, stops: Offsets, block: memoryview) -> None:
        self.whole.fill(int(self.row_of[row]), starts, stops, block)

    def pieces(self, row: int, piece_bytes: int) -> Iterator[memoryview]:
        return self.whole.pieces(int(self.row_of[row]), piece_bytes)

    def select(self, row: int, selection: Selection) -> Array:
        return self.whole.select(int(self.row_of[row]), selection)

    def other_content(self) -> dict[str, bytes]:
        # Nobody can tell which part of a skeleton is of these tensors, so a part has all of it.
        return self.whole.other_content()

    def chunk_digests(self, row: int) -> bytes | None:
        return self.whole.chunk_digests(int(self.row_of[row]))
