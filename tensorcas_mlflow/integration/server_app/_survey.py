"""Figures of one store, and what a comparison or a lineage finds. All of it is for everybody: `_access` hides."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tensorcas_mlflow.base.threads import Lazy
from tensorcas_mlflow.integration._artifact_uri import owner_of
from tensorcas_mlflow.integration.server_app._tracking import Named, find_models, find_runs
from tensorcas_mlflow.layout import STEP_TEXT, Ref, list_blobs, step_of_text
from tensorcas_mlflow.maintenance import (
    DiskUsage,
    Division,
    GcPlan,
    PackFigures,
    Round,
    StoredBytes,
    disk_usage,
    pack_figures,
    plan_gc,
    read_rounds,
    running_round,
)
from tensorcas_mlflow.reader import CheckpointDiff, Lineage, open_ref
from tensorcas_mlflow.reader import diff as diff_readers
from tensorcas_mlflow.reader import lineage as lineage_of
from tensorcas_mlflow.store import Store

_MOST_RELATIVES = 12
_STEP_FILE = re.compile(rf".*/artifacts/checkpoints/(?P<name>[^/]+)/step-(?P<step>{STEP_TEXT})\.tensors", re.DOTALL)


class Owner(NamedTuple):
    """The run and the logged model that a ref belongs to, by MLflow's ids."""

    run_id: str | None
    model_id: str | None


@dataclass(frozen=True, kw_only=True)
class StoreSurvey:
    """Refs of a store, their owners, and the bytes of each owner."""

    refs: tuple[Ref, ...]
    """Oldest first."""
    owners: tuple[Owner, ...]
    """The owner of each ref."""
    n_damaged: int
    """Refs that cannot be read, and are left out."""
    runs: Mapping[str, Named]
    models: Mapping[str, Named]
    by_experiment: Division[str | None]
    by_run: Division[str | None]
    by_model: Division[str | None]
    by_ref: Division[str]
    state: frozenset[str] = field(repr=False)
    """Refs and packs from which the figures were computed."""

    @Lazy
    def position(self) -> Mapping[str, int]:
        """Position of each ref, by key."""
        return {ref.key: at for at, ref in enumerate(self.refs)}

    @Lazy
    def refs_of_run(self) -> Mapping[str, list[Ref]]:
        """The refs of each run, oldest first."""
        found: dict[str, list[Ref]] = {}
        for ref, owner in zip(self.refs, self.owners, strict=True):
            if owner.run_id is not None:
                found.setdefault(owner.run_id, []).append(ref)
        return found

    @Lazy
    def refs_of_model(self) -> Mapping[str, list[Ref]]:
        """The refs of each logged model, oldest first."""
        found: dict[str, list[Ref]] = {}
        for ref, owner in zip(self.refs, self.owners, strict=True):
            if owner.model_id is not None:
                found.setdefault(owner.model_id, []).append(ref)
        return found

    def named_owners(self, ref: Ref) -> tuple[Named | None, ...]:
        """Return MLflow's run and logged model of a ref, as far as MLflow knows them."""
        run_id, model_id = self.owners[self.position[ref.key]]
        return self.runs.get(run_id or ""), self.models.get(model_id or "")


def survey(store: Store, last: StoreSurvey | None) -> StoreSurvey:
    """Take the survey of a store, or return the last one if nothing has changed.

    Raises:
        CorruptError: A manifest cannot be read.
        BackendError: The storage failed.
    """
    refs, damaged = store.readable_checkpoints()
    state = frozenset(
        [*(f"{ref.key} {ref.write}" for ref in refs), *(info.key for info in list_blobs(store.backend, "packs"))]
    )
    if last is not None and last.state == state:
        return last
    stored = StoredBytes(store, refs)
    owners = tuple(map(owner_of_ref, stored.refs))
    runs = find_runs(owner.run_id for owner in owners if owner.run_id is not None)
    models = find_models(owner.model_id for owner in owners if owner.model_id is not None)
    owners = tuple(_with_source_run(owner, models) for owner in owners)
    missing = {owner.run_id for owner in owners if owner.run_id is not None} - runs.keys()
    runs |= find_runs(filter(None, missing))

    def experiment_of(owner: Owner) -> str | None:
        known = runs.get(owner.run_id or "") or models.get(owner.model_id or "")
        return None if known is None else known.experiment_id

    return StoreSurvey(
        refs=stored.refs,
        owners=owners,
        n_damaged=len(damaged),
        runs=runs,
        models=models,
        by_experiment=stored.divide([experiment_of(owner) for owner in owners]),
        by_run=stored.divide([owner.run_id for owner in owners]),
        by_model=stored.divide([owner.model_id for owner in owners]),
        by_ref=stored.divide([ref.key for ref in stored.refs]),
        state=state,
    )


def owner_of_ref(ref: Ref) -> Owner:
    """Find the owner of a ref; where the ref and its path name two runs, the path's counts: it is the place."""
    path = ref.path or ref.copy_path
    placed = owner_of(ref.uri or "" if path is None else f"store/{path}")
    return Owner(placed.run_id or ref.run_id, placed.model_id or ref.model_id)


def step_of(ref: Ref) -> tuple[str | None, int | None]:
    """Return the series and the step of a ref; a file that was logged through a server has them in its path."""
    found = _STEP_FILE.fullmatch(ref.path or "") if ref.step is None else None
    return (ref.name, ref.step) if found is None else (found["name"], step_of_text(found["step"]))


def _with_source_run(owner: Owner, models: Mapping[str, Named]) -> Owner:
    model = models.get(owner.model_id or "")
    return owner if model is None or owner.run_id is not None else owner._replace(run_id=model.source_run_id)


class Health(NamedTuple):
    """State of a store."""

    plan: GcPlan
    """What a collection would delete now."""
    packs: PackFigures
    disk: DiskUsage
    rounds: tuple[Round, ...]
    """Rounds of maintenance, the newest first."""
    running: Round | None


def check_health(store: Store) -> Health:
    """Look at the state of a store. Reads no tensor.

    Raises:
        TensorCasError: What a collection relies on cannot be read.
    """
    return Health(
        plan=plan_gc(store),
        packs=pack_figures(store),
        disk=disk_usage(store.backend),
        rounds=tuple(read_rounds(store.backend)),
        running=running_round(store.backend),
    )


def compare(before: tuple[Store, Ref], after: tuple[Store, Ref], *, values: bool) -> CheckpointDiff:
    """Compare two checkpoints of one store or of two; see `tensorcas_mlflow.reader.diff`."""
    with open_ref(*before) as one, open_ref(*after) as other:
        return diff_readers(one, other, values=values)


def find_lineage(store: Store, ref: Ref) -> Lineage:
    """Find the relatives of a checkpoint in its store."""
    with open_ref(store, ref) as reader:
        return lineage_of(reader, most=_MOST_RELATIVES)
