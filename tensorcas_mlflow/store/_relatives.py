"""Relatives of a model in its store, found by sketches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tensorcas_mlflow.base.sketch import LEAST_SKETCHED_BYTES, LIKELY_BITS, compare
from tensorcas_mlflow.base.tensors import distinct
from tensorcas_mlflow.base.threads import Lazy
from tensorcas_mlflow.errors import BackendError, FormatError, NotFoundError
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.layout.manifests import Columns, Manifest
from tensorcas_mlflow.store._sketches import (
    MOST_DECODED_BYTES,
    Sketched,
    SketchedStore,
    compute_sketches,
    listed_sketches_of,
    read_manifest,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Likely:
    """A checkpoint or file with tensors related to those of a model."""

    refs: Sequence[Ref]
    """Its refs, the oldest first."""
    manifest: Manifest
    likeness: float
    """See `Match`."""
    rows: Mapping[int, int]
    """Its rows by those of the model, for related tensors."""


class ListedStore(SketchedStore, Protocol):
    """The parts of an open store that a search of all its refs needs."""

    def checkpoints(self) -> list[Ref]:
        """List every ref; see `Store.checkpoints`."""


def find_likely(store: ListedStore, manifest: Manifest, *, most: int) -> tuple[list[Ref], list[Likely]]:
    """Compare a model with all checkpoints and files of its store by their sketches.

    A checkpoint without sketches is read if it is the last of its series.

    Args:
        store: The store.
        manifest: The manifest of the model.
        most: Maximum number of results.

    Returns:
        The refs of the model itself; and others, the nearest first.
    """
    query = Sketched.stored("", manifest) or compute_sketches(store, "", manifest)
    by_manifest: dict[str, list[Ref]] = {}
    last: dict[Any, str] = {}
    refs = store.checkpoints()
    for ref in refs:
        by_manifest.setdefault(ref.manifest, []).append(ref)
        last[(ref.run_id, ref.name) if ref.path is None else ref.key] = ref.manifest
    own = [ref for ref in refs if ref.manifest.partition(".")[0] == manifest.digest]
    if query is None:
        return own, []
    ends = {*last.values()}
    everything = listed_sketches_of(store.id)
    for name in by_manifest.keys() - everything.keys():
        if all(ref.kind == "file" and ref.n_bytes < LEAST_SKETCHED_BYTES for ref in by_manifest[name]):
            continue
        with suppress(NotFoundError, FormatError, BackendError):
            other = read_manifest(store, name)
            each = Sketched.stored(name, other)
            if each is None and name in ends:
                each = compute_sketches(store, name, other, most_bytes=MOST_DECODED_BYTES)
            if each is not None:
                everything.note(name, each)
    likely: list[Likely] = []
    is_own = {ref.manifest for ref in own}
    for match in everything.relatives(query):
        each = match.sketched
        if len(likely) == most:
            break
        if each.manifest in is_own or each.manifest not in by_manifest:
            continue
        with suppress(NotFoundError, FormatError, BackendError):
            other = read_manifest(store, each.manifest)
            pairs = pairs_of(query, manifest.columns, each, other.columns)
            refs_of = by_manifest[each.manifest]
            likely.append(Likely(refs=refs_of, manifest=other, likeness=match.likeness, rows=pairs))
    return own, likely


_MOST_COMPARED = 1 << 28
"""Bound of the pairs of sketches that one pairing compares; then it compares tensors with equal sketches only."""


def pairs_of(one: Sketched, columns: Columns, other: Sketched, other_columns: Columns) -> dict[int, int]:
    """Pair the related tensors of two models: rows of the other one by those of the first; one name wins a tie.

    Tensors with equal sketches are compared once, as a model may have thousands of them.
    """
    groups = _EqualSketches(other, other_columns)
    pairs: dict[int, int] = {}
    left = _MOST_COMPARED
    for at, row in enumerate(one.rows.tolist()):
        if not one.words[at].any():
            continue
        places = groups.of_size(int(one.n_elements[at]))
        if len(places) > left:
            places = groups.equal_to(int(one.n_elements[at]), one.words[at])
        left -= len(places)
        if not len(places):
            continue
        likeness = compare(one.words[at], groups.words[:, places])
        related = likeness.evidence >= LIKELY_BITS
        number = groups.take(places[related], likeness.share[related], columns.name(row))
        if number is not None:
            pairs[row] = number
    return pairs


class _EqualSketches:
    """Tensors of one model, those with equal sketches together; each is taken once."""

    def __init__(self, sketched: Sketched, columns: Columns) -> None:
        """Sort the tensors.

        Args:
            sketched: Their sketches.
            columns: The rows of the model.
        """
        self._columns = columns
        by_sketch: dict[tuple[int, bytes], list[int]] = {}
        positions: list[int] = []
        for at, (number, n) in enumerate(zip(sketched.rows.tolist(), sketched.n_elements.tolist(), strict=True)):
            key = (n, sketched.words[at].tobytes())
            if key not in by_sketch:
                positions.append(at)
            by_sketch.setdefault(key, []).append(number)
        self._by_sketch = {key: group for group, key in enumerate(by_sketch)}
        self._numbers = [sorted(numbers) for numbers in by_sketch.values()]
        self._begins = [0] * len(self._numbers)
        self._next = np.array([numbers[0] for numbers in self._numbers], dtype=np.int64)
        """For each group its lowest tensor that is not taken; `_NONE_LEFT` if there is none."""
        self._taken: set[int] = set()
        self._group_of = {number: group for group, numbers in enumerate(self._numbers) for number in numbers}
        self.words = np.ascontiguousarray(sketched.words[positions].T)
        """The words of each group, one column each."""
        sizes = sketched.n_elements[positions]
        self._by_size = {int(n): (sizes == n).nonzero()[0] for n in distinct(sizes)}

    def of_size(self, n_elements: int) -> Any:
        """Return the groups of the tensors with this many elements."""
        return self._by_size.get(n_elements, _NOTHING)

    def equal_to(self, n_elements: int, words: Any) -> Any:
        """Return the group with this sketch, in an array; an empty one if there is none."""
        group = self._by_sketch.get((n_elements, words.tobytes()))
        return _NOTHING if group is None else np.array([group])

    def take(self, groups: Any, shares: Any, name: str) -> int | None:
        """Take a tensor of the likest groups: the one of a name, or else the first; None if all are taken.

        Args:
            groups: The groups to take from.
            shares: The likeness of each.
            name: The name.
        """
        is_open = self._next[groups] != _NONE_LEFT
        groups, shares = groups[is_open], shares[is_open]
        if not len(groups):
            return None
        likest = groups[shares == shares.max()]
        named = [number for number in self._of_name.get(name, ()) if number not in self._taken]
        number = next((each for each in named if self._group_of[each] in likest), int(self._next[likest].min()))
        self._taken.add(number)
        group = self._group_of[number]
        numbers, at = self._numbers[group], self._begins[group]
        while at < len(numbers) and numbers[at] in self._taken:
            at += 1
        self._begins[group] = at
        self._next[group] = numbers[at] if at < len(numbers) else _NONE_LEFT
        return number

    @Lazy
    def _of_name(self) -> dict[str, list[int]]:
        """The tensors by name, each list ascending."""
        found: dict[str, list[int]] = {}
        names = self._columns.names.to_list()
        for number in sorted(self._group_of):
            found.setdefault(names[number], []).append(number)
        return found


_NONE_LEFT = np.iinfo(np.int64).max
_NOTHING = np.empty(0, dtype=np.int64)
