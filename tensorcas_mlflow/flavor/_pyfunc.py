"""The model as ``mlflow.pyfunc`` sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensorcas_mlflow._mlflow_errors import to_mlflow
from tensorcas_mlflow.adapter import Adapter
from tensorcas_mlflow.errors import TensorCasError


class PyFuncWrapper:
    """A native model behind the calls that ``mlflow.pyfunc`` makes."""

    def __init__(self, model: Any, adapter: Adapter) -> None:
        self._model = model
        self._adapter = adapter

    def get_raw_model(self) -> Any:
        """Return the native model."""
        return self._model

    def predict(self, data: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Return the native model's own predictions; see `Adapter.predict`."""
        try:
            return self._adapter.predict(self._model, data, params)
        except TensorCasError as error:  # not ValueError: that is the framework's own answer to bad input
            raise to_mlflow(error) from error
