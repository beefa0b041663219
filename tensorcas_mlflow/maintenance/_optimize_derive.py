"""Recipes of an optimization: tensors that are functions of others, of which packs need hold no copy.

Saves find such rows by themselves (``docs/design/codecs.md``, Functions). An optimization finds those of
checkpoints whose inputs were saved later, or that were saved without a search.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.digest import Digests, distinct_digests
from tensorcas_mlflow.errors import FormatError, NotFoundError
from tensorcas_mlflow.layout import Manifest, Ref, new_recipe_name, pack_key, recipe_key
from tensorcas_mlflow.maintenance._inventory import is_among, manifest_of
from tensorcas_mlflow.maintenance._optimize_done import DoneChunks
from tensorcas_mlflow.maintenance._optimize_relatives import MOST_UNREAD, compute_sketched, series_of
from tensorcas_mlflow.maintenance._recipe_rows import rows_of_recipe
from tensorcas_mlflow.store import (
    LEAST_DERIVED_BYTES,
    MOST_DERIVED_BYTES,
    Derived,
    Sketched,
    Sketches,
    Store,
    find_derived,
    recipe_of,
)
from tensorcas_mlflow.store import protocol as p

_log = logging.getLogger(__name__)

_LEAST_SHARE = 1 / 20
"""A row is not derived if its chunks take less than this share of their bytes."""
_MOST_OLD = 32
"""Bound of the checkpoints that are optimized already and whose rows may be made of new ones: the last of so many
series."""


def write_recipes(store: Store, done_chunks: DoneChunks, refs: Sequence[Ref], on_done: Callable[[int], None]) -> int:
    """Find rows of checkpoints that are functions of other stored rows, and write recipes for them.

    Checkpoints without relatives come first, such as transposed and quantized ones: the others can be bases of each
    other's deltas. Of these, the latest come first, so that they are made of earlier ones. No row is derived whose
    chunks are the bases of deltas, the inputs of another derived row, or to be restored fast.

    Args:
        store: Store to optimize.
        done_chunks: Chunks that are done; it learns what the recipes make.
        refs: One ref of each different manifest, in the order in which they are optimized.
        on_done: Told the bytes of chunks that need no copy in a pack any more.

    Returns:
        Number of new recipes.

    Raises:
        BackendError: The storage failed; the next run finds what was written.
    """
    if len(refs) < 2:
        return 0
    known = Sketches()
    taken: list[Digests] = []
    new: list[Ref] = []
    old: dict[Hashable, Ref] = {}
    unsketched: list[Ref] = []
    read = threads.ordered_map(lambda ref: manifest_of(store, [ref]), refs, waits=store.backend.is_remote)
    for ref, manifest in zip(refs, read, strict=True):
        if manifest is None:
            continue
        sketched = Sketched.stored(ref.manifest, manifest)
        if sketched is None:
            unsketched.append(ref)
        else:
            known.note(manifest.digest, sketched)
        for each in manifest.derived:
            taken += [manifest.table.row(number).digests for number in each.sources]
        if done_chunks.are_done(manifest.stored_digests).all():
            old.pop(series_of(ref), None)
            old[series_of(ref)] = ref
        else:
            new.append(ref)
    if not new:
        return 0
    for ref in unsketched[-MOST_UNREAD:]:
        manifest = manifest_of(store, [ref])
        found = None if manifest is None else compute_sketched(store, ref.manifest, manifest)
        if manifest is not None and found is not None:
            known.note(manifest.digest, found)
    chosen = {ref.manifest for ref in [*list(old.values())[-_MOST_OLD:], *new]}
    kept = distinct_digests([done_chunks.base_digests(), *taken])
    n_recipes = 0
    latest_first = reversed([ref for ref in refs if ref.manifest in chosen])
    for ref in sorted(latest_first, key=lambda ref: _has_relatives(ref, known)):
        manifest = manifest_of(store, [ref])
        if manifest is None:
            continue
        derived = _derive(store, done_chunks, manifest, kept, known)
        recipe = recipe_of(manifest, derived) if derived else None
        if recipe is not None and (name := write_recipe(store, recipe, manifest.digest)) is not None:
            done_chunks.add_recipe(name, rows_of_recipe(name, recipe))
            n_recipes += 1
            on_done(sum(each.row.spec.n_bytes for each in derived.values()))
    return n_recipes


def _has_relatives(ref: Ref, known: Sketches) -> bool:
    """Tell whether another checkpoint has tensors near those of a checkpoint, element by element."""
    query = known.get(ref.manifest)
    matches = () if query is None else known.relatives(query)
    return any(match.sketched is not query for match in matches)


def _derive(
    store: Store, done_chunks: DoneChunks, manifest: Manifest, kept: Digests, known: Sketches
) -> Mapping[int, Derived]:
    """Find the rows of one checkpoint or file to derive.

    Args:
        store: Store to optimize.
        done_chunks: Chunks that are done.
        manifest: Manifest of the checkpoint or file.
        kept: Chunks that packs have to hold.
        known: Sketches of all checkpoints and files.
    """
    rows = _rows_to_derive(done_chunks, manifest, kept)
    accepted: dict[int, Derived] = {}
    made: list[Digests] = []
    taken: list[Digests] = []
    for batch in _found(store, done_chunks, manifest, rows, known):
        for number, each in sorted(batch.items()):
            sources, products = distinct_digests([each.input_digests]), distinct_digests([each.row.digests])
            # An input is never made by a recipe.
            is_made = done_chunks.are_made(sources) | is_among(sources, distinct_digests(made))
            is_input = done_chunks.are_inputs(products) | is_among(products, distinct_digests(taken))
            if not is_made.any() and not is_input.any() and not is_among(sources, products).any():
                accepted[number] = each
                made.append(products)
                taken.append(sources)
    return accepted


def _found(
    store: Store, done_chunks: DoneChunks, manifest: Manifest, rows: Sequence[int], known: Sketches
) -> Iterator[Mapping[int, Derived]]:
    """Find functions for rows, batch by batch; end at a chunk that cannot be read."""
    try:
        yield from find_derived(store, manifest, rows, known, done_chunks.are_made) if rows else ()
    except (NotFoundError, FormatError) as error:
        _log.warning("%s: functions of other tensors are not looked for in the rest: %s", manifest.label, error)


def _rows_to_derive(done_chunks: DoneChunks, manifest: Manifest, kept: Digests) -> list[int]:
    """Return the rows that packs hold, and that a function may make."""
    columns = manifest.columns
    stored = done_chunks.stored_bytes(columns.digests)
    unfit = (stored < 0) | done_chunks.are_made(columns.digests) | done_chunks.are_inputs(columns.digests)
    unfit |= is_among(columns.digests, kept) | done_chunks.must_be_shallow(columns.digests)

    def sums(values: Any) -> Any:
        ends = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
        return ends[columns.chunk_at[1:]] - ends[columns.chunk_at[:-1]]

    n_bytes = columns.n_bytes
    fits = (n_bytes >= LEAST_DERIVED_BYTES) & (n_bytes <= MOST_DERIVED_BYTES) & (sums(unfit) == 0)
    fits &= sums(stored) > _LEAST_SHARE * n_bytes
    fits[[each.row for each in manifest.derived]] = False
    rows: list[int] = np.flatnonzero(fits).tolist()
    return rows


def write_recipe(store: Store, recipe: Manifest, of: str) -> str | None:
    """Write a recipe, while an intent protects its inputs (``docs/design/protocol.md``, Recipes).

    Args:
        store: Store to optimize.
        recipe: The recipe; see `recipe_of`.
        of: Digest of the manifest for which it was found.

    Returns:
        Its name; None if an input is gone, or a collector is about to delete it.

    Raises:
        BackendError: The storage failed.
    """
    inputs = distinct_digests([recipe.stored_digests])
    places = store.catalog.find_sound(inputs, ())
    if not places.found.all():
        store.catalog.refresh()
        places = store.catalog.find_sound(inputs, ())
    if not places.found.all():
        return None
    packs = {places.packs[number] for number in np.unique(places.pack)} | store.catalog.find_chains(places)[1]
    with p.protected(store.backend, inputs, packs):
        if not _are_there(store, packs):
            return None
        name = new_recipe_name(recipe, of)
        store.backend.put_new(recipe_key(name), [recipe.to_blob()])
        return name


def _are_there(store: Store, packs: Set[str]) -> bool:
    """Tell whether packs exist and none is condemned; called when an intent names them."""
    return not packs & p.read_condemned(store.backend).packs and not store.backend.missing(map(pack_key, sorted(packs)))
