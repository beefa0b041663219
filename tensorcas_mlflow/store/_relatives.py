"""Relatives of a model in its store, found by sketches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tensorcas_mlflow.base.sketch import LEAST_SKETCHED_BYTES, LIKELY_BITS, compare
from tensorcas_mlflow.errors import BackendError, FormatError, NotFoundError
from tensorcas_mlflow.layout import Columns, Manifest, Ref
from tensorcas_mlflow.store._sketches import (
    MOST_DECODED_BYTES,
    Sketched,
    SketchedStore,
    compute,
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
    query = Sketched.stored("", manifest) or compute(store, "", manifest)
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
                each = compute(store, name, other, most_bytes=MOST_DECODED_BYTES)
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


def pairs_of(one: Sketched, columns: Columns, other: Sketched, other_columns: Columns) -> dict[int, int]:
    """Pair the related tensors of two models: rows of the other one by those of the first; one name wins a tie."""
    words = np.ascontiguousarray(other.words.T)
    taken: set[int] = set()
    pairs: dict[int, int] = {}
    for at, row in enumerate(one.rows.tolist()):
        places = (other.n_elements == one.n_elements[at]).nonzero()[0]
        if not len(places) or not one.words[at].any():
            continue
        likeness = compare(one.words[at], words[:, places])
        name = columns.name(row)
        related = (likeness.evidence >= LIKELY_BITS).nonzero()[0]
        shares, numbers = likeness.share[related].tolist(), other.rows[places][related].tolist()
        ranked = sorted(
            (-share, other_columns.name(number) != name, number)
            for share, number in zip(shares, numbers, strict=True)
            if number not in taken
        )
        if ranked:
            pairs[row] = ranked[0][2]
            taken.add(ranked[0][2])
    return pairs
