"""Adoption: the plain files of an artifact root become content of a store, and back.

A root and MLflow's databases come in; a plan goes out, whose ``execute()`` stores files, switches their locations in
the databases to ``tensorcas:``, and removes the plain copies. `revert` does the opposite. `docs/adopt.md` is the
contract. The room imports `artifacts`, and of the rooms below the integration `store` and lower ones.
"""

from __future__ import annotations

from tensorcas_mlflow.integration.adoption._adopt import (
    AdoptionPlan,
    AdoptionReport,
    Estimate,
    plan_adoption,
    real_root,
)
from tensorcas_mlflow.integration.adoption._database import Database
from tensorcas_mlflow.integration.adoption._files import LeftAlone
from tensorcas_mlflow.integration.adoption._revert import RevertReport, revert

__all__ = [
    "AdoptionPlan",
    "AdoptionReport",
    "Database",
    "Estimate",
    "LeftAlone",
    "RevertReport",
    "plan_adoption",
    "real_root",
    "revert",
]
