"""Readers for checkpoints, models and files that MLflow knows, and files of other formats as checkpoints of runs.

Users import these functions from ``tensorcas_mlflow``. They are a package of their own, so that a training loop, which
logs checkpoints and reads none, imports nothing of it.
"""

from tensorcas_mlflow.parts._exchange import export_checkpoint, import_checkpoint
from tensorcas_mlflow.parts._open import diff, open_checkpoint, safe_open

__all__ = ["diff", "export_checkpoint", "import_checkpoint", "open_checkpoint", "safe_open"]
