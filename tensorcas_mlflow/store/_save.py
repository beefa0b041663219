"""The writer's side of the save/collect protocol.

In order: intent, condemned lists, index, packs, manifest, ref. The intent tells every collector what this save
relies on before the save looks at anything; what is condemned when it looks is not relied on; and the commit fails if a
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
    """A checkpoint or file that is being stored and not yet committed: its intent keeps it from being collected.

    `detach` and `write` may be called before `commit`, which does itself what was left out. A context manager: a save
    that is left uncommitted is abandoned, and the next collection removes what it wrote.
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
        """Find out what is new; see `Store.begin_checkpoint`.

        Args:
            backend: The store's.
            catalog: The store's.
            manifest: Of what is saved.
            source: Its bytes.
            policy: What to spend time on.
            parents: Where to look for what it has come from; None stores everything in full.
        """
        self.manifest = manifest
        self.n_stored_bytes = 0
        """Bytes this save has added to the store."""
        self._backend = backend
        self._catalog = catalog
        self._source = source
        self._policy = policy
        self._parents = parents if policy is not Policy.FAST else None
        self._plan: BasePlan | None = None
        """What new chunks may be stored against; the intent names it."""
        self._unique, self._first, _ = unique_rows(manifest.digests)
        self._manifest_name = ""
        self._intent: Intent | None = None
        self._condemned = Condemnation(lists=(), generation=None)
        self._lock = threading.Lock()
        self._missing: Mask | None = None
        """Which of the different chunks have to be written; None once all are there."""
        self._has_manifest = False
        try:
            self._begin()
        except BaseException:
            self.abandon()
            raise
        self.n_new_bytes = int(self._source.sizes[self._new_chunks()].sum())
        """Size of the chunks that the store did not hold."""

    def __enter__(self) -> PendingSave:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()

    def detach(self) -> None:
        """Copy what is still to be written, so that the caller may change the arrays.

        A save that collectors give up for dead afterwards cannot be begun again, and its commit raises `FencedError`.
        """
        with self._lock:
            self._check_open()
            self._source = self._source.detached(self._new_chunks())

    def write(self, *, watch: Watch | None = None) -> None:
        """Write the chunks that are new, and the manifest.

        Args:
            watch: Told of the bytes of chunks as they are encoded, `n_new_bytes` in all.

        Raises:
            BackendError: The storage failed; what was written is garbage and nothing is lost.
            ConflictError: An array was changed after it was hashed.
        """
        with self._lock:
            self._check_open()
            self._write(watch)

    def commit(self, target: RefTarget, *, replace: bool = True) -> Ref:
        """Make the save visible and permanent, in one step.

        Args:
            target: Where the ref stands.
            replace: Whether it may take the place of an earlier one.

        Raises:
            CheckpointExistsError: There is one and ``replace`` is False; it is untouched.
            FencedError: Collectors gave this save up again and again; nothing is committed.
            StoreNotFoundError: The store was deleted meanwhile; nothing is committed.
            ConflictError: Another store was made in its place; nothing is committed.
            BackendError: The storage failed; if it was at the very end the commit may have happened.
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
        """Give the save up. Does nothing if it is committed or abandoned already."""
        intent, self._intent = self._intent, None
        self._source = _NOTHING  # an error that somebody keeps would keep the bytes too
        if intent is not None:
            try:
                self._backend.withdraw(*intent)
            except BackendError as error:
                # Why the save is given up is what the reader wants to know. The intent costs nothing that stays.
                _log.warning("a save was given up, and %s", error)

    def _check_open(self) -> Intent:
        if self._intent is None:
            raise ValueError("this save is committed or abandoned already")
        return self._intent

    def _shown_bytes(self) -> int:
        return self.manifest.n_bytes if self.manifest.kind == "file" else len(self.manifest.stream)

    def _begin(self) -> None:
        """Steps 1 and 2 of the protocol: say what the save relies on, and then look what of it is there."""
        # What may be relied on has to be named before it is known what must be written: going by the index, what must.
        missing = ~self._catalog.find_sound(self._unique, ()).found
        self._plan = None
        if self._parents is not None and missing.any():
            self._plan = self._parents.plan(self._source, np.sort(self._first[missing]))
        self._declare(self._catalog.known_manifest(self.manifest.digest))
        if self._plan is not None:
            self._plan.leave_out(self._backend, self._condemned.packs)
        self._missing = probe(self._backend, self._catalog, self._unique, self._condemned)

    def _write(self, watch: Watch | None = None) -> None:
        """Step 3: after it all that the save relies on is there, and stays as long as the intent does."""
        # Far away a manifest's blob says where its chunks lie, which is known only when they are there.
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
        # Of a small state, choosing and decoding would take most of the time. The next step finds both done.
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
        """The chunks to be written: for each the first place it stands in, counted over all rows; ascending."""
        none = np.empty(0, dtype=np.intp)
        return none if self._missing is None else np.sort(self._first[self._missing])

    def _declare(self, known: str | None) -> None:
        """Create the intent, and only then read what is condemned.

        Args:
            known: Name of a manifest that says the same and may be relied on like a pack, if it is still there.
        """
        # A collector that was taken for dead may still be about to delete what it has condemned. So a manifest that
        # has to be written gets a name that never was.
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
