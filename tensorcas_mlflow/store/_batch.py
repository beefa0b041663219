"""Checkpoints and files of another store, stored together: many saves that walk the protocol in step.

Each has an intent of its own, which names all it relies on and becomes its ref. What comes between is done once for
all of them: only when the last intent is there are the condemned lists read and the chunks looked for, and what is
missing goes into packs that they share. So for each of them the order is that of a save (``docs/design/protocol.md``).
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import uuid
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from tensorcas_mlflow import threads
from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.digest import DIGEST_BYTES, Digests, unique_rows
from tensorcas_mlflow.errors import (
    BackendError,
    BlobExistsError,
    BlobNotFoundError,
    CheckpointExistsError,
    ChunkNotFoundError,
)
from tensorcas_mlflow.index import pack_key, pack_name
from tensorcas_mlflow.manifest import Manifest
from tensorcas_mlflow.pack import TARGET_BYTES, Base, Packed, Payload
from tensorcas_mlflow.store._catalog import Catalog
from tensorcas_mlflow.store._claim import Intent, declare, look, manifest_blob, probe, write_packs
from tensorcas_mlflow.store._condemned import Condemnation
from tensorcas_mlflow.store._lookup import Places
from tensorcas_mlflow.store._packs import new_pack_name
from tensorcas_mlflow.store._records import Ref, ref_bytes

_log = logging.getLogger(__name__)


class PendingBatch:
    """Saves of manifests that are known, whose chunks the caller brings encoded. A context manager, as `PendingSave`.

    Call `write` once with what is `missing`, and then `commit` for each.
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
        """Declare all of them, and only then look what is there.

        Args:
            backend: The store's.
            catalog: The store's.
            manifests: Of this store's id; one may stand there several times, for several refs.
            bases: Chunks that the store may hold, and against which payloads may be deltas. So may they be against what
                is written here. None if there are to be none.
            n_bytes: Where there may be deltas, most bytes that are written.
        """
        self.manifests = manifests
        self.n_stored_bytes = 0
        """Bytes added to the store so far."""
        self._backend = backend
        self._catalog = catalog
        self._lock = threading.Lock()
        self._intents: list[Intent | None] = [None] * len(manifests)
        self._names: dict[str, str] = {}
        """The name of each manifest, by its digest."""
        self._there: set[str] = set()
        """Names of manifests that may be relied on."""
        self._bases: dict[bytes, Base] = {}
        """By digest what deltas may be added to. The intents name the packs in which these lie."""
        self._new_packs: list[str] = []
        """Names for packs in which bases may come to lie: the intents have to name them too."""
        places: Places | None = None
        packs: set[str] = set()
        if bases is not None:
            self._new_packs = [new_pack_name(backend) for _ in range(2 + n_bytes // TARGET_BYTES)]
            places = catalog.find_sound(bases, ())
            packs = {places.packs[number] for number in np.unique(places.pack[places.found])}
            packs |= catalog.find_chains(places)[1]
        self._pinned = frozenset({*packs, *self._new_packs})
        try:
            self._condemned = self._declare_all()
            if places is not None:
                self._find_bases(places, packs)
            unique = _union(manifests)
            self.missing: Digests = unique[probe(backend, catalog, unique, self._condemned)]
            """Chunks that have to be written."""
        except BaseException:
            self.abandon()
            raise
        self._lacking: Any = _as_keys(self.missing)

    def __enter__(self) -> PendingBatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()

    def base_of(self, digest: bytes) -> Base | None:
        """Name the copy of a chunk that a delta may be added to; None if there is none."""
        return self._bases.get(digest)

    def has_written(self, base: Base) -> bool:
        """Tell whether a base lies in a pack that is written here."""
        return base.pack in self._new_packs

    def write(self, payloads: Iterator[Payload]) -> None:
        """Write chunks that are missing into new packs, and the manifests that then have all of theirs.

        Args:
            payloads: Encoded and verified. A chunk that is left out keeps those from being committed that need it. A
                delta names what `base_of` gives when the payload is drawn.

        Raises:
            BackendError: The storage failed; what was written is garbage or is found by the next batch.
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
        """Turn one intent into a ref. Different ones may be committed by several threads at once.

        Args:
            number: Which of the manifests.
            ref: What the ref says, and its key; the manifest's name and size are put in here.
            replace: Whether it may take the place of one that is there.

        Returns:
            False if a collector has given it up meanwhile; then nothing is committed, and another batch may try.

        Raises:
            ChunkNotFoundError: One of its chunks was missing and has not been written; nothing is committed.
            CheckpointExistsError: There is one and ``replace`` is False; it is untouched.
            BackendError: The storage failed; if it was at the very end the commit may have happened.
        """
        manifest = self.manifests[number]
        lacking = self._lacks(manifest)
        if lacking.any():
            at = int(np.flatnonzero(lacking)[0])
            raise ChunkNotFoundError(manifest.digests[at].tobytes().hex(), int(lacking.sum()))
        intent, name = self._intents[number], self._names[manifest.digest]
        if intent is None or name not in self._there:
            raise ValueError("this one is not written yet, or is committed or abandoned already")
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
        """Give up what is not committed."""
        for number, intent in enumerate(self._intents):
            self._intents[number] = None
            if intent is None:
                continue
            try:
                self._backend.withdraw(*intent)
            except BackendError as error:
                # Why they are given up is what the reader wants to know. The intent costs nothing that stays.
                _log.warning("a save was given up, and %s", error)

    def _declare_all(self) -> Condemnation:
        """Create the intents, and only then read what is condemned."""
        known: set[str] = set()
        for manifest in self.manifests:
            name = self._catalog.known_manifest(manifest.digest)
            if name is not None:
                known.add(manifest.digest)
            # As in a save: one that has to be written gets a name that never was.
            self._names.setdefault(manifest.digest, name or _new_name(manifest.digest))
        while True:
            threads.run_all(self._declare, range(len(self.manifests)), waits=self._backend.is_remote)
            condemned = look(self._backend, self._catalog)
            seen = self._catalog.seen(condemned.generation)
            wanted = {f"manifests/{self._names[digest]}" for digest in known}
            gone = self._backend.missing(wanted - seen)
            seen |= wanted - gone
            lost = {d for d in known if self._names[d] in condemned.manifests or f"manifests/{self._names[d]}" in gone}
            if not lost:
                self._there = {self._names[digest] for digest in known}
                return condemned
            known -= lost
            self._rename(lost)

    def _find_bases(self, places: Places, packs: set[str]) -> None:
        """Leave out, now that intents name the packs of possible bases, what is condemned or gone."""
        there = packs - self._condemned.packs
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
            unique, _, _ = unique_rows(manifest.digests)
            name = self._names[manifest.digest]
            self._intents[number] = declare(self._backend, name, unique, sorted(self._pinned))

    def _rename(self, lost: set[str]) -> None:
        """Take back the intents that name manifests which cannot be relied on."""
        for number, manifest in enumerate(self.manifests):
            intent = self._intents[number]
            if manifest.digest in lost and intent is not None:
                self._intents[number] = None
                self._backend.withdraw(*intent)
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
        """For each chunk of a manifest whether it was missing and has not been written."""
        return np.isin(_as_keys(manifest.digests), self._lacking)


def _new_name(digest: str) -> str:
    return f"{digest}.{uuid.uuid4().hex[:8]}"


def _union(manifests: Sequence[Manifest]) -> Digests:
    parts = [np.empty((0, DIGEST_BYTES), np.uint8), *(manifest.digests for manifest in manifests)]
    return unique_rows(np.concatenate(parts))[0]


def _as_keys(digests: Digests) -> Any:
    """Each digest as one value."""
    return np.ascontiguousarray(digests).view(f"V{DIGEST_BYTES}").ravel()
