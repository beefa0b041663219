"""Work in the background of a server: one job after the other, with a bounded number of results kept."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, Generic, NamedTuple, TypeVar

from tensorcas_mlflow.base import threads
from tensorcas_mlflow.errors import TensorCasError, without_secrets

_log = logging.getLogger(__name__)

Value = TypeVar("Value")

_AGAIN_S = 30.0
"""Seconds after which a failed job is tried again."""


class Known(NamedTuple, Generic[Value]):
    """What is known of a job's result."""

    value: Value | None
    """The last result; None while there is none."""
    at_s: float | None
    """Unix time of this result."""
    is_fresh: bool
    """True if nothing newer is being computed."""
    error: str | None
    """Why the last try failed, in words."""


class BusyError(Exception):
    """Too many jobs wait."""


class _Entry:
    def __init__(self) -> None:
        self.value: Any = None
        self.at_s: float | None = None
        self.tried_s = float("-inf")
        self.error: str | None = None
        self.running: Future[None] | None = None


class Jobs:
    """Results by key, computed in the background. Safe for many threads."""

    def __init__(self, *, most_kept: int = 64, most_waiting: int = 16) -> None:
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        """Held while a job runs: figures of a large store take memory."""
        self._most_kept = most_kept
        self._most_waiting = most_waiting
        self._n_waiting = 0

    def get(
        self, key: Hashable, compute: Callable[[Value | None], Value], *, fresh_s: float, wait_s: float
    ) -> Known[Value]:
        """Return the result of a job; start the job if the result is missing or older than ``fresh_s``.

        Args:
            key: Name of the result.
            compute: Computes it, given the last one.
            fresh_s: Age in seconds from which a result is computed again.
            wait_s: How long to wait for a new result.

        Raises:
            BusyError: There is no result, and too many other jobs wait.
        """
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
            for old in [each for each, e in self._entries.items() if e.running is None][: -self._most_kept]:
                del self._entries[old]
            age_s = time.monotonic() - entry.tried_s
            is_due = entry.running is None and age_s >= (fresh_s if entry.error is None else min(fresh_s, _AGAIN_S))
            if is_due and self._n_waiting < self._most_waiting:
                self._n_waiting += 1
                entry.running = threads.start(lambda: self._run(entry, compute), "tensorcas-page")
            elif is_due and entry.at_s is None and entry.error is None:
                raise BusyError
            running = entry.running
        if running is not None:
            with contextlib.suppress(TimeoutError):
                running.result(timeout=wait_s)
        return Known(entry.value, entry.at_s, entry.running is None, entry.error)

    def forget(self, key: Hashable) -> None:
        """Let the next `get` compute a result again; the last one is shown until then."""
        with self._lock:
            if (entry := self._entries.get(key)) is not None:
                entry.tried_s = float("-inf")

    def _run(self, entry: _Entry, compute: Callable[[Any], Any]) -> None:
        try:
            with self._turn:
                value = compute(entry.value)
            entry.value, entry.at_s, entry.error = value, time.time(), None
        except (TensorCasError, ValueError, OSError) as error:
            entry.error = without_secrets(str(error))
        except Exception as error:  # noqa: BLE001 -- the page says so, and the server goes on
            _log.exception("figures of a page failed")
            entry.error = f"an unexpected error, {type(error).__name__}: the server's log has more"
        finally:
            with self._lock:
                entry.tried_s = time.monotonic()
                entry.running = None
                self._n_waiting -= 1
