"""Checkpoints and files of another store, stored together: many saves walking the protocol in step.

Each has an intent of its own, naming every chunk it relies on, and the intent becomes its ref. The steps in between
are done once for all of them. Only after creating the last intent does the batch read the condemned lists and look for
the chunks; missing ones go into shared packs. So each keeps the order of a single save (``docs/design/protocol.md``).
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.digest import DIGEST_BYTES, Digests, as_keys, distinct_digests, unique_rows
from tensorcas_mlflow.base.files import new_name
from tensorcas_mlflow.chunk_io import Catalog, Places
from tensorcas_mlflow.errors import (
    BackendError,
    BlobExistsError,
    BlobNotFoundError,
    CheckpointExistsError,
    ChunkNotFoundError,
)
from tensorcas_mlflow.layout import Condemnation, Ref, ref_bytes
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.layout.packs import TARGET_BYTES, Base, Packed, Payload, new_pack_name, pack_key, pack_name
from tensorcas_mlflow.store._save import WrittenIntent, declare, look, manifest_blob, probe, write_packs

_log = logging.getLogger(__name__)


class PendingBatch:
    """Saves of known manifests, with chunks encoded by the caller. A context manager, like `PendingSave`.

    Call `write` once with the `missing` chunks, and then `commit` for each save.
    """

    def __init__(
        self,
        backend: Backend,
        catalog: Catalog,
        manifests: Sequence[Manifest],
        *,
        bases: Digests | None = None,
        n_bytes: int = 0,
    ) -> None:
        """Declare all saves, and only then look for their chunks.

        Args:
            backend: The store's.
            catalog: The store's.
            manifests: Manifests with this store's id; one may occur several times, for several refs.
            bases: Chunks the store may hold, as possible bases of deltas. Chunks written here are possible bases
                too. None if there are to be no deltas.
            n_bytes: With deltas, the most bytes to be written.
        """
        self.manifests = manifests
        self.n_stored_bytes = 0
        """Bytes added to the store so far."""
        self._backend = backend
        self._catalog = catalog
        self._lock = threading.Lock()
        self._intents: list[WrittenIntent | None] = [None] * len(manifests)
        self._names: dict[str, str] = {}
        """The name of each manifest, by its digest."""
        self._there: set[str] = set()
        """Names of manifests to rely on."""
        self._bases: dict[bytes, Base] = {}
        """Possible bases of deltas, by digest. The intents name their packs."""
        self._new_packs: list[str] = []
        """Names for packs of future bases: the intents have to name them too."""
        places: Places | None = None
        packs: set[str] = set()
        if bases is not None:
            self._new_packs = [new_pack_name(backend) for _ in range(2 + n_bytes // TARGET_BYTES)]
            places = catalog.find_sound(bases, ())
            packs = {places.packs[number] for number in np.unique(places.pack[places.found])}
            packs |= catalog.find_chains(places)[1]
        self._pinned = frozenset({*packs, *self._new_packs})
        unique = distinct_digests(each.stored_digests for each in manifests)
        before = catalog.find_sound(unique, ())
        try:
            self._condemned = self._declare_all()
            if places is not None:
                self._find_bases(places, packs)
            is_missing = probe(backend, catalog, unique, self._condemned, before=before, look_again=self._look_again)
            self.missing: Digests = unique[is_missing]
            """Chunks to write."""
        except BaseException:
            self.abandon()
            raise
        self._lacking: Any = as_keys(self.missing)

    def __enter__(self) -> PendingBatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()

    def base_of(self, digest: bytes) -> Base | None:
        """Return the copy of a chunk to use as a delta's base; None if there is none."""
        return self._bases.get(digest)

    def has_written(self, base: Base) -> bool:
        """Tell whether a base lies in a pack written here."""
        return base.pack in self._new_packs

    def write(self, payloads: Iterator[Payload]) -> None:
        """Write missing chunks into new packs, and the manifests with complete chunks.

        Args:
            payloads: Encoded and verified chunks. If one is left out, the saves in need of it cannot be committed. A
                delta names the result of `base_of` at the time the payload is drawn.

        Raises:
            BackendError: The storage failed; the written blobs are garbage, or the next batch finds them.
        """
        brought: list[bytes] = []

        def note(pack: str, payload: Packed) -> None:
            assert isinstance(payload, Payload)
            brought.append(payload.digest)
            if pack in self._pinned:
                depth = 0 if payload.base is None else payload.base.depth + 1
                self._bases[payload.digest] = Base(pack=pack, digest=payload.digest, depth=depth)

        self.n_stored_bytes += write_packs(
            self._backend, self._catalog, payloads, self._condemned, names=self._new_packs, note=note
        )
        there = np.frombuffer(b"".join(brought), dtype=f"V{DIGEST_BYTES}")
        self._lacking = self._lacking[~np.isin(self._lacking, there)]
        whole = {each.digest: each for each in self.manifests if not self._lacks(each).any()}
        new = [each for digest, each in whole.items() if self._names[digest] not in self._there]
        threads.run_all(self._put_manifest, new, waits=self._backend.is_remote)

    def commit(self, number: int, ref: Ref, *, replace: bool) -> bool:
        """Turn one intent into a ref. Several threads may commit different ones at once.

        Args:
            number: Number of the manifest.
            ref: The ref and its key; this call fills in the manifest's name and size.
            replace: Whether it may replace an existing one.

        Returns:
            False if a collector has given it up meanwhile; then nothing is committed, and another batch may try.

        Raises:
            ChunkNotFoundError: One of its chunks was missing and has not been written; nothing is committed.
            CheckpointExistsError: There is one and ``replace`` is False; it is untouched.
            BackendError: The storage failed; if it failed at the very end the commit may have happened.
        """
        manifest = self.manifests[number]
        lacking = self._lacks(manifest)
        if lacking.any():
            at = int(np.flatnonzero(lacking)[0])
            raise ChunkNotFoundError(manifest.stored_digests[at].tobytes().hex(), int(lacking.sum()))
        intent, name = self._intents[number], self._names[manifest.digest]
        if intent is None or name not in self._there:
            raise ValueError("this save is not written yet, or is committed or abandoned already")
        n_bytes = manifest.n_bytes if manifest.kind == "file" else len(manifest.stream)
        data = ref_bytes(dataclasses.replace(ref, manifest=name, n_bytes=n_bytes))
        source, token = intent
        try:
            self._backend.promote(source, ref.key, data, token=token, replace=replace)
        except BlobNotFoundError:
            self._intents[number] = None
            return False
        except BlobExistsError:
            raise CheckpointExistsError(ref.label) from None
        self._intents[number] = None
        with self._lock:
            self.n_stored_bytes += len(data)
        self._catalog.fold()
        return True

    def abandon(self) -> None:
        """Give up the uncommitted saves."""
        for number, intent in enumerate(self._intents):
            self._intents[number] = None
            if intent is None:
                continue
            try:
                self._backend.withdraw(*intent, own=())
            except BackendError as error:
                # The caller wants the reason for giving up, not this error. A leftover intent costs little.
                _log.warning("a save was given up, and %s", error)

    def _declare_all(self) -> Condemnation:
        """Create the intents, and only then read the condemned lists."""
        known: set[str] = set()
        for manifest in self.manifests:
            name = self._catalog.known_manifest(manifest.digest)
            if name is not None:
                known.add(manifest.digest)
            # Like in a save: a newly written manifest gets a name never used before.
            self._names.setdefault(manifest.digest, name or _new_name(manifest.digest))
        while True:
            threads.run_all(self._declare, range(len(self.manifests)), waits=self._backend.is_remote)
            condemned = look(self._backend, self._catalog)
            seen = self._catalog.seen(condemned.generation)
            wanted = {f"manifests/{self._names[digest]}" for digest in known}
            gone = wanted if condemned.is_unknown else self._backend.missing(wanted - seen)
            seen |= wanted - gone
            lost = {d for d in known if self._names[d] in condemned.manifests or f"manifests/{self._names[d]}" in gone}
            if not lost:
                self._there = {self._names[digest] for digest in known}
                return condemned
            known -= lost
            self._rename(lost)

    def _look_again(self) -> Condemnation:
        self._condemned = look(self._backend, self._catalog)
        return self._condemned

    def _find_bases(self, places: Places, packs: set[str]) -> None:
        """Remove condemned and missing packs from the possible bases, now that intents name these packs."""
        there = set[str]() if self._condemned.is_unknown else packs - self._condemned.packs
        gone = {pack_name(key) for key in self._backend.missing(map(pack_key, sorted(there)))}
        self._catalog.forget(gone)
        lost = gone | (packs - there)
        is_whole, _ = self._catalog.find_chains(places, lost)
        for row in np.flatnonzero(places.found & is_whole).tolist():
            pack = places.packs[places.pack[row]]
            if pack not in lost:
                entry = places.entries[row]
                digest = entry["digest"].tobytes()
                self._bases[digest] = Base(pack=pack, digest=digest, depth=int(entry["depth"]))

    def _declare(self, number: int) -> None:
        if self._intents[number] is None:
            manifest = self.manifests[number]
            unique, _, _ = unique_rows(manifest.stored_digests)
            name = self._names[manifest.digest]
            self._intents[number] = declare(self._backend, name, unique, sorted(self._pinned))

    def _rename(self, lost: set[str]) -> None:
        """Withdraw the intents naming manifests nobody can rely on."""
        for number, manifest in enumerate(self.manifests):
            intent = self._intents[number]
            if manifest.digest in lost and intent is not None:
                self._intents[number] = None
                self._backend.withdraw(*intent, own=())
        self._names.update({digest: _new_name(digest) for digest in lost})

    def _put_manifest(self, manifest: Manifest) -> None:
        blob = manifest_blob(self._backend, self._catalog, manifest)
        name = self._names[manifest.digest]
        self._backend.put_new(f"manifests/{name}", [blob])
        self._catalog.seen(self._condemned.generation).add(f"manifests/{name}")
        self._catalog.know_manifest(manifest.digest, name)
        with self._lock:
            self._there.add(name)
            self.n_stored_bytes += len(blob)

    def _lacks(self, manifest: Manifest) -> Any:
        """Return for each chunk of a manifest whether it was missing and has not been written."""
        return np.isin(as_keys(manifest.stored_digests), self._lacking)


def _new_name(digest: str) -> str:
    return f"{digest}.{new_name()[:8]}"
