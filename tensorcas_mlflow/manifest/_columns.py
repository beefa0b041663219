"""The rows of a manifest as columns: what 100,000 tensors cost is then a few calls, and not some for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tensorcas_mlflow._lazy import Lazy
from tensorcas_mlflow.chunking import Offsets, RowCuts, check_cuts, chunk_counts, chunk_sizes, offsets_of, ranges
from tensorcas_mlflow.digest import DIGEST_BYTES, Digests
from tensorcas_mlflow.dtypes import parse_dtype
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.manifest._checks import check_names, row_cuts, row_sizes
from tensorcas_mlflow.manifest._row import Row
from tensorcas_mlflow.tensor import Spec


@dataclass(frozen=True, kw_only=True, eq=False)
class Columns:
    """All rows of a manifest, column by column. Names and shapes are checked here, chunks by `check_chunks`.

    Raises:
        FormatError: A name, a dtype or a shape is none.
    """

    names: Any
    """A pyarrow array of texts without a null."""
    dtypes: tuple[str | None, ...]
    """The different dtypes, as manifests name them."""
    dtype: Any
    """For each row which of them it has."""
    shape_at: Offsets
    """Where the sides of each row begin among ``sides``, and, last, where those of the last row end."""
    sides: Offsets
    chunk_at: Offsets
    """Number of the first chunk of each row, counted over all rows, and, last, how many chunks there are."""
    digests: Digests
    """The digests of all rows, one after the other."""
    cuts: RowCuts | None
    """Byte offsets at which chunks end; None where no row has any."""

    def __post_init__(self) -> None:
        check_names(self.names)
        self.n_bytes  # noqa: B018 - computed once, and checked by that
        if None in self.dtypes:
            is_plain = self.dtype == self.dtypes.index(None)
            if (np.diff(self.shape_at)[is_plain] != 1).any():
                raise FormatError("plain bytes must have one dimension")

    def __len__(self) -> int:
        return len(self.chunk_at) - 1

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Columns:
        """Put rows together."""
        different: dict[str | None, int] = {}
        codes = [different.setdefault(row.spec.dtype, len(different)) for row in rows]
        all_cuts = [row.cuts for row in rows]
        none = [np.empty((0, DIGEST_BYTES), np.uint8)]
        return cls(
            names=pa.array([row.spec.name for row in rows], pa.utf8()),
            dtypes=tuple(different),
            dtype=np.array(codes, dtype=np.intp),
            shape_at=offsets_of([len(row.spec.shape) for row in rows]),
            sides=np.fromiter(chain.from_iterable(row.spec.shape for row in rows), dtype=np.int64),
            chunk_at=offsets_of([len(row.digests) for row in rows]),
            digests=np.concatenate(none + [row.digests for row in rows]),
            cuts=row_cuts(all_cuts),
        )

    def check_chunks(self, chunk_bytes: int) -> None:
        """See that each row has the chunks that its size and its cuts make.

        Raises:
            FormatError: One has not.
        """
        # Counted before offsets are made for them: a hostile shape must not cost memory.
        if self.cuts is not None:
            check_cuts(self.n_bytes, self.cuts)
        wrong = np.flatnonzero(chunk_counts(self.n_bytes, chunk_bytes, self.cuts) != np.diff(self.chunk_at))
        if len(wrong):
            row = int(wrong[0])
            n_chunks = int(self.chunk_at[row + 1] - self.chunk_at[row])
            raise FormatError(
                f"row {self.name(row)[:80]!r} of a manifest has {n_chunks} chunks, which do not make its size"
            )

    # --- sizes

    @Lazy
    def itemsizes(self) -> Offsets:
        """Size of an element of each row in bytes; 1 for plain bytes."""
        return self._of_dtypes([1 if name is None else parse_dtype(name).itemsize for name in self.dtypes])

    @Lazy
    def codec_itemsizes(self) -> Offsets:
        """Size of an element of each row as codecs are told it: 1 for texts too."""
        is_text = [name is None or name[0] in "SU" for name in self.dtypes]
        sizes = [1 if name is None else parse_dtype(name).itemsize for name in self.dtypes]
        return self._of_dtypes(np.where(is_text, 1, sizes))

    def _of_dtypes(self, numbers: Any) -> Offsets:
        """Give each row the number of its dtype."""
        if len(self.dtypes) == 1:
            return np.full(len(self), numbers[0], dtype=np.int64)
        return np.array(numbers, dtype=np.int64)[self.dtype]

    @Lazy
    def n_bytes(self) -> Offsets:
        """Size of each row in bytes."""
        return row_sizes(self.shape_at, self.sides, self.itemsizes)

    def chunk_sizes(self, chunk_bytes: int, rows: Any = None) -> Offsets:
        """Give the sizes of the chunks of all rows, or of some in the order in which they are given."""
        if rows is None:
            return chunk_sizes(self.n_bytes, chunk_bytes, self.cuts)
        cuts = None if self.cuts is None else self.cuts.some(rows)
        return chunk_sizes(self.n_bytes[rows], chunk_bytes, cuts)

    def chunks_of(self, rows: Any) -> Offsets:
        """The numbers of the chunks of some rows, one after the other."""
        begins = self.chunk_at[rows]
        return ranges(begins, self.chunk_at[np.asarray(rows) + 1] - begins)

    def rows_of(self, chunks: Any) -> Any:
        """Tell which row each of some chunks, by their numbers, belongs to."""
        return np.searchsorted(self.chunk_at[1:], chunks, side="right")

    # --- single rows

    def name(self, row: int) -> str:
        """The name of one row."""
        name: str = self.names[row].as_py()
        return name

    def shape(self, row: int) -> tuple[int, ...]:
        """The shape of one row."""
        return tuple(self.sides[self.shape_at[row] : self.shape_at[row + 1]].tolist())

    def spec(self, row: int) -> Spec:
        """Describe one row."""
        return Spec(name=self.name(row), dtype=self.dtypes[self.dtype[row]], shape=self.shape(row))

    def row(self, row: int) -> Row:
        """Make one row."""
        cuts = None if self.cuts is None else self.cuts.of(row)
        return Row(spec=self.spec(row), cuts=cuts, digests=self.digests[self.chunk_at[row] : self.chunk_at[row + 1]])

    def each_row(self) -> Iterator[Row]:
        """Make all rows, one after the other."""
        names, dtype = self.names.to_pylist(), self.dtype.tolist()
        shape_at, sides, chunk_at = self.shape_at.tolist(), self.sides.tolist(), self.chunk_at.tolist()
        for row, name in enumerate(names):
            shape = tuple(sides[shape_at[row] : shape_at[row + 1]])
            yield Row(
                spec=Spec(name=name, dtype=self.dtypes[dtype[row]], shape=shape),
                cuts=None if self.cuts is None else self.cuts.of(row),
                digests=self.digests[chunk_at[row] : chunk_at[row + 1]],
            )

    def find(self, name: str) -> Any:
        """Find the rows of one name: their numbers, ascending."""
        return np.flatnonzero(pc.equal(self.names, pa.scalar(name, pa.utf8())).to_numpy(zero_copy_only=False))
