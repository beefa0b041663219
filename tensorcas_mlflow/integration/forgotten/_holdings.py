"""Holdings: what a store keeps for each run, logged model and trace of MLflow."""

from __future__ import annotations

import os
import posixpath
import re
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from tensorcas_mlflow.backends import Root, is_ours, open_plain_files
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.errors import CheckpointExistsError
from tensorcas_mlflow.integration._artifact_uri import store_root_for
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.store import Store

# The first match from the left counts, as everywhere: what lies below an artifact root belongs to it.
LAYOUT = re.compile(
    r"(?P<root>(?:(?P<experiment>.*?)/)?"
    r"(?:(?P<run>[0-9a-f]{32})|models/(?P<model>m-[0-9a-f]{32})|traces/(?P<trace>(?:tr-)?[0-9a-f]{32}))"
    r"/artifacts)(?:/.*)?",
    re.DOTALL,
)
"""Paths of artifact roots below an experiment's."""


_OF_MLFLOW = re.compile(r"[0-9a-f]{32}|models|traces")


def orphaned_refs(store: Store, *, grace_s: float) -> list[Ref]:
    """Find refs of models and runs that are gone from where MLflow kept them, and of models that were logged over.

    A place below the store's root is looked for below the root as it is now, so a store may be moved or copied together
    with its models. Only local places are looked at, and only where something else of the experiment is there: a share
    that is not mounted shows nothing either, nor does a copy of the store alone. For the same reason nothing counts as
    gone behind a symbolic link that leads nowhere or to an empty folder.

    Args:
        store: Which.
        grace_s: Younger refs are left out: a model's ref is made before it is uploaded.

    Raises:
        OSError: One of the places cannot be looked at.
    """
    before = time.time() - grace_s
    return [ref for ref in store.checkpoints() if ref.created_s <= before and _is_orphan(store, ref)]


def drop_orphans(store: Store, refs: Iterable[Ref]) -> int:
    """Drop refs that are still orphans.

    A model's upload may end while its ref is dropped. So what the ref keeps alive is pinned by an intent first, and a
    ref is made again if the manifest has turned up; `log_model`, once its upload is done, looks for its ref too.

    Returns:
        How many were dropped.

    Raises:
        OSError: The place of one cannot be looked at; that one and the rest are as they were.
    """
    n_dropped = 0
    for ref in refs:
        info = store.backend.stat(ref.key)
        now = store.ref(ref.key)
        if info is None or now is None or now.write != ref.write or not _is_orphan(store, ref):
            continue
        with store.adopt(store.manifest(ref)) as pin:
            # Only the very blob that was looked at: a step of a run may have been saved anew meanwhile.
            if not store.backend.withdraw(ref.key, info.token):
                continue
            is_gone = False
            try:
                is_gone = _is_orphan(store, ref)
            finally:
                if is_gone:
                    n_dropped += 1
                else:
                    with suppress(CheckpointExistsError):  # a later one, saved in between
                        pin.commit(_target_of(ref), replace=False)
    return n_dropped


def remove_copy(store: Store, ref: Ref) -> None:
    """Remove the copy that MLflow shows of the manifest of a run's checkpoint, if it is a local file.

    That of a model stays: without it MLflow would take the model's folder for a damaged one.

    Args:
        store: Whose ref it was.
        ref: Already dropped.
    """
    place = None if ref.name is None else copy_of(store, ref)
    if place is not None:
        with suppress(OSError):
            if digest(place.read_bytes()).hex() == ref.manifest[:64]:
                place.unlink()


def _is_orphan(store: Store, ref: Ref) -> bool:
    place = copy_of(store, ref)
    if place is None:
        return False
    experiment = Path(store_root_for(str(place)))
    if experiment == place:
        return False
    parts = place.relative_to(experiment).parts
    if ref.name is not None:
        artifacts = experiment.joinpath(*parts[: parts.index("artifacts") + 1])
        # With nothing of MLflow's there, it is the experiment that is out of sight, and not the run that is gone.
        return _is_gone(artifacts) and _has_folders_of_mlflow(experiment)
    if not (experiment / parts[0]).is_dir():
        return False
    try:
        return digest(place.read_bytes()).hex() != ref.manifest[:64]
    except (FileNotFoundError, NotADirectoryError):
        return _is_gone(place)


def _is_gone(place: Path) -> bool:
    """Tell whether there is certainly nothing at a place: behind a link to nothing, a disk may be missing for a while.

    Raises:
        OSError: It cannot be told.
    """
    for part in (*reversed(place.parents), place):
        try:
            mode = part.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return True
        if stat.S_ISLNK(mode) and not _leads_to_something(part):
            return False
    return False


def _leads_to_something(link: Path) -> bool:
    # Where a disk is not mounted there is an empty folder.
    try:
        with os.scandir(link) as entries:
            return any(True for _ in entries)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _has_folders_of_mlflow(experiment: Path) -> bool:
    """Tell whether a folder holds one of a run, with or without anything in it, or those of models or traces."""
    try:
        return any(_OF_MLFLOW.fullmatch(entry.name) and entry.is_dir() for entry in experiment.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return False


def _target_of(ref: Ref) -> RefTarget:
    return RefTarget(**{field.name: getattr(ref, field.name) for field in fields(RefTarget)})


def copy_of(store: Store, ref: Ref) -> Path | None:
    """Say where MLflow keeps a copy of the ref's manifest; None if it keeps none, or none that can be looked at."""
    if ref.copy_path is not None:
        root = None if store.backend.is_carrier else Root.parse(store.uri)
        return root.folder / ref.copy_path if root is not None and root.is_local else None
    if ref.path is not None or ref.uri is None or is_ours(ref.uri):
        return None
    try:
        return Root.parse(ref.uri).folder
    except ValueError:
        return None


Kind = Literal["run", "model", "trace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Refs and plain files of one run, logged model or trace. Two are equal if nothing was written in between."""

    kind: Kind
    id: str
    root: str
    """Its artifact root: relative to the store's, or a URI if its artifacts lie elsewhere and only tensors are here."""
    experiment: str
    """The artifact location of its experiment, in the same form; "" is the store's root."""
    is_elsewhere: bool
    refs: tuple[Ref, ...]
    n_plain: int
    """Plain files below its artifact root; none of those that lie elsewhere."""
    plain_bytes: int
    newest_s: float
    """Time of its last write, in seconds of Unix time."""


def find_holdings(store: Store) -> list[Holding]:
    """Find what a store holds for runs, logged models and traces, sorted by where it is.

    Experiments whose artifacts MLflow keeps by itself, with copies of manifests among them, are left out: there the
    folders tell, see `orphaned_refs`. So are folders with nothing in them, and whatever lies behind a symbolic link.
    """
    refs: dict[tuple[str, bool], list[Ref]] = {}
    checkpoints = store.checkpoints()
    copied = _copied(checkpoints)
    for ref in checkpoints:
        if ref.copy_path is not None or (ref.path is None and (ref.uri is None or copy_of(store, ref) is not None)):
            continue
        match = LAYOUT.fullmatch(ref.path if ref.path is not None else ref.uri or "")
        if match:
            refs.setdefault((match["root"], ref.path is None), []).append(ref)
    plain = open_plain_files(Root.parse(store.uri))
    for root in plain.topmost(lambda folder: LAYOUT.fullmatch(folder) is not None):
        refs.setdefault((root, False), [])
    found = (
        _holding(store, root, refs=refs[root, is_elsewhere], is_elsewhere=is_elsewhere)
        for root, is_elsewhere in sorted(refs)
    )
    return [
        holding
        for holding in found
        if (holding.refs or holding.n_plain) and (holding.is_elsewhere or holding.experiment not in copied)
    ]


def folders_of_mlflow(store: Store) -> set[str]:
    """Find the experiments' folders, as `Holding.experiment` has them, that `find_holdings` leaves to MLflow."""
    return _copied(store.checkpoints())


def look_again(store: Store, holding: Holding) -> Holding:
    """Look what a store holds for the same run, model or trace now."""
    if holding.is_elsewhere:
        refs = [ref for known in holding.refs if (ref := store.ref(known.key)) is not None]
    else:
        refs = store.walk_artifacts(holding.root)
    return _holding(store, holding.root, refs=refs, is_elsewhere=holding.is_elsewhere)


def drop_holding(store: Store, holding: Holding) -> None:
    """Drop the refs and remove the plain files of a holding; what was written since it was looked at stays."""
    for ref in holding.refs:
        info, now = store.backend.stat(ref.key), store.ref(ref.key)
        if info is not None and now is not None and now.write == ref.write:
            store.backend.withdraw(ref.key, info.token)
    if not holding.is_elsewhere:
        plain = open_plain_files(Root.parse(store.uri))
        if next(plain.content(holding.root), None) is not None:  # nothing is seen through a link
            plain.remove(holding.root, until_s=holding.newest_s)
        # The folder of the run or model itself; those above it are shared, and somebody may be writing there.
        folder = plain.find(posixpath.dirname(holding.root))
        if folder is not None:
            with suppress(OSError):
                folder.rmdir()


def _copied(checkpoints: Iterable[Ref]) -> set[str]:
    matches = (LAYOUT.fullmatch(ref.copy_path) for ref in checkpoints if ref.copy_path is not None)
    return {match["experiment"] or "" for match in matches if match}


def _holding(store: Store, root: str, *, refs: Iterable[Ref], is_elsewhere: bool) -> Holding:
    match = LAYOUT.fullmatch(root)
    assert match is not None
    kind: Kind = "run" if match["run"] else "model" if match["model"] else "trace"
    content = [] if is_elsewhere else list(open_plain_files(Root.parse(store.uri)).content(root))
    sizes = [size for size, _ in content if size is not None]
    in_order = tuple(sorted(refs, key=lambda ref: ref.key))
    written = [ref.created_s for ref in in_order]
    return Holding(
        kind=kind,
        id=match[kind],
        root=root,
        experiment=match["experiment"] or "",
        is_elsewhere=is_elsewhere,
        refs=in_order,
        n_plain=len(sizes),
        plain_bytes=sum(sizes),
        newest_s=max([0.0, *(changed_s for _, changed_s in content), *written]),
    )
