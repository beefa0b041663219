"""Sources of lost blobs for a repair: other stores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tensorcas_mlflow.base.digest import Digests
from tensorcas_mlflow.errors import BackendError, FormatError, NotFoundError
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.layout.manifests import MAX_BYTES, Manifest
from tensorcas_mlflow.layout.packs import Payload
from tensorcas_mlflow.maintenance._copy_chunks import CopyReader
from tensorcas_mlflow.maintenance._copy_refs import of_store
from tensorcas_mlflow.maintenance._inventory import list_manifests
from tensorcas_mlflow.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundManifest:
    """Lost manifest that was found elsewhere."""

    manifest: Manifest
    where: str
    """Place where it was found, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRef:
    """Damaged ref that another store has."""

    source: Store
    ref: Ref
    manifest: Manifest
    """The manifest as the repaired store is to have it."""


class Sources:
    """Places that a repair may take from. It takes nothing that does not hash to its digest."""

    def __init__(self, store: Store, others: Sequence[Store]) -> None:
        """Read nothing yet.

        Args:
            store: Store that is repaired. A manifest may lie there under two names.
            others: Other stores, in the order in which to ask them. They are only read.
        """
        self._store = store
        self._others = others
        self._manifests: dict[int, dict[str, list[str]]] = {}
        """For each store the names of its manifests, by their digest."""

    @property
    def is_empty(self) -> bool:
        """True if there is no other store."""
        return not self._others

    def manifest(self, name: str, refs: Iterable[Ref]) -> FoundManifest | None:
        """Find a manifest that hashes to its name.

        Args:
            name: Name of the manifest in the repaired store.
            refs: Refs that name it. In a store of another id, refs at their keys lead to an equal manifest.
        """
        for source in (self._store, *self._others):
            for other in self._named(source).get(name[:64], []):
                if source is self._store and other == name:
                    continue
                try:
                    blob = source.backend.get(f"manifests/{other}", max_bytes=MAX_BYTES)
                    return FoundManifest(
                        manifest=Manifest.from_blob(blob, name), where=f"{source.uri} (manifests/{other})"
                    )
                except (NotFoundError, FormatError, BackendError):
                    continue
        for source in self._others:
            for ref in refs:
                found = self._adapted(source, ref.key)
                if found is not None and found.manifest.digest == name[:64]:
                    return FoundManifest(manifest=found.manifest, where=f"{source.uri} ({ref.key})")
        return None

    def ref(self, key: str) -> FoundRef | None:
        """Find what another store has at the key of a ref."""
        for source in self._others:
            found = self._adapted(source, key)
            if found is not None:
                return found
        return None

    def payloads(self, digests: Digests) -> Iterator[Payload]:
        """Yield chunks as a source stores them, each decoded and checked against its digest, none twice."""
        had: set[bytes] = set()
        for source in self._others:
            left = np.array([digest for digest in digests if digest.tobytes() not in had], dtype=np.uint8)
            if len(left) == 0:
                return
            for payload in CopyReader(source).payloads(left):
                if payload.digest not in had:
                    had.add(payload.digest)
                    yield payload

    def _adapted(self, source: Store, key: str) -> FoundRef | None:
        """Read the ref at a key of another store, and adapt its manifest to the repaired store."""
        try:
            ref = source.ref(key)
            if ref is None:
                return None
            manifest = source.manifest(ref)
        except (FormatError, BackendError):
            return None
        if manifest.store_id != source.id:
            return None
        return FoundRef(source=source, ref=ref, manifest=of_store(manifest, self._store.id))

    def _named(self, source: Store) -> dict[str, list[str]]:
        names = self._manifests.get(id(source))
        if names is None:
            names = self._manifests[id(source)] = {}
            for name in list_manifests(source.backend):
                names.setdefault(name[:64], []).append(name)
        return names
