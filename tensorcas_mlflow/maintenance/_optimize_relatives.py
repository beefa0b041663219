"""Related checkpoints, far back in a store or with other names of tensors, found by sketches."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from tensorcas_mlflow.errors import FormatError, NotFoundError
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.layout.manifests import Columns, Manifest
from tensorcas_mlflow.maintenance._inventory import manifest_of
from tensorcas_mlflow.store import Sketched, Sketches, Store, compute_sketches, pairs_of

_MOST_READ_BYTES = 8 << 20
"""Bound of the chunks read for the sketches of one checkpoint that was saved without any; the largest tensors count."""
MOST_UNREAD = 256
"""Bound of such checkpoints, the latest ones, for which a search reads chunks."""


def series_of(ref: Ref) -> Hashable:
    """Return the series of a ref: the steps of one name in one run are in one, and any other ref is alone."""
    return (ref.run_id, ref.name) if ref.run_id is not None and ref.step is not None else ref.key


def compute_sketched(store: Store, name: str, manifest: Manifest) -> Sketched | None:
    """Return the sketches of a checkpoint, which are computed if it was saved without any; None if it gives none."""
    found = Sketched.stored(name, manifest)
    if found is None:
        with suppress(NotFoundError, FormatError):
            found = compute_sketches(store, name, manifest, most_bytes=_MOST_READ_BYTES)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """A checkpoint, and the nearest one before it by sketches."""

    query: Sketched
    """The sketches of the checkpoint."""
    other: Manifest
    sketched: Sketched
    """The sketches of the other one."""

    def pairs(self, columns: Columns, strangers: Collection[int], others: Collection[int]) -> dict[int, int]:
        """Pair rows with the related rows of the other checkpoint.

        Args:
            columns: The rows of the checkpoint.
            strangers: Those to pair.
            others: The rows of the other one that they may be versions of.
        """
        one, other = _some_of(self.query, strangers), _some_of(self.sketched, others)
        return pairs_of(one, columns, other, self.other.columns)


def _some_of(sketched: Sketched, rows: Collection[int]) -> Sketched:
    at = np.isin(sketched.rows, list(rows))
    return replace(
        sketched,
        rows=sketched.rows[at],
        n_bytes=sketched.n_bytes[at],
        n_elements=sketched.n_elements[at],
        words=sketched.words[at],
    )


class Relatives:
    """Last checkpoint of each series that an optimization has passed, by its sketches.

    A wrong guess costs time and bytes: bases are chosen by the sizes of deltas.
    """

    def __init__(self, store: Store) -> None:
        """Begin without checkpoints.

        Args:
            store: Store to optimize.
        """
        self._store = store
        self._known = Sketches()
        self._refs: dict[str, Ref] = {}
        """A ref of each manifest that is known, by digest."""
        self._unread: dict[Hashable, Ref] = {}
        """Refs of the last checkpoints without sketches; they are made when a search needs them."""

    def note(self, ref: Ref, manifest: Manifest) -> None:
        """Add a checkpoint in the place of the one before it in its series.

        Args:
            ref: Its ref.
            manifest: Its manifest.
        """
        series = series_of(ref)
        found = Sketched.stored(ref.manifest, manifest)
        self._unread.pop(series, None)
        self._refs[manifest.digest] = ref
        if found is not None:
            self._known.note(repr(series), found)
            return
        self._unread[series] = ref
        if len(self._unread) > MOST_UNREAD:
            del self._unread[next(iter(self._unread))]

    def nearest(self, manifest: Manifest, at_hand: Mapping[str, Manifest]) -> Relation | None:
        """Find the nearest of the checkpoints so far.

        Args:
            manifest: A checkpoint with chunks to encode.
            at_hand: Manifests, by digest, that need not be read.

        Raises:
            BackendError: The storage failed.
        """
        query = compute_sketched(self._store, "", manifest)
        if query is None:
            return None
        self._sketch_unread()
        match = self._known.search(query).nearest
        if match is None:
            return None
        digest = match.sketched.manifest.partition(".")[0]
        other = at_hand.get(digest) or manifest_of(self._store, [self._refs[digest]])
        return None if other is None else Relation(query=query, other=other, sketched=match.sketched)

    def _sketch_unread(self) -> None:
        """Sketch the checkpoints that were saved without sketches."""
        for series, ref in self._unread.items():
            manifest = manifest_of(self._store, [ref])
            each = None if manifest is None else compute_sketched(self._store, ref.manifest, manifest)
            if each is not None:
                self._known.note(repr(series), each)
        self._unread = {}
