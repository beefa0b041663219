"""Work that continues after `log_checkpoint` returns: saves, whose errors a later call raises, and reports."""

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


@translate_errors()
def wait() -> None:
    """Wait until all checkpoints that this process logged are saved and MLflow has their figures.

    Raises:
        TensorCasError: A save in the background failed, and no call has raised its error yet. It is also an
            `mlflow.exceptions.MlflowException`.
    """
    saves.wait()
    reports.wait()


def _finish_at_exit() -> None:
    # Threads are over by now, unless another function that runs at exit has logged a checkpoint.
    while True:
        try:
            saves.wait()
            break
        except Exception as error:  # noqa: BLE001 -- there is nobody left to raise it to
            _logger.error("a checkpoint was not saved in the background: %s", without_secrets(str(error)))
            _end_with_status_120()
    reports.wait()
    # Of functions that run at exit, those registered first come last.
    saves.end()
    reports.end()


def _end_with_status_120() -> None:
    """Let this interpreter end with the status that Python has for an error in its cleanup.

    Python ignores what functions that run at exit raise. It looks at one thing after them: whether the standard streams
    can be flushed.
    """
    if not isinstance(sys.stderr, _UnflushedAtEnd):
        sys.stderr = _UnflushedAtEnd(sys.stderr)


class _UnflushedAtEnd:
    """Standard error of which only the interpreter's own last flush fails."""

    closed = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()
        if sys._getframe().f_back is None:  # the interpreter itself calls, and no code in Python
            raise OSError("a checkpoint was not saved in the background")


atexit.register(_finish_at_exit)
