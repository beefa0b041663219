"""Forms of an optimization: manifests that derive rows of checkpoints and files which exist.

Saves find derived rows by themselves (``docs/design/codecs.md``, Functions). An optimization runs the same search over
stored checkpoints, whose inputs may have been saved later, or which were saved without a search. It changes no
manifest: a form says how the content of a manifest is stored (``docs/design/protocol.md``, Forms).
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.digest import Digests, distinct_digests
from tensorcas_mlflow.errors import FormatError, NotFoundError
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.maintenance._inventory import NO_DIGESTS, Inventory, is_among, manifest_of
from tensorcas_mlflow.maintenance._optimize_done import DoneChunks
from tensorcas_mlflow.maintenance._optimize_relatives import MOST_UNREAD, compute_sketched, series_of
from tensorcas_mlflow.store import (
    LEAST_DERIVED_BYTES,
    MOST_DERIVED_BYTES,
    Derived,
    Sketched,
    Sketches,
    Store,
    commit_form,
    find_derived,
)
from tensorcas_mlflow.store import protocol as p

_log = logging.getLogger(__name__)

_LEAST_SHARE = 1 / 20
"""A row is not derived if its chunks take less than this share of their bytes."""
_MOST_OLD = 32
"""Bound of the checkpoints that are optimized already and whose rows may be made of new ones: the last of so many
series."""


class StoredRefs(NamedTuple):
    """Refs of a store, and the forms of their manifests."""

    refs: Sequence[Ref]
    """The refs that are no forms."""
    forms: Mapping[str, str]
    """For each manifest with a form the name of the form's manifest."""

    @classmethod
    def read(cls, store: Store) -> StoredRefs:
        """Read all refs of a store."""
        refs = p.read_refs(store.backend)
        forms = {ref.of: ref.manifest for ref in refs if ref.of is not None}
        return cls([ref for ref in refs if ref.of is None], forms)

    def as_stored(self, *, without: Set[str] = frozenset()) -> list[Ref]:
        """Return the refs, each with the manifest that says how its content is stored.

        Args:
            without: Manifests whose forms do not count.
        """
        return [
            ref if ref.manifest in without else replace(ref, manifest=self.forms.get(ref.manifest, ref.manifest))
            for ref in self.refs
        ]


def forms_to_replace(
    store: Store, done_chunks: DoneChunks, inventory: Inventory, found: StoredRefs, shallow: Sequence[Ref]
) -> frozenset[str]:
    """Return the manifests with a form that are to be stored in full again.

    These are the manifests of refs that are to be restored fast, and those whose forms keep more room for inputs that
    no checkpoint needs than what they derive would take in packs.

    Args:
        store: Store to optimize.
        done_chunks: Chunks that are done.
        inventory: All chunks that manifests name.
        found: Refs of the store.
        shallow: Refs that are to be restored fast.
    """
    formed = {ref.manifest: found.forms[ref.manifest] for ref in found.refs if ref.manifest in found.forms}
    chunks_of = inventory.chunks_of
    content = chunks_of({ref.manifest for ref in found.refs if ref.manifest not in formed})
    for of, name in formed.items():
        content |= chunks_of({of}) & chunks_of({name})
    fast = {ref.manifest for ref in shallow}
    chosen: set[str] = set()
    for ref in found.refs:
        form = None
        if ref.manifest in formed and ref.manifest not in chosen:
            form = manifest_of(store, [replace(ref, manifest=formed[ref.manifest])])
        if form is None:
            continue
        own, kept = chunks_of({ref.manifest}), chunks_of({formed[ref.manifest]})
        if not (own & ~kept).any():
            continue  # it derives no more than the manifest
        kept_bytes = done_chunks.sizes_of(inventory.digests[kept & ~content])[1]
        if ref.manifest in fast or kept_bytes > _bytes_in_packs(form, done_chunks, inventory.digests[own & ~kept]):
            chosen.add(ref.manifest)
    return frozenset(chosen)


def _bytes_in_packs(form: Manifest, done_chunks: DoneChunks, derived: Digests) -> int:
    """Estimate the bytes that what a form derives would take in packs: it is encoded about as well as the inputs."""
    sources = sorted({number for each in form.derived for number in each.inputs})
    raw, stored = done_chunks.sizes_of(distinct_digests([form.table.take(np.array(sources)).digests]))
    _, first = np.unique(form.digests, axis=0, return_index=True)
    n_bytes = int(form.chunk_sizes[first[is_among(form.digests[first], derived)]].sum())
    return n_bytes * stored // max(1, raw)


def write_in_full(store: Store, found: StoredRefs, chosen: Set[str]) -> None:
    """Store the content of some manifests with forms in full again, each in the place of its form.

    Args:
        store: Store to optimize.
        found: Refs of the store.
        chosen: See `forms_to_replace`.

    Raises:
        BackendError: The storage failed.
    """
    for ref in {ref.manifest: ref for ref in found.refs if ref.manifest in chosen}.values():
        manifest = manifest_of(store, [ref])
        if manifest is not None:
            commit_form(store, manifest, None, [ref.manifest])


def write_forms(store: Store, done_chunks: DoneChunks, found: StoredRefs, refs: Sequence[Ref]) -> int:
    """Find rows of checkpoints that are functions of other stored rows, and write forms that derive them.

    Checkpoints without relatives come first, such as transposed and quantized ones: the others can be bases of each
    other's deltas. Of these, the latest come first, so that they are made of earlier ones. No row is derived whose
    chunks are the bases of deltas, the inputs of another derived row, or to be restored fast.

    Args:
        store: Store to optimize.
        done_chunks: Chunks that are done.
        found: Refs of the store.
        refs: One ref of each different content as it is stored, in the order in which they are optimized.

    Returns:
        Number of contents with a new form.

    Raises:
        BackendError: The storage failed; the next run finds what was written.
    """
    if len(refs) < 2:
        return 0
    search = _Search(store, done_chunks)
    chosen = search.take(refs)
    n_forms = 0
    for ref in chosen:
        manifest = manifest_of(store, [ref])
        derived = {} if manifest is None else search.derive(manifest)
        if manifest is None or not derived:
            continue
        digest_text = ref.manifest.partition(".")[0]
        named = {each.manifest for each in found.refs}
        of = [name for name in sorted(named) if found.forms.get(name, name).partition(".")[0] == digest_text]
        n_forms += commit_form(store, manifest, derived, of)
    return n_forms


class _Search:
    """Search for the derived rows of stored checkpoints and files."""

    def __init__(self, store: Store, done_chunks: DoneChunks) -> None:
        self._store = store
        self._done_chunks = done_chunks
        self._known = Sketches()
        self._bases = done_chunks.base_digests()
        self._taken = NO_DIGESTS
        """Chunks of inputs: none is derived."""
        self._made = NO_DIGESTS
        """Chunks of derived rows: none is an input."""

    def take(self, refs: Sequence[Ref]) -> list[Ref]:
        """Learn what there is; return the refs whose rows may be derived, in the order in which to try them."""
        new: list[Ref] = []
        old: dict[Hashable, Ref] = {}
        unsketched: list[Ref] = []
        read = threads.ordered_map(
            lambda ref: manifest_of(self._store, [ref]), refs, waits=self._store.backend.is_remote
        )
        for ref, manifest in zip(refs, read, strict=True):
            if manifest is None:
                continue
            sketched = Sketched.stored(ref.manifest, manifest)
            if sketched is None:
                unsketched.append(ref)
            else:
                self._known.note(manifest.digest, sketched)
            for each in manifest.derived:
                self._note(manifest.rows[each.row].digests, [manifest.table.row(row).digests for row in each.inputs])
            if self._done_chunks.are_done(manifest.stored_digests).all():
                old.pop(series_of(ref), None)
                old[series_of(ref)] = ref
            else:
                new.append(ref)
        if not new:
            return []
        for ref in unsketched[-MOST_UNREAD:]:
            manifest = manifest_of(self._store, [ref])
            found = None if manifest is None else compute_sketched(self._store, ref.manifest, manifest)
            if manifest is not None and found is not None:
                self._known.note(manifest.digest, found)
        chosen = {ref.manifest for ref in [*list(old.values())[-_MOST_OLD:], *new]}
        latest_first = [ref for ref in refs if ref.manifest in chosen][::-1]
        return sorted(latest_first, key=self._has_relatives)

    def _has_relatives(self, ref: Ref) -> bool:
        """Tell whether another checkpoint has tensors near those of a checkpoint, element by element."""
        query = self._known.get(ref.manifest)
        matches = () if query is None else self._known.relatives(query)
        return any(match.sketched is not query for match in matches)

    def derive(self, manifest: Manifest) -> Mapping[int, Derived]:
        """Find the rows of one checkpoint or file to derive."""
        accepted: dict[int, Derived] = {}
        for batch in self._found(manifest, self._rows_to_derive(manifest)):
            for number, each in sorted(batch.items()):
                sources, products = distinct_digests([each.input_digests]), distinct_digests([each.row.digests])
                if not (
                    is_among(sources, self._made).any()
                    or is_among(products, self._taken).any()
                    or is_among(sources, products).any()
                ):
                    accepted[number] = each
                    self._note(products, [sources])
        return accepted

    def _note(self, products: Digests, sources: Sequence[Digests]) -> None:
        self._made = distinct_digests([self._made, products])
        self._taken = distinct_digests([self._taken, *sources])

    def _found(self, manifest: Manifest, rows: Sequence[int]) -> Iterator[Mapping[int, Derived]]:
        """Find functions for rows, batch by batch; end at a chunk that cannot be read."""

        def are_made(digests: Digests) -> Any:
            return is_among(digests, self._made)

        try:
            yield from find_derived(self._store, manifest, rows, self._known, are_made) if rows else ()
        except (NotFoundError, FormatError) as error:
            _log.warning("%s: functions of other tensors are not looked for in the rest: %s", manifest.label, error)

    def _rows_to_derive(self, manifest: Manifest) -> list[int]:
        """Return the rows that packs hold, and that a function may make."""
        columns = manifest.columns
        stored = self._done_chunks.stored_bytes(columns.digests)
        unfit = (stored < 0) | is_among(columns.digests, self._taken) | is_among(columns.digests, self._bases)
        unfit |= self._done_chunks.must_be_shallow(columns.digests)

        def sums(values: Any) -> Any:
            ends = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
            return ends[columns.chunk_at[1:]] - ends[columns.chunk_at[:-1]]

        n_bytes = columns.n_bytes
        fits = (n_bytes >= LEAST_DERIVED_BYTES) & (n_bytes <= MOST_DERIVED_BYTES) & (sums(unfit) == 0)
        fits &= sums(stored) > _LEAST_SHARE * n_bytes
        fits[[each.row for each in manifest.derived]] = False
        rows: list[int] = np.flatnonzero(fits).tolist()
        return rows
