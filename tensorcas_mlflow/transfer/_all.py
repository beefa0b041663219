"""A store and the plain files beside it, in the order in which a copy may break off."""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tensorcas_mlflow.errors import ConflictError
from tensorcas_mlflow.store import Ref
from tensorcas_mlflow.store.protocol import read_condemned
from tensorcas_mlflow.transfer._copy import copy_refs, plan_copy
from tensorcas_mlflow.transfer._open import Place
from tensorcas_mlflow.transfer._plain import PlainReport, copy_plain
from tensorcas_mlflow.transfer._report import CopyPlan, CopyReport, Watcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What a copy has done, or what it would do."""

    refs: CopyReport | CopyPlan
    plain: PlainReport | None
    """None where one of the places shows no plain files."""


def copy_all(
    source: Place,
    destination: Place,
    refs: Sequence[Ref],
    *,
    wanted_plain: Callable[[str], bool] = lambda path: True,
    replace: bool = False,
    dry_run: bool = False,
    watch: Watcher | None = None,
) -> Copied:
    """Copy refs with all they need, and the plain files beside them.

    Plain files go first: where MLflow keeps a manifest's copy beside the store, `tensorcas gc --orphans` takes a ref
    whose copy is not there for one of a deleted model. So what was complete when the refs were read is complete at the
    destination when its ref is there.

    Args:
        source: It is only read.
        destination: See `copy_refs` for a store of another id.
        refs: Of the source.
        wanted_plain: Tells by its path whether a plain file is to be copied.
        replace: Whether what the destination has otherwise is replaced, and not kept.
        dry_run: Whether only to say what would be done.
        watch: Told of progress with the refs.

    Raises:
        ConflictError: Both are one store.
        NewerFormatError: A later release has written into one of them what a copy must know; nothing is copied.
        BackendError: A storage failed; what was copied until then is there, and the next copy goes on.
    """
    if source.uri == destination.uri:
        raise ConflictError(f"{source.uri!r} cannot be copied to itself")
    # What a later release has written is refused before anything is copied.
    source.store.catalog.refresh()
    destination.store.catalog.refresh()
    read_condemned(destination.store.backend)
    plain = _copy_plain(source, destination, refs, wanted=wanted_plain, replace=replace, dry_run=dry_run)
    if dry_run:
        return Copied(refs=plan_copy(source.store, destination.store, refs, replace=replace), plain=plain)
    report = copy_refs(source.store, destination.store, refs, replace=replace, watch=watch)
    return Copied(refs=report, plain=plain)


def _copy_plain(
    source: Place,
    destination: Place,
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
            # A run's folder says that the run is there, though the copy of a manifest in it may be missing.
            with contextlib.suppress(ConflictError, ValueError):
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
