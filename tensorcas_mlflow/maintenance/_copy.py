"""Copies of a store and of the plain files beside it, in an order that may be broken off."""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tensorcas_mlflow.backends import (
    STORE_FOLDER,
    LocalBackend,
    MemoryBackend,
    ObjectBackend,
    PlainFiles,
    Root,
    open_plain_files,
)
from tensorcas_mlflow.base.engines import Engine
from tensorcas_mlflow.base.progress import Watcher, ignore
from tensorcas_mlflow.errors import ConflictError, StoreNotFoundError
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.maintenance._copy_plain import PlainReport, backend_errors, copy_plain
from tensorcas_mlflow.maintenance._copy_refs import CopyPlan, CopyReport, copy_refs, plan_copy
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import read_condemned


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyEnd:
    """One end of a copy."""

    store: Store
    plain: PlainFiles | None
    """Plain files beside it; None if they cannot be listed."""
    uri: str
    is_new: bool = False
    """True if the copy made the store, or a dry run would make it."""


def end_of(store: Store) -> CopyEnd:
    """Return a store and its plain files as one end of a copy."""
    return CopyEnd(store=store, plain=_plain_files_of(store), uri=store.uri)


def open_destination(
    root: str | os.PathLike[str], source: Store, *, new_id: bool = False, dry_run: bool = False
) -> CopyEnd:
    """Open the store at exactly this root, or make one with the source's chunk size.

    Args:
        root: Root of the store.
        source: Store that is copied.
        new_id: Whether a new store gets an id of its own. Otherwise it gets the source's id: then every manifest stays
            the same bytes, and the copies of manifests that MLflow keeps belong to both stores.
        dry_run: Whether to make no store, and return an empty one in memory.

    Raises:
        ConflictError: There is a store above or below this root.
        ValueError: No store can be kept at such a root.
    """
    try:
        return end_of(Store.open(root))
    except StoreNotFoundError:
        pass
    store_id = None if new_id else source.id
    if dry_run:
        stand_in = Store.init_backend(MemoryBackend(), chunk_bytes=source.chunk_bytes, store_id=store_id)
        place = Root.parse(root)
        return CopyEnd(store=stand_in, plain=open_plain_files(place), uri=place.uri, is_new=True)
    try:
        made = Store.init(root, chunk_bytes=source.chunk_bytes, store_id=store_id)
    except ConflictError:
        try:
            return end_of(Store.open(root))  # somebody made it just now
        except StoreNotFoundError:
            pass
        raise
    return CopyEnd(store=made, plain=_plain_files_of(made), uri=made.uri, is_new=True)


def _plain_files_of(store: Store) -> PlainFiles | None:
    backend = store.backend
    try:
        root = Root.parse(store.uri)
    except ValueError:
        return None
    is_beside = isinstance(backend, ObjectBackend) or (
        root.is_local and isinstance(backend, LocalBackend) and backend.root == root.folder / STORE_FOLDER
    )
    return open_plain_files(root) if is_beside else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """Result of a copy, or of its dry run."""

    refs: CopyReport | CopyPlan
    plain: PlainReport | None
    """None if one of the ends shows no plain files."""


def copy_all(
    source: CopyEnd,
    destination: CopyEnd,
    refs: Sequence[Ref],
    *,
    wanted_plain: Callable[[str], bool] = lambda path: True,
    replace: bool = False,
    dry_run: bool = False,
    engine: Engine | None = None,
    watch: Watcher = ignore,
) -> Copied:
    """Copy refs with all they need, and the plain files beside them.

    Plain files go first. Where MLflow keeps a copy of a manifest beside the store, `tensorcas gc --orphans` takes a ref
    without that copy for one of a deleted model. So a model that was complete when the refs were read is complete at
    the destination when its ref is there.

    Args:
        source: It is only read.
        destination: See `copy_refs` for a store of another id.
        refs: Refs of the source.
        wanted_plain: Tells by its path whether to copy a plain file.
        replace: Whether to replace refs and files that differ at the destination. They are kept otherwise.
        dry_run: Whether to plan only.
        engine: Workers that read the chunks; see `copy_refs`.
        watch: Told the progress with the refs.

    Raises:
        ConflictError: Source and destination are one store.
        NewerFormatError: A later release wrote a blob that a copy has to understand; nothing is copied.
        BackendError: A storage failed; what was copied stays, and the next copy goes on from there.
    """
    if source.uri == destination.uri:
        raise ConflictError(f"{source.uri!r} cannot be copied to itself")
    # Refuse what a later release wrote before anything is copied.
    source.store.catalog.refresh()
    destination.store.catalog.refresh()
    read_condemned(destination.store.backend)
    plain = _copy_plain(source, destination, refs, wanted=wanted_plain, replace=replace, dry_run=dry_run)
    if dry_run:
        return Copied(refs=plan_copy(source.store, destination.store, refs, replace=replace), plain=plain)
    report = copy_refs(source.store, destination.store, refs, replace=replace, engine=engine, watch=watch)
    return Copied(refs=report, plain=plain)


def _copy_plain(
    source: CopyEnd,
    destination: CopyEnd,
    refs: Sequence[Ref],
    *,
    wanted: Callable[[str], bool],
    replace: bool,
    dry_run: bool,
) -> PlainReport | None:
    if source.plain is None or destination.plain is None:
        return None
    shown = [(ref.copy_path, ref.manifest[:64]) for ref in refs if ref.copy_path is not None]
    manifests: dict[str, set[str]] = {}
    if source.store.id != destination.store.id:
        for path, digest in shown:
            manifests.setdefault(path, set()).add(digest)
    if not dry_run:
        for folder in {posixpath.dirname(path) for path, _ in shown} - {""}:
            # A run's folder says that the run exists, though the copy of a manifest in it may be missing.
            with contextlib.suppress(ConflictError, ValueError), backend_errors(folder):
                destination.plain.make_folder(folder)
    return copy_plain(
        source.plain,
        destination.plain,
        wanted=wanted,
        manifests=manifests,
        store_id=destination.store.id,
        replace=replace,
        dry_run=dry_run,
    )
