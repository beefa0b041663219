"""MLflow flavor: models as deduplicated tensors.

A live model comes in, and MLflow's ``ModelInfo`` goes out; a model's URI comes in, and the model goes out. The tensors
go to the store, all other files of the model's folder to MLflow. The room imports the rooms below the integration, and
finds frameworks by the entry points of `tensorcas_mlflow.adapter`. Users import its functions from
``tensorcas_mlflow``.
"""

from __future__ import annotations

from tensorcas_mlflow.integration.models._code import without_code_of_models

with without_code_of_models():
    from tensorcas_mlflow.integration.models._export import export_model
    from tensorcas_mlflow.integration.models._load import _load_pyfunc, load_model
    from tensorcas_mlflow.integration.models._log import log_model, save_model
    from tensorcas_mlflow.integration.models._open import open_artifact

__all__ = ["_load_pyfunc", "export_model", "load_model", "log_model", "open_artifact", "save_model"]
