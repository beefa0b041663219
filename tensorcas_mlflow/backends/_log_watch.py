"""Watch on the folder of one store's logs: which files have changed, told by the kernel (inotify) in one call."""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import weakref
from functools import cache
from typing import Any

_MODIFY, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x40, 0x80, 0x100, 0x200
_DELETE_SELF, _MOVE_SELF, _ONLYDIR, _DONT_FOLLOW = 0x400, 0x800, 0x1000000, 0x2000000
_WANTED = _MODIFY | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _DELETE_SELF | _MOVE_SELF | _ONLYDIR | _DONT_FOLLOW
_ENDS = _DELETE_SELF | _MOVE_SELF | 0x2000 | 0x4000 | 0x8000  # unmounted, too many changes, no watch any more
_EVENT = struct.Struct("=iIII")
_BUFFER_BYTES = 64 << 10
_MOST = 4
"""Bound of the watches of one process: a user has 128 by default."""
_n_watches = 0


class LogWatch:
    """The names of the files that have changed in a folder since the last question.

    The kernel reports a change before the call that made it returns. So a file without a report is as it was at the
    last question, except for changes under way.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        self._process = os.getpid()
        # It also ends the watch at the end of the program, while the modules that it needs are still there.
        self._end = weakref.finalize(self, _end, descriptor)

    @classmethod
    def begin(cls, folder: str) -> LogWatch | None:
        """Watch a folder of a local disk; None if the system cannot."""
        global _n_watches
        library = _library()
        if library is None or _n_watches >= _MOST:
            return None
        descriptor = library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if descriptor < 0:
            return None
        if library.inotify_add_watch(descriptor, os.fsencode(folder), _WANTED) < 0:
            os.close(descriptor)
            return None
        _n_watches += 1
        return cls(descriptor)

    def changed(self) -> set[str] | None:
        """Return the names of the files that have changed; None if any may have, and then the watch has ended."""
        descriptor = self._descriptor
        # A child made by fork would take the reports away from its parent.
        if descriptor is None or os.getpid() != self._process:
            self.close()
            return None
        names: set[bytes] = set()
        while True:
            try:
                data = os.read(descriptor, _BUFFER_BYTES)
            except BlockingIOError:
                return set(map(os.fsdecode, names))
            at = 0
            while at < len(data):
                _, what, _, size = _EVENT.unpack_from(data, at)
                if what & _ENDS:
                    self.close()
                    return None
                at += _EVENT.size + size
                names.add(data[at - size : at].rstrip(b"\0"))

    def close(self) -> None:
        """End the watch."""
        self._descriptor = None
        self._end()


def _end(descriptor: int) -> None:
    """Close the descriptor of a watch."""
    global _n_watches
    _n_watches -= 1
    with contextlib.suppress(OSError):
        os.close(descriptor)


@cache
def _library() -> Any:
    """Return the library with the calls of inotify; None if the system has none."""
    if sys.platform != "linux":
        return None
    import ctypes

    try:
        library = ctypes.CDLL(None)
        library.inotify_init1.argtypes = [ctypes.c_int]
        library.inotify_add_watch.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32]
    except (OSError, AttributeError):
        return None
    return library
