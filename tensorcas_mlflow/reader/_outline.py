"""Outline of a checkpoint: the tensors of each layer and expert, by their names."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow._lazy import Lazy
from tensorcas_mlflow.chunking import Offsets
from tensorcas_mlflow.errors import PartNotFoundError
from tensorcas_mlflow.manifest import Specs
from tensorcas_mlflow.reader._distinct import distinct
from tensorcas_mlflow.reader._names import Patterns
from tensorcas_mlflow.reader._naming import Naming, Reading, read_any, read_pattern

_NONE = -1
_MOST_EXPERTS = 1 << 16
"""Nobody has more; shapes that somebody has made up may."""
_MOST_LISTED, _MOST_CHARACTERS = 50, 100
"""What a message says of names and numbers that somebody may have made up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A tensor, or some rows of one."""

    row: int
    """Its number among all tensors."""
    rows: slice | None = None
    """Which rows of axis 0; None for all of it."""
    is_one: bool = False
    """Whether it is one row, without axis 0."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """For each tensor, what its name says; -1 where it says nothing."""

    stacks: tuple[str, ...]
    """What there are layers of, in the order of the checkpoint."""
    stack: Any
    """Which of ``stacks``."""
    layer: Any
    expert: Any
    is_fused: Any
    """Whether it holds all experts of its layer."""
    is_router: Any


class Outline:
    """The layers and experts of a checkpoint. Made from names and shapes alone, once."""

    def __init__(self, specs: Specs, naming: Naming | None = None) -> None:
        """Describe tensors.

        Args:
            specs: All of them.
            naming: How they are named; unless given, as the frameworks do.
        """
        self._specs = specs
        self._naming = naming

    @Lazy
    def patterns(self) -> Patterns:
        """The names, as patterns."""
        return Patterns.of(self._specs.names)

    @Lazy
    def assignment(self) -> Assignment:
        """The layer and expert of each tensor, by its name."""
        if self._naming is not None:
            return _by_naming(self._specs.names.to_pylist(), self._naming)
        return _by_patterns(self.patterns)

    @property
    def stacks(self) -> tuple[str, ...]:
        """The stacks of layers: ``model.layers``, or ``encoder.layers`` and ``decoder.layers``."""
        return self.assignment.stacks

    def layers(self, stack: str | None = None) -> list[int]:
        """List the layers of a stack, ascending; raises as `rows_of_layer`."""
        found = self.assignment
        numbers = distinct(found.layer[found.stack == self._stack(stack)])
        return [int(number) for number in numbers]

    def experts(self, layer: int, stack: str | None = None) -> list[int]:
        """List the experts of a layer, ascending; empty where it has none. Raises as `rows_of_layer`."""
        return self.experts_among(self.rows_of_layer(layer, stack))

    def experts_among(self, rows: Offsets) -> list[int]:
        """List the experts that the tensors of a layer are of, or hold."""
        experts = self.assignment.expert[rows]
        fused = self._fused(rows)
        return sorted({*experts[experts >= 0].tolist(), *range(fused[0] if fused else 0)})

    def rows_of_layer(self, layer: int, stack: str | None = None) -> Offsets:
        """Find the tensors of a layer, in their order.

        Args:
            layer: Its number, as the names have it; where there are stages, counted through all of them from 0.
            stack: Which layers are meant; may be left out where there is only one kind.

        Raises:
            PartNotFoundError: There is no such layer; the message says which there are.
            TypeError: The number is none.
            ValueError: There are several stacks and none is named, or there is none of that name.
        """
        layer = operator.index(layer)
        found, which = self.assignment, self._stack(stack)
        rows: Offsets = np.flatnonzero((found.layer == layer) & (found.stack == which))
        if len(rows) == 0:
            known = self.layers(found.stacks[which])
            of_stack = f" of {found.stacks[which]!r}" if found.stacks[which] else ""
            raise PartNotFoundError(f"layer {layer}{of_stack}", f"there are layers {number_ranges(known)}")
        return rows

    def parts_of_expert(self, layer: int, expert: int, stack: str | None = None) -> list[Part]:
        """Find the tensors of one expert, and its rows of those that hold all experts of the layer.

        Raises:
            PartNotFoundError: There is no such expert, or no such layer.
            ValueError: See `rows_of_layer`.
        """
        rows, expert = self.rows_of_layer(layer, stack), operator.index(expert)
        found = self.assignment
        is_its = (found.expert[rows] == expert) & (found.expert[rows] != _NONE)
        parts = [Part(row=int(row)) for row in rows[is_its]]
        fused = self._fused(rows)
        if fused is not None and 0 <= expert < fused[0]:
            n_experts, whole = fused
            for row in whole:
                n_rows = self._specs.shape(row)[0] // n_experts
                chosen = slice(expert * n_rows, (expert + 1) * n_rows)
                parts.append(Part(row=row, rows=chosen, is_one=n_rows == 1))
        if not parts:
            known = self.experts(layer, stack)
            what = (
                f"there are experts {number_ranges(known)}" if known else "no name says that it is of one (see Naming)"
            )
            raise PartNotFoundError(f"expert {expert} in layer {layer}", what)
        return sorted(parts, key=lambda part: part.row)

    def rows_for_expert(self, layer: int, expert: int, stack: str | None = None) -> Offsets:
        """Find the tensors of a layer that may hold something of an expert, by their names alone."""
        rows, found = self.rows_of_layer(layer, stack), self.assignment
        is_its = (found.expert[rows] == expert) & (found.expert[rows] != _NONE)
        some: Offsets = rows[is_its | found.is_fused[rows]]
        return some

    def _fused(self, rows: Offsets) -> tuple[int, list[int]] | None:
        """Say how many experts the fused tensors among some of a layer hold, and which these are; None for none.

        As many as the router has rows. Where no router is seen, as many as all of them, and one with three dimensions
        at least, have rows.
        """
        found = self.assignment
        fused = rows[found.is_fused[rows]].tolist()
        shapes = {row: self._specs.shape(row) for row in fused}
        fused = [row for row in fused if shapes[row] and shapes[row][0]]
        if not fused:
            return None
        routers = [self._specs.shape(row) for row in rows[found.is_router[rows]].tolist()]
        sizes = {shape[0] for shape in routers if len(shape) == 2}
        if len(sizes) == 1:
            n_experts = sizes.pop()
        else:
            lengths = {shapes[row][0] for row in fused}
            if len(lengths) > 1 or max(len(shapes[row]) for row in fused) < 3:
                return None
            n_experts = lengths.pop()
        if not 0 < n_experts <= _MOST_EXPERTS:
            return None
        whole = [row for row in fused if shapes[row][0] % n_experts == 0]
        return (n_experts, whole) if whole else None

    def _stack(self, stack: str | None) -> int:
        stacks = self.assignment.stacks
        if stack is not None:
            if stack not in stacks:
                raise ValueError(f"there are no layers of {stack!r}; there are some of {_listed(stacks)}")
            return stacks.index(stack)
        if len(stacks) > 1:
            raise ValueError(f"there are layers of {_listed(stacks)}: say which are meant, with stack=")
        if not stacks:
            raise PartNotFoundError("layers", "no name of a tensor says that it is of one (see Naming)")
        return 0


def _by_patterns(patterns: Patterns) -> Assignment:
    readings = _kept([read_pattern(text) for text in patterns.texts], read_any, patterns)
    number_of: dict[str, int] = {}
    for reading in readings:
        if reading is not None:
            number_of.setdefault(reading.stack, len(number_of))
    stacks = tuple(number_of)
    of_pattern = np.array(
        [_columns(reading, number_of) for reading in readings] or np.empty((0, 6)), dtype=np.int64
    ).reshape(-1, 6)
    stack, layer_slot, stage, expert_slot, is_fused, is_router = of_pattern[patterns.pattern].T
    layer, expert = np.full(len(stack), _NONE), np.full(len(stack), _NONE)
    has_layer, has_expert = np.flatnonzero(stack >= 0), np.flatnonzero(expert_slot >= 0)
    layer[has_layer] = patterns.slot(has_layer, layer_slot[has_layer])
    expert[has_expert] = patterns.slot(has_expert, expert_slot[has_expert])
    has_stages = np.zeros(len(stacks) + 1, dtype=bool)  # the last one is for what is of no stack
    has_stages[stack[stage > 0]] = True
    mine = np.flatnonzero(has_stages[stack])
    layer[mine] = _counted_through(stack[mine], stage[mine], layer[mine])
    return Assignment(
        stacks=stacks, stack=stack, layer=layer, expert=expert, is_fused=is_fused > 0, is_router=is_router > 0
    )


def _counted_through(stack: Any, stage: Any, layer: Any) -> Any:
    """Number the layers of each stack from 0, through all of its stages."""
    order = np.lexsort((layer, stage, stack))
    sorts = [numbers[order] for numbers in (stack, stage, layer)]
    begins, other_stage, other_layer = (np.append(True, each[1:] != each[:-1])[: len(each)] for each in sorts)
    nth = (begins | other_stage | other_layer).cumsum()
    found = np.empty(len(order), dtype=np.int64)
    found[order] = nth - np.maximum.accumulate(np.where(begins, nth, 0))
    return found


def _kept(
    readings: list[Reading | None], other: Callable[[str], Reading | None], patterns: Patterns
) -> list[Reading | None]:
    """Read patterns in another way if nothing was found in any."""
    return readings if any(readings) else [other(text) for text in patterns.texts]


def _columns(reading: Reading | None, number_of: Mapping[str, int]) -> tuple[int, ...]:
    if reading is None:
        return (_NONE, 0, 0, _NONE, 0, 0)
    expert = _NONE if reading.expert is None else reading.expert
    stack = number_of[reading.stack]
    return (stack, reading.layer, reading.stage, expert, int(reading.is_fused), int(reading.is_router))


def _by_naming(names: list[str], naming: Naming) -> Assignment:
    layer, expert = np.full(len(names), _NONE), np.full(len(names), _NONE)
    is_fused = np.zeros(len(names), dtype=bool)
    of_layer, of_expert = naming._layer_regex(), naming._expert_regex()
    for row, name in enumerate(names):
        match = of_layer.match(name)
        if match is not None:
            layer[row] = int(match["layer"])
        match = _match(of_expert, name)
        if match is not None:
            layer[row] = int(match["layer"])
            if naming._has_fused:
                is_fused[row] = True
            else:
                expert[row] = int(match["expert"])
    stack = np.where(layer >= 0, 0, _NONE)
    stacks = (naming.layer,) if (layer >= 0).any() else ()
    none = np.zeros(len(names), dtype=bool)
    return Assignment(stacks=stacks, stack=stack, layer=layer, expert=expert, is_fused=is_fused, is_router=none)


def _match(regex: re.Pattern[str] | None, name: str) -> re.Match[str] | None:
    return None if regex is None else regex.match(name)


def _listed(stacks: tuple[str, ...]) -> str:
    listed = ", ".join(f"{stack!r:.{_MOST_CHARACTERS}}" for stack in stacks[:_MOST_LISTED])
    return listed + (" …" if len(stacks) > _MOST_LISTED else "") or "nothing"


def number_ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers as ``0..3, 7``; of very many runs the first."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        elif len(runs) == _MOST_LISTED:
            return ", ".join("..".join(map(str, run)) for run in runs) + " …"
        else:
            runs.append([number])
    return ", ".join("..".join(map(str, run)) for run in runs) or "none"
