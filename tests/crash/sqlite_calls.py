"""SQLite's calls to the disk, shown to a `Recorder` and failed by it.

SQLite writes from C, where a patch of `os` sees nothing. While a recorder watches, the default VFS of SQLite is a copy
of the one for Unix. Its calls that change the disk pass through Python (https://sqlite.org/c3ref/vfs.html,
https://sqlite.org/c3ref/io_methods.html). Connections that were opened before are not seen.

The wal-index (`-shm`) is memory that processes share, and the first connection after a cut makes it anew: it is not
recorded.
"""

from __future__ import annotations

import _sqlite3
import atexit
import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from tests.crash.disk import Effect, Named, Node, Resized, Synced, Wrote
from tests.faulty import SimulatedCrash

if TYPE_CHECKING:
    from tests.crash.recorder import Recorder

WAL_INDEX = "-shm"
"""Ending of the name of a wal-index."""
VFS_NAME = b"recorded"

OK, IOERR, FULL, CANTOPEN = 0, 10, 13, 14
IOERR_WRITE, IOERR_FSYNC, IOERR_DIR_FSYNC, IOERR_TRUNCATE, IOERR_DELETE = (IOERR | n << 8 for n in (3, 4, 5, 6, 10))
CODES = {
    "open": CANTOPEN,
    "create": CANTOPEN,
    "write": IOERR_WRITE,
    "ftruncate": IOERR_TRUNCATE,
    "fsync": IOERR_FSYNC,
    "sync": IOERR_DIR_FSYNC,
    "unlink": IOERR_DELETE,
}
"""Result codes of SQLite by the name of the call that failed."""
OPEN_CREATE = 0x4
"""Flag of xOpen: make the file if there is none."""

_int, _pointer = ctypes.c_int, ctypes.c_void_p
_XOpen = ctypes.CFUNCTYPE(_int, _pointer, _pointer, _pointer, _int, _pointer)
_XDelete = ctypes.CFUNCTYPE(_int, _pointer, _pointer, _int)
_XClose = ctypes.CFUNCTYPE(_int, _pointer)
_XWrite = ctypes.CFUNCTYPE(_int, _pointer, _pointer, _int, ctypes.c_int64)
_XTruncate = ctypes.CFUNCTYPE(_int, _pointer, ctypes.c_int64)
_XSync = ctypes.CFUNCTYPE(_int, _pointer, _int)
_XLock = ctypes.CFUNCTYPE(_int, _pointer, _int)
_XSetSystemCall = ctypes.CFUNCTYPE(_int, _pointer, ctypes.c_char_p, _pointer)
_XGetSystemCall = ctypes.CFUNCTYPE(_pointer, _pointer, ctypes.c_char_p)
_OpenDirectory = ctypes.CFUNCTYPE(_int, ctypes.c_char_p, _pointer)


class _Vfs(ctypes.Structure):
    """`sqlite3_vfs`, version 3."""

    _fields_ = (
        ("iVersion", _int),
        ("szOsFile", _int),
        ("mxPathname", _int),
        ("pNext", _pointer),
        ("zName", ctypes.c_char_p),
        ("pAppData", _pointer),
        ("xOpen", _XOpen),
        ("xDelete", _XDelete),
        *((name, _pointer) for name in ("xAccess", "xFullPathname")),
        *((name, _pointer) for name in ("xDlOpen", "xDlError", "xDlSym", "xDlClose")),
        *((name, _pointer) for name in ("xRandomness", "xSleep", "xCurrentTime", "xGetLastError", "xCurrentTimeInt64")),
        ("xSetSystemCall", _XSetSystemCall),
        ("xGetSystemCall", _XGetSystemCall),
        ("xNextSystemCall", _pointer),
    )


class _IoMethods(ctypes.Structure):
    """`sqlite3_io_methods`, version 3."""

    _fields_ = (
        ("iVersion", _int),
        ("xClose", _XClose),
        ("xRead", _pointer),
        ("xWrite", _XWrite),
        ("xTruncate", _XTruncate),
        ("xSync", _XSync),
        ("xFileSize", _pointer),
        ("xLock", _XLock),
        *((name, _pointer) for name in ("xUnlock", "xCheckReservedLock", "xFileControl", "xSectorSize")),
        *((name, _pointer) for name in ("xDeviceCharacteristics", "xShmMap", "xShmLock", "xShmBarrier", "xShmUnmap")),
        *((name, _pointer) for name in ("xFetch", "xUnfetch")),
    )


class _RefusedError(OSError):
    """The real call failed."""

    def __init__(self, code: int) -> None:
        super().__init__(errno.EIO, f"SQLite's result code {code}")
        self.code = code


@dataclass
class _File:
    """An open file of SQLite below the recorder's folder."""

    node: Node | None
    """None if the recorder does not know the file: then no call may change it."""
    methods: _IoMethods
    """The real ones."""
    recorder: Recorder
    life: int
    """Number of the recorder's process that opened the file."""
    is_synced: bool = False
    """True if SQLite has synced the file since it opened it."""

    @property
    def is_dead(self) -> bool:
        """True if the process that opened the file has died."""
        return self.recorder.is_dead or self.life != self.recorder.life

    def known_node(self) -> Node:
        """Return the node that a call is about to change."""
        assert self.node is not None, "SQLite changes a file that was made while the recorder did not watch"
        return self.node


@contextmanager
def shown_to(recorder: Recorder) -> Iterator[None]:
    """Show SQLite's calls to a recorder. Skip the test if the SQLite of this Python cannot be reached.

    Raises:
        BaseException: A call raised an error that is not one of the disk. SQLite cannot pass it on, so it is raised at
            the end.
    """
    shim = _shim()
    if isinstance(shim, str):
        pytest.skip(shim)
    with shim.shown_to(recorder):
        yield


@cache
def _shim() -> _Shim | str:
    """Return the one shim of the process, or the reason why there is none."""
    # Symbols are looked up in the module and in what it was linked with, so this is the library that `sqlite3` uses.
    library = ctypes.CDLL(getattr(_sqlite3, "__file__", None))
    if not hasattr(library, "sqlite3_vfs_register"):
        return "SQLite is linked statically into this Python, which hides the functions of SQLite"
    library.sqlite3_vfs_find.restype = ctypes.POINTER(_Vfs)
    found = library.sqlite3_vfs_find(b"unix")
    if not found or found.contents.iVersion < 3:
        return "this SQLite has no VFS 'unix' of version 3"
    return _Shim(library, found.contents)


class _Shim:
    """The VFS. Connections that are still open refer to its structures, so they are never freed."""

    def __init__(self, library: ctypes.CDLL, real: _Vfs) -> None:
        self._library = library
        self._real = real
        self._vfs = _Vfs.from_buffer_copy(real)
        self._vfs.iVersion = 3
        self._vfs.pNext = None
        self._vfs.zName = VFS_NAME
        self._vfs.xOpen = _XOpen(self._open)
        self._vfs.xDelete = _XDelete(self._delete)
        self._open_directory = _OpenDirectory(self._sync_folder)
        self._really_open_directory = _OpenDirectory(self.system_call("openDirectory"))
        self._methods: dict[int, _IoMethods] = {}
        """Methods that are seen, by the address of the real ones."""
        self._files: dict[int, _File] = {}
        """Open files by their address."""
        self._recorder: Recorder | None = None
        self._errors: list[BaseException] = []
        self._due: Effect | None = None
        """Effect of the call that is under way, until it is in the log."""
        self._is_folder_failed = False
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        atexit.register(self._let_go)

    @contextmanager
    def shown_to(self, recorder: Recorder) -> Iterator[None]:
        assert self._recorder is None, "another recorder watches SQLite"
        self._recorder = recorder
        self._library.sqlite3_vfs_register(ctypes.byref(self._vfs), 1)
        self._set_open_directory(ctypes.cast(self._open_directory, _pointer))
        try:
            yield
        finally:
            self._set_open_directory(None)  # the default
            self._library.sqlite3_vfs_unregister(ctypes.byref(self._vfs))
            self._recorder = None
            errors, self._errors = self._errors, []
        if errors:
            raise errors[0]

    def system_call(self, name: str) -> int:
        """Return the address of a function that the real VFS calls."""
        return int(self._real.xGetSystemCall(ctypes.addressof(self._real), name.encode()))

    def _set_open_directory(self, call: Any) -> None:
        code = self._real.xSetSystemCall(ctypes.addressof(self._real), b"openDirectory", call)
        assert code == OK

    def _let_go(self) -> None:
        """Lead all calls past Python, which ends before the last connections are closed."""
        self._vfs.xOpen, self._vfs.xDelete = self._real.xOpen, self._real.xDelete
        for address, file in self._files.items():
            _pointer.from_address(address).value = ctypes.addressof(file.methods)

    # --- calls of the VFS

    def _open(self, vfs: int, name: int | None, address: int, flags: int, flags_out: int | None) -> int:
        # The real VFS gets its own structure, and the very pointer to the name, as SQLite keeps more behind the name.
        arguments = (ctypes.addressof(self._real), name, address, flags, flags_out)
        recorder, path = self._recorder, _path(name)
        if recorder is None or path is None or not recorder._is_below(path):
            return int(self._real.xOpen(*arguments))

        def act() -> None:
            is_new = not _exists(path)
            _require(self._real.xOpen(*arguments))
            found = _stat(path)
            node = recorder._nodes.get((found.st_dev, found.st_ino))
            if is_new:
                node = recorder._new_node(found)
                recorder._did(Named(*recorder._folder_of(path), node))
            self._take(address, node, recorder)

        methods = _pointer.from_address(address)
        methods.value = None
        code = self._call("create" if flags & OPEN_CREATE else "open", recorder, act)
        if code != OK and methods.value is not None:  # the fault came after the call
            self._close(address)
            methods.value = None
        return code

    def _delete(self, vfs: int, name: int, syncs_folder: int) -> int:
        arguments = (ctypes.addressof(self._real), name, syncs_folder)
        recorder, path = self._recorder, _path(name)
        if recorder is None or path is None or not recorder._is_below(path):
            return int(self._real.xDelete(*arguments))

        def act() -> None:
            self._and_folder(lambda: self._real.xDelete(*arguments), Named(*recorder._folder_of(path), None))
            if self._is_folder_failed:
                raise _RefusedError(IOERR_DIR_FSYNC)

        return self._call("unlink", recorder, act)

    def _sync_folder(self, path: bytes, descriptor: int | None) -> int:
        """Stand in for the call that opens the folder of a file, which SQLite makes in order to sync the folder."""
        recorder = self._recorder
        if recorder is None or not recorder._is_below(os.fsdecode(path)):
            return int(self._really_open_directory(path, descriptor))
        with recorder._lock:
            self._record_due()
            node, _ = recorder._folder_of(os.fsdecode(path))
            code = self._call("sync", recorder, lambda: recorder._did(Synced(node)))
            self._is_folder_failed = code != OK
        # An xSync of SQLite ignores that the folder could not be synced.
        return CANTOPEN if code != OK else int(self._really_open_directory(path, descriptor))

    # --- calls of a file

    def _take(self, address: int, node: Node | None, recorder: Recorder) -> None:
        """See the calls of a file that was just opened."""
        pointer = _pointer.from_address(address)
        real = pointer.value
        assert real is not None
        methods = _IoMethods.from_address(real)
        if real not in self._methods:
            seen = self._methods[real] = _IoMethods.from_buffer_copy(methods)
            seen.iVersion = min(3, methods.iVersion)
            seen.xClose = _XClose(self._close)
            seen.xWrite = _XWrite(self._write)
            seen.xTruncate = _XTruncate(self._truncate)
            seen.xSync = _XSync(self._sync)
            seen.xLock = _XLock(self._lock)
        self._files[address] = _File(node, methods, recorder, recorder.life)
        pointer.value = ctypes.addressof(self._methods[real])

    def _close(self, address: int) -> int:
        return int(self._files.pop(address).methods.xClose(address))

    def _write(self, address: int, data: int, n_bytes: int, at: int) -> int:
        def act(file: _File) -> None:
            node = file.known_node()
            _require(file.methods.xWrite(address, data, n_bytes, at))
            file.recorder._did(Wrote(node, at, ctypes.string_at(data, n_bytes)))

        return self._call_of_file("write", address, act, lambda real: real.xWrite(address, data, n_bytes, at))

    def _truncate(self, address: int, size: int) -> int:
        def act(file: _File) -> None:
            node = file.known_node()
            _require(file.methods.xTruncate(address, size))
            file.recorder._did(Resized(node, size))

        return self._call_of_file("ftruncate", address, act, lambda real: real.xTruncate(address, size))

    def _sync(self, address: int, flags: int) -> int:
        def act(file: _File) -> None:
            effect = Synced(file.known_node())
            if file.is_synced:  # only the first sync may reach the folder, and nobody needs to wait for the disk
                file.recorder._did(effect)
                return
            self._and_folder(lambda: file.methods.xSync(address, flags), effect)
            file.is_synced = True

        return self._call_of_file("fsync", address, act, lambda real: real.xSync(address, flags))

    def _lock(self, address: int, level: int) -> int:
        """Let a dead process lock nothing, so that closing its connection checkpoints and deletes nothing."""
        file = self._files[address]
        return IOERR if file.is_dead else int(file.methods.xLock(address, level))

    def _call_of_file(
        self, name: str, address: int, act: Callable[[_File], None], really: Callable[[_IoMethods], int]
    ) -> int:
        file = self._files[address]
        if file.is_dead:
            return IOERR
        if file.recorder is not self._recorder:
            return really(file.methods)
        synced = file.node if name == "fsync" else None
        return self._call(name, file.recorder, lambda: act(file), synced=synced)

    # --- the recorder's part

    def _call(self, name: str, recorder: Recorder, act: Callable[[], None], *, synced: Node | None = None) -> int:
        """Do one call, or let it fail. Nothing is raised, as C cannot pass it on: SQLite's result code is returned."""
        with recorder._lock:
            try:
                if recorder.fault is not None and isinstance(recorder.fault.error, KeyboardInterrupt):
                    act()  # the handler of a signal runs when SQLite has returned
                else:
                    recorder._call(name, act, synced=synced)
            except _RefusedError as error:
                return error.code
            except OSError as error:
                is_full = name == "write" and error.errno == errno.ENOSPC
                return FULL if is_full else CODES[name]
            except SimulatedCrash:
                return IOERR
            except BaseException as error:  # noqa: BLE001 -- raised when the recorder is done
                self._errors.append(error)
                return IOERR
            return IOERR if recorder.is_dead else OK  # it may have died of a call inside of this one

    def _and_folder(self, really: Callable[[], int], effect: Effect) -> None:
        """Do a call after which SQLite may sync the folder. The log has the call's effect before that of the sync."""
        self._due, self._is_folder_failed = effect, False
        try:
            _require(really())
            self._record_due()
        finally:
            self._due = None

    def _record_due(self) -> None:
        if self._due is not None and self._recorder is not None:
            self._recorder._did(self._due)
        self._due = None


_stat = os.stat
"""The real one. `os.stat` is patched while a recorder watches."""


def _exists(path: str) -> bool:
    try:
        _stat(path)
    except FileNotFoundError:
        return False
    return True


def _path(name: int | None) -> str | None:
    return None if name is None else os.fsdecode(ctypes.string_at(name))


def _require(code: int) -> None:
    if code != OK:
        raise _RefusedError(code)
