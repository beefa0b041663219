"""The rows of a manifest as columns: 100,000 tensors cost a few calls, and not some calls for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from tensorcas_mlflow._lazy import Lazy
from tensorcas_mlflow.chunking import (
    Offsets,
    RowCuts,
    blocks_of,
    check_cuts,
    chunk_counts,
    chunk_sizes,
    offsets_of,
    ranges,
)
from tensorcas_mlflow.digest import DIGEST_BYTES, Digests
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.manifest._checks import row_cuts
from tensorcas_mlflow.manifest._row import Row
from tensorcas_mlflow.manifest._specs import Specs
from tensorcas_mlflow.tensor import Spec


@dataclass(frozen=True, kw_only=True, eq=False)
class Columns(Specs):
    """All rows of a manifest, column by column; `check_chunks` checks that the chunks fit them."""

    chunk_offsets: Any
    """The values of ``chunk_at``, in integers of any size, like ``shape_offsets``."""
    digests: Digests
    """The digests of all rows, one after the other."""
    cuts: RowCuts | None
    """Byte offsets of chunk ends; None if no row has any."""

    @Lazy
    def chunk_at(self) -> Offsets:
        """Number of the first chunk of each row, counted over all rows, and, last, the number of all chunks."""
        return np.asarray(self.chunk_offsets, dtype=np.int64)

    @classmethod
    def of_specs(cls, specs: Specs, *, chunk_at: Offsets, digests: Digests, cuts: RowCuts | None) -> Columns:
        """Add chunks to described rows."""
        described = {each.name: getattr(specs, each.name) for each in fields(specs)}
        return cls(**described, chunk_offsets=chunk_at, digests=digests, cuts=cuts)

    @classmethod
    def of_rows(cls, rows: Sequence[Row]) -> Columns:
        """Combine rows into columns."""
        return cls.of_specs(
            Specs.of([row.spec for row in rows]),
            chunk_at=offsets_of([len(row.digests) for row in rows]),
            digests=np.concatenate([np.empty((0, DIGEST_BYTES), np.uint8), *(row.digests for row in rows)]),
            cuts=row_cuts([row.cuts for row in rows]),
        )

    def check_chunks(self, chunk_bytes: int) -> None:
        """Check that each row has the chunks of its size and its cuts.

        Raises:
            FormatError: A row has others.
        """
        if self.cuts is not None:
            check_cuts(self.n_bytes, self.cuts)
        for block in blocks_of(len(self)):
            cuts = None if self.cuts is None else self.cuts.some(np.arange(block.start, block.stop))
            # Count the chunks before allocating offsets for them: a hostile shape must not cost memory.
            counts = chunk_counts(self.n_bytes_of(block), chunk_bytes, cuts)
            wrong = np.flatnonzero(counts != np.diff(self.chunk_offsets[block.start : block.stop + 1]))
            if len(wrong):
                row = block.start + int(wrong[0])
                n_chunks = int(self.chunk_offsets[row + 1] - self.chunk_offsets[row])
                name = self.name(row)[:80]
                raise FormatError(f"row {name!r} of a manifest has {n_chunks} chunks, which do not make its size")

    def chunk_sizes(self, chunk_bytes: int, rows: Any = None) -> Offsets:
        """Return the sizes of the chunks of all rows, or of some in the given order."""
        if rows is None:
            return chunk_sizes(self.n_bytes, chunk_bytes, self.cuts)
        cuts = None if self.cuts is None else self.cuts.some(rows)
        return chunk_sizes(self.n_bytes[rows], chunk_bytes, cuts)

    def chunks_of(self, rows: Any) -> Offsets:
        """Return the numbers of the chunks of some rows, one row after the other."""
        begins = self.chunk_at[rows]
        return ranges(begins, self.chunk_at[np.asarray(rows) + 1] - begins)

    def rows_of(self, chunks: Any) -> Any:
        """Return the row of each of these chunks, given by number."""
        return np.searchsorted(self.chunk_at[1:], chunks, side="right")

    def equal(self, rows: Any, other: Columns, other_rows: Any) -> Any:
        """Compare rows with as many of other columns, one to one.

        Returns:
            For each pair whether both have one dtype, one shape and the same chunks, and so one identity.
        """
        codes = {name: code for code, name in enumerate(other.dtypes)}
        same_dtype = np.array([codes.get(name, -1) for name in self.dtypes], dtype=np.intp)
        is_equal = same_dtype[self.dtype[rows]] == other.dtype[other_rows]
        for mine, at, its, its_at in (
            (self.sides, self.shape_at, other.sides, other.shape_at),
            (self.digests, self.chunk_at, other.digests, other.chunk_at),
        ):
            begins, its_begins = at[rows], its_at[other_rows]
            counts = at[rows + 1] - begins
            is_equal &= counts == its_at[other_rows + 1] - its_begins
            left = np.flatnonzero(is_equal)
            differs = mine[ranges(begins[left], counts[left])] != its[ranges(its_begins[left], counts[left])]
            if differs.ndim > 1:
                differs = differs.any(axis=1)
            is_equal[np.repeat(left, counts[left])[differs]] = False
        return is_equal

    def contents(self) -> Iterator[tuple[str | None, tuple[int, ...], bytes]]:
        """Yield the input of each row's identity: dtype, shape, and digests one after the other."""
        dtype, shape_at, sides = self.dtype.tolist(), self.shape_at.tolist(), self.sides.tolist()
        digests, digest_at = self.digests.tobytes(), (self.chunk_at * DIGEST_BYTES).tolist()
        for row, code in enumerate(dtype):
            shape = tuple(sides[shape_at[row] : shape_at[row + 1]])
            yield self.dtypes[code], shape, digests[digest_at[row] : digest_at[row + 1]]

    def row(self, row: int) -> Row:
        """Return one row."""
        cuts = None if self.cuts is None else self.cuts.of(row)
        digests = self.digests[self.chunk_offsets[row] : self.chunk_offsets[row + 1]]
        return Row(spec=self.spec(row), cuts=cuts, digests=digests)

    def each_row(self) -> Iterator[Row]:
        """Yield all rows, one after the other."""
        dtype, shape_at, chunk_at = self.dtype.tolist(), self.shape_at.tolist(), self.chunk_at.tolist()
        sides = self.sides.tolist()
        for row, name in enumerate(self.names.to_pylist()):
            shape = tuple(sides[shape_at[row] : shape_at[row + 1]])
            yield Row(
                spec=Spec(name=name, dtype=self.dtypes[dtype[row]], shape=shape),
                cuts=None if self.cuts is None else self.cuts.of(row),
                digests=self.digests[chunk_at[row] : chunk_at[row + 1]],
            )
