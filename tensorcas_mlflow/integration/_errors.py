"""Translation of our errors to `MlflowException`, done once, at the calls from MLflow and its users.

The translation imports MLflow with the first error: a call that needs no MLflow and succeeds does not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tensorcas_mlflow.errors import TensorCasError


@contextmanager
def translate_errors() -> Iterator[None]:
    """Make our errors those of MLflow, too: around a block, or on a function as ``@translate_errors()``.

    A `ValueError` is a wrong call and is translated too. All others, MLflow's own exceptions included, pass through.
    A generator function must hold a ``with`` block: the decorator would end before the first item is produced.
    """
    try:
        yield
    except (TensorCasError, ValueError) as error:
        from tensorcas_mlflow.integration._mlflow_errors import MlflowException, to_mlflow

        if isinstance(error, MlflowException):  # one of ours, translated by an inner call
            raise
        raise to_mlflow(error) from error
