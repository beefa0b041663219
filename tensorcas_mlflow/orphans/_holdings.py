"""What a store holds for each run, logged model and trace of MLflow, as MLflow's folder names show it.

Below an experiment's artifact location MLflow gives each of them a folder: ``<run id>/artifacts``,
``models/m-<id>/artifacts``, ``traces/tr-<id>/artifacts``. What lies elsewhere is nobody's that could be asked about.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from tensorcas_mlflow.backends import STORE_FOLDER, local_path
from tensorcas_mlflow.orphans._copies import copy_of
from tensorcas_mlflow.store import Ref, Store

Kind = Literal["run", "model", "trace"]

# The first match from the left counts, as everywhere: what lies below an artifact root belongs to it.
_LAYOUT = re.compile(
    r"(?P<root>(?:(?P<experiment>.*?)/)?"
    r"(?:(?P<run>[0-9a-f]{32})|models/(?P<model>m-[0-9a-f]{32})|traces/(?P<trace>(?:tr-)?[0-9a-f]{32}))"
    r"/artifacts)(?:/.*)?",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a store holds for one run, logged model or trace. Two are equal if nothing was written in between."""

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
    """When something of it was written last, in seconds of Unix time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plain:
    n_files: int = 0
    n_bytes: int = 0
    newest_s: float = 0.0


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
        match = _LAYOUT.fullmatch(ref.path if ref.path is not None else ref.uri or "")
        if match:
            refs.setdefault((match["root"], ref.path is None), []).append(ref)
    for root in _plain_roots(local_path(store.uri)):
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
        top = _unlinked(store, holding.root)
        if top is not None:
            _remove(top, holding.newest_s)
            # The folder of the run or model itself; those above it are shared, and somebody may be writing there.
            with suppress(OSError):
                top.parent.rmdir()


def _copied(checkpoints: Iterable[Ref]) -> set[str]:
    matches = (_LAYOUT.fullmatch(ref.copy_path) for ref in checkpoints if ref.copy_path is not None)
    return {match["experiment"] or "" for match in matches if match}


def _holding(store: Store, root: str, *, refs: Iterable[Ref], is_elsewhere: bool) -> Holding:
    match = _LAYOUT.fullmatch(root)
    assert match is not None
    kind: Kind = "run" if match["run"] else "model" if match["model"] else "trace"
    place = None if is_elsewhere else _unlinked(store, root)
    plain = _Plain() if place is None else _measure(place)
    in_order = tuple(sorted(refs, key=lambda ref: ref.key))
    written = [datetime.fromisoformat(ref.created).timestamp() for ref in in_order]
    return Holding(
        kind=kind,
        id=match[kind],
        root=root,
        experiment=match["experiment"] or "",
        is_elsewhere=is_elsewhere,
        refs=in_order,
        n_plain=plain.n_files,
        plain_bytes=plain.n_bytes,
        newest_s=max([plain.newest_s, *written]),
    )


def _unlinked(store: Store, root: str) -> Path | None:
    """Give the folder of an artifact root, unless a symbolic link lies on the way to it from the store's root."""
    top = Path(os.path.realpath(local_path(store.uri)))
    place = top / root
    return place if os.path.realpath(place) == os.fspath(place) else None


def _plain_roots(top: Path) -> Iterator[str]:
    """Find the folders below a store's root that are artifact roots by their names, relative to it."""
    folders = [""]
    while folders:
        folder = folders.pop()
        if _LAYOUT.fullmatch(folder):
            yield folder
            continue
        with suppress(FileNotFoundError), os.scandir(top / folder) as entries:
            folders.extend(
                f"{folder}/{entry.name}" if folder else entry.name
                for entry in entries
                if entry.is_dir(follow_symlinks=False) and entry.name.casefold() != STORE_FOLDER
            )


def _measure(top: Path) -> _Plain:
    n_files = n_bytes = 0
    newest_s = 0.0
    for folder, _, names in os.walk(top):
        # A copied file has the times of its source, but its inode was changed when it was copied.
        for place in [folder, *(os.path.join(folder, name) for name in names)]:
            with suppress(FileNotFoundError):
                found = os.lstat(place)
                newest_s = max(newest_s, found.st_ctime)
                if place != folder:
                    n_files += 1
                    n_bytes += found.st_size
    return _Plain(n_files=n_files, n_bytes=n_bytes, newest_s=newest_s)


def _remove(top: Path, newest_s: float) -> None:
    for folder, folders, names in os.walk(top, topdown=False):
        for place in (Path(folder, name) for name in [*names, *folders]):
            with suppress(FileNotFoundError):
                if place.is_dir() and not place.is_symlink():
                    continue
                if place.lstat().st_ctime <= newest_s:
                    place.unlink()
        # It stays if it holds something new.
        with suppress(OSError):
            os.rmdir(folder)
