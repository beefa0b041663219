"""Recipes for the chunks of one save: the choices for their tensors, and their bases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.codecs import Buffer, Effort
from tensorcas_mlflow.pack import Base
from tensorcas_mlflow.store._base_plan import MAX_DEPTH, BasePlan
from tensorcas_mlflow.store._choose import Arrangements, Choice, Chooser, sample_number
from tensorcas_mlflow.store._policy import Policy
from tensorcas_mlflow.store._sources import Pieces, Source

_LEAST_ROW_BYTES = 16 << 10
"""Smaller tensors are not examined one by one."""


def new_chooser(policy: Policy, arrangements: Arrangements | None = None) -> Chooser:
    """Create the chooser for the tensors of one save; see `Chooser`."""
    effort = Effort.SMALL if policy is Policy.SMALL else Effort.BALANCED
    return Chooser(max_depth=MAX_DEPTH, effort=effort, arrangements=arrangements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Encoding of one chunk."""

    choice: Choice
    named: Base | None = None
    """Possible base of the chunk."""
    base: Buffer | None = None
    """The same base, decoded."""


class Recipes:
    """The recipes of one save. For one thread: the one that draws the chunks the others encode."""

    def __init__(
        self, source: Source, chunks: Any, policy: Policy, plan: BasePlan | None, chooser: Chooser | None = None
    ) -> None:
        """Begin without any choice.

        Args:
            source: Source of the bytes.
            chunks: Numbers of the chunks to encode, ascending.
            policy: Encoding effort.
            plan: Possible bases, protected by the save's intent.
            chooser: The choices for earlier batches of the same stream, under the same policy.
        """
        self._source = source
        self._chunks = chunks
        self._plan = plan
        columns = source.columns
        is_tensor = np.array([name is not None and name[0] not in "SU" for name in columns.dtypes], dtype=bool)
        self._is_chosen = is_tensor[columns.dtype] & (columns.n_bytes >= _LEAST_ROW_BYTES) & (policy is not Policy.FAST)
        self._chooser = chooser or new_chooser(policy)
        self._choices: dict[int, Choice] = {}
        if plan:
            rows = np.unique(columns.rows_of(chunks[plan.has(chunks)]))
            rows = rows[self._is_chosen[rows]]
            if len(rows):  # the first tensor asked for decides the depth of bases
                self._choice(int(rows[np.argmax(columns.n_bytes[rows])]))

    def of(self, pieces: Pieces) -> list[Recipe | None]:
        """Return the recipe of each chunk; None for chunks too small to be examined one by one."""
        out: list[Recipe | None] = [None] * len(pieces.data)
        chosen = np.flatnonzero(self._is_chosen[pieces.rows])
        if len(chosen) == 0:
            return out
        choices = [self._choice(row) for row in pieces.rows[chosen].tolist()]
        for at, choice in zip(chosen.tolist(), choices, strict=True):
            out[at] = Recipe(choice=choice)
        if self._plan:
            by_depth: dict[int, list[int]] = {}
            has = self._plan.has(pieces.chunks[chosen])
            for at, choice, with_base in zip(chosen.tolist(), choices, has.tolist(), strict=True):
                if with_base and choice.delta is not None:
                    by_depth.setdefault(choice.delta.depth, []).append(at)
            for depth, members in by_depth.items():
                found = self._plan.bases(pieces.chunks[members], pieces.digests[members], depth)
                for at, named, base in zip(members, found.named, found.data, strict=True):
                    # A manifest of another writer may have a chunk of another size at a place.
                    if base is not None and memoryview(base).nbytes == memoryview(pieces.data[at]).nbytes:
                        out[at] = Recipe(choice=self._choice(int(pieces.rows[at])), named=named, base=base)
        return out

    def _choice(self, row: int) -> Choice:
        choice = self._choices.get(row)
        if choice is None:
            columns = self._source.columns
            begin, end = (int(at) for at in columns.chunk_at[row : row + 2])
            mine = self._chunks[np.searchsorted(self._chunks, begin) : np.searchsorted(self._chunks, end)]
            based = mine[self._plan.has(mine)] if self._plan else mine[:0]
            number = int(based[sample_number(len(based))] if len(based) else mine[sample_number(len(mine))])

            def sample(depth: int | None) -> tuple[Buffer, list[tuple[int, Buffer]]]:
                [raw] = next(self._source.pieces(np.array([number]))).data
                behind = self._plan.behind(number, depth) if self._plan and len(based) and depth != -1 else []
                return raw, [(at, base) for at, base in behind if len(base) == memoryview(raw).nbytes]

            choice = self._choices[row] = self._chooser.choice(
                columns.name(row),
                columns.dtypes[columns.dtype[row]] or "",
                int(self._source.itemsizes[row]),
                sample,
                has_bases=bool(len(based)),
            )
        return choice
