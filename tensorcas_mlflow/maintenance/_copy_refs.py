"""From one store to another: only what is missing there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tensorcas_mlflow import threads
from tensorcas_mlflow._progress import Progress, Watcher, ignore
from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.blob_names import list_blobs
from tensorcas_mlflow.digest import DIGEST_BYTES, Digests, hex_of, unique_rows
from tensorcas_mlflow.errors import (
    BackendError,
    CheckpointExistsError,
    ChunkNotFoundError,
    CorruptError,
    FencedError,
    FormatError,
)
from tensorcas_mlflow.maintenance._copy_chunks import ChunkReader, Rebaser, plan_deltas
from tensorcas_mlflow.maintenance._copy_report import CopyPlan, CopyReport, Failure
from tensorcas_mlflow.maintenance._inventory import is_among
from tensorcas_mlflow.manifest import Manifest
from tensorcas_mlflow.pack import TARGET_BYTES
from tensorcas_mlflow.store import PendingBatch, Ref, Store
from tensorcas_mlflow.store.protocol import STAND_INS

_N_TOGETHER = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A ref that is to be copied."""

    ref: Ref
    """The source's, changed to what the destination is to say."""
    manifest: Manifest
    """The destination's."""
    replaces: bool
    """Whether it may take the place of another one."""
    source: Ref
    """The source's, as it was read."""


State = Literal["there", "kept", "dropped"]
"""What became of a ref that is not to be copied: see `CopyReport`."""


def read_source(store: Store) -> tuple[list[Ref], list[Failure]]:
    """Read every ref of a store but stand-ins, in the order of their creation.

    Returns:
        The refs, and those that cannot be read.

    Raises:
        BackendError: The storage does not answer.
    """
    keys = [info.key for info in list_blobs(store.backend, "refs") if not info.key.startswith(f"{STAND_INS}/")]

    def read(key: str) -> Ref | Failure | None:
        try:
            return store.ref(key)
        except (FormatError, BackendError) as error:
            return _failure(store.backend, key, key, error)

    refs: list[Ref] = []
    failed: list[Failure] = []
    for found in threads.ordered_map(read, keys, waits=store.backend.is_remote):
        if isinstance(found, Ref):
            refs.append(found)
        elif found is not None:
            failed.append(found)
    return sorted(refs, key=lambda ref: (ref.created, ref.key)), failed


def compare(
    source: Store, destination: Store, refs: Sequence[Ref], *, replace: bool
) -> Iterator[tuple[Ref, Wanted | State | Failure]]:
    """Say of each ref what is to become of it.

    A ref that comes of the same commit is there already, without a look at anything else, and so is one of an equal
    manifest. Any other at its key is another one.

    Raises:
        BackendError: One of the storages does not answer.
    """
    keys = {info.key for info in list_blobs(destination.backend, "refs")}
    is_remote = source.backend.is_remote or destination.backend.is_remote

    def look(ref: Ref) -> Wanted | State | Failure:
        there: Ref | None = None
        is_taken = ref.key in keys
        if is_taken:
            try:
                there = destination.ref(ref.key)
                is_taken = there is not None
            except FormatError:
                pass  # damaged: another one
        if there is not None and there.write == ref.write != "":
            return "there"
        try:
            found = source.manifest(ref)
        except (FormatError, BackendError) as error:
            if not stands(source, ref):
                return "dropped"
            return _failure(source.backend, ref.label, f"manifests/{ref.manifest}", error)
        if found.store_id != source.id:
            return Failure(what=ref.label, reason=f"its manifest is of store {found.store_id}")
        manifest = of_store(found, destination.id)
        if there is not None and there.manifest[:64] == manifest.digest:
            return "there"
        if is_taken and not replace:
            return "kept"
        target = ref if source.id == destination.id else _for_another(ref)
        return Wanted(ref=target, manifest=manifest, replaces=is_taken, source=ref)

    for begin in range(0, len(refs), _N_TOGETHER):
        some = refs[begin : begin + _N_TOGETHER]
        yield from zip(some, threads.ordered_map(look, some, waits=is_remote), strict=True)


def of_store(manifest: Manifest, store_id: str) -> Manifest:
    """Give a manifest as a store of some id has it: byte for byte the same if it is of that id."""
    return manifest if manifest.store_id == store_id else dataclasses.replace(manifest, store_id=store_id)


def stands(store: Store, ref: Ref) -> bool:
    """Tell whether a ref is still there and says the same."""
    try:
        now = store.ref(ref.key)
    except FormatError:
        return True
    return now is not None and now.write == ref.write and now.manifest == ref.manifest


def _for_another(ref: Ref) -> Ref:
    """Say of a ref what holds in a store of another id.

    Where only a URI says where MLflow keeps a copy of the manifest, that copy goes on belonging to the source, and what
    becomes of it must not decide about this ref.
    """
    is_elsewhere = ref.path is None and ref.copy_path is None
    return dataclasses.replace(ref, uri=None) if is_elsewhere else ref


def _failure(backend: Backend, what: str, key: str, error: FormatError | BackendError) -> Failure:
    """Describe what cannot be read, if the storage answers at all; else it is not this blob's fault, and raises."""
    if isinstance(error, BackendError):
        backend.stat(key)
    return Failure(what=what, reason=error.reason if isinstance(error, CorruptError) else str(error))


MAX_BATCH_BYTES = 4 * TARGET_BYTES
"""New bytes after which a batch is committed: a few packs, of which only the last is not full."""
_MAX_BATCH_REFS = 256
_MAX_BATCH_ROWS = 1 << 17
"""Rows of manifests that are held at once; one takes about 1.4 KB."""
_MAX_ATTEMPTS = 4


def plan_copy(source: Store, destination: Store, refs: Sequence[Ref], *, replace: bool = False) -> CopyPlan:
    """Find out what a copy would move; nothing is written, and no chunk is read. See `copy_refs`."""
    n_new = n_there = 0
    kept: list[str] = []
    failed: list[Failure] = []
    moving = _Moving(source, destination)
    for ref, found in compare(source, destination, refs, replace=replace):
        if isinstance(found, Failure):
            failed.append(found)
        elif isinstance(found, Wanted):
            n_new += 1
            moving.add(found.manifest.digests)
        elif found == "kept":
            kept.append(ref.label)
        else:
            n_there += found == "there"
    return CopyPlan(
        n_new=n_new,
        n_there=n_there,
        kept=tuple(kept),
        failed=tuple(failed),
        n_chunks=moving.n_chunks,
        chunk_bytes=moving.n_bytes,
    )


def copy_refs(
    source: Store, destination: Store, refs: Sequence[Ref], *, replace: bool = False, watch: Watcher | None = None
) -> CopyReport:
    """Copy checkpoints and files, moving only chunks that the destination does not hold.

    Any number of processes may save into both stores, and collect in them, meanwhile. What is copied is there whole or
    not at all; called again after any end, this goes on where it was. A ref keeps its key, its commit's time and id,
    and all it says; only in a store of another id a ref that nothing but a URI says the place of loses that.

    Args:
        source: It is only read.
        destination: Manifests of another store id are rewritten to its id.
        refs: Of the source, in the order in which they are to be copied.
        replace: Whether refs take the place of other ones that the destination has at their keys.
        watch: Told of progress.

    Raises:
        BackendError: One of the storages failed; what was committed until then is there.
    """
    copier = _Copier(source, destination, refs, watch=watch)
    for ref, found in compare(source, destination, refs, replace=replace):
        if isinstance(found, Wanted):
            copier.add(found)
        elif isinstance(found, Failure):
            copier.fail(found)
        else:
            copier.pass_by(ref, found)
    copier.flush()
    return copier.report()


class _Moving:
    """Adds up the chunks that some manifests need and a store does not hold, as far as indexes tell."""

    def __init__(self, source: Store, destination: Store) -> None:
        self.n_chunks = 0
        self.n_bytes = 0
        self._source = source
        self._destination = destination
        self._seen: Any = np.empty(0, dtype=f"V{DIGEST_BYTES}")
        source.catalog.refresh()
        destination.catalog.refresh()

    def add(self, digests: Digests) -> None:
        """Count what is new of a manifest."""
        unique, _, _ = unique_rows(digests)
        new = unique[~self._destination.catalog.find(unique).found]
        keys = new.view(f"V{DIGEST_BYTES}").ravel()
        is_unseen = ~np.isin(keys, self._seen)
        self._seen = np.concatenate([self._seen, keys[is_unseen]])
        places = self._source.catalog.find(new[is_unseen])
        self.n_chunks += int(is_unseen.sum())
        self.n_bytes += int(places.entries["stored_bytes"][places.found].sum(dtype=np.int64))


class _Copier:
    """One copy under way."""

    def __init__(self, source: Store, destination: Store, refs: Sequence[Ref], *, watch: Watcher | None) -> None:
        self._source = source
        self._destination = destination
        self._n = len(refs)
        self._refs = refs
        self._all_needed: Digests | None = None
        self._watch = watch or ignore
        self._reader = ChunkReader(source, on_read=self._note_read)
        self._n_done = self._n_copied = self._n_there = 0
        self._read_bytes = self._written_bytes = 0
        self._kept: list[str] = []
        self._dropped: list[str] = []
        self._failed: list[Failure] = []
        self._batch: list[Wanted] = []
        self._n_rows = 0
        self._moving: _Moving | None = None

    def add(self, wanted: Wanted) -> None:
        """Copy a ref, soon: several are stored together, so that small ones share packs."""
        if self._moving is None:
            self._moving = _Moving(self._source, self._destination)
        self._batch.append(wanted)
        self._n_rows += len(wanted.manifest.rows)
        self._moving.add(wanted.manifest.digests)
        is_full = len(self._batch) >= _MAX_BATCH_REFS or self._n_rows >= _MAX_BATCH_ROWS
        if is_full or self._moving.n_bytes >= MAX_BATCH_BYTES:
            self.flush()

    def pass_by(self, ref: Ref, state: str) -> None:
        """Note a ref that needs no copy."""
        if state == "there":
            self._n_there += 1
        elif state == "kept":
            self._kept.append(ref.label)
        else:
            self._dropped.append(ref.label)
        self._note_done()

    def fail(self, failure: Failure) -> None:
        """Note a ref that cannot be copied."""
        self._failed.append(failure)
        self._note_done()

    def flush(self) -> None:
        """Store and commit what has been added so far."""
        batch, self._batch = self._batch, []
        self._n_rows, self._moving = 0, None
        for _ in range(_MAX_ATTEMPTS):
            if not batch:
                return
            batch = self._store(batch)
        for wanted in batch:
            self.fail(Failure(what=wanted.ref.label, reason=str(FencedError(_MAX_ATTEMPTS))))

    def report(self) -> CopyReport:
        """Say what has been done."""
        return CopyReport(
            n_copied=self._n_copied,
            n_there=self._n_there,
            kept=tuple(self._kept),
            dropped=tuple(self._dropped),
            failed=tuple(self._failed),
            read_bytes=self._read_bytes,
            written_bytes=self._written_bytes,
        )

    def _store(self, batch: Sequence[Wanted]) -> list[Wanted]:
        """Store a batch; returns those that a collector has given up."""
        manifests = [wanted.manifest for wanted in batch]
        fenced: list[Wanted] = []
        backend, catalog = self._destination.backend, self._destination.catalog
        deltas = plan_deltas(self._source, self._destination, _union(manifests), self._needed)
        options: dict[str, Any] = {} if deltas is None else {"bases": deltas.there, "n_bytes": deltas.n_bytes}
        with PendingBatch(backend, catalog, manifests, **options) as pending:
            try:
                if deltas is None:
                    pending.write(self._reader.payloads(pending.missing))
                else:
                    extra = deltas.extra[~is_among(deltas.extra, pending.missing)]
                    chunks = np.concatenate([pending.missing, extra])
                    base_of = Rebaser(pending, self._destination).base_of
                    pending.write(self._reader.payloads(chunks, bases=deltas.bases, base_of=base_of))

                def commit(number: int) -> bool | CheckpointExistsError | ChunkNotFoundError:
                    wanted = batch[number]
                    try:
                        return pending.commit(number, wanted.ref, replace=wanted.replaces)
                    except (CheckpointExistsError, ChunkNotFoundError) as error:
                        return error

                waits = self._destination.backend.is_remote
                outcomes = threads.ordered_map(commit, range(len(batch)), waits=waits)
                for wanted, outcome in zip(batch, outcomes, strict=True):
                    if isinstance(outcome, CheckpointExistsError):
                        self.pass_by(wanted.ref, "kept")
                    elif isinstance(outcome, ChunkNotFoundError):
                        self._explain(wanted)
                    elif outcome:
                        self._n_copied += 1
                        self._note_done()
                    else:
                        fenced.append(wanted)
            finally:
                self._written_bytes += pending.n_stored_bytes
        return fenced

    def _needed(self) -> Digests:
        """Give the chunks that all refs need which are to be copied, as far as they can be read."""
        if self._all_needed is None:
            needed = _union([])
            for begin in range(0, len(self._refs), _MAX_BATCH_REFS):
                found = [_manifest(self._source, ref) for ref in self._refs[begin : begin + _MAX_BATCH_REFS]]
                needed = unique_rows(np.concatenate([needed, *(each.digests for each in found if each)]))[0]
            self._all_needed = needed
        return self._all_needed

    def _explain(self, wanted: Wanted) -> None:
        """Note why the chunks of a ref could not be had."""
        if not stands(self._source, wanted.source):
            self.pass_by(wanted.ref, "dropped")
            return
        faults: dict[str, str] = {}
        columns = wanted.manifest.columns
        for chunk, each in enumerate(columns.digests):
            if each.tobytes() in self._reader.faults:
                fault = f"chunk {hex_of(each)}: {self._reader.faults[each.tobytes()]}"
                faults.setdefault(columns.name(int(columns.rows_of(chunk))), fault)
        reason = next(iter(faults.values()), "one of its chunks could not be read")
        self.fail(Failure(what=wanted.ref.label, reason=reason, tensors=tuple(filter(None, faults))))

    def _note_read(self, n_bytes: int) -> None:
        self._read_bytes += n_bytes
        self._tell()

    def _note_done(self) -> None:
        self._n_done += 1
        self._tell()

    def _tell(self) -> None:
        self._watch(Progress(done_bytes=self._read_bytes, n_done=self._n_done, n=self._n))


def _union(manifests: Sequence[Manifest]) -> Digests:
    """Give the different chunks of some manifests."""
    return unique_rows(np.concatenate([np.empty((0, DIGEST_BYTES), np.uint8), *(each.digests for each in manifests)]))[
        0
    ]


def _manifest(store: Store, ref: Ref) -> Manifest | None:
    try:
        return store.manifest(ref)
    except (FormatError, BackendError):
        return None  # which the copy of that ref tells of
