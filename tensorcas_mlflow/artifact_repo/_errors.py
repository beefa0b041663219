"""What the operating system refuses, told to MLflow together with our own errors."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, PERMISSION_DENIED, RESOURCE_DOES_NOT_EXIST

from tensorcas_mlflow import config
from tensorcas_mlflow._mlflow_errors import translate_errors
from tensorcas_mlflow.errors import BackendError, ChunkNotFoundError, CorruptChunkError, CorruptError

_log = logging.getLogger(__name__)

_CODES = {
    errno.ENOENT: RESOURCE_DOES_NOT_EXIST,
    errno.EACCES: PERMISSION_DENIED,
    errno.EPERM: PERMISSION_DENIED,
    errno.EROFS: PERMISSION_DENIED,
    errno.EEXIST: INVALID_PARAMETER_VALUE,
    errno.EINVAL: INVALID_PARAMETER_VALUE,
    errno.EISDIR: INVALID_PARAMETER_VALUE,
    errno.ELOOP: INVALID_PARAMETER_VALUE,
    errno.ENAMETOOLONG: INVALID_PARAMETER_VALUE,
    errno.ENOTDIR: INVALID_PARAMETER_VALUE,
}


@contextmanager
def for_mlflow() -> Iterator[None]:
    """Turn our errors and those of the file system into `MlflowException`, around a block."""
    with translate_errors():
        try:
            yield
        except (CorruptError, CorruptChunkError, ChunkNotFoundError) as error:
            if config.in_mlflow_server():  # a client may be told something else in its place
                _log.error("%s", error)
            raise
        except shutil.SameFileError as error:
            raise MlflowException.invalid_parameter_value(
                f"an artifact cannot be downloaded onto itself; give another dst_path: {error}"
            ) from error
        except OSError as error:
            code = _CODES.get(error.errno or 0)
            if code is None:
                raise BackendError("reach", str(error.filename or ""), str(error)) from error
            raise MlflowException(str(error), error_code=code) from error
