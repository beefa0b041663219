"""Steps of the save/collect protocol common to all writers (``docs/design/protocol.md``)."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial

import numpy as np

from tensorcas_mlflow.backends import Backend, Buffer, Token
from tensorcas_mlflow.digest import Digests, unique_rows
from tensorcas_mlflow.hints import hint_bytes
from tensorcas_mlflow.index import Mask, pack_key, pack_name
from tensorcas_mlflow.manifest import Manifest
from tensorcas_mlflow.pack import TARGET_BYTES, Packed, PackWriter, PayloadGroup, is_delta
from tensorcas_mlflow.store._catalog import Catalog
from tensorcas_mlflow.store._condemned import Condemnation, read_condemned
from tensorcas_mlflow.store._packs import new_pack_name
from tensorcas_mlflow.store._records import intent_bytes

Intent = tuple[str, Token]
"""Key and token of an intent."""


def declare(backend: Backend, manifest_name: str, digests: Digests, bases: Collection[str] = ()) -> Intent:
    """Create the intent of a save: from now on every collector sees the chunks it relies on.

    Args:
        bases: Packs of the bases of deltas the save may write.
    """
    key = f"intents/{uuid.uuid4().hex}"
    intent = intent_bytes(manifest_name, digests, bases=bases, through_carrier=backend.is_carrier)
    return key, backend.put_new(key, [intent], durable=False)


def look(backend: Backend, catalog: Catalog) -> Condemnation:
    """Read the condemned lists, after creating an intent, and check that the intent is in the store this object opened.

    Raises:
        CorruptError: A list is unreadable.
        StoreNotFoundError: The store is gone.
        ConflictError: Another store is in its place.
    """
    condemned = read_condemned(backend)
    catalog.identity.check(condemned.generation)
    return condemned


def probe(backend: Backend, catalog: Catalog, digests: Digests, condemned: Condemnation) -> Mask:
    """Find the chunks to write: probe the index, then check that every pack to be relied on exists.

    Args:
        digests: Distinct digests, named by an intent older than the reading of ``condemned``.
        condemned: Blobs not to be relied on.

    Returns:
        For each digest whether the chunk is missing.
    """
    seen = catalog.seen(condemned.generation)
    doomed = set(condemned.packs)
    # For a remote store, refresh this process's view of the index only if it lacks a chunk.
    is_known = backend.is_remote and bool(catalog.find_sound(digests, doomed).found.all())
    while True:
        if not is_known:
            # Repeated if a pack turned out to be gone: its collector has put the needed chunks elsewhere before.
            seen |= catalog.refresh()
        places = catalog.find_sound(digests, doomed)
        used = {pack_key(places.packs[number]) for number in np.unique(places.pack[places.found])}
        # A delta without its base is no copy.
        used |= set(map(pack_key, catalog.find_chains(places)[1]))
        gone = backend.missing(used - seen)
        seen |= used - gone
        if not gone:
            missing: Mask = ~places.found
            return missing
        catalog.forget({pack_name(key) for key in gone})
        is_known = False


def write_packs(
    backend: Backend,
    catalog: Catalog,
    payloads: Iterator[Packed],
    condemned: Condemnation,
    *,
    names: Iterable[str] = (),
    note: Callable[[str, Packed], None] | None = None,
) -> int:
    """Write chunks into new packs, durable on return, and add the packs to the index.

    Args:
        condemned: The condemned lists, read after the intent was created.
        names: Names of the first packs, drawn before; those of further ones are drawn here.
        note: Called with the name of a pack and each payload about to go into it.

    Returns:
        Size of the packs.
    """
    n_bytes = 0
    for name, writer, pieces in _new_packs(backend, payloads, names=names, note=note):
        backend.put_new(pack_key(name), pieces)
        n_bytes += publish(catalog, {name: writer}, condemned)
    return n_bytes


def put_packs(
    backend: Backend, payloads: Iterator[Packed], beside: Iterable[tuple[str, bytes]]
) -> dict[str, PackWriter]:
    """Write chunks into new packs needed only by a later commit; see `Backend.put_all`.

    Args:
        beside: Other new blobs, by key, that need not wait for the packs.

    Returns:
        The packs by name, for `publish`.
    """
    packs: dict[str, PackWriter] = {}

    def blobs() -> Iterator[tuple[str, Iterable[Buffer]]]:
        for name, writer, pieces in _new_packs(backend, payloads):
            packs[name] = writer
            yield pack_key(name), pieces
        for key, blob in beside:
            yield key, [blob]

    backend.put_all(blobs())
    return packs


def _new_packs(
    backend: Backend,
    payloads: Iterator[Packed],
    *,
    names: Iterable[str] = (),
    note: Callable[[str, Packed], None] | None = None,
) -> Iterator[tuple[str, PackWriter, Iterator[Buffer]]]:
    """Lay out chunks in packs: yield name, table and bytes of each; draw the bytes before the next pack."""
    ahead = _Lookahead(payloads)
    drawn = iter(names)
    while ahead.has_more():
        writer = PackWriter()
        name = next(drawn, None) or new_pack_name(backend)
        some = ahead.until(TARGET_BYTES)
        yield name, writer, writer.pieces(some if note is None else _noted(some, partial(note, name)))


def _noted(payloads: Iterator[Packed], note: Callable[[Packed], None]) -> Iterator[Packed]:
    for payload in payloads:
        note(payload)
        yield payload


def publish(catalog: Catalog, packs: Mapping[str, PackWriter], condemned: Condemnation) -> int:
    """Add written packs to the index, and return their size."""
    seen = catalog.seen(condemned.generation)
    for name, writer in packs.items():
        seen.add(pack_key(name))
        catalog.publish(name, writer.entries())
    return sum(writer.n_bytes for writer in packs.values())


def manifest_blob(backend: Backend, catalog: Catalog, manifest: Manifest) -> bytes:
    """Return the blob of a manifest with stored chunks: in a remote store with hints, for readers without an index."""
    blob = manifest.to_blob()
    if backend.is_remote:
        places = catalog.find(unique_rows(manifest.digests)[0])
        # Hints do not record the bases of deltas.
        if not is_delta(places.entries).any():
            blob += hint_bytes(places.packs, places.pack, places.entries)
    return blob


class _Lookahead:
    """An iterator of payloads with a test for more, divisible into packs."""

    def __init__(self, payloads: Iterator[Packed]) -> None:
        self._payloads = payloads
        self._next: Packed | None = None

    def has_more(self) -> bool:
        if self._next is None:
            self._next = next(self._payloads, None)
        return self._next is not None

    def until(self, n_bytes: int) -> Iterator[Packed]:
        taken = 0
        while taken < n_bytes and self.has_more():
            assert self._next is not None
            payload, self._next = self._next, None
            taken += payload.n_bytes if isinstance(payload, PayloadGroup) else memoryview(payload.data).nbytes
            yield payload
