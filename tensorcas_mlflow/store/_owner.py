"""Whose chunks are read, for errors that say who suffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.manifest import Row


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
    counts = np.fromiter((len(row.digests) for row in rows), np.int64, len(rows))
    at = np.unique(np.searchsorted(np.cumsum(counts), chunks, side="right"))
    return tuple(name for row in at.tolist() if row < len(rows) and (name := rows[row].spec.name))


NOBODY = Owner()
