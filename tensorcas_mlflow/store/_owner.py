"""Owners of chunks, for errors that name the affected checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.manifest import Columns, Row, Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The checkpoint or file of some consecutive chunks."""

    label: str | None = None
    """Its name in words; None if it is unknown."""
    rows: Sequence[Row] = ()
    """All rows that count in the chunks' numbers."""
    first: int = 0
    """Number of the first of the chunks, counted over all rows."""

    def names(self, chunks: Any) -> tuple[str, ...]:
        """Return the names of some chunks' tensors, by the chunks' numbers; stretches of a file have no name."""
        return names_of(self.rows, np.asarray(chunks) + self.first)


def names_of(rows: Sequence[Row], chunks: Any) -> tuple[str, ...]:
    """Return the names of some chunks' tensors, by the chunks' numbers counted over all rows."""
    columns = rows.columns if isinstance(rows, Rows) else Columns.of_rows(rows)
    at = np.unique(columns.rows_of(chunks))
    return tuple(name for row in at.tolist() if row < len(columns) and (name := columns.name(row)))


NOBODY = Owner()
