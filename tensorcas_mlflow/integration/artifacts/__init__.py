"""MLflow's artifact repository for ``tensorcas:`` locations: small text stays a file, all else goes to the store.

Calls of MLflow come in: files to log, paths to list, download and delete. Files go to the store as tensors, and come
back bit for bit. The room imports `server_store`, and of the rooms below the integration `store`, `file_formats` and
lower ones. MLflow reaches it through `tensorcas_mlflow.plugin`.
"""

from __future__ import annotations

from tensorcas_mlflow.integration.artifacts._repository import (
    PLAIN_BYTES,
    TensorCasArtifactRepository,
    is_small_text,
)

__all__ = ["PLAIN_BYTES", "TensorCasArtifactRepository", "is_small_text"]
