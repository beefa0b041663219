"""The writer's side of the save/collect protocol.

The order is: intent, condemned lists, index, packs, manifest, ref. The intent tells every collector which chunks the
save relies on, before the save looks for them. The save relies on no condemned blob, and its commit fails if a
collector has given the intent up meanwhile. ``docs/design/protocol.md`` gives the argument.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.digest import unique_rows
from tensorcas_mlflow.errors import (
    BackendError,
    BlobExistsError,
    BlobNotFoundError,
    CheckpointExistsError,
    FencedError,
)
from tensorcas_mlflow.index import Mask
from tensorcas_mlflow.manifest import Manifest
from tensorcas_mlflow.pack import PayloadGroup
from tensorcas_mlflow.store._base_plan import BasePlan
from tensorcas_mlflow.store._catalog import Catalog
from tensorcas_mlflow.store._claim import Intent, declare, look, manifest_blob, probe, publish, put_packs
from tensorcas_mlflow.store._condemned import Condemnation
from tensorcas_mlflow.store._encode import encode_chunks
from tensorcas_mlflow.store._parents import Parents
from tensorcas_mlflow.store._policy import Policy
from tensorcas_mlflow.store._recent_chunks import MOST_SAVED_BYTES
from tensorcas_mlflow.store._recipes import new_chooser
from tensorcas_mlflow.store._records import Ref, RefTarget, new_ref, ref_bytes
from tensorcas_mlflow.store._sources import NoSource, Source, Watch

_log = logging.getLogger(__name__)

_MAX_ATTEMPTS = 4
_NOTHING = NoSource((), 1)


class PendingSave:
    """A checkpoint or file under way, stored and not yet committed: its intent protects it from collections.

    `detach` and `write` may be called before `commit`, which does any missing step itself. A context manager: an
    uncommitted save is abandoned at its end, and the next collection removes its blobs.
    """

    def __init__(
        self,
        backend: Backend,
        catalog: Catalog,
        manifest: Manifest,
        source: Source,
        *,
        policy: Policy = Policy.BALANCED,
        parents: Parents | None = None,
    ) -> None:
        """Find the new chunks; see `Store.begin_checkpoint`.

        Args:
            backend: The store's.
            catalog: The store's.
            manifest: Manifest of the saved data.
            source: Its bytes.
            policy: Encoding effort.
            parents: Search for its earlier states; None stores everything in full.
        """
        self.manifest = manifest
        self.n_stored_bytes = 0
        """Bytes added to the store by this save."""
        self._backend = backend
        self._catalog = catalog
        self._source = source
        self._policy = policy
        self._parents = parents if policy is not Policy.FAST else None
        self._plan: BasePlan | None = None
        """Possible bases of new chunks; the intent names them."""
        self._unique, self._first, _ = unique_rows(manifest.digests)
        self._manifest_name = ""
        self._intent: Intent | None = None
        self._condemned = Condemnation(lists=(), generation=None)
        self._lock = threading.Lock()
        self._missing: Mask | None = None
        """Flags the distinct chunks to write; None once all are in the store."""
        self._has_manifest = False
        try:
            self._begin()
        except BaseException:
            self.abandon()
            raise
        self.n_new_bytes = int(self._source.sizes[self._new_chunks()].sum())
        """Size of the chunks missing from the store."""

    def __enter__(self) -> PendingSave:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()

    def detach(self) -> None:
        """Copy the chunks still to be written, so the caller may change the arrays.

        If collectors treat the save as dead afterwards, it cannot start again, and its commit raises `FencedError`.
        """
        with self._lock:
            self._check_open()
            self._source = self._source.detached(self._new_chunks())

    def write(self, *, watch: Watch | None = None) -> None:
        """Write the new chunks, and the manifest.

        Args:
            watch: Called with the number of bytes encoded, `n_new_bytes` in all.

        Raises:
            BackendError: The storage failed; the written blobs are garbage and nothing is lost.
            ConflictError: An array was changed after it was hashed.
        """
        with self._lock:
            self._check_open()
            self._write(watch)

    def commit(self, target: RefTarget, *, replace: bool = True) -> Ref:
        """Make the save visible and permanent, in one step.

        Args:
            target: Key and facts of the ref.
            replace: Whether the ref may replace an earlier one.

        Raises:
            CheckpointExistsError: There is one and ``replace`` is False; it is untouched.
            FencedError: Collectors gave this save up again and again; nothing is committed.
            StoreNotFoundError: Somebody deleted the store meanwhile; nothing is committed.
            ConflictError: Somebody created another store in its place; nothing is committed.
            BackendError: The storage failed; if it failed at the very end the commit may have happened.
        """
        key = target.key
        with self._lock:
            for _ in range(_MAX_ATTEMPTS):
                intent = self._check_open()
                self._write()
                ref = new_ref(
                    target,
                    key=key,
                    kind=self.manifest.kind,
                    manifest=self._manifest_name,
                    n_bytes=self._shown_bytes(),
                    flavor=self.manifest.flavor,
                )
                data = ref_bytes(ref)
                source, token = intent
                try:
                    self._backend.promote(source, key, data, token=token, replace=replace)
                except BlobNotFoundError:
                    self._begin()
                except BlobExistsError:
                    raise CheckpointExistsError(ref.label) from None
                else:
                    self._intent = None
                    if self._parents is not None:
                        self._parents.note(self.manifest)
                    self.n_stored_bytes += len(data)
                    self._catalog.fold()
                    return ref
            raise FencedError(_MAX_ATTEMPTS)

    def abandon(self) -> None:
        """Give the save up. Does nothing after a commit or an abandon."""
        intent, self._intent = self._intent, None
        self._source = _NOTHING  # a stored error would keep the bytes alive too
        if intent is not None:
            try:
                self._backend.withdraw(*intent)
            except BackendError as error:
                # The caller wants the reason for giving up, not this error. A leftover intent costs little.
                _log.warning("a save was given up, and %s", error)

    def _check_open(self) -> Intent:
        if self._intent is None:
            raise ValueError("this save is committed or abandoned already")
        return self._intent

    def _shown_bytes(self) -> int:
        return self.manifest.n_bytes if self.manifest.kind == "file" else len(self.manifest.stream)

    def _begin(self) -> None:
        """Take steps 1 and 2 of the protocol: declare the save's chunks, and then look them up."""
        # The intent must name possible bases before the save knows the missing chunks: the index gives an estimate.
        missing = ~self._catalog.find_sound(self._unique, ()).found
        self._plan = None
        if self._parents is not None and missing.any():
            self._plan = self._parents.plan(self._source, np.sort(self._first[missing]))
        self._declare(self._catalog.known_manifest(self.manifest.digest))
        if self._plan is not None:
            self._plan.leave_out(self._backend, self._condemned.packs)
        self._missing = probe(self._backend, self._catalog, self._unique, self._condemned)

    def _write(self, watch: Watch | None = None) -> None:
        """Take step 3: after it everything the save relies on exists, and stays as long as the intent does."""
        # In a remote store a manifest's blob has hints of its chunks' places, known only after the packs are written.
        is_together = not self._backend.is_remote
        if self._missing is not None:
            payloads = self._payloads()
            if watch is not None:
                payloads = self._watched(payloads, watch)
            self._put(payloads, with_manifest=is_together and not self._has_manifest)
            self._missing = None
        if not self._has_manifest:
            self._put(iter(()), with_manifest=True)

    def _payloads(self) -> Iterator[PayloadGroup]:
        new = self._new_chunks()
        if self._parents is None or int(self._source.sizes[new].sum()) > MOST_SAVED_BYTES:
            return encode_chunks(self._source, new, self._policy, self._plan)
        # For a small state, choosing and decoding would take most of the time. The next step finds both done.
        series = self._parents.series
        arrangements = None if series is None else self._catalog.arrangements.of((series, self._policy))
        chooser = new_chooser(self._policy, arrangements)
        return encode_chunks(self._source, new, self._policy, self._plan, chooser, keep=self._catalog.recent.note)

    def _watched(self, payloads: Iterator[PayloadGroup], watch: Watch) -> Iterator[PayloadGroup]:
        sizes = self._source.sizes[self._new_chunks()]
        begin = 0
        for group in payloads:
            yield group
            watch(int(sizes[begin : begin + len(group.entries)].sum()))
            begin += len(group.entries)

    def _put(self, payloads: Iterator[PayloadGroup], *, with_manifest: bool) -> None:
        key = f"manifests/{self._manifest_name}"
        beside = {key: manifest_blob(self._backend, self._catalog, self.manifest)} if with_manifest else {}
        packs = put_packs(self._backend, payloads, beside.items())
        if with_manifest:
            self._catalog.seen(self._condemned.generation).add(key)
            self._catalog.know_manifest(self.manifest.digest, self._manifest_name)
            self._has_manifest = True
            self.n_stored_bytes += len(beside[key])
        self.n_stored_bytes += publish(self._catalog, packs, self._condemned)

    def _new_chunks(self) -> Any:
        """Return the chunks to write: for each its first place, counted over all rows; ascending."""
        none = np.empty(0, dtype=np.intp)
        return none if self._missing is None else np.sort(self._first[self._missing])

    def _declare(self, known: str | None) -> None:
        """Create the intent, and only then read the condemned lists.

        Args:
            known: Name of a manifest with the same content, to rely on like on a pack, if it still exists.
        """
        # A collector treated as dead may still be about to delete its condemned blobs. So a newly written manifest gets
        # a name never used before.
        self._manifest_name = known or f"{self.manifest.digest}.{uuid.uuid4().hex[:8]}"
        bases = self._plan.packs if self._plan is not None else ()
        self._intent = declare(self._backend, self._manifest_name, self._unique, bases)
        self._condemned = look(self._backend, self._catalog)
        self._has_manifest = known is not None
        if known is not None and (known in self._condemned.manifests or not self._is_there(f"manifests/{known}")):
            self._backend.withdraw(*self._intent)
            self._declare(None)

    def _is_there(self, key: str) -> bool:
        seen = self._catalog.seen(self._condemned.generation)
        if key not in seen and self._backend.stat(key) is not None:
            seen.add(key)
        return key in seen
