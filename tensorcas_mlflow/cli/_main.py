"""Runs one command and turns what happens into an exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tensorcas_mlflow.cli._output import complain
from tensorcas_mlflow.cli._parser import parser
from tensorcas_mlflow.errors import CorruptError, TensorCasError

_OPTIONS = {
    "overwrite=True": "--overwrite",
    "allow_left_out=True": "--skip-unknown",
    "in TENSORCAS_STORE": "by --root or TENSORCAS_STORE",
}
"""What messages name for callers in Python, and what it is at the command line."""

DONE, FAILED, INTERRUPTED, UNREAD = 0, 1, 130, 141
"""Besides these, argparse exits with 2 for a command line it cannot read, and `verify` with 3 for problems."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: The words after ``tensorcas``; those of this process if None.

    Returns:
        The exit status: 0, or 1 after an error, which is told on standard error in one line; 3 if ``verify`` has found
        problems or ``repair`` has left some; 130 after an interrupt; 141 if nobody reads the output any more.

    Raises:
        SystemExit: The words are no command (2), or ask for help (0).
    """
    options = parser().parse_args(arguments)
    try:
        status: int = options.act(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes standard output once more when it ends, and would complain of it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    except CorruptError as error:
        _fail(f"{error}; `tensorcas verify` lists all that is damaged, `tensorcas repair` mends what can be")
        return FAILED
    except (TensorCasError, ValueError, OSError, ImportError, MemoryError) as error:
        _fail(str(error) or type(error).__name__)
        return FAILED
    except Exception as error:
        if not _is_mlflows(error):
            raise
        _fail(" ".join(str(error).split()))
        return FAILED
    return status


def _fail(reason: str) -> None:
    for in_python, here in _OPTIONS.items():
        reason = reason.replace(in_python, here)
    complain(f"error: {reason}")


def _is_mlflows(error: Exception) -> bool:
    """Tell whether an error is MLflow's own; who has not imported MLflow need not do so to know."""
    exceptions = sys.modules.get("mlflow.exceptions")
    return exceptions is not None and isinstance(error, exceptions.MlflowException)
