"""Loader of logged models for ``mlflow.pyfunc``.

Every MLmodel names this module as its ``loader_module``, so neither the module nor `_load_pyfunc` is ever renamed.
"""

from tensorcas_mlflow.integration.models import _load_pyfunc

__all__ = ["_load_pyfunc"]
