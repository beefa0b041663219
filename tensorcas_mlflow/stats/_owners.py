"""Whose a ref is: of which experiment, run and step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from tensorcas_mlflow.store import Ref

By = Literal["experiment", "run", "step"]


class Owner(NamedTuple):
    """Who needs something. What is not known, or not asked for, is None."""

    experiment: str | None
    """The folder above those of runs, models and traces, which MLflow names by the experiment's id."""
    run_id: str | None
    step: int | None


def owners_of(refs: Sequence[Ref], by: By, *, store_uri: str) -> list[Owner]:
    """Tell whose each ref is, as far as refs say it and artifact paths show it.

    Args:
        refs: All of the store, since one tells of a run what another does not.
        by: How much of it is to be told apart.
        store_uri: The store's root, which may be the folder of an experiment.
    """
    placed = [_place(ref, store_uri) for ref in refs]
    runs = [ref.run_id if ref.run_id is not None else run for ref, (_, run) in zip(refs, placed, strict=True)]
    known = {run: experiment for run, (experiment, _) in zip(runs, placed, strict=True) if run and experiment}
    found: list[Owner] = []
    for ref, run, (experiment, _) in zip(refs, runs, placed, strict=True):
        if experiment is None and run is not None:
            experiment = known.get(run)
        found.append(Owner(experiment, None if by == "experiment" else run, ref.step if by == "step" and run else None))
    return found


def _place(ref: Ref, store_uri: str) -> tuple[str | None, str | None]:
    """Read an artifact path as MLflow lays it: the experiment's folder, and the run's where it is a run's."""
    path = ref.path or ref.copy_path or ref.uri or ""
    folders = path.split("/")
    if "artifacts" not in folders[1:]:
        return None, None
    at = folders.index("artifacts", 1) - 1
    run: str | None = folders[at]
    if at > 0 and folders[at - 1] in ("models", "traces") and folders[at].startswith(("m-", "tr-")):
        run, at = None, at - 1
    experiment = folders[at - 1] if at > 0 else store_uri.rstrip("/").rpartition("/")[2]
    return experiment or None, run
