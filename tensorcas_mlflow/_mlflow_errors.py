"""Our errors, told to MLflow: translated once, where MLflow or its user calls us."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import (
    BAD_REQUEST,
    INVALID_PARAMETER_VALUE,
    PERMISSION_DENIED,
    RESOURCE_ALREADY_EXISTS,
    RESOURCE_CONFLICT,
    RESOURCE_DOES_NOT_EXIST,
    TEMPORARILY_UNAVAILABLE,
)

from tensorcas_mlflow._texts import without_secrets
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
)

# The first that fits counts. A client of an MLflow server repeats a call for minutes when the code maps to HTTP 429 or
# 5xx, so only what a repetition may mend has such a code: damage is BAD_REQUEST, for DATA_LOSS is a 500.
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


class NoSuchFileError(MlflowException, FileNotFoundError):
    """A path of this machine that is not there, for those who catch what MLflow raises and for those who open files."""

    def __init__(self, path: str) -> None:
        path = without_secrets(path)
        super().__init__(
            f"there is no file or folder {path!r} on this machine (a run is named by its id, and a model or artifact "
            "by its URI, such as runs:/<run id>/<path>)",
            error_code=RESOURCE_DOES_NOT_EXIST,
        )
        self.path = path

    def __reduce__(self) -> tuple[type[NoSuchFileError], tuple[str]]:
        return type(self), (self.path,)


def to_mlflow(error: TensorCasError | ValueError) -> MlflowException:
    """Make the exception MLflow knows, saying the same sentence; raise it ``from`` the error it stands for."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return MlflowException(without_secrets(str(error)), error_code=code)
    return MlflowException(without_secrets(str(error)))


@contextmanager
def translate_errors() -> Iterator[None]:
    """Turn our errors into `MlflowException`: around a block, or on a function as ``@translate_errors()``.

    A `ValueError` is a wrong call and is translated too. All else, MLflow's own exceptions included, passes through.
    A generator function must hold a ``with`` block: the decorator would be over before its first piece is made.
    """
    try:
        yield
    except (TensorCasError, ValueError) as error:
        raise to_mlflow(error) from error
