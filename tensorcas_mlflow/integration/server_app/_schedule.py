"""Maintenance on a schedule, and links in descriptions. One process of all servers of a store does it at a time."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.text import content_text, count_text, freed_text
from tensorcas_mlflow.errors import TensorCasError, without_secrets
from tensorcas_mlflow.integration.server_app._catalog import Place
from tensorcas_mlflow.integration.server_app._links import add_links
from tensorcas_mlflow.maintenance import Lease, Outcome, Round, read_rounds

_log = logging.getLogger(__name__)

_COMMANDS: Mapping[str, tuple[str, ...]] = {
    "verify": ("verify", "--full", "--json", "--quiet", "--no-record"),
    "collect": ("gc", "--yes", "--json", "--no-record"),
    "optimize": ("optimize", "--yes", "--json", "--quiet", "--no-record"),
}
"""Words of the program ``tensorcas`` for each action; the store follows. The lease makes the record."""
_PROGRAM = "import os, sys; os.nice(10); from tensorcas_mlflow.cli import main; sys.exit(main(sys.argv[1:]))"
_RENEW_S = 60.0
_LOOK_S = 60.0
"""Seconds between looks for what is due."""
_LOOK_AT_CHILD_S = 0.2
_MOST_OUTPUT = 1 << 20
_FOUND_PROBLEMS = 3
"""Exit status of a verification that found damage."""


class Scheduler:
    """Runs what is due in processes of their own, so that a crash there leaves the server alone.

    Every worker process of a server has one. A lease in the store (`Lease`) lets one of them run a round, and the
    records in the store say what is due.
    """

    def __init__(
        self, stores: Callable[[], Sequence[Place]], schedule: Mapping[str, float], *, adds_links: bool = False
    ) -> None:
        """Prepare a scheduler; `start` begins it.

        Args:
            stores: Returns the stores to maintain.
            schedule: Seconds between begins, by action; see `tensorcas_mlflow.base.config.maintenance`.
            adds_links: Whether to add links to descriptions in MLflow.
        """
        self.schedule = schedule
        self._stores = stores
        self._adds_links = adds_links
        self._asked: deque[tuple[Place, str]] = deque(maxlen=16)
        self._wake = threading.Event()
        self._is_over = False

    def start(self) -> None:
        """Begin, on a daemon thread: it keeps no server from ending."""
        threads.start(self._work, "tensorcas-maintenance")

    def ask(self, place: Place, action: str) -> None:
        """Run an action soon, whatever the schedule says."""
        if (place, action) not in self._asked:
            self._asked.append((place, action))
        self._wake.set()

    def stop(self) -> None:
        """End after the round under way."""
        self._is_over = True
        self._wake.set()

    def _work(self) -> None:
        pause = min([_LOOK_S, *(seconds / 4 for seconds in self.schedule.values())])
        while not self._is_over:
            try:
                self.run_due()
            except Exception:  # noqa: BLE001 -- the server goes on
                _log.exception("scheduled maintenance of tensorcas stores failed; it is tried again")
            self._wake.wait(pause)
            self._wake.clear()

    def run_due(self) -> list[Round]:
        """Run what is due or was asked for; return the records."""
        done: list[Round] = []
        while self._asked:
            place, action = self._asked.popleft()
            done += self._run_one(place, action, is_asked=True)
        for place in self._stores():
            for action in self.schedule:
                done += self._run_one(place, action, is_asked=False)
            if self._adds_links:
                add_links(place)
        return done

    def _run_one(self, place: Place, action: str, *, is_asked: bool) -> list[Round]:
        backend = place.store.backend
        try:
            if not (is_asked or self._is_due(place, action)):
                return []
            lease = Lease.take(backend, action)
            if lease is None:
                return []
            # Another process may have done it between the look and the lease.
            if not (is_asked or self._is_due(place, action)):
                lease.give_back()
                return []
            return [lease.end(*run_in_process(place.store.uri, action, lease.renew))]
        except (TensorCasError, OSError) as error:
            _log.warning("%s of %s was not run: %s", action, place.store.uri, without_secrets(str(error)))
            return []

    def _is_due(self, place: Place, action: str) -> bool:
        last = next((each for each in read_rounds(place.store.backend) if each.action == action), None)
        return last is None or time.time() - last.began_s >= self.schedule[action]


def run_in_process(root: str, action: str, renew: Callable[[], object]) -> tuple[Outcome, str]:
    """Run an action on a store in a process of its own.

    Args:
        root: Root of the store.
        action: One of `tensorcas_mlflow.base.config.ACTIONS`.
        renew: Called every minute meanwhile.

    Returns:
        The outcome, and the report or the error in words.
    """
    command = [sys.executable, "-c", _PROGRAM, *_COMMANDS[action], "--root", root]
    with TemporaryFile() as out, TemporaryFile() as err:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=Path.cwd())
        try:
            renewed = time.monotonic()
            while process.poll() is None:
                time.sleep(_LOOK_AT_CHILD_S)
                if time.monotonic() - renewed >= _RENEW_S:
                    renew()
                    renewed = time.monotonic()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        said, complaint = _read(out), _read(err)
    status = process.returncode
    if status == 0:
        return "done", _summary(action, said)
    if status == _FOUND_PROBLEMS and action == "verify":
        return "problems", _summary(action, said)
    how = f"it was ended by signal {-status}" if status < 0 else f"exit status {status}"
    return ("died" if status < 0 else "failed"), f"{how}: {complaint.strip()[-2000:]}".rstrip(": ")


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MOST_OUTPUT).decode(errors="replace")


def _summary(action: str, said: str) -> str:
    """Put the JSON report of a command in words."""
    try:
        report: dict[str, Any] = json.loads(said)
        if action == "verify":
            problems = [
                f"{each.get('checkpoint') or each.get('key')}: {each.get('reason')}" for each in report["problems"]
            ]
            found = "; ".join(problems[:10]) or "no problem found"
            return f"{content_text(report['n_refs'])}, {count_text(report['n_chunks'], 'chunk')}: {found}"
        done = report["report"] or {}
        if action == "collect":
            deleted = f"{count_text(done['n_packs'], 'pack')} and {count_text(done['n_manifests'], 'manifest')}"
            return f"deleted {deleted}, {freed_text(done['bytes_before'], done['bytes_after'])}"
        return ", ".join(
            f"{name.replace('_', ' ')} {value:,}" for name, value in done.items() if isinstance(value, int)
        )
    except (ValueError, KeyError, TypeError):
        return said.strip()[:2000]
