"""Runs one command and turns what happens into an exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tensorcas_mlflow.cli._output import complain
from tensorcas_mlflow.cli._parser import parser
from tensorcas_mlflow.errors import CorruptError, TensorCasError

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
        complain(f"error: {error}; `tensorcas verify` lists all that is damaged, `tensorcas repair` mends what can be")
        return FAILED
    except (TensorCasError, ValueError, OSError, ImportError, MemoryError) as error:
        complain(f"error: {str(error) or type(error).__name__}")
        return FAILED
    return status
