"""Recorder of the package's calls to the disk below one folder, with injected faults."""

from __future__ import annotations

import builtins
import fcntl
import io
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tensorcas_mlflow.backends._database import _gate
from tests.crash import sqlite_calls
from tests.crash.disk import Effect, Entry, Mark, Named, Node, Resized, Synced, SyncFailed, Wrote
from tests.faulty import SimulatedCrash

OF_THE_DEAD = 1 << 23
"""A process id that no process has, so that who looks finds the one that was recorded gone."""

LOOKS = frozenset({"lstat", "stat", "fstat", "scandir", "preadv", "fdopen"})
"""Calls that change nothing, but may fail."""
WRITES = frozenset(
    {"create", "write", "ftruncate", "fsync", "sync", "rename", "replace", "link", "unlink", "mkdir", "rmdir", "utime"}
)
"""Calls that change something; ``create`` is an open that makes a file, ``sync`` an fsync of a folder."""


@dataclass
class Fault:
    """An error, and the calls to the disk that raise it."""

    nth: int
    """At which call from now on, counted from 0."""
    error: BaseException
    calls: frozenset[str] | None = None
    """Only these count; all if not given."""
    lasts: bool = False
    """True if every later call fails too."""
    after: bool = False
    """True if the call takes effect before it fails."""


class Recorder:
    """Watches `os` and SQLite below one folder while it is installed."""

    def __init__(self, top: Path) -> None:
        self.top = os.path.realpath(top)
        self.log: list[Entry] = []
        self.calls: list[str] = []
        """Names of all calls below the folder."""
        self.fault: Fault | None = None
        self.short_writes = False
        """True if each write of `os` writes a part of what it is given. SQLite goes on until all is written."""
        self.life = 0
        """How many processes have died."""
        self._is_dead = False
        self._lock = threading.RLock()
        self._nodes: dict[tuple[int, int], Node] = {}
        self._n_nodes = 0
        self._folders: set[Node] = set()
        self._scan()

    @property
    def folders(self) -> set[Node]:
        """All nodes that are folders."""
        return set(self._folders)

    @property
    def is_dead(self) -> bool:
        """True from a simulated kill on, until another process begins."""
        return self._is_dead

    def mark(self, said: Any) -> None:
        """Put something into the log."""
        with self._lock:
            self.log.append((Mark(said),))

    def kill(self, nth: int) -> None:
        """Let one call be the last of the process; the dead do nothing, and what was not synced is not synced by it."""
        self.fault = Fault(nth, SimulatedCrash(), lasts=True)

    def revive(self) -> None:
        """Let another process begin, on the same machine."""
        self.life += self._is_dead
        self.fault, self._is_dead = None, False

    def open_descriptors(self) -> list[str]:
        """Files below the folder that are still open."""
        names = []
        for each in os.listdir("/proc/self/fd"):
            try:
                place = os.readlink(f"/proc/self/fd/{each}")
            except OSError:
                continue
            if self._is_below(place):
                names.append(place)
        return names

    @contextmanager
    def installed(self) -> Iterator[Recorder]:
        """Watch."""
        with sqlite_calls.shown_to(self), pytest.MonkeyPatch.context() as patch:
            for name in (
                "write",
                "pwrite",
                "ftruncate",
                "fsync",
                "link",
                "mkdir",
                "rmdir",
                "utime",
                *LOOKS - {"fdopen"},
            ):
                patch.setattr(os, name, getattr(self, f"_{name}")(getattr(os, name)))
            for name in ("rename", "replace"):
                patch.setattr(os, name, self._rename(name, getattr(os, name)))
            for name in ("unlink", "remove"):
                patch.setattr(os, name, self._unlink(getattr(os, name)))
            real_open = os.open
            patch.setattr(os, "open", self._open(real_open))
            patch.setattr(os, "fdopen", self._fdopen(os.fdopen))
            opened = self._io_open(io.open)
            patch.setattr(io, "open", opened)
            patch.setattr(builtins, "open", opened)
            patch.setattr(os, "getpid", lambda: OF_THE_DEAD)
            patch.setattr(_gate, "_pid", OF_THE_DEAD)
            yield self

    # --- which file

    def _is_below(self, path: Any) -> bool:
        if not isinstance(path, str | os.PathLike):
            return False
        place = os.path.abspath(os.fspath(path))
        return place == self.top or place.startswith(self.top + os.sep)

    def _place_of(self, descriptor: int) -> str | None:
        try:
            place = _readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            return None
        return place if self._is_below(place) else None

    def _node(self, found: os.stat_result) -> Node:
        return self._nodes[found.st_dev, found.st_ino]

    def _new_node(self, found: os.stat_result) -> Node:
        node = self._n_nodes
        self._n_nodes += 1
        self._nodes[found.st_dev, found.st_ino] = node
        if stat.S_ISDIR(found.st_mode):
            self._folders.add(node)
        return node

    def _folder_of(self, path: Any) -> tuple[Node, str]:
        folder, name = os.path.split(os.path.abspath(os.fspath(path)))
        return self._node(_stat(folder)), name

    def _scan(self) -> None:
        """Record the initial files and folders as durable."""
        self._new_node(_stat(self.top))
        first: list[Effect] = []
        for folder, folders, files in os.walk(self.top):
            above = self._node(_stat(folder))
            for name in [*folders, *(each for each in files if not each.endswith(sqlite_calls.WAL_INDEX))]:
                found = os.lstat(os.path.join(folder, name))
                is_known = (found.st_dev, found.st_ino) in self._nodes
                node = self._node(found) if is_known else self._new_node(found)
                first.append(Named(above, name, node))
                if name in files and not is_known:
                    first.append(Wrote(node, 0, Path(folder, name).read_bytes()))
        self.log.append((*first, *(Synced(node) for node in range(self._n_nodes))))

    # --- calls

    def _call(self, name: str, act: Callable[[], Any], *, synced: Node | None = None) -> Any:
        """Do one call, or let it fail.

        Args:
            name: Its name.
            act: What it does.
            synced: The file whose bytes it syncs.
        """
        if self._is_dead:
            raise SimulatedCrash
        self.calls.append(name)
        fault = self.fault
        if fault is None or (fault.calls is not None and name not in fault.calls):
            return act()
        fault.nth -= 1
        if fault.nth >= 0:
            return act()
        if not fault.lasts:
            self.fault = None
        if fault.after:
            with suppress(OSError):
                act()
        self._is_dead = isinstance(fault.error, SimulatedCrash)
        if isinstance(fault.error, OSError):
            if synced is not None:
                self._did(SyncFailed(synced))
            raise OSError(*fault.error.args)
        raise fault.error

    def _did(self, *effects: Effect) -> None:
        self.log.append(effects)

    def _open(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if not self._is_below(path):
                return real(path, flags, mode, dir_fd=dir_fd)

            def act() -> int:
                is_new = bool(flags & os.O_CREAT) and not _exists(path)
                descriptor = real(path, flags, mode)
                if is_new:
                    folder, name = self._folder_of(path)
                    self._did(Named(folder, name, self._new_node(_fstat(descriptor))))
                elif flags & os.O_TRUNC:
                    self._did(Resized(self._node(_fstat(descriptor)), 0))
                return descriptor

            with self._lock:
                return int(self._call("create" if flags & os.O_CREAT else "open", act))

        return call

    def _write(self, real: Callable[[int, Any], int]) -> Callable[[int, Any], int]:
        def call(descriptor: int, data: Any) -> int:
            if self._place_of(descriptor) is None:
                return real(descriptor, data)

            def act() -> int:
                view = memoryview(data).cast("B")
                appends = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND
                at = _fstat(descriptor).st_size if appends else os.lseek(descriptor, 0, os.SEEK_CUR)
                n = real(descriptor, view[: max(1, len(view) // 3)] if self.short_writes else view)
                self._did(Wrote(self._node(_fstat(descriptor)), at, bytes(view[:n])))
                return n

            with self._lock:
                return int(self._call("write", act))

        return call

    def _pwrite(self, real: Callable[[int, Any, int], int]) -> Callable[[int, Any, int], int]:
        def call(descriptor: int, data: Any, at: int) -> int:
            if self._place_of(descriptor) is None:
                return real(descriptor, data, at)

            def act() -> int:
                n = real(descriptor, data, at)
                self._did(Wrote(self._node(_fstat(descriptor)), at, bytes(memoryview(data)[:n])))
                return n

            with self._lock:
                return int(self._call("write", act))

        return call

    def _ftruncate(self, real: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def call(descriptor: int, size: int) -> None:
            if self._place_of(descriptor) is None:
                return real(descriptor, size)

            def act() -> None:
                real(descriptor, size)
                self._did(Resized(self._node(_fstat(descriptor)), size))

            with self._lock:
                self._call("ftruncate", act)

        return call

    def _fsync(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def call(descriptor: int) -> None:
            if self._place_of(descriptor) is None:
                return real(descriptor)
            found = _fstat(descriptor)
            node, is_folder = self._node(found), stat.S_ISDIR(found.st_mode)
            with self._lock:
                if is_folder:
                    self._call("sync", lambda: self._did(Synced(node)))
                else:
                    self._call("fsync", lambda: self._did(Synced(node)), synced=node)

        return call

    def _rename(self, name: str, real: Callable[..., None]) -> Callable[..., None]:
        def call(source: Any, dest: Any, **options: Any) -> None:
            if not self._is_below(dest):
                return real(source, dest, **options)

            if str(source).endswith(sqlite_calls.WAL_INDEX):
                return real(source, dest, **options)

            def act() -> None:
                node = self._node(_lstat(source))
                real(source, dest, **options)
                if not _exists(source):  # to rename one name of a file to another does nothing
                    self._did(Named(*self._folder_of(dest), node), Named(*self._folder_of(source), None))

            with self._lock:
                self._call(name, act)

        return call

    def _link(self, real: Callable[..., None]) -> Callable[..., None]:
        return self._naming("link", real, lambda dest: self._node(_lstat(dest)), at=1)

    def _mkdir(self, real: Callable[..., None]) -> Callable[..., None]:
        return self._naming("mkdir", real, lambda path: self._new_node(_lstat(path)))

    def _unlink(self, real: Callable[..., None]) -> Callable[..., None]:
        return self._naming("unlink", real, lambda path: None)

    def _rmdir(self, real: Callable[..., None]) -> Callable[..., None]:
        return self._naming("rmdir", real, lambda path: None)

    def _naming(
        self, name: str, real: Callable[..., None], node_at: Callable[[Any], Node | None], *, at: int = 0
    ) -> Callable[..., None]:
        """Wrap a call that changes what one name stands for.

        Args:
            name: Name of the call.
            real: The call.
            node_at: Returns the node that the name stands for after the call; None for none.
            at: Position of the path among the arguments.
        """

        def call(*arguments: Any, **options: Any) -> None:
            path = arguments[at]
            if not self._is_below(path):
                return real(*arguments, **options)

            def act() -> None:
                real(*arguments, **options)
                self._did(Named(*self._folder_of(path), node_at(path)))

            with self._lock:
                self._call(name, act)

        return call

    def _utime(self, real: Callable[..., None]) -> Callable[..., None]:
        return self._looking("utime", real)

    def _lstat(self, real: Callable[..., Any]) -> Callable[..., Any]:
        return self._looking("lstat", real)

    def _stat(self, real: Callable[..., Any]) -> Callable[..., Any]:
        return self._looking("stat", real)

    def _fstat(self, real: Callable[..., Any]) -> Callable[..., Any]:
        return self._looking("fstat", real)

    def _scandir(self, real: Callable[..., Any]) -> Callable[..., Any]:
        return self._looking("scandir", real)

    def _preadv(self, real: Callable[..., Any]) -> Callable[..., Any]:
        return self._looking("preadv", real)

    def _looking(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(what: Any = ".", *arguments: Any, **options: Any) -> Any:
            is_ours = self._place_of(what) is not None if isinstance(what, int) else self._is_below(what)
            if not is_ours:
                return real(what, *arguments, **options)
            return self._call(name, lambda: real(what, *arguments, **options))

        return call

    def _fdopen(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(descriptor: int, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if self._place_of(descriptor) is None:
                return real(descriptor, mode, *arguments, **options)
            if "r" in mode:
                return self._call("fdopen", lambda: real(descriptor, mode, *arguments, **options))
            return io.BufferedWriter(_Writer(descriptor))

        return call

    def _io_open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", buffering: int = -1, *arguments: Any, **options: Any) -> Any:
            if not self._is_below(file):
                return real(file, mode, buffering, *arguments, **options)
            if "r" in mode:
                return self._call("open", lambda: real(file, mode, buffering, *arguments, **options))
            assert "b" in mode
            flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if "x" in mode else os.O_TRUNC)
            raw = _Writer(os.open(file, flags, 0o666))
            return raw if buffering == 0 else io.BufferedWriter(raw)

        return call


class _Writer(io.RawIOBase):
    """A file opened by Python, written through `os`, where it is seen."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return os.write(self._descriptor, data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._descriptor)


_stat, _lstat, _fstat, _readlink = os.stat, os.lstat, os.fstat, os.readlink


def _exists(path: Any) -> bool:
    try:
        _lstat(path)
    except FileNotFoundError:
        return False
    return True
