"""Records of maintenance at the command line: the health page of a server shows them beside its own rounds."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tensorcas_mlflow.cli._command import flag
from tensorcas_mlflow.cli._output import complain
from tensorcas_mlflow.errors import TensorCasError
from tensorcas_mlflow.maintenance import Outcome, record_round, round_since
from tensorcas_mlflow.store import Store

NO_RECORD = flag("--no-record", help="leave no record of this in the store (default: a note of what was found or done)")


@dataclass(slots=True)
class Report:
    """Report of a command about its work."""

    summary: str | None = None
    """The report in words; None if nothing was done, and then there is no record."""
    outcome: Outcome = "done"


@contextmanager
def recorded(options: Namespace, store: Store, action: str) -> Iterator[Report]:
    """Record the work of this context in a store, and an error that ends it.

    If the record cannot be written, standard error says so, and the command ends as it would without one.

    Args:
        options: Options of a command with `NO_RECORD`.
        store: The store.
        action: Name of the work; a server with a schedule takes ``verify``, ``collect`` and ``optimize`` for its own.

    Yields:
        The report to fill in.
    """
    report, began_s = Report(), time.time()
    try:
        yield report
    except Exception as error:
        report.summary, report.outcome = str(error) or type(error).__name__, "failed"
        raise
    finally:
        # Clients of a stock server write only what a save needs.
        is_wanted = not options.no_record and not store.backend.is_carrier
        if report.summary is not None and is_wanted:
            try:
                record_round(store.backend, round_since(began_s, action, report.outcome, report.summary))
            except TensorCasError as error:
                complain(f"no record of this is left in the store: {error}")
