"""Search for rows of a stored checkpoint or file that are functions of other stored rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorcas_mlflow.base.digest import Digests, hex_of
from tensorcas_mlflow.base.tensors import offsets_of
from tensorcas_mlflow.chunk_io import LastRow
from tensorcas_mlflow.codecs import computes_exactly
from tensorcas_mlflow.errors import ChunkNotFoundError, FencedError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout.manifests import Derivation, Manifest, Row, Rows
from tensorcas_mlflow.layout.packs import Mask
from tensorcas_mlflow.store._derivations import Derivations, Derived, DerivingStore, with_derived
from tensorcas_mlflow.store._save import PendingSave
from tensorcas_mlflow.store._sketches import Sketches, query_of
from tensorcas_mlflow.store._sources import NoSource, ReadRows, Source

if TYPE_CHECKING:
    from tensorcas_mlflow.store._store import Store

_log = logging.getLogger(__name__)

_BATCH_BYTES = 256 << 20
"""Approximate bound of the rows whose bytes a search holds at once."""
_MOST_TRIED = 32
"""Number of checkpoints that are tried for one: fine-tunes of the right one are as likely by their sketches."""
_MOST_MERGED = 8
"""Number of related checkpoints that may be the inputs of a mean."""


class StoredRows(Source):
    """The rows of a stored checkpoint or file."""

    def __init__(self, store: DerivingStore, manifest: Manifest) -> None:
        self.rows = manifest.rows
        self.sizes = manifest.chunk_sizes
        self._store = store
        self._manifest = manifest
        self._last = LastRow()

    def _reader(self) -> ReadRows:
        def read(chunks: Any, _rows: Any) -> list[Any]:
            at = offsets_of(self._manifest.chunk_sizes[chunks]).tolist()
            block = np.empty(at[-1], np.uint8).data
            data = [block[begin:end] for begin, end in pairwise(at)]
            self._store.chunks.read_chunks(self._manifest, chunks, data, verify=True, last=self._last)
            return data

        return read


class _SavedRows(StoredRows):
    """The rows that a checkpoint or file has in packs without its form: no derived ones, and then the inputs."""

    def __init__(self, store: DerivingStore, manifest: Manifest) -> None:
        super().__init__(store, manifest)
        self.rows, self.sizes = Rows(manifest.stored), manifest.stored_sizes
        stored = manifest.stored_rows
        self._content = manifest.columns.chunks_of(stored[stored < len(manifest.columns)])

    def _reader(self) -> ReadRows:
        read_content = super()._reader()

        def read(chunks: Any, rows: Any) -> list[Any]:
            inputs = chunks[chunks >= len(self._content)]
            if len(inputs):  # no form makes these, and each keeps them
                raise ChunkNotFoundError(hex_of(self.columns.digests[inputs[0]]), len(inputs))
            return read_content(self._content[chunks], rows)

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
        are_made: Tells for each chunk whether it is derived, so that it is no input.

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
        source = StoredRows(store, manifest)
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


def with_more_derived(manifest: Manifest, derived: Mapping[int, Derived]) -> Manifest:
    """Return a manifest of the same content in which more rows are derived.

    Args:
        manifest: The manifest.
        derived: The rows, by number, that are not derived in it.
    """
    known = {each.row: _derived_of(manifest, each) for each in manifest.derived}
    return with_derived(replace(manifest, inputs=(), derived=()), {**known, **derived})


def _derived_of(manifest: Manifest, derivation: Derivation) -> Derived:
    inputs = [manifest.table.row(number) for number in derivation.inputs]
    row = manifest.rows[derivation.row]
    return Derived(
        function=derivation.function, params=derivation.params, inputs=inputs, row=row, made=lambda: memoryview(b"")
    )


def commit_form(store: Store, manifest: Manifest, derived: Mapping[int, Derived] | None, of: Sequence[str]) -> bool:
    """Commit the form of some manifests of one content, by the steps of any save.

    Args:
        store: The store.
        manifest: Manifest that says how the content is stored now; if none is derived besides, the first manifest.
        derived: Rows to derive besides, by number; None to derive those that the first manifest derives, and to write
            the chunks of the others again.
        of: Names of the manifests.

    Returns:
        Whether it is committed; False if a collector has deleted what it takes.

    Raises:
        BackendError: The storage failed.
    """
    if derived is None:
        # The inputs of the manifest itself stay: copies of it, here or in other stores, are read by them.
        form = manifest
        source: Source = _SavedRows(store, manifest)
    else:
        form = with_more_derived(manifest, derived).sketched(manifest.sketches)
        source = NoSource(Rows(form.stored), form.chunk_bytes)
    try:
        for name in of:
            with PendingSave(store.backend, store.catalog, form, source) as save:
                save.commit(RefTarget(of=name))
    except (ChunkNotFoundError, FencedError) as error:
        _log.warning("%s stays as it is stored: %s", form.label, error)
        return False
    return True
