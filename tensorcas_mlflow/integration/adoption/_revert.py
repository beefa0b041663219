"""The reversal of an adoption: plain files come back, then the old locations."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from tensorcas_mlflow.backends import Root, open_plain_files
from tensorcas_mlflow.base.text import count_text, size_text
from tensorcas_mlflow.errors import ConflictError, CorruptError
from tensorcas_mlflow.integration.adoption._adopt import Watch, by_folder, open_store, real_root, switch
from tensorcas_mlflow.integration.adoption._database import UNITS, Database, Place
from tensorcas_mlflow.integration.adoption._files import LeftAlone, is_same
from tensorcas_mlflow.integration.adoption._journal import EXPERIMENTS, JOURNAL, Entry, Journal, old_location
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.store import Store


@dataclass(slots=True, kw_only=True)
class RevertReport:
    """Report of a reversal. Printing it says so in words."""

    n_units: int = 0
    n_files: int = 0
    plain_bytes: int = 0
    left_alone: list[LeftAlone]

    def __str__(self) -> str:
        units = count_text(self.n_units, "artifact folder is", "artifact folders are")
        return (
            f"{units} plain again, with {count_text(self.n_files, 'file')} "
            f"({size_text(self.plain_bytes)}) from the store; `tensorcas gc` frees what the store no longer needs"
        )


def revert(
    root: str | os.PathLike[str],
    databases: Sequence[Database],
    *,
    runs: Collection[str] = (),
    watch: Watch = lambda *_: None,
) -> RevertReport:
    """Make adopted artifact folders plain again. It may be repeated after it failed or was killed.

    Args:
        root: The artifact root.
        databases: All databases of MLflow with artifacts there.
        runs: Ids of the runs and logged models to revert; all, if there are none. Then experiments change back too.
        watch: Is told of each step.

    Raises:
        ValueError: Nothing was adopted there.
        BackendError: A database or the storage failed; what was reverted until then stays so.
        ConflictError: An adoption is under way.
        CorruptError: The store or the journal is damaged.
    """
    top = real_root(root)
    if not os.path.lexists(top / JOURNAL):
        raise ValueError(f"there is no {JOURNAL!r} in {str(top)!r}: nothing was adopted there")
    report = RevertReport(left_alone=[])
    with Journal(top) as journal:
        named = [(database, place) for database in databases for place in database.places(top)]
        experiments = journal.entries.get(EXPERIMENTS, Entry(state="reverted"))
        if experiments.state != "reverted" and not runs:
            ours = [each for each in named if each[1].table == "experiments" and each[1].is_switched]
            adopted = [each for each in ours if each[1].id in experiments.old]
            switch(adopted, lambda place: old_location(experiments, place))
            journal.end(EXPERIMENTS, reverted=True)
            watch("experiments switched", "", 0)
        wanted = {place.folder for _, place in named if place.table in UNITS and place.key[0] in runs}
        inside = by_folder(named, {top / unit for unit in journal.entries if unit != EXPERIMENTS})
        for unit, entry in sorted(journal.entries.items()):
            if unit != EXPERIMENTS and entry.state != "reverted" and (not runs or top / unit in wanted):
                _revert_unit(top, unit, entry, inside[top / unit], journal, report, watch)
        known = {top / unit for unit in journal.entries}
        report.left_alone += [
            LeftAlone(path=place.folder.relative_to(top).as_posix(), reason="it was logged into the store")
            for _, place in named
            if place.table in UNITS and place.is_switched and place.folder not in known and not runs
        ]
    return report


def _revert_unit(
    root: Path,
    unit: str,
    entry: Entry,
    places: Sequence[tuple[Database, Place]],
    journal: Journal,
    report: RevertReport,
    watch: Watch,
) -> None:
    _, store, top = open_store(root, create=False)
    in_store = f"{top}/{unit}" if top else unit
    plain = open_plain_files(Root.parse(root))
    missing = sorted(set(entry.old) - {place.id for _, place in places})
    if missing:
        # Without all that names the folder, nobody can tell whether the store's files are still needed.
        reason = f"no database given names it in {' '.join(missing[0])}, as one did: pass all databases"
        report.left_alone.append(LeftAlone(path=unit, reason=reason))
        return
    is_switched = any(place.is_switched for _, place in places)
    refs = store.walk_artifacts(in_store)
    if is_switched:
        for ref in refs:
            path = (ref.path or "").removeprefix(f"{top}/" if top else "")
            obstacle = _write_back(root, store, ref, path, entry.times.get(path), report)
            if obstacle is not None:
                report.left_alone.append(LeftAlone(path=unit, reason=f"{path!r} {obstacle}"))
                return
            watch("written", path, report.plain_bytes)
        plain.settle({os.path.dirname((ref.path or "").removeprefix(f"{top}/" if top else "")) for ref in refs})
        try:
            ours = [(database, place) for database, place in places if place.is_switched]
            switch(ours, lambda place: old_location(entry, place))
        except ConflictError as error:
            report.left_alone.append(LeftAlone(path=unit, reason=str(error)))
            return
        watch("switched back", unit, report.plain_bytes)
    for ref in refs:
        store.drop(ref)
    journal.end(unit, reverted=True)
    report.n_units += 1
    watch("reverted", unit, report.plain_bytes)


def _write_back(
    root: Path, store: Store, ref: Ref, path: str, modified_ns: int | None, report: RevertReport
) -> str | None:
    """Write a plain file and compare it with the store; return why it cannot be, if so."""
    plain = open_plain_files(Root.parse(root))
    if ref.kind != "file":
        return "was logged into the store with `mlflow.tensorcas`, and needs it"
    is_new = not os.path.lexists(root / path)
    if is_new:
        blocker = plain.blocker(os.path.dirname(path))
        if blocker is not None:
            return f"has no place: {blocker!r} is not a folder"
        pieces = (bytes(piece) for piece in store.iter_file(ref))
        plain.write(path, pieces, modified_ns=modified_ns, replace=False, settle=False)
    elif os.path.islink(root / path) or not os.path.isfile(root / path):
        return "has no place: something else has its name"
    with plain.open(path) as file:
        is_equal = is_same(store, ref, file)
    if not is_equal and is_new:
        raise CorruptError(path, "the plain file does not have the bytes of the store")
    if not is_equal:
        return "has a plain file of this name with other bytes: remove the wrong one of both"
    report.n_files += 1
    report.plain_bytes += os.stat(root / path).st_size
    return None
