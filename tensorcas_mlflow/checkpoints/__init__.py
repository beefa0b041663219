"""Checkpoints of a training loop: states of a run by step, light enough to log at every step.

Users import these functions from ``tensorcas_mlflow``. A checkpoint is no logged model: it has no environment, no
signature and no row in MLflow's database.
"""

from tensorcas_mlflow.checkpoints._background import wait
from tensorcas_mlflow.checkpoints._keep import Keep
from tensorcas_mlflow.checkpoints._load import load_checkpoint
from tensorcas_mlflow.checkpoints._log import CheckpointInfo, log_checkpoint
from tensorcas_mlflow.checkpoints._manage import (
    CheckpointRecord,
    delete_checkpoint,
    list_before_logging,
    list_checkpoints,
)

__all__ = [
    "CheckpointInfo",
    "CheckpointRecord",
    "Keep",
    "delete_checkpoint",
    "list_before_logging",
    "list_checkpoints",
    "load_checkpoint",
    "log_checkpoint",
    "wait",
]
