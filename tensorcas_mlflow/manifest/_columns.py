"""The rows of a manifest as columns: what 100,000 tensors cost is then a few calls, and not some for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from tensorcas_mlflow.chunking import Offsets, RowCuts, check_cuts, chunk_counts, chunk_sizes, offsets_of, ranges
from tensorcas_mlflow.digest import DIGEST_BYTES, Digests
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.manifest._checks import row_cuts
from tensorcas_mlflow.manifest._row import Row
from tensorcas_mlflow.manifest._specs import Specs
from tensorcas_mlflow.tensor import Spec


@dataclass(frozen=True, kw_only=True, eq=False)
class Columns(Specs):
    """All rows of a manifest, column by column; that the chunks fit them is seen to by `check_chunks`."""

    chunk_at: Offsets
    """Number of the first chunk of each row, counted over all rows, and, last, how many chunks there are."""
    digests: Digests
    """The digests of all rows, one after the other."""
    cuts: RowCuts | None
    """Byte offsets at which chunks end; None where no row has any."""

    @classmethod
    def of_specs(cls, specs: Specs, *, chunk_at: Offsets, digests: Digests, cuts: RowCuts | None) -> Columns:
        """Give rows that are described their chunks."""
        described = {each.name: getattr(specs, each.name) for each in fields(specs)}
        return cls(**described, chunk_at=chunk_at, digests=digests, cuts=cuts)

    @classmethod
    def of_rows(cls, rows: Sequence[Row]) -> Columns:
        """Put rows together."""
        return cls.of_specs(
            Specs.of([row.spec for row in rows]),
            chunk_at=offsets_of([len(row.digests) for row in rows]),
            digests=np.concatenate([np.empty((0, DIGEST_BYTES), np.uint8), *(row.digests for row in rows)]),
            cuts=row_cuts([row.cuts for row in rows]),
        )

    def check_chunks(self, chunk_bytes: int) -> None:
        """See that each row has the chunks that its size and its cuts make.

        Raises:
            FormatError: One has not.
        """
        if self.cuts is not None:
            check_cuts(self.n_bytes, self.cuts)
        # Counted before offsets are made for them: a hostile shape must not cost memory.
        wrong = np.flatnonzero(chunk_counts(self.n_bytes, chunk_bytes, self.cuts) != np.diff(self.chunk_at))
        if len(wrong):
            row = int(wrong[0])
            n_chunks = int(self.chunk_at[row + 1] - self.chunk_at[row])
            raise FormatError(
                f"row {self.name(row)[:80]!r} of a manifest has {n_chunks} chunks, which do not make its size"
            )

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

    def row(self, row: int) -> Row:
        """Make one row."""
        cuts = None if self.cuts is None else self.cuts.of(row)
        return Row(spec=self.spec(row), cuts=cuts, digests=self.digests[self.chunk_at[row] : self.chunk_at[row + 1]])

    def each_row(self) -> Iterator[Row]:
        """Make all rows, one after the other."""
        dtype, shape_at, chunk_at = self.dtype.tolist(), self.shape_at.tolist(), self.chunk_at.tolist()
        sides = self.sides.tolist()
        for row, name in enumerate(self.names.to_pylist()):
            shape = tuple(sides[shape_at[row] : shape_at[row + 1]])
            yield Row(
                spec=Spec(name=name, dtype=self.dtypes[dtype[row]], shape=shape),
                cuts=None if self.cuts is None else self.cuts.of(row),
                digests=self.digests[chunk_at[row] : chunk_at[row + 1]],
            )
