"""Errors of this package that are errors of MLflow, too."""

from __future__ import annotations

from typing import Any

from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import (
    BAD_REQUEST,
    INTERNAL_ERROR,
    INVALID_PARAMETER_VALUE,
    PERMISSION_DENIED,
    RESOURCE_ALREADY_EXISTS,
    RESOURCE_CONFLICT,
    RESOURCE_DOES_NOT_EXIST,
    TEMPORARILY_UNAVAILABLE,
    ErrorCode,
)

from tensorcas_mlflow.errors import (
    AdapterError,
    BackendError,
    BlobExistsError,
    CheckpointExistsError,
    ConflictError,
    ForbiddenError,
    FormatError,
    NewerFormatError,
    NotFoundError,
    RefusedError,
    TensorCasError,
    WrongStoreError,
    without_secrets,
)

# The first match counts. A client of an MLflow server repeats a call for minutes when the code maps to HTTP 429 or
# 5xx. So only errors a retry may fix have such a code: damage is BAD_REQUEST, for DATA_LOSS is a 500.
_CODES: tuple[tuple[type[Exception], int], ...] = (
    (NotFoundError, RESOURCE_DOES_NOT_EXIST),
    (WrongStoreError, INVALID_PARAMETER_VALUE),
    (NewerFormatError, INVALID_PARAMETER_VALUE),
    (FormatError, BAD_REQUEST),
    (CheckpointExistsError, RESOURCE_ALREADY_EXISTS),
    (BlobExistsError, RESOURCE_ALREADY_EXISTS),
    (ConflictError, RESOURCE_CONFLICT),
    (AdapterError, INVALID_PARAMETER_VALUE),
    (ForbiddenError, PERMISSION_DENIED),
    (RefusedError, BAD_REQUEST),
    (BackendError, TEMPORARILY_UNAVAILABLE),
    (ValueError, INVALID_PARAMETER_VALUE),
)


class _OfMlflow(MlflowException):
    """One of our errors, made catchable as an error of MLflow."""

    _ours: TensorCasError | ValueError

    def __str__(self) -> str:
        return str(self.message)

    def __reduce__(self) -> Any:
        return to_mlflow, (self._ours, ErrorCode.Value(self.error_code))


class NoSuchFileError(MlflowException, NotFoundError, FileNotFoundError):
    """A missing path of this machine: an error for users of MLflow and of files alike."""

    def __init__(self, path: str) -> None:
        path = without_secrets(path)
        super().__init__(
            f"there is no file or folder {path!r} on this machine (name a run by its id, and a model or artifact "
            "by its URI, such as runs:/<run id>/<path>)",
            error_code=RESOURCE_DOES_NOT_EXIST,
        )
        self.path = path

    def __reduce__(self) -> tuple[type[NoSuchFileError], tuple[str]]:
        return type(self), (self.path,)


def to_mlflow(error: TensorCasError | ValueError, code: int | None = None) -> MlflowException:
    """Return an `MlflowException` of the same class as an error of ours; raise it ``from`` the original.

    Args:
        error: The error. Its class, its facts and its sentence stay.
        code: An error code of MLflow; by default the code of the error's class.
    """
    if code is None:
        code = next((code for kind, code in _CODES if isinstance(error, kind)), INTERNAL_ERROR)
    told = MlflowException(without_secrets(str(error)), error_code=code)
    kind: type[Exception] = type(error) if isinstance(error, TensorCasError) else ValueError
    both = _with_mlflow(kind)
    # The constructor is not called: the facts are set already, and each class takes different arguments.
    made = both.__new__(both, *error.args)
    made.args = error.args if isinstance(error, TensorCasError) else told.args
    vars(made).update(vars(error), **vars(told), _ours=error)
    return made


def _with_mlflow(kind: type[Exception]) -> type[_OfMlflow]:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (_OfMlflow, kind), names)
