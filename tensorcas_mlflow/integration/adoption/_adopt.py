"""Plans of adoptions: what would move into the store, and the work, one artifact folder after the other."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tensorcas_mlflow.backends import STORE_FOLDER, Root, Token, open_backend, open_plain_files
from tensorcas_mlflow.base.text import count_text, size_text
from tensorcas_mlflow.errors import BlobNotFoundError, ConflictError, CorruptError, FencedError, StoreNotFoundError
from tensorcas_mlflow.file_formats import FilePlace
from tensorcas_mlflow.integration._artifact_uri import owner_of
from tensorcas_mlflow.integration.adoption._database import UNITS, Database, Place, local_folder, new_location
from tensorcas_mlflow.integration.adoption._files import (
    LeftAlone,
    Stamp,
    folder_bytes,
    is_same,
    link_targets,
    look,
)
from tensorcas_mlflow.integration.adoption._journal import EXPERIMENTS, Journal
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store

Watch = Callable[[str, str, int], None]
"""Is told of each step: its name, the path, and the bytes done."""

_MAX_ATTEMPTS = 3
_CHANGED = "it has changed meanwhile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One artifact folder of a run or a logged model, with all that names it."""

    path: str
    """Its path below the root."""
    places: tuple[tuple[Database, Place], ...]
    files: Mapping[str, int]
    """Sizes of the files for the store, by path below the root."""

    @property
    def n_bytes(self) -> int:
        """Bytes of the files for the store."""
        return sum(self.files.values())

    @property
    def is_switched(self) -> bool:
        """True if its run or model reads from the store already."""
        return any(place.is_switched for _, place in self.places if place.table in UNITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Result of a dry run."""

    plain_bytes: int
    stored_bytes: int
    """Size of a new store with these files alone."""

    def __str__(self) -> str:
        saved = self.plain_bytes - self.stored_bytes
        times = f", {self.plain_bytes / self.stored_bytes:.1f} times smaller" if saved > 0 else ""
        return (
            f"{size_text(self.plain_bytes)} of plain files would take {size_text(self.stored_bytes)} in a store: "
            f"{size_text(saved)} saved{times}"
        )


@dataclass(slots=True, kw_only=True)
class AdoptionReport:
    """Report of an adoption. Printing it says so in words."""

    n_units: int = 0
    n_files: int = 0
    plain_bytes: int = 0
    """Bytes of the removed plain files."""
    stored_bytes: int = 0
    """Growth of the store."""
    left_alone: list[LeftAlone]

    def __str__(self) -> str:
        saved = self.plain_bytes - self.stored_bytes
        return (
            f"adopted {count_text(self.n_files, 'file')} ({size_text(self.plain_bytes)}) of "
            f"{count_text(self.n_units, 'artifact folder')}; the store grew by {size_text(self.stored_bytes)}, so "
            f"{size_text(abs(saved))} {'are free' if saved >= 0 else 'more are in use'}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptionPlan:
    """The artifact folders that an adoption takes."""

    root: Path
    units: tuple[Unit, ...]
    experiments: tuple[tuple[Database, Place], ...]
    """The locations of experiments to switch, so that new runs log into the store."""
    left_alone: tuple[LeftAlone, ...]

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to do."""
        return not self.units and not self.experiments

    def __str__(self) -> str:
        n_files = sum(len(unit.files) for unit in self.units)
        n_bytes = sum(unit.n_bytes for unit in self.units)
        folders = count_text(len(self.units), "artifact folder")
        experiments = count_text(len(self.experiments), "experiment")
        return (
            f"{folders} to adopt, with {count_text(n_files, 'file')} ({size_text(n_bytes)}) for the store; "
            f"new runs of {experiments} would log into the store"
        )

    def estimate(self, watch: Watch = lambda *_: None) -> Estimate:
        """Store the files in a temporary store, and tell its size.

        Raises:
            ValueError: The temporary folder may have too little room.
        """
        plain_bytes = sum(unit.n_bytes for unit in self.units)
        with tempfile.TemporaryDirectory(prefix="tensorcas-") as scratch:
            free = shutil.disk_usage(scratch).free
            if free < plain_bytes:
                raise ValueError(
                    f"the dry run stores up to {size_text(plain_bytes)} in {scratch!r}, which has {size_text(free)} "
                    "left: set TMPDIR to a larger disk, or name some runs with --run"
                )
            store = Store.init(scratch)
            before = folder_bytes(Path(scratch, STORE_FOLDER))
            n_done = 0
            for unit in self.units:
                for path, n_bytes in unit.files.items():
                    if Stamp.of(self.root / path) is not None:
                        _store(store, self.root / path, path)
                    n_done += n_bytes
                    watch("stored", path, n_done)
            stored_bytes = folder_bytes(Path(scratch, STORE_FOLDER)) - before
        return Estimate(plain_bytes=plain_bytes, stored_bytes=stored_bytes)

    def execute(self, watch: Watch = lambda *_: None) -> AdoptionReport:
        """Adopt. It may be repeated after it failed or was killed, with a new plan.

        Raises:
            BackendError: A database or the storage failed; what was adopted until then stays so.
            ConflictError: Another adoption is under way.
            CorruptError: The store did not give back what it was given, or the journal is damaged.
        """
        report = AdoptionReport(left_alone=list(self.left_alone))
        if self.is_empty:
            return report
        with Journal(self.root) as journal:
            folder = open_store(self.root, create=True)[0]
            before = folder_bytes(folder)
            if self.experiments:
                journal.begin(EXPERIMENTS, [place for _, place in self.experiments])
                switch(self.experiments, lambda place: new_location(place.folder))
                journal.end(EXPERIMENTS)
                watch("experiments switched", "", 0)
            for unit in self.units:
                _Adopter(self.root, unit, journal, report, watch).run()
            report.stored_bytes = folder_bytes(folder) - before
        return report


def open_store(root: Path, *, create: bool) -> tuple[Path, Store, str]:
    """Open the store around a root, or create one in it.

    Returns:
        The store's folder, the store, and the root's path in it.

    Raises:
        StoreNotFoundError: There is none and ``create`` is False.
    """
    place = Root.parse(root)
    try:
        store, in_store = Store.find(place)
    except StoreNotFoundError:
        if not create:
            raise
        # Experiments in it may have stores of their own, and keep them.
        Store.init_backend(open_backend(place))
        store, in_store = Store.find(place)
    return Root.parse(store.uri).folder / STORE_FOLDER, store, in_store


def switch(places: Sequence[tuple[Database, Place]], to: Callable[[Place], str]) -> None:
    """Change fields, in one transaction for each database; raises as `Database.switch`."""
    for database in dict.fromkeys(each for each, _ in places):
        database.switch([(place, to(place)) for each, place in places if each is database])


def real_root(root: str | os.PathLike[str]) -> Path:
    """Return the real folder of an artifact root.

    Raises:
        ValueError: It is no folder of this machine.
    """
    folder = local_folder(os.fspath(root))
    if folder is not None and not os.path.lexists(folder):
        raise ValueError(
            f"there is no folder {os.fspath(root)!r}: name an artifact root, such as mlruns or mlartifacts"
        )
    if folder is None or not folder.is_dir() or folder.parent == folder:
        raise ValueError(f"{os.fspath(root)!r} is no artifact root: name a folder of this machine")
    return folder


def plan_adoption(
    root: str | os.PathLike[str],
    databases: Sequence[Database],
    *,
    runs: Collection[str] = (),
    with_running: bool = False,
) -> AdoptionPlan:
    """Find what an adoption of an artifact root would take; change nothing.

    Args:
        root: The artifact root, a folder.
        databases: All databases of MLflow with artifacts there.
        runs: Ids of the runs and logged models to take; all, if there are none. Then experiments change too.
        with_running: Whether to take runs that are running.

    Raises:
        ValueError: There is no such root, or the databases name none of these runs.
        BackendError: A database failed.
    """
    top = real_root(root)
    named = [(database, place) for database in databases for place in database.places(top)]
    folders = {place.folder for _, place in named if place.table in UNITS}
    wanted = {place.folder for _, place in named if place.table in UNITS and place.key[0] in runs}
    missing = sorted(set(runs) - {place.key[0] for _, place in named if place.table in UNITS})
    if missing:
        raise ValueError(f"no run or logged model {missing[0]!r} has its artifacts below {str(top)!r}")
    linked = {folder for target in link_targets(top) for folder in (target, *target.parents)}
    inside = by_folder(named, folders)
    versions = {place.folder: place for _, place in named if place.table == "model_versions"}
    around = {above for folder in folders for above in folder.parents}
    units: list[Unit] = []
    left_alone: list[LeftAlone] = []
    n_served = sum(database.n_served() for database in databases)
    if n_served:
        through = f"runs and logged models at mlflow-artifacts: ({n_served}) are reached through a server alone"
        left_alone.append(LeftAlone(path=".", reason=through))
    for folder in sorted(wanted if runs else folders):
        path = folder.relative_to(top).as_posix()
        places = inside[folder]
        found = look(top, path) if path != "." else None
        reason = _reason(top, folder, places, with_running=with_running)
        outer = next((versions[above] for above in folder.parents if above in versions), None)
        if reason is None and (folder in around or not folders.isdisjoint(folder.parents)):
            reason = "it holds another run's or model's folder, or lies in one"
        elif reason is None and outer is not None:
            reason = f"version {' '.join(outer.key)} of a registered model is a folder around it"
        elif reason is None and folder in linked:
            reason = "a link leads into it"
        if found is None or reason is not None or found.reason is not None:
            left_alone.append(
                LeftAlone(path=path, reason=reason or (found.reason if found else None) or "it is the root")
            )
        elif found.files or any(not place.is_switched for _, place in places):
            units.append(Unit(path=path, places=tuple(places), files=found.files))
    experiments = [
        (database, place)
        for database, place in named
        if place.table == "experiments"
        and not place.is_switched
        and not runs
        and _store_above(top, place.folder) is None
    ]
    fitting = [each for each in experiments if not each[0].too_long(each[1], new_location(each[1].folder))]
    return AdoptionPlan(root=top, units=tuple(units), experiments=tuple(fitting), left_alone=tuple(left_alone))


def by_folder(
    named: Sequence[tuple[Database, Place]], folders: Collection[Path]
) -> dict[Path, list[tuple[Database, Place]]]:
    """Sort places by the folders that they name or lie in."""
    found: dict[Path, list[tuple[Database, Place]]] = {folder: [] for folder in folders}
    for each in named:
        for folder in (each[1].folder, *each[1].folder.parents):
            if folder in found:
                found[folder].append(each)
    return found


def _reason(root: Path, folder: Path, places: Sequence[tuple[Database, Place]], *, with_running: bool) -> str | None:
    """Tell why a folder must stay as it is, as far as its own places show."""
    if not with_running and any(place.is_open for _, place in places):
        return "its run is running; --running takes it too"
    if (inner := _store_above(root, folder)) is not None:
        return f"it lies in another store, at {str(inner)!r}"
    for database, place in places:
        if database.too_long(place, new_location(place.folder)):
            return f"its location would be too long for {place.table}.{place.column}"
    return None


def _store_above(root: Path, folder: Path) -> Path | None:
    """Find a store at a folder or above it, but below the root."""
    while folder != root:
        if os.path.lexists(folder / STORE_FOLDER):
            return folder
        folder = folder.parent
    return None


class _Stored(NamedTuple):
    stamp: Stamp
    token: Token | None


class _Adopter:
    """The adoption of one artifact folder."""

    def __init__(self, root: Path, unit: Unit, journal: Journal, report: AdoptionReport, watch: Watch) -> None:
        self._root = root
        self._unit = unit
        self._journal = journal
        self._report = report
        self._watch = watch
        self._plain = open_plain_files(Root.parse(root))
        self._store, self._top = open_store(root, create=False)[1:]
        self._stored: dict[str, _Stored] = {}
        self._n_kept = 0

    def run(self) -> None:
        """Store, compare, switch, remove."""
        unit = self._unit
        strange = self._strange_refs()
        if strange:
            self._leave(unit.path, f"the store holds {strange[0]!r} already, and no adoption put it there")
            return
        self._journal.begin(unit.path, [place for _, place in unit.places])
        self._watch("begun", unit.path, 0)
        for path in unit.files:
            try:
                self._take(path)
            except (FileNotFoundError, BlobNotFoundError):
                self._leave(path, _CHANGED)
        self._compare()
        self._drop_left_over()
        self._journal.stored(unit.path, {path: each.stamp.modified_ns for path, each in self._stored.items()})
        self._watch("compared", unit.path, 0)
        for path, each in list(self._stored.items()):
            if Stamp.of(self._root / path) != each.stamp:
                self._give_up(path)
        plain = [(database, place) for database, place in unit.places if not place.is_switched]
        try:
            switch(plain, lambda place: new_location(place.folder))
        except ConflictError as error:
            self._leave(unit.path, str(error))
            return
        self._watch("switched", unit.path, 0)
        for path, each in list(self._stored.items()):
            self._remove(path, each)
        self._plain.settle({os.path.dirname(path) for path in self._stored})
        if not self._n_kept:
            self._journal.end(unit.path)
        self._report.n_units += 1
        self._watch("done", unit.path, self._report.plain_bytes)

    def _in_store(self, path: str) -> str:
        return f"{self._top}/{path}" if self._top else path

    def _below_root(self, in_store: str) -> str:
        return in_store.removeprefix(f"{self._top}/") if self._top else in_store

    def _strange_refs(self) -> list[str]:
        """List what somebody else has stored here while the run's location was a plain one."""
        if self._unit.is_switched or self._is_known:
            return []
        return [self._below_root(ref.path or "") for ref in self._store.walk_artifacts(self._in_store(self._unit.path))]

    @property
    def _is_known(self) -> bool:
        entry = self._journal.entries.get(self._unit.path)
        return entry is not None and entry.state != "reverted"

    def _leave(self, path: str, reason: str) -> None:
        self._report.left_alone.append(LeftAlone(path=path, reason=reason))
        self._n_kept += 1

    def _take(self, path: str) -> None:
        """Store one file, unless the store has its bytes."""
        before = Stamp.of(self._root / path)
        in_store = self._in_store(path)
        ref = self._store.artifact(in_store)
        if before is None:
            self._leave(path, _CHANGED)
            return
        with self._plain.open(path) as file:
            is_there = ref is not None and ref.kind == "file" and is_same(self._store, ref, file)
        if ref is not None and not is_there and self._unit.is_switched:
            self._leave(path, "it differs from the store's file of this name, which is the one that MLflow shows")
            return
        if not is_there:
            _store(self._store, self._root / path, in_store)
        self._stored[path] = _Stored(before, self._store.artifact_token(in_store))
        if Stamp.of(self._root / path) != before:
            self._give_up(path)
        self._watch("stored", path, self._report.plain_bytes)

    def _compare(self) -> None:
        """Read each file back through a store opened anew, and compare."""
        store = Store.open(Root.parse(self._store.uri))
        for path, each in list(self._stored.items()):
            ref = store.artifact(self._in_store(path))
            try:
                with self._plain.open(path) as file:
                    is_equal = ref is not None and is_same(store, ref, file)
                    is_untouched = each.stamp == Stamp.of(file.fileno()) == Stamp.of(self._root / path)
            except BlobNotFoundError:
                is_equal = is_untouched = False
            if not is_untouched:
                self._give_up(path)
            elif not is_equal:
                self._give_up(path)
                raise CorruptError(self._in_store(path), "the store does not give back the bytes of this file")

    def _drop_left_over(self) -> None:
        """Drop what a killed adoption has stored and its plain folder lacks by now."""
        if self._unit.is_switched:
            return
        for ref in self._store.walk_artifacts(self._in_store(self._unit.path)):
            if ref.path is not None and self._below_root(ref.path) not in self._stored:
                self._store.drop(ref)

    def _give_up(self, path: str) -> None:
        """Let the plain file count, and not the store's."""
        self._store.drop_artifact(self._in_store(path), self._stored.pop(path).token)
        self._leave(path, _CHANGED)

    def _remove(self, path: str, stored: _Stored) -> None:
        """Remove a plain file if it is still the one that was compared."""
        place, in_store = self._root / path, self._in_store(path)
        with self._plain.replacing(path) as remove:
            try:
                file = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:  # removed, or a link by now
                self._give_up(path)
                return
            try:
                if Stamp.of(file) != stored.stamp:
                    self._give_up(path)
                    return

                # Asked when the file has another name: a program that had it open may have written since.
                def is_hidden() -> bool:
                    is_untouched = stored.stamp.has_bytes_of(Stamp.of(file))
                    return is_untouched and self._store.artifact_token(in_store) == stored.token

                remove(is_hidden)
            finally:
                os.close(file)
        if os.path.lexists(place):
            self._give_up(path)
            return
        self._report.n_files += 1
        self._report.plain_bytes += stored.stamp.size
        self._watch("removed", path, self._report.plain_bytes)


def _store(store: Store, file: Path, in_store: str) -> None:
    """Store a plain file under a path."""
    uri = Root.parse(store.uri).joined(in_store).uri
    owner = owner_of(uri)
    target = RefTarget(path=in_store, uri=uri, run_id=owner.run_id, model_id=owner.model_id)
    for attempt in range(_MAX_ATTEMPTS):
        try:
            with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb", buffering=0) as opened:
                save = store.write_stream(opened, place=FilePlace.of(file))
                with save:
                    save.commit(target)
            return
        except FencedError:
            if attempt == _MAX_ATTEMPTS - 1:
                raise
