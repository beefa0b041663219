"""One row of a manifest, and a manifest's rows as a sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from tensorcas_mlflow.chunking import chunk_ends
from tensorcas_mlflow.digest import Digests, digest
from tensorcas_mlflow.tensor import Spec

if TYPE_CHECKING:
    from tensorcas_mlflow.manifest._columns import Columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a manifest: its name, dtype and shape, and its chunks."""

    spec: Spec
    cuts: Any
    """Byte offsets of chunk ends, an int64 array, or None."""
    digests: Digests

    def ends(self, chunk_bytes: int) -> Any:
        """Return the ends of the row's chunks, in bytes."""
        return chunk_ends(self.spec.n_bytes, chunk_bytes, self.cuts)

    @property
    def identity(self) -> str:
        """Digest of the row's content: equal for equal tensors in any store."""
        shape = np.array(self.spec.shape, dtype="<i8").tobytes()
        return digest((self.spec.dtype or "").encode() + b"\0" + shape + self.digests.tobytes()).hex()


class Rows(Sequence[Row]):
    """The rows of columns, each built on access."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> list[Row]: ...

    def __getitem__(self, at: int | slice) -> Row | list[Row]:
        numbers = range(len(self.columns))[at]
        if isinstance(numbers, int):
            return self.columns.row(numbers)
        return [self.columns.row(number) for number in numbers]

    def __iter__(self) -> Iterator[Row]:
        return self.columns.each_row()
