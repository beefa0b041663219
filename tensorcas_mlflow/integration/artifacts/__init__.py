"""MLflow's artifact repository for ``tensorcas:`` locations: small text stays a file, all else goes to the store."""

from __future__ import annotations

from tensorcas_mlflow.integration.artifacts._repository import TensorCasArtifactRepository

__all__ = ["TensorCasArtifactRepository"]
