"""MLflow flavor: models as deduplicated tensors.

A live model comes in, and MLflow's ``ModelInfo`` goes out; a model's URI comes in, and the model goes out. The tensors
go to the store, all other files of the model's folder to MLflow. The room imports the rooms below the integration, and
finds frameworks by the entry points of `tensorcas_mlflow.adapter`. Users import its functions from
``tensorcas_mlflow``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorcas_mlflow.base.lazy_names import lazy_names
from tensorcas_mlflow.integration.models._code import without_code_of_models

if TYPE_CHECKING:
    from tensorcas_mlflow.integration.models._export import export_model
    from tensorcas_mlflow.integration.models._load import _load_pyfunc, load_model
    from tensorcas_mlflow.integration.models._log import log_model, save_model
    from tensorcas_mlflow.integration.models._open import manifest_in, open_artifact
    from tensorcas_mlflow.integration.models._saved import resolve

_NAMES = {
    "_export": "export_model",
    "_load": "_load_pyfunc load_model",
    "_log": "log_model save_model",
    "_open": "manifest_in open_artifact",
    "_saved": "resolve",
}

if not TYPE_CHECKING:
    _look_up, __dir__ = lazy_names(__name__, _NAMES)

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):  # asked for by Python itself, at every import
            return _look_up(name)
        with without_code_of_models():
            return _look_up(name)
