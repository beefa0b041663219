"""Runs several processes of real code on one folder with a database, one at a time, switching at every call.

A process is a thread with a backend of its own, and so with connections of its own. Before each call that changes the
folder or looks at something others may change, and before each transaction of SQLite begins, ends or makes a
checkpoint, it waits for its turn. A lock that another process holds makes it wait until that one goes on. A process
that dies makes no further call; the system releases its locks, and its transaction never was.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import random
import shutil
import sqlite3
import tempfile
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tensorcas_mlflow.backends import FolderBackend, _database, _folder, _local, _locked_file
from tensorcas_mlflow.backends._database import Database
from tensorcas_mlflow.base import files
from tests.protocol.interleave import KilledError

Act = Callable[[FolderBackend], object]
"""A program of one process."""

_SWITCHES = frozenset(
    {"open", "write", "unlink", "link", "rename", "stat", "lstat", "listdir", "scandir", "ftruncate", "mkdir", "utime"}
)
_STATEMENTS = ("BEGIN", "COMMIT", "PRAGMA wal_checkpoint", "PRAGMA incremental_vacuum")
"""Beginnings of statements before which a process may be interrupted. Others see nothing of what is in between."""
_current = threading.local()
_names_before = itertools.count(1)


@dataclass(eq=False)
class Process:
    """One process of a run."""

    name: str
    act: Act
    number: int
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    pending: str = "start"
    waits_for_lock: bool = False
    is_done: bool = False
    is_dead: bool = False
    said: object = None
    error: BaseException | None = None
    n_drawn: int = 0
    backend: FolderBackend | None = None
    opened: dict[Any, Any] = field(default_factory=dict)
    """What stands for `_database._opened`."""

    @property
    def can_run(self) -> bool:
        return not self.is_done and not self.waits_for_lock


class Choice:
    """One point of a schedule: the options, and the one taken."""

    def __init__(self, options: Sequence[tuple[str, int]], taken: int, cost: int) -> None:
        self.options = options
        self.taken = taken
        self.cost = cost
        """Preemptions and deaths up to here."""


class Run:
    """One schedule, carried out."""

    def __init__(
        self, folder: Path, acts: Mapping[str, Act], decisions: Sequence[int], *, mortal: Sequence[str] = ()
    ) -> None:
        """Carry out a schedule.

        Args:
            folder: A store's folder with a database.
            acts: Programs by name.
            decisions: The option to take at each point; beyond them, the first.
            mortal: Names of the processes that may die, at most one of them, once.
        """
        self.folder = folder
        self.processes = [Process(name, act, number) for number, (name, act) in enumerate(acts.items())]
        self.choices: list[Choice] = []
        self.trace: list[str] = []
        self._decisions = decisions
        self._mortal = mortal
        self._cost = 0
        self._has_killed = False
        self._over = threading.Semaphore(0)
        threads = [threading.Thread(target=self._live, args=(each,), daemon=True) for each in self.processes]
        for thread in threads:
            thread.start()
        self._hand_on(None)
        assert self._over.acquire(timeout=60), f"nobody goes on: {self.trace[-20:]}"
        for thread in threads:
            thread.join(60)

    def said(self, name: str) -> Any:
        """Return the result of a process; raise its error."""
        process = next(each for each in self.processes if each.name == name)
        if process.error is not None:
            raise process.error
        return process.said

    def close(self) -> None:
        """Close what the dead have left open."""
        for each in self.processes:
            _current.owner = each
            if each.backend is not None:
                each.backend._database.close()
        _current.owner = None

    def has_died(self, name: str) -> bool:
        return any(each.name == name and each.is_dead for each in self.processes)

    def _live(self, process: Process) -> None:
        process.go.acquire()
        _current.run, _current.process, _current.owner = self, process, process
        process.backend = FolderBackend(self.folder)
        try:
            process.said = process.act(process.backend)
        except KilledError:
            pass
        except BaseException as error:  # noqa: BLE001 - judged by who checks the run
            process.error = error
        _current.process = None
        if not process.is_dead:
            process.backend._database.close()
        process.is_done = True
        for each in self.processes:
            each.waits_for_lock = False
        self._hand_on(None)

    def wait_for_turn(self, process: Process, pending: str) -> None:
        """Let the schedule decide who is next, and return when it is this process's turn."""
        if process.is_dead:
            raise KilledError
        process.pending = pending
        self._hand_on(process)
        if process.is_dead:
            raise KilledError
        self.trace.append(f"{process.name}: {pending}")

    def wait_for_lock(self, process: Process) -> None:
        """Wait until another process has made a call."""
        process.waits_for_lock = True
        self._hand_on(process)
        if process.is_dead:
            raise KilledError

    def woken(self) -> None:
        """Note that a lock may be free now."""
        for each in self.processes:
            each.waits_for_lock = False

    def _hand_on(self, current: Process | None) -> None:
        able = [each for each in self.processes if each.can_run]
        if not able:
            waiting = [each for each in self.processes if not each.is_done]
            if waiting:
                self.trace.append("deadlock")
                for each in waiting:
                    each.error = AssertionError("deadlock")
            self._over.release()
            return
        options: list[tuple[str, int]] = []
        if current in able:
            options.append(("run", current.number))
        options += [("run", each.number) for each in able if each is not current]
        if not self._has_killed and current is not None and current in able and current.name in self._mortal:
            options.append(("kill", current.number))
        at = len(self.choices)
        taken = self._decisions[at] if at < len(self._decisions) else 0
        kind, number = options[taken]
        is_free = current not in able  # somebody else has to go on anyway
        self._cost += 0 if taken == 0 or (is_free and kind == "run") else 1
        self.choices.append(Choice(options, taken, self._cost))
        chosen = self.processes[number]
        if kind == "kill":
            self._has_killed = chosen.is_dead = True
            self.trace.append(f"{chosen.name}: dies before {chosen.pending}")
            self.woken()
            return
        if chosen is current:
            return
        chosen.go.release()
        if current is not None and not current.is_done:
            current.go.acquire()


def explore(
    prepare: Callable[[Path], None],
    acts: Mapping[str, Act],
    check: Callable[[Run], None],
    *,
    most_changes: int,
    mortal: Sequence[str] = (),
) -> int:
    """Carry out every schedule with a bounded number of preemptions and deaths; return how many there are."""
    base = "/dev/shm" if os.path.isdir("/dev/shm") else None
    scratch = Path(tempfile.mkdtemp(dir=base))
    try:
        with _patched():
            first = scratch / "first"
            prepare(first)
            open_: list[list[int]] = [[]]
            n_runs = 0
            while open_:
                decisions = open_.pop()
                folder = scratch / str(n_runs)
                shutil.copytree(first, folder)
                run = Run(folder, acts, decisions, mortal=mortal)
                n_runs += 1
                try:
                    check(run)
                except BaseException as error:
                    error.add_note("\n".join(run.trace))
                    raise
                finally:
                    run.close()
                    Database.close_all()
                shutil.rmtree(folder)
                for at in range(len(decisions), len(run.choices)):
                    choice = run.choices[at]
                    before = run.choices[at - 1].cost if at else 0
                    for option, (kind, _) in enumerate(choice.options[1:], 1):
                        is_free = kind == "run" and (at == 0 or _is_forced(run, at))
                        if before + (0 if is_free else 1) <= most_changes:
                            open_.append([each.taken for each in run.choices[:at]] + [option])
        return n_runs
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _is_forced(run: Run, at: int) -> bool:
    """Tell whether the process before a point could not go on there, so that a switch is no preemption."""
    return run.choices[at].options[0][1] != _runner_before(run, at)


def _runner_before(run: Run, at: int) -> int:
    return run.choices[at - 1].options[run.choices[at - 1].taken][1]


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    watched = _WatchedOs()
    with contextlib.ExitStack() as stack:
        for module in (_folder, _database, _local, _locked_file):
            stack.enter_context(patch.object(module, "os", watched))
        stack.enter_context(patch.object(_database, "sqlite3", _WatchedSqlite()))
        stack.enter_context(patch.object(_database, "_opened", _Opened()))
        # A process has one thread, which may wait for its turn while it opens a connection.
        stack.enter_context(patch.object(_database._gate, "opening", contextlib.nullcontext()))
        stack.enter_context(patch.object(Database, "_all", _Databases()))
        stack.enter_context(patch.object(_locked_file, "fcntl", _WatchedLocks()))
        stack.enter_context(patch.object(files, "_draw", lambda n_bytes: _drawn().bytes))
        # Nobody may wait inside of SQLite: the one that is waited for would never get its turn.
        stack.enter_context(patch.object(_database, "_TIMEOUT_S", 0.0))
        stack.enter_context(patch.object(_database, "_CHECKPOINT_TIMEOUT_S", 0.0))
        # What is durable does not matter here; tests of power cuts look at that.
        stack.enter_context(patch.object(files.Settled, "settle", lambda self, *folders, **_: None))
        stack.enter_context(patch.object(_database, "sync_folder", lambda folder: None))
        yield


def _drawn() -> uuid.UUID:
    """Draw a name that depends on the process and its past only, so that a schedule determines the run.

    Names drawn before the processes begin come first: then two sweeps at once each count the blobs of the old log.
    """
    process: Process | None = getattr(_current, "process", None)
    if process is None:
        return uuid.UUID(int=next(_names_before), version=4)
    process.n_drawn += 1
    return uuid.UUID(int=random.Random(f"{process.name}/{process.n_drawn}").getrandbits(128), version=4)


class _Opened(MutableMapping[Any, Any]):
    """The connections of the current process."""

    def __init__(self) -> None:
        self._before: dict[Any, Any] = {}

    def _own(self) -> dict[Any, Any]:
        process = getattr(_current, "owner", None)
        return self._before if process is None else process.opened

    def __getitem__(self, key: Any) -> Any:
        return self._own()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._own()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._own())

    def __len__(self) -> int:
        return len(self._own())


class _Databases(weakref.WeakSet[Database]):
    """All databases; to the current process, its own."""

    def __iter__(self) -> Iterator[Database]:
        process: Process | None = getattr(_current, "owner", None)
        if process is None:
            return super().__iter__()
        assert process.backend is not None
        return iter([process.backend._database])


def _call(name: str, real: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    process: Process | None = getattr(_current, "process", None)
    if process is None:
        return real(*arguments, **options)
    run: Run = _current.run
    if process.is_dead:
        if name == "close":
            return real(*arguments, **options)
        raise KilledError
    if name not in _SWITCHES:
        return real(*arguments, **options)
    what = arguments[0] if arguments else ""
    place = os.path.relpath(what, run.folder) if isinstance(what, str) else str(what)
    run.wait_for_turn(process, f"{name} {place}")
    if name == "listdir":
        # A listing takes time. What comes or goes meanwhile is in none.
        first = set(real(*arguments))
        run.wait_for_turn(process, f"{name} {place} goes on")
        return [each for each in real(*arguments) if each in first]
    return real(*arguments, **options)


class _WatchedOs:
    """Stands in for `os`."""

    def __init__(self) -> None:
        self.path = SimpleNamespace(
            **{name: getattr(os.path, name) for name in ("dirname", "samestat", "isdir", "islink", "join", "relpath")},
            exists=lambda path: _exists(self.stat, path),
            lexists=lambda path: _exists(self.lstat, path),
        )

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if not callable(real) or isinstance(real, type) or name in ("fsdecode", "fspath", "getpid"):
            return real
        return lambda *arguments, **options: _call(name, real, *arguments, **options)


def _exists(stat: Callable[[str], object], path: str) -> bool:
    try:
        stat(path)
    except FileNotFoundError:
        return False
    return True


class _WatchedSqlite:
    """Stands in for `sqlite3`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sqlite3, name)

    def connect(self, *arguments: Any, **options: Any) -> sqlite3.Connection:
        return sqlite3.connect(*arguments, **options, factory=_WatchedConnection)


class _WatchedConnection(sqlite3.Connection):
    def execute(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
        process: Process | None = getattr(_current, "process", None)
        if process is not None and statement != "ROLLBACK":
            if process.is_dead:
                raise KilledError
            if statement.startswith(_STATEMENTS) or (statement.startswith("SELECT") and not self.in_transaction):
                _current.run.wait_for_turn(process, f"{statement[:60]}")
        return super().execute(statement, *arguments)


class _WatchedLocks:
    """Stands in for `fcntl`."""

    LOCK_EX, LOCK_NB, LOCK_UN = fcntl.LOCK_EX, fcntl.LOCK_NB, fcntl.LOCK_UN

    def flock(self, descriptor: int, operation: int) -> None:
        process: Process | None = getattr(_current, "process", None)
        if process is None:
            fcntl.flock(descriptor, operation)
            return
        run: Run = _current.run
        if operation == fcntl.LOCK_UN:
            fcntl.flock(descriptor, operation)
            run.woken()
            return
        run.wait_for_turn(process, "flock")
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if operation & fcntl.LOCK_NB:
                    raise
                run.wait_for_lock(process)
            else:
                return
