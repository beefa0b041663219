"""What changed at each step of a series, from manifests alone: no tensor is read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.adapter import SKELETON
from tensorcas_mlflow.base.texts import Texts
from tensorcas_mlflow.layout.manifests import Columns, Manifest, read_sketches

_LAYER = re.compile(r"(.*?(?:^|\.)\d+)\.")
_MOST_PARTS = 64
"""With more parts, the numbered ones of one name are one part."""


class StepFacts(NamedTuple):
    """One step."""

    step: int
    created: str
    """ISO 8601, UTC."""
    n_tensors: int
    n_bytes: int
    """Size of the state."""
    n_changed: int
    """Tensors that the step before lacked, or had with other bytes."""
    n_changed_bytes: int
    """Size of these tensors."""
    stored_bytes: int | None
    """Growth of the store; None if unknown."""
    shares: dict[str, float]
    """By part of the model: the share of its bytes in changed tensors."""
    amounts: Mapping[str, float] = MappingProxyType({})
    """By part of the model: the mean relative norm of the change, estimated from sketches; NaN if unknown."""


class Tensors(NamedTuple):
    """The tensors of a step, in the order of its manifest."""

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    n_bytes: Sequence[int]

    @classmethod
    def of(cls, columns: Columns, rows: Sequence[int]) -> Tensors:
        """Describe rows of a manifest."""
        specs = [columns.spec(row) for row in rows]
        return cls(
            names=[spec.name for spec in specs],
            dtypes=[spec.dtype or "bytes" for spec in specs],
            shapes=[spec.shape for spec in specs],
            n_bytes=[spec.n_bytes for spec in specs],
        )


class Changes(NamedTuple):
    """The steps at which the tensors of the latest step changed."""

    is_changed: Any
    """For each of the latest steps and each tensor: bool, shape ``(steps, tensors)``."""
    begin: int
    """Index of the step of the first row."""
    first: Any
    """For each tensor the index of the step since which all steps have it."""


class _Era(NamedTuple):
    """Steps with the same tensors, one after the other."""

    names: Sequence[str]
    bits: list[Any]
    """For each step the changed tensors, eight to a byte."""


_MOST_MARKS = 8_000_000
"""Marks of changed tensors, one for each tensor and step: those of more steps are not returned."""


class SeriesFacts:
    """Steps of a series, in the order in which they are added. It holds the latest manifest's contents as numbers."""

    def __init__(self) -> None:
        self.steps: list[StepFacts] = []
        self._names: list[str] = []
        self._contents = np.empty(0, np.int64)
        self._since = np.empty(0, np.int64)
        self._is_new = np.empty(0, bool)
        self._parts: list[str] = []
        self._part_names: list[str] = []
        self._part_of = np.empty(0, np.int64)
        self._columns: Columns | None = None
        self._rows: list[int] = []
        """Numbers of the tensors' rows in ``_columns``."""
        self._eras: list[_Era] = []
        self._words: Any = None
        """Numbers of the sketched rows of the latest manifest, and their words; None if it has no sketches."""
        self.amounts: dict[int, tuple[float, float]] = {}
        """For tensors that changed at the latest step, by number: the relative norm of the change and the share of
        equal elements, both estimated from 32 elements."""

    def add(self, step: int, created: str, manifest: Manifest, *, stored_bytes: int | None = None) -> None:
        """Add a step after the others."""
        columns = manifest.columns
        last = None if self._columns is None else self._columns.names
        if last is not None and _are_equal(columns.names, last):
            names, rows = self._names, self._rows
        else:
            all_names = columns.names.to_list()
            # The bytes between the tensors of a file have no name.
            rows = [number for number, name in enumerate(all_names) if name not in (SKELETON, "")]
            names = [all_names[number] for number in rows]
        contents = np.array(list(map(hash, columns.contents())), np.int64)[rows]
        sizes = np.asarray(columns.n_bytes, np.int64)[rows]
        if names == self._names:
            changed = contents != self._contents
            since = np.where(changed, step, self._since)
            is_new = np.full(len(names), not self.steps)
        else:
            at = {name: number for number, name in enumerate(self._names)}
            before = np.array([at.get(name, -1) for name in names], np.int64)
            is_new = before < 0
            changed, since = is_new.copy(), np.full(len(names), step)
            known = np.flatnonzero(~is_new)
            changed[known] = contents[known] != self._contents[before[known]]
            kept = np.flatnonzero(~changed)
            since[kept] = self._since[before[kept]]
            self._parts = _parts_of(names)
            number = {part: at for at, part in enumerate(dict.fromkeys(self._parts))}
            self._part_names, self._part_of = list(number), np.array([number[part] for part in self._parts], np.int64)
        if not self._eras or names != self._eras[-1].names:
            self._eras.append(_Era(names, []))
        self._eras[-1].bits.append(np.packbits(changed))
        norms = self._estimate(manifest, rows, names == self._names, changed)
        self._names, self._contents, self._since, self._is_new = names, contents, since, is_new
        self._columns, self._rows = columns, rows
        whole = np.bincount(self._part_of, sizes, len(self._part_names))
        new = np.bincount(self._part_of, sizes * changed, len(self._part_names))
        shares = np.divide(new, whole, out=np.zeros(len(whole)), where=whole > 0).tolist()
        amounts = self._amounts(sizes, changed, norms).tolist()
        self.steps.append(
            StepFacts(
                step=step,
                created=created,
                n_tensors=len(names),
                n_bytes=int(sizes.sum()),
                n_changed=int(changed.sum()),
                n_changed_bytes=int(sizes[changed].sum()),
                stored_bytes=stored_bytes,
                shares=dict(zip(self._part_names, shares, strict=True)),
                amounts=dict(zip(self._part_names, amounts, strict=True)),
            )
        )

    def tensors(self) -> Tensors:
        """Return the tensors of the latest step."""
        return Tensors((), (), (), ()) if self._columns is None else Tensors.of(self._columns, self._rows)

    def changes(self) -> Changes:
        """Return the steps at which the tensors of the latest step changed."""
        n = len(self._names)
        most = max(1, _MOST_MARKS // max(1, n))
        blocks: list[Any] = []
        first = np.zeros(n, np.int64)
        is_there = np.ones(n, bool)
        end, n_rows = len(self.steps), 0
        for era in reversed(self._eras):
            begin = end - len(era.bits)
            at = {name: number for number, name in enumerate(era.names)} if era is not self._eras[-1] else None
            which = np.arange(n) if at is None else np.array([at.get(name, -1) for name in self._names], np.int64)
            first[is_there & (which < 0)] = end
            is_there &= which >= 0
            if n_rows < most and len(era.names):
                marks = np.unpackbits(np.array(era.bits[-(most - n_rows) :]), axis=1, count=len(era.names)).view(bool)
                blocks.append(marks[:, which] & is_there)
                n_rows += len(marks)
            end = begin
        marks = np.concatenate(blocks[::-1]) if blocks else np.zeros((0, n), bool)
        return Changes(is_changed=marks, begin=len(self.steps) - len(marks), first=first)

    def _amounts(self, sizes: Any, changed: Any, norms: Any) -> Any:
        """Return the mean of some norms for each part, by size; NaN if most of what changed in it has none."""
        is_known = np.isfinite(norms)

        def in_parts(weights: Any) -> Any:
            return np.bincount(self._part_of, weights, len(self._part_names))

        known = in_parts(sizes * is_known)
        moved = in_parts(np.where(is_known, sizes * norms, 0))
        is_told = (known > 0) & (in_parts(sizes * (changed & is_known)) >= in_parts(sizes * (changed & ~is_known)))
        return np.divide(moved, known, out=np.full(len(known), np.nan), where=is_told)

    def _estimate(self, manifest: Manifest, rows: Sequence[int], has_same_names: bool, changed: Any) -> Any:
        """Return for each tensor the relative norm of its change, as far as sketches tell; NaN if they do not."""
        before, self._words = self._words, read_sketches(manifest.sketches, manifest.columns)
        norms = np.where(changed, np.nan, 0.0)
        self.amounts = {}
        if before is None or self._words is None or not has_same_names or not np.array_equal(before[0], self._words[0]):
            return norms
        columns = manifest.columns
        is_float = np.array(["float" in (name or "") for name in columns.dtypes], bool)
        number = np.full(len(columns.n_bytes), -1)
        number[rows] = np.arange(len(rows))
        sketched, words = self._words
        some = np.flatnonzero(is_float[columns.dtype[sketched]] & (number[sketched] >= 0))
        some = some[changed[number[sketched[some]]]]
        was, now = _numbers(before[1][some]), _numbers(words[some])
        told = np.isfinite(was) & np.isfinite(now)
        was, now = np.where(told, was, 0), np.where(told, now, 0)
        whole = np.square(was).sum(axis=1)
        ratio = np.divide(np.square(now - was).sum(axis=1), whole, out=np.full(len(some), np.nan), where=whole > 0)
        equal = (before[1][some] == words[some]).mean(axis=1)
        numbers = number[sketched[some]]
        norms[numbers] = np.sqrt(ratio)
        self.amounts = dict(
            zip(numbers.tolist(), zip(np.sqrt(ratio).tolist(), equal.tolist(), strict=True), strict=True)
        )
        return norms


def _numbers(words: Any) -> Any:
    """Return the numbers that words of sketches stand for: the upper half of a float32 each."""
    return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def parts_by_steps(steps: Sequence[StepFacts]) -> tuple[list[str], Any]:
    """Return the parts of a series, and the share of each that changed at each step: shape ``(parts, steps)``.

    A part that a step does not have is NaN there.
    """
    parts = list(dict.fromkeys(part for step in steps for part in step.shares))
    return parts, np.array([[step.shares.get(part, np.nan) for step in steps] for part in parts])


def amounts_by_steps(steps: Sequence[StepFacts]) -> Any:
    """Return how much each part changed at each step, as `parts_by_steps` orders them; NaN if it is not known."""
    parts = list(dict.fromkeys(part for step in steps for part in step.shares))
    return np.array([[step.amounts.get(part, np.nan) for step in steps] for part in parts])


def _are_equal(some: Texts, others: Texts) -> bool:
    return np.array_equal(some.data, others.data) and np.array_equal(some.at, others.at)


def _parts_of(names: Sequence[str]) -> list[str]:
    """Return the part of the model of each tensor: its layer, else its module."""
    parts = [
        layer[1] if (layer := _LAYER.match(name)) is not None else name.rpartition(".")[0] or name for name in names
    ]
    if len(set(parts)) <= _MOST_PARTS:
        return parts
    parts = [re.sub(r"\.?\d+$", "", part) or "(numbered)" for part in parts]
    if len(set(parts)) <= _MOST_PARTS:
        return parts
    return [part.partition(".")[0] for part in parts]
