"""What nobody can reach through MLflow any more: what its own deletions leave behind, and how to be rid of it.

Under a ``tensorcas:`` root, and behind a server that keeps its artifacts in a store, the artifact repository drops refs
when MLflow deletes artifacts. But MLflow forgets logged models, traces and now and then a run without deleting what
they hold: `plan_orphans` asks its tracking stores. Under a root of MLflow's own nobody tells us of any deletion:
`orphaned_refs` looks there.
"""

from __future__ import annotations

from tensorcas_mlflow.integration.forgotten._holdings import (
    Holding,
    Kind,
    drop_orphans,
    find_holdings,
    orphaned_refs,
    remove_copy,
)
from tensorcas_mlflow.integration.forgotten._lost import Lost, find_lost
from tensorcas_mlflow.integration.forgotten._mlflow import open_registry, open_tracker
from tensorcas_mlflow.integration.forgotten._plan import Kept, OrphanPlan, plan_orphans
from tensorcas_mlflow.integration.forgotten._tracker import Experiment, Registry, Tracker

__all__ = [
    "Experiment",
    "Holding",
    "Kept",
    "Kind",
    "Lost",
    "OrphanPlan",
    "Registry",
    "Tracker",
    "drop_orphans",
    "find_holdings",
    "find_lost",
    "open_registry",
    "open_tracker",
    "orphaned_refs",
    "plan_orphans",
    "remove_copy",
]
