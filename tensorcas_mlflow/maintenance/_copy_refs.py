"""Copies of refs from one store to another, with the chunks that are missing there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.digest import DIGEST_BYTES, Digests, as_keys, distinct_digests, hex_of, unique_rows
from tensorcas_mlflow.base.engines import Engine
from tensorcas_mlflow.base.notebook import PrintedPlan
from tensorcas_mlflow.base.progress import Progress, Watcher, ignore
from tensorcas_mlflow.base.text import content_text, count_text, size_text
from tensorcas_mlflow.errors import (
    BackendError,
    CheckpointExistsError,
    ChunkNotFoundError,
    CorruptError,
    FencedError,
    FormatError,
)
from tensorcas_mlflow.layout import Ref, is_shown, list_blobs
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.layout.packs import TARGET_BYTES
from tensorcas_mlflow.maintenance._copy_chunks import CopyReader, Rebaser, plan_deltas
from tensorcas_mlflow.maintenance._inventory import is_among
from tensorcas_mlflow.store import PendingBatch, Store

MAX_BATCH_BYTES = 4 * TARGET_BYTES
"""New bytes after which a batch is committed: a few packs, and only the last of them is not full."""
_MAX_BATCH_REFS = 256
_MAX_BATCH_ROWS = 1 << 17
"""Rows of manifests that a batch holds; a row takes about 1.4 KB."""
_MAX_ATTEMPTS = 4
_N_TOGETHER = 64
_N_NAMES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Ref or file that could not be copied. Printing it says so in words."""

    what: str
    """The ref in words, or the key or path that cannot be read."""
    reason: str
    tensors: tuple[str, ...] = ()
    """Names of damaged tensors."""

    def __str__(self) -> str:
        names = ", ".join(map(repr, self.tensors[:_N_NAMES]))
        more = f" and {len(self.tensors) - _N_NAMES} more" if len(self.tensors) > _N_NAMES else ""
        return f"{self.what}: {self.reason}" + (f" (tensor {names}{more})" if names else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan(PrintedPlan):
    """Plan of a copy, as things stand. Printing it says so in words."""

    source: Store = field(repr=False, compare=False)
    destination: Store = field(repr=False, compare=False)
    refs: Sequence[Ref] = field(repr=False, compare=False)
    """Refs of the source to copy."""
    replace: bool
    """True if refs take the place of other ones at the destination."""
    n_new: int
    """Checkpoints and files that the destination lacks, or that replace others there."""
    n_there: int
    """Checkpoints and files that it has already."""
    kept: tuple[str, ...]
    """Checkpoints and files that differ there, and stay."""
    failed: tuple[Failure, ...]
    n_chunks: int
    """Chunks that it lacks."""
    chunk_bytes: int
    """Their bytes as they are stored."""

    def __str__(self) -> str:
        return (
            f"{content_text(self.n_new)} to copy, {self.n_there} there already; "
            f"{count_text(self.n_chunks, 'chunk')} to move ({size_text(self.chunk_bytes)})"
        )

    def execute(self, *, engine: Engine | None = None, watch: Watcher = ignore) -> CopyReport:
        """Execute the plan; see `copy_refs`. Refs that changed since are compared anew."""
        return copy_refs(self.source, self.destination, self.refs, replace=self.replace, engine=engine, watch=watch)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """Report of a copy. Printing it says so in words."""

    n_copied: int
    n_there: int
    """Checkpoints and files that the destination had already."""
    kept: tuple[str, ...]
    """Checkpoints and files that differed there, and stayed."""
    deleted: tuple[str, ...]
    """Checkpoints and files that were deleted or replaced at the source meanwhile; they are left out."""
    failed: tuple[Failure, ...]
    read_bytes: int
    written_bytes: int

    def __str__(self) -> str:
        deleted = f", {len(self.deleted)} deleted or saved anew meanwhile" if self.deleted else ""
        failed = f", {len(self.failed)} failed" if self.failed else ""
        kept = f", {len(self.kept)} kept that differ there" if self.kept else ""
        return (
            f"copied {content_text(self.n_copied)}, {self.n_there} there already{kept}{deleted}{failed}; "
            f"read {size_text(self.read_bytes)}, wrote {size_text(self.written_bytes)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RefToCopy:
    """Ref to copy."""

    ref: Ref
    """The ref as the destination is to have it."""
    manifest: Manifest
    """The manifest as the destination is to have it."""
    replaces: bool
    """True if it may replace another ref."""
    source: Ref
    """The ref as the source has it."""


State = Literal["there", "kept", "deleted"]
"""State of a ref that needs no copy; see `CopyReport`."""


def read_source(store: Store) -> tuple[list[Ref], list[Failure]]:
    """Read every ref of a store but stand-ins, in the order of their creation.

    Returns:
        The refs, and those that cannot be read.

    Raises:
        BackendError: The storage does not answer.
    """
    keys = [info.key for info in list_blobs(store.backend, "refs") if is_shown(info.key)]

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
) -> Iterator[tuple[Ref, RefToCopy | State | Failure]]:
    """Decide for each ref whether to copy it.

    The destination has a ref already if the ref at its key is of the same commit, or names an equal manifest.

    Raises:
        BackendError: One of the storages does not answer.
    """
    keys = {info.key for info in list_blobs(destination.backend, "refs")}
    is_remote = source.backend.is_remote or destination.backend.is_remote

    def look(ref: Ref) -> RefToCopy | State | Failure:
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
            if not is_unchanged(source, ref):
                return "deleted"
            return _failure(source.backend, ref.label, f"manifests/{ref.manifest}", error)
        if found.store_id != source.id:
            return Failure(what=ref.label, reason=f"its manifest is of store {found.store_id}")
        manifest = of_store(found, destination.id)
        if there is not None and there.manifest[:64] == manifest.digest:
            return "there"
        if is_taken and not replace:
            return "kept"
        return RefToCopy(ref=ref_for(source, destination, ref), manifest=manifest, replaces=is_taken, source=ref)

    for begin in range(0, len(refs), _N_TOGETHER):
        some = refs[begin : begin + _N_TOGETHER]
        yield from zip(some, threads.ordered_map(look, some, waits=is_remote), strict=True)


def of_store(manifest: Manifest, store_id: str) -> Manifest:
    """Return a manifest as a store of some id has it: the same bytes if it is of that id."""
    return manifest if manifest.store_id == store_id else dataclasses.replace(manifest, store_id=store_id)


def is_unchanged(store: Store, ref: Ref) -> bool:
    """Tell whether a ref still stands, unchanged."""
    try:
        now = store.ref(ref.key)
    except FormatError:
        return True
    return now is not None and now.write == ref.write and now.manifest == ref.manifest


def ref_for(source: Store, destination: Store, ref: Ref) -> Ref:
    """Return a ref as the destination has it: without its URI, if that alone says its place and the ids differ.

    The copy of the manifest at that URI still belongs to the source. Its fate must not decide about this ref.
    """
    is_elsewhere = source.id != destination.id and ref.path is None and ref.copy_path is None
    return dataclasses.replace(ref, uri=None) if is_elsewhere else ref


def _failure(backend: Backend, what: str, key: str, error: FormatError | BackendError) -> Failure:
    """Describe a blob that cannot be read; raise if the storage does not answer at all."""
    if isinstance(error, BackendError):
        backend.stat(key)
    return Failure(what=what, reason=error.reason if isinstance(error, CorruptError) else str(error))


def plan_copy(source: Store, destination: Store, refs: Sequence[Ref], *, replace: bool = False) -> CopyPlan:
    """Plan a copy; see `copy_refs`. Writes nothing and reads no chunk."""
    n_new = n_there = 0
    kept: list[str] = []
    failed: list[Failure] = []
    moving = _Moving(source, destination)
    for ref, found in compare(source, destination, refs, replace=replace):
        if isinstance(found, Failure):
            failed.append(found)
        elif isinstance(found, RefToCopy):
            n_new += 1
            moving.add(found.manifest.stored_digests)
        elif found == "kept":
            kept.append(ref.label)
        else:
            n_there += found == "there"
    return CopyPlan(
        source=source,
        destination=destination,
        refs=refs,
        replace=replace,
        n_new=n_new,
        n_there=n_there,
        kept=tuple(kept),
        failed=tuple(failed),
        n_chunks=moving.n_chunks,
        chunk_bytes=moving.n_bytes,
    )


def copy_refs(
    source: Store,
    destination: Store,
    refs: Sequence[Ref],
    *,
    replace: bool = False,
    engine: Engine | None = None,
    watch: Watcher = ignore,
) -> CopyReport:
    """Copy checkpoints and files, moving only chunks that the destination lacks.

    Any number of processes may save into both stores, and collect in them, meanwhile. A ref is copied whole or not at
    all. Called again after any end, the copy goes on where it was. A ref keeps its key, the time and id of its commit,
    and all it says. In a store of another id it loses its URI, if only that says its place.

    Args:
        source: It is only read.
        destination: Manifests of another store id are rewritten to its id.
        refs: Refs of the source, in the order in which to copy them.
        replace: Whether to replace other refs that the destination has at their keys.
        engine: Workers that read, decode and compare chunks; by default this process does, on all cores. This process
            alone writes, and the destination is the same.
        watch: Told the progress.

    Raises:
        BackendError: One of the storages failed; what was committed stays. Or a worker does not find the source.
        DirectAccessError: There are workers, and the source is reached through an MLflow server.
    """
    copier = _Copier(source, destination, refs, engine=engine, watch=watch)
    with nullcontext() if engine is None else engine.kept():
        for ref, found in compare(source, destination, refs, replace=replace):
            if isinstance(found, RefToCopy):
                copier.add(found)
            elif isinstance(found, Failure):
                copier.fail(found)
            else:
                copier.pass_by(ref, found)
        copier.flush()
    return copier.report()


class _Moving:
    """Count of the chunks that some manifests need and a store lacks, as far as indexes tell."""

    def __init__(self, source: Store, destination: Store) -> None:
        self.n_chunks = 0
        self.n_bytes = 0
        self._source = source
        self._destination = destination
        self._seen: Any = np.empty(0, dtype=f"V{DIGEST_BYTES}")
        source.catalog.refresh()
        destination.catalog.refresh()

    def add(self, digests: Digests) -> None:
        """Count the new chunks of a manifest."""
        unique, _, _ = unique_rows(digests)
        new = unique[~self._destination.catalog.find(unique).found]
        keys = as_keys(new)
        is_unseen = ~np.isin(keys, self._seen)
        self._seen = np.concatenate([self._seen, keys[is_unseen]])
        places = self._source.catalog.find(new[is_unseen])
        self.n_chunks += int(is_unseen.sum())
        self.n_bytes += int(places.entries["stored_bytes"][places.found].sum(dtype=np.int64))


class _Copier:
    """One copy under way."""

    def __init__(
        self, source: Store, destination: Store, refs: Sequence[Ref], *, engine: Engine | None, watch: Watcher
    ) -> None:
        self._source = source
        self._destination = destination
        self._n = len(refs)
        self._refs = refs
        self._all_needed: Digests | None = None
        self._watch = watch
        self._reader = CopyReader(source, on_read=self._note_read, engine=engine)
        self._n_done = self._n_copied = self._n_there = 0
        self._read_bytes = self._written_bytes = 0
        self._kept: list[str] = []
        self._deleted: list[str] = []
        self._failed: list[Failure] = []
        self._batch: list[RefToCopy] = []
        self._n_rows = 0
        self._moving: _Moving | None = None

    def add(self, ref_to_copy: RefToCopy) -> None:
        """Add a ref to the batch: small refs share packs."""
        if self._moving is None:
            self._moving = _Moving(self._source, self._destination)
        self._batch.append(ref_to_copy)
        self._n_rows += len(ref_to_copy.manifest.rows)
        self._moving.add(ref_to_copy.manifest.stored_digests)
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
            self._deleted.append(ref.label)
        self._note_done()

    def fail(self, failure: Failure) -> None:
        """Note a ref that cannot be copied."""
        self._failed.append(failure)
        self._note_done()

    def flush(self) -> None:
        """Store and commit the batch."""
        batch, self._batch = self._batch, []
        self._n_rows, self._moving = 0, None
        for _ in range(_MAX_ATTEMPTS):
            if not batch:
                return
            batch = self._store(batch)
        for ref_to_copy in batch:
            self.fail(Failure(what=ref_to_copy.ref.label, reason=str(FencedError(_MAX_ATTEMPTS))))

    def report(self) -> CopyReport:
        """Return the report."""
        return CopyReport(
            n_copied=self._n_copied,
            n_there=self._n_there,
            kept=tuple(self._kept),
            deleted=tuple(self._deleted),
            failed=tuple(self._failed),
            read_bytes=self._read_bytes,
            written_bytes=self._written_bytes,
        )

    def _store(self, batch: Sequence[RefToCopy]) -> list[RefToCopy]:
        """Store a batch; return the refs whose intents a collector withdrew."""
        manifests = [ref_to_copy.manifest for ref_to_copy in batch]
        fenced: list[RefToCopy] = []
        backend, catalog = self._destination.backend, self._destination.catalog
        deltas = plan_deltas(
            self._source, self._destination, distinct_digests(each.stored_digests for each in manifests), self._needed
        )
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
                    ref_to_copy = batch[number]
                    try:
                        return pending.commit(number, ref_to_copy.ref, replace=ref_to_copy.replaces)
                    except (CheckpointExistsError, ChunkNotFoundError) as error:
                        return error

                outcomes = threads.ordered_map(commit, range(len(batch)), waits=self._destination.backend.is_remote)
                for ref_to_copy, outcome in zip(batch, outcomes, strict=True):
                    if isinstance(outcome, CheckpointExistsError):
                        self.pass_by(ref_to_copy.ref, "kept")
                    elif isinstance(outcome, ChunkNotFoundError):
                        self._explain(ref_to_copy)
                    elif outcome:
                        self._n_copied += 1
                        self._note_done()
                    else:
                        fenced.append(ref_to_copy)
            finally:
                self._written_bytes += pending.n_stored_bytes
        return fenced

    def _needed(self) -> Digests:
        """Return the chunks that all refs of this copy need, as far as these can be read."""
        if self._all_needed is None:
            needed = distinct_digests([])
            for begin in range(0, len(self._refs), _MAX_BATCH_REFS):
                found = [_manifest(self._source, ref) for ref in self._refs[begin : begin + _MAX_BATCH_REFS]]
                needed = distinct_digests([needed, *(each.stored_digests for each in found if each)])
            self._all_needed = needed
        return self._all_needed

    def _explain(self, ref_to_copy: RefToCopy) -> None:
        """Note why the chunks of a ref could not be read."""
        if not is_unchanged(self._source, ref_to_copy.source):
            self.pass_by(ref_to_copy.ref, "deleted")
            return
        faults: dict[str, str] = {}
        manifest = ref_to_copy.manifest
        for chunk, each in enumerate(manifest.stored_digests):
            if each.tobytes() in self._reader.faults:
                fault = f"chunk {hex_of(each)}: {self._reader.faults[each.tobytes()]}"
                for name in manifest.names_of_stored([chunk]) or ("",):
                    faults.setdefault(name, fault)
        reason = next(iter(faults.values()), "one of its chunks could not be read")
        self.fail(Failure(what=ref_to_copy.ref.label, reason=reason, tensors=tuple(filter(None, faults))))

    def _note_read(self, n_bytes: int) -> None:
        self._read_bytes += n_bytes
        self._tell()

    def _note_done(self) -> None:
        self._n_done += 1
        self._tell()

    def _tell(self) -> None:
        self._watch(Progress(done_bytes=self._read_bytes, n_done=self._n_done, n=self._n))


def _manifest(store: Store, ref: Ref) -> Manifest | None:
    try:
        return store.manifest(ref)
    except (FormatError, BackendError):
        return None  # the copy of that ref reports it
