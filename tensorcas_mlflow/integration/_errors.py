"""Translation of our errors to `MlflowException`, done once, at the calls from MLflow and its users.

The translation imports MLflow with the first error: a call that needs no MLflow and succeeds does not wait for it.
"""

from __future__ import annotations

from contextlib import ContextDecorator
from types import TracebackType

from tensorcas_mlflow.errors import TensorCasError


def translate_errors() -> _Translation:
    """Make our errors those of MLflow, too: around a block, or on a function as ``@translate_errors()``.

    A `ValueError` is a wrong call and is translated too. All others, MLflow's own exceptions included, pass through.
    A generator function must hold a ``with`` block: the decorator would end before the first item is produced.
    """
    return _TRANSLATION


class _Translation(ContextDecorator):
    """Translation of the errors of a block. Stateless: one serves all blocks, on every thread.

    A class, since `contextlib.contextmanager` makes eight calls of Python for each block.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, TensorCasError | ValueError):
            from mlflow.exceptions import MlflowException

            from tensorcas_mlflow.integration._mlflow_errors import to_mlflow

            if not isinstance(error, MlflowException):  # else it is one of ours, translated by an inner call
                raise to_mlflow(error) from error


_TRANSLATION = _Translation()
