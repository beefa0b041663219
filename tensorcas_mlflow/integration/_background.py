"""Work continued after `log_checkpoint` returns: saves, reports, pages. A later call raises a failed save's error."""

from __future__ import annotations

import atexit
import logging
import sys
from typing import Any

from tensorcas_mlflow.base.threads import Background
from tensorcas_mlflow.errors import without_secrets
from tensorcas_mlflow.integration._errors import translate_errors

_logger = logging.getLogger(__name__)

saves = Background("tensorcas-save")
reports = Background("tensorcas-report")
pages = Background("tensorcas-page")
"""Pages for people. Long pauses lie between them, and reports need not wait for these."""


@translate_errors()
def wait() -> None:
    """Wait until all checkpoints logged by this process are saved, and MLflow has their figures and pages.

    Raises:
        TensorCasError: A save in the background failed, and no call has raised its error yet. It is also an
            `mlflow.exceptions.MlflowException`.
    """
    saves.wait()
    reports.wait()
    pages.wait()


def _finish_at_exit() -> None:
    # Threads are over by now, unless another exit function has logged a checkpoint.
    while True:
        try:
            saves.wait()
            break
        except Exception as error:  # noqa: BLE001 -- there is nobody left to raise it to
            _logger.error("a checkpoint was not saved in the background: %s", without_secrets(str(error)))
            _end_with_status_120()
    reports.wait()
    pages.wait()
    # Exit functions run in reverse order of their registration.
    saves.end()
    reports.end()
    pages.end()


def _end_with_status_120() -> None:
    """End this interpreter with Python's exit status for a failed cleanup.

    Python ignores exceptions of exit functions. Afterwards it checks one thing: a failed flush of a standard stream
    sets the status.
    """
    if not isinstance(sys.stderr, _UnflushedAtEnd):
        sys.stderr = _UnflushedAtEnd(sys.stderr)


class _UnflushedAtEnd:
    """Standard error with a failing last flush, called by the interpreter itself."""

    closed = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()
        if sys._getframe().f_back is None:  # the interpreter itself calls, not Python code
            raise OSError("a checkpoint was not saved in the background")


atexit.register(_finish_at_exit)
