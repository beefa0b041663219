"""Files under way: a blob's bytes under a name that is no key, until they are all there."""

from __future__ import annotations

import contextlib
import ctypes
import os
import uuid
from collections.abc import Callable
from functools import cache
from typing import Any

from tensorcas_mlflow._pids import pid_space
from tensorcas_mlflow.backends._contract import Buffer, Token

STAGING = "+staging-"
"""Begins the names of files under way. ``+`` is in no key, so such a file is never taken for a blob."""
O_BINARY = getattr(os, "O_BINARY", 0)
MOST_BYTES = 1 << 30
"""Linux reads and writes at most 2 GiB in one call."""
_EARLY_BYTES = 32 << 20
"""After so many bytes the system is asked to begin to write them to the disk: else it would mostly begin at the fsync.
Fewer at a time measured slower, and smaller blobs are not worth a call."""
_SYNC_FILE_RANGE_WRITE = 2


class NewFile:
    """One file under way. Its methods raise OSError."""

    def __init__(self, path: str, make_folder: Callable[[str], None]) -> None:
        """Create it in the folder of the place where it is to be.

        Args:
            path: Where the blob is to be.
            make_folder: Makes the folder, if it is not there.
        """
        self.path = path
        self.folder = os.path.dirname(path)
        self._staging = f"{self.folder}{os.sep}{STAGING}{os.getpid()}-{_HOST}-{uuid.uuid4().hex}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | O_BINARY
        try:
            self._descriptor = os.open(self._staging, flags, 0o666)
        except FileNotFoundError:
            make_folder(self.folder)
            self._descriptor = os.open(self._staging, flags, 0o666)
        self._n_bytes = 0
        self._n_early_bytes = 0

    def write(self, piece: Buffer) -> None:
        """Write more bytes, and see to it that what is written does not gather in memory."""
        self._n_bytes += write_all(self._descriptor, piece)
        if self._n_bytes - self._n_early_bytes >= _EARLY_BYTES:
            begin_writeback(self._descriptor, self._n_early_bytes, self._n_bytes)
            self._n_early_bytes = self._n_bytes

    def sync(self) -> None:
        """Make the bytes durable."""
        os.fsync(self._descriptor)

    def name(self) -> Token:
        """Give it its name, and say what tells it from other files.

        Raises:
            FileExistsError: The name is taken.
        """
        token = token_of(os.fstat(self._descriptor))
        # link() refuses a name that exists, so the first writer wins; rename() would replace it.
        os.link(self._staging, self.path)
        return token

    def close(self) -> None:
        """Let go of it, named or not. What stays behind is for `Backend.sweep`; it must not hide what happened."""
        try:
            os.close(self._descriptor)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(self._staging)


def write_all(descriptor: int, piece: Buffer) -> int:
    """Write a buffer to a file where it stands, and return its size."""
    view = memoryview(piece).cast("B")
    n_bytes = view.nbytes
    while len(view):
        view = view[os.write(descriptor, view[:MOST_BYTES]) :]
    return n_bytes


def begin_writeback(descriptor: int, start: int, stop: int) -> None:
    """Ask the system to begin to write a range of a file to the disk, if it can be asked. Nothing depends on it."""
    ask = _sync_file_range()
    if ask is not None:
        ask(descriptor, start, stop - start, _SYNC_FILE_RANGE_WRITE)


@cache
def _sync_file_range() -> Any:
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError, TypeError):  # TypeError: on Windows there is no library without a name
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


def token_of(found: os.stat_result) -> Token:
    """What tells a file from others at the same place, as long as it is there."""
    return f"{found.st_dev:x}-{found.st_ino:x}"


_NODE = "".join(c for c in os.uname().nodename if c.isalnum())[:40] if hasattr(os, "uname") else "host"
_HOST = _NODE + pid_space()
"""Stands in the names of files under way: where else a process of this id may live, nothing is known of it here."""


def writer_is_dead(name: str) -> bool:
    """Tell whether the process is known to be gone that made a file under way, from the file's name."""
    pid, _, rest = name.removeprefix(STAGING).partition("-")
    host = rest.partition("-")[0]
    if host != _HOST or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False
