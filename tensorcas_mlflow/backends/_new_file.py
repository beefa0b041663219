"""Files under way: a blob's bytes under a name that is no key, until the blob is complete."""

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
"""Prefix of the names of files under way. No key contains ``+``, so such a file is never mistaken for a blob."""
O_BINARY = getattr(os, "O_BINARY", 0)
MOST_BYTES = 1 << 30
"""Bound of bytes per call; Linux reads and writes at most 2 GiB."""
_EARLY_BYTES = 32 << 20
"""After so many bytes the system is asked to start writing them to disk; otherwise it would mostly start at the fsync.
Smaller steps measured slower, and smaller blobs are not worth a call."""
_SYNC_FILE_RANGE_WRITE = 2


class NewFile:
    """One file under way. Its methods raise OSError."""

    def __init__(self, path: str, make_folder: Callable[[str], None]) -> None:
        """Create it in the folder of the blob.

        Args:
            path: Path of the blob.
            make_folder: Creates the folder if it is missing.
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
        """Write more bytes, and keep unwritten ones from piling up in memory."""
        self._n_bytes += write_all(self._descriptor, piece)
        if self._n_bytes - self._n_early_bytes >= _EARLY_BYTES:
            begin_writeback(self._descriptor, self._n_early_bytes, self._n_bytes)
            self._n_early_bytes = self._n_bytes

    def sync(self) -> None:
        """Make the bytes durable."""
        os.fsync(self._descriptor)

    def name(self) -> Token:
        """Give the file its name, and return its token.

        Raises:
            FileExistsError: The name is taken.
        """
        token = token_of(os.fstat(self._descriptor))
        # link() refuses a name that exists, so the first writer wins; rename() would replace it.
        os.link(self._staging, self.path)
        return token

    def close(self) -> None:
        """Close it, named or not. Remains are for `Backend.sweep`; they must not hide the original error."""
        try:
            os.close(self._descriptor)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(self._staging)


def write_all(descriptor: int, piece: Buffer) -> int:
    """Write a buffer to a file at its current position, and return its size."""
    view = memoryview(piece).cast("B")
    n_bytes = view.nbytes
    while len(view):
        view = view[os.write(descriptor, view[:MOST_BYTES]) :]
    return n_bytes


def begin_writeback(descriptor: int, start: int, stop: int) -> None:
    """Ask the system to start writing a range of a file to disk, if it supports that. Nothing depends on it."""
    ask = _sync_file_range()
    if ask is not None:
        ask(descriptor, start, stop - start, _SYNC_FILE_RANGE_WRITE)


@cache
def _sync_file_range() -> Any:
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError, TypeError):  # TypeError: Windows has no library without a name
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


def token_of(found: os.stat_result) -> Token:
    """Return a text that differs between files at the same place, as long as the file exists."""
    return f"{found.st_dev:x}-{found.st_ino:x}"


_NODE = "".join(c for c in os.uname().nodename if c.isalnum())[:40] if hasattr(os, "uname") else "host"
_HOST = _NODE + pid_space()
"""Part of the names of files under way: elsewhere the process id means nothing here."""


def writer_is_dead(name: str) -> bool:
    """Tell from the name of a file under way whether its process is known to be dead."""
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
