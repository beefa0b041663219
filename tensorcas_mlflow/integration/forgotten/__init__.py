"""Forgotten content: what MLflow's deletions leave behind in a store, and plans to drop it.

A store comes in, with the tracking stores of MLflow; a plan goes out, whose ``execute()`` drops refs and plain files.
`tensorcas_mlflow.maintenance` then collects what no ref needs. The room imports the store and everything below it.

The artifact repository drops refs when MLflow deletes artifacts under a ``tensorcas:`` root, or behind a server with
such a root. But MLflow forgets logged models, traces and now and then a run without deleting their artifacts:
`plan_orphans` asks its tracking stores. Under a root of MLflow's own, no deletion reaches this package: `orphaned_refs`
looks there. `find_lost` goes the other way, from MLflow's lists to refs that are missing.
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
from tensorcas_mlflow.integration.forgotten._mlflow import Experiment, Registry, Tracker
from tensorcas_mlflow.integration.forgotten._plan import Kept, OrphanPlan, plan_orphans

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
    "orphaned_refs",
    "plan_orphans",
    "remove_copy",
]
