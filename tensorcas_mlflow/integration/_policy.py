"""MLflow's rule for code that comes with a model, asked of MLflow itself."""

from __future__ import annotations

from tensorcas_mlflow.base import config


def pickle_forbidden_by() -> str | None:
    """Return the switch of MLflow that forbids to unpickle models; None if MLflow allows it.

    MLflow decides, from release 3.18 on: it also knows where its switches do not count. Earlier releases have no
    function for it; then both names count.

    Raises:
        ValueError: A switch is neither true nor false.
    """
    from mlflow.utils import model_utils

    is_allowed = getattr(model_utils, "_is_pickle_loading_allowed", None)
    if is_allowed is None:
        return config.pickle_forbidden_by()
    return None if is_allowed() else config.pickle_forbidden_by() or "MLflow's switch for code of models"
