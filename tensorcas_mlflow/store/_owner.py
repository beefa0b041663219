"""Whose chunks are read, for errors that say who suffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.manifest import Columns, Row, Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The checkpoint or file that some chunks, which follow each other, belong to."""

    label: str | None = None
    """In words; None if it is not known."""
    rows: Sequence[Row] = ()
    """All rows whose chunks are counted."""
    first: int = 0
    """Number of the first of the chunks, counted over all rows."""

    def names(self, chunks: Any) -> tuple[str, ...]:
        """Name the tensors that some of the chunks, by their numbers, belong to; stretches of a file have no name."""
        return names_of(self.rows, np.asarray(chunks) + self.first)


def names_of(rows: Sequence[Row], chunks: Any) -> tuple[str, ...]:
    """Name the tensors that some chunks, by their numbers counted over all rows, belong to."""
    columns = rows.columns if isinstance(rows, Rows) else Columns.of_rows(rows)
    at = np.unique(columns.rows_of(chunks))
    return tuple(name for row in at.tolist() if row < len(columns) and (name := columns.name(row)))


NOBODY = Owner()
