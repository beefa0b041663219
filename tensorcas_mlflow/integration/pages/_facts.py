"""What changed at each step of a series, from manifests alone: no tensor is read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.adapter import SKELETON
from tensorcas_mlflow.base.texts import Texts
from tensorcas_mlflow.layout import Columns, Manifest

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


class LatestTensor(NamedTuple):
    """A tensor of the latest step."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    n_bytes: int
    part: str
    since: int
    """The step at which it got its bytes; the first known one if it had them there."""
    is_new: bool
    """True if the step before had no tensor of this name."""


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

    def add(self, step: int, created: str, manifest: Manifest, *, stored_bytes: int | None = None) -> None:
        """Add a step after the others."""
        columns = manifest.columns
        last = None if self._columns is None else self._columns.names
        if (
            last is not None
            and np.array_equal(columns.names.data, last.data)
            and np.array_equal(columns.names.at, last.at)
        ):
            names, rows = self._names, self._rows
        else:
            all_names = columns.names.to_list()
            rows = [number for number, name in enumerate(all_names) if name != SKELETON]
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
        self._names, self._contents, self._since, self._is_new = names, contents, since, is_new
        self._columns, self._rows = columns, rows
        whole = np.bincount(self._part_of, sizes, len(self._part_names))
        new = np.bincount(self._part_of, sizes * changed, len(self._part_names))
        shares = np.divide(new, whole, out=np.zeros(len(whole)), where=whole > 0).tolist()
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
            )
        )

    def latest(self) -> list[LatestTensor]:
        """Return the tensors of the latest step: changed ones first, the largest first, then as in its manifest."""
        if self._columns is None:
            return []
        step = self.steps[-1].step
        specs = map(self._columns.spec, self._rows)
        tensors = [
            LatestTensor(spec.name, spec.dtype or "bytes", spec.shape, spec.n_bytes, *rest)
            for spec, *rest in zip(specs, self._parts, self._since.tolist(), self._is_new.tolist(), strict=True)
        ]
        return sorted(
            tensors, key=lambda tensor: (tensor.since != step, -tensor.n_bytes if tensor.since == step else 0)
        )


def parts_by_steps(steps: Sequence[StepFacts]) -> tuple[list[str], Any]:
    """Return the parts of a series, and the share of each that changed at each step: shape ``(parts, steps)``.

    A part that a step does not have is NaN there.
    """
    parts = list(dict.fromkeys(part for step in steps for part in step.shares))
    return parts, np.array([[step.shares.get(part, np.nan) for step in steps] for part in parts])


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
