"""Runs several processes of real code on one folder with logs, one at a time, switching at every call to the disk.

A process is a thread with its own view of the modules' state. Before each call that changes the folder, or looks at
something others may change, it waits for its turn. A lock that another process holds makes it wait until that one goes
on. A process that dies makes no further call; the system releases its locks. A death in a write leaves half of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import random
import shutil
import tempfile
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tensorcas_mlflow.backends import (
    LoggedBackend,
    _local,
    _locked_file,
    _log_folder,
    _log_rewriter,
    _log_view,
    _log_writer,
    _logged,
    _logs,
)
from tensorcas_mlflow.base import files
from tests.protocol.interleave import KilledError

Act = Callable[[LoggedBackend], object]
"""A program of one process."""

_SWITCHES = frozenset(
    {"open", "write", "unlink", "link", "rename", "stat", "lstat", "listdir", "scandir", "ftruncate", "mkdir", "utime"}
)
_CHANGES = frozenset({"write", "unlink", "link", "rename", "ftruncate", "mkdir"})
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
    writers: OrderedDict[str, Any] = field(default_factory=OrderedDict)

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
            folder: A store's folder with logs.
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

    def has_died(self, name: str) -> bool:
        return any(each.name == name and each.is_dead for each in self.processes)

    def _live(self, process: Process) -> None:
        process.go.acquire()
        _current.run, _current.process = self, process
        try:
            process.said = process.act(LoggedBackend(self.folder))
        except KilledError:
            pass
        except BaseException as error:  # noqa: BLE001 - judged by who checks the run
            process.error = error
        for writer in process.writers.values():  # the system closes the files of a process that has ended
            with contextlib.suppress(OSError):
                os.close(writer.descriptor)
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
        for module in (_logs, _log_view, _log_writer, _log_rewriter, _log_folder, _logged, _local, _locked_file):
            stack.enter_context(patch.object(module, "os", watched))
        stack.enter_context(patch.object(_locked_file, "fcntl", _WatchedLocks()))
        stack.enter_context(patch.object(_log_writer, "_writers", _Writers()))
        stack.enter_context(patch.object(_log_writer, "_writers_lock", contextlib.nullcontext()))
        stack.enter_context(patch.object(uuid, "uuid4", _drawn))
        # What is durable does not matter here; tests of power cuts look at that.
        stack.enter_context(patch.object(files.Settled, "settle", lambda self, *folders, **_: None))
        stack.enter_context(patch.object(_log_folder, "sync_folder", lambda folder: None))
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


class _Writers:
    """The writers of the current process."""

    def __init__(self) -> None:
        self._before: OrderedDict[str, Any] = OrderedDict()

    def __getattr__(self, name: str) -> Any:
        process = getattr(_current, "process", None)
        return getattr(self._before if process is None else process.writers, name)

    def __setitem__(self, key: str, value: Any) -> None:
        self.__getattr__("__setitem__")(key, value)

    def __len__(self) -> int:
        return int(self.__getattr__("__len__")())


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
    try:
        run.wait_for_turn(process, f"{name} {place}")
    except KilledError:
        if name == "write":
            real(arguments[0], arguments[1][: len(arguments[1]) // 2])
        raise
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
            **{name: getattr(os.path, name) for name in ("dirname", "samestat", "isdir", "islink", "lexists")},
            exists=lambda path: _exists(self, path),
        )

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if not callable(real) or isinstance(real, type) or name in ("fsdecode", "fspath", "getpid"):
            return real
        return lambda *arguments, **options: _call(name, real, *arguments, **options)


def _exists(watched: _WatchedOs, path: str) -> bool:
    try:
        watched.stat(path)
    except FileNotFoundError:
        return False
    return True


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
