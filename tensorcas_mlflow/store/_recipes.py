"""Search for the recipe of a stored checkpoint or file: its rows that are functions of other stored rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from tensorcas_mlflow.base.digest import Digests
from tensorcas_mlflow.base.files import new_name
from tensorcas_mlflow.base.tensors import offsets_of
from tensorcas_mlflow.codecs import computes_exactly
from tensorcas_mlflow.layout import Manifest, Mask, Row, Rows
from tensorcas_mlflow.store._derivations import Derivations, Derived, DerivingStore, with_derived
from tensorcas_mlflow.store._sketches import Sketches, query_of
from tensorcas_mlflow.store._sources import ReadRows, Source

_BATCH_BYTES = 256 << 20
"""Approximate bound of the rows whose bytes a search holds at once."""
_MOST_TRIED = 32
"""Number of checkpoints that are tried for one: fine-tunes of the right one are as likely by their sketches."""
_MOST_MERGED = 8
"""Number of related checkpoints that may be the inputs of a mean."""


class _StoredRows(Source):
    """The rows of a stored checkpoint or file."""

    def __init__(self, store: DerivingStore, manifest: Manifest) -> None:
        self.rows = manifest.rows
        self.sizes = manifest.chunk_sizes
        self._store = store

    def _reader(self) -> ReadRows:
        def read(chunks: Any, _rows: Any) -> list[Any]:
            at = offsets_of(self.sizes[chunks]).tolist()
            block = np.empty(at[-1], np.uint8).data
            data = [block[begin:end] for begin, end in pairwise(at)]
            self._store.chunks.read(self.columns.digests[chunks], list(data), verify=True)
            return data

        return read


def find_derived(
    store: DerivingStore,
    manifest: Manifest,
    rows: Collection[int],
    known: Sketches,
    are_made: Callable[[Digests], Mask],
) -> Iterator[dict[int, Derived]]:
    """Find functions of stored rows that give rows of a stored checkpoint or file, proven for all of their chunks.

    Args:
        store: The store.
        manifest: Manifest of the checkpoint or file.
        rows: Numbers of the rows to derive, whose chunks packs hold.
        known: Sketches of the checkpoints and files that may have inputs.
        are_made: Tells for each chunk whether a recipe makes it, so that it is no input.

    Yields:
        The derived rows by number, in batches; the caller may stop between them.

    Raises:
        NotFoundError: A chunk is gone.
        FormatError: A chunk is damaged.
        BackendError: The storage failed.
    """
    if not computes_exactly():  # the proof would hold in this thread only
        return
    search = Derivations(store, known=known, without=manifest.digest, are_made=are_made, most=_MOST_TRIED)
    for batch in _batches(manifest, rows):
        source = _StoredRows(store, manifest)
        found = search.find(source, batch, ())
        left = {number: row for number, row in batch.items() if number not in found}
        if left:
            if not search.has_looked_for_means:
                relatives = (match.sketched.manifest for match in known.relatives(query_of(source, left)))
                names = [name for name in relatives if name.partition(".")[0] != manifest.digest]
                search.look_for_means(source, left, names[:_MOST_MERGED])
            found |= search.find_means(source, left)
        yield found


def _batches(manifest: Manifest, rows: Collection[int]) -> Iterator[dict[int, Row]]:
    """Yield some rows at a time, the largest first."""
    batch: dict[int, Row] = {}
    n_bytes = 0
    for number in sorted(rows, key=lambda number: (-int(manifest.columns.n_bytes[number]), number)):
        row = manifest.columns.row(number)
        if batch and n_bytes + row.spec.n_bytes > _BATCH_BYTES:
            yield batch
            batch, n_bytes = {}, 0
        batch[number] = row
        n_bytes += row.spec.n_bytes
    if batch:
        yield batch


def recipe_of(manifest: Manifest, derived: Mapping[int, Derived]) -> Manifest:
    """Return the recipe that makes some rows of a checkpoint or file.

    Args:
        manifest: Manifest of the checkpoint or file.
        derived: The derived rows, by number; at least one.
    """
    numbers = sorted(derived)
    content = dataclasses.replace(
        manifest,
        kind="file",  # whose rows need no names
        flavor=None,
        metadata={"nonce": new_name()},  # so that no name is used again
        left_out={},
        rows=Rows(manifest.columns.take(np.array(numbers))),
        inputs=(),
        derived=(),
        hints=b"",
        sketches=b"",
    )
    renumbered = {at: derived[number] for at, number in enumerate(numbers)}
    return dataclasses.replace(with_derived(content, renumbered), kind="recipe")
