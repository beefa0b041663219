"""The bound of the cache: a shared tally of its size, and eviction of the least recently used files.

Each put adds its size to the tally, a file all processes append to. Only when the tally reaches the bound does a
process scan the files, remove the oldest until an eighth of the bound is free, and begin a new
tally. So an eighth of the bound in new bytes pays for one scan of all files, whoever wrote them.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import struct
import time
import uuid
from collections.abc import Iterator
from typing import NamedTuple

from tensorcas_mlflow.extent_cache._file import NAME, STAGING_NAME, disk_bytes

_RECORD = struct.Struct("<q")
_PACK_NAME = re.compile(r"[0-9a-f]{32}")
_SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_MARK_BYTES = 16
_MOST_TALLY_BYTES = 64 << 10
"""A longer tally is begun anew, as each put reads all of it."""
_STALE_S = 3600
"""Writing a file takes seconds. One still under way after this is its dead writer's; if the writer only slept, its
put has no effect."""


class Listed(NamedTuple):
    """A file of the cache, as listed in a scan of its folders."""

    used: float
    n_bytes: int
    path: str


class Room:
    """The space of the files below a folder, and its bound."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._tally = os.path.join(folder, "tally")

    def reserve(self, n_bytes: int, max_bytes: int) -> bytes | None:
        """Make room for a file; evict the least recently used files if there is none.

        Returns:
            The mark for `settle` after the write; None if the file is too large for this bound.

        Raises:
            OSError: The tally cannot be written.
        """
        size = disk_bytes(n_bytes)
        too_large = size > max_bytes // 8
        total, mark = self._add(0 if too_large else size)
        if total is None or total > max_bytes:
            mark = self._tidy(0 if too_large else size, max_bytes)
        return None if too_large else mark

    def settle(self, mark: bytes, n_bytes: int, max_bytes: int) -> None:
        """Record that a file with reserved room exists.

        Raises:
            OSError: The tally cannot be written.
        """
        # If another process has begun a new tally since, its scan perhaps missed the file. Counting it twice
        # only causes an earlier scan.
        if self._read_mark() != mark:
            total, _ = self._add(disk_bytes(n_bytes))
            if total is None or total > max_bytes:
                self._tidy(0, max_bytes)

    def total(self) -> int | None:
        """Return the size in the tally; None if nobody has counted yet."""
        return self._add(0)[0]

    def give_back(self, n_bytes: int) -> None:
        """Record that a file is gone; without this record the next scan only comes earlier."""
        with contextlib.suppress(OSError):
            self._add(-disk_bytes(n_bytes))

    def _tidy(self, wanted_bytes: int, max_bytes: int) -> bytes:
        files = sorted(self._look())
        total = sum(file.n_bytes for file in files) + wanted_bytes
        if total > max_bytes:
            for file in files:
                if total <= max_bytes - max_bytes // 8:
                    break
                remove(file.path)
                total -= file.n_bytes
        return self._begin_tally(total)

    def _look(self) -> Iterator[Listed]:
        now = time.time()
        for folder in [self._folder, *_folders(self._folder)]:
            n_left = 0
            for file in files_in(folder):
                if STAGING_NAME.fullmatch(os.path.basename(file.path)) and abs(now - file.used) > _STALE_S:
                    remove(file.path)
                else:
                    n_left += 1
                    # A file with a time in the future counts as the oldest: a clock was wrong.
                    yield file if file.used <= now + _STALE_S else file._replace(used=0.0)
            if not n_left and folder != self._folder:
                with contextlib.suppress(OSError):
                    os.rmdir(folder)

    def _add(self, n_bytes: int) -> tuple[int | None, bytes]:
        """Add to the tally; return its sum, None if there is none to trust, and the tally's mark."""
        try:
            descriptor = os.open(self._tally, os.O_RDWR | os.O_APPEND | _SAFE)
        except OSError:
            return None, b""
        try:
            if n_bytes:
                os.write(descriptor, _RECORD.pack(n_bytes))
            data = _read_some(descriptor)
        except BlockingIOError:
            return None, b""  # no file
        finally:
            os.close(descriptor)
        if len(data) < _MARK_BYTES or (len(data) - _MARK_BYTES) % _RECORD.size or len(data) > _MOST_TALLY_BYTES:
            return None, b""
        total = sum(record for (record,) in _RECORD.iter_unpack(data[_MARK_BYTES:]))
        return (total if total >= 0 else None), data[:_MARK_BYTES]

    def _read_mark(self) -> bytes:
        try:
            descriptor = os.open(self._tally, os.O_RDONLY | _SAFE)
        except OSError:
            return b""
        try:
            return os.read(descriptor, _MARK_BYTES)
        except OSError:
            return b""
        finally:
            os.close(descriptor)

    def _begin_tally(self, total: int) -> bytes:
        mark = uuid.uuid4().bytes
        staging = os.path.join(self._folder, f"{uuid.uuid4().hex}.staging")
        try:
            descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o600)
            try:
                os.fchmod(descriptor, 0o600)
                os.write(descriptor, mark + _RECORD.pack(total))
            finally:
                os.close(descriptor)
            os.replace(staging, self._tally)
        except BaseException:
            remove(staging)
            raise
        return mark


def files_in(folder: str) -> list[Listed]:
    """List the cache's files of one pack, those under way too; other names are left alone."""
    found: list[Listed] = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if NAME.fullmatch(entry.name) or STAGING_NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    info = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(info.st_mode):
                        found.append(Listed(info.st_mtime, disk_bytes(info.st_size), entry.path))
    return found


def remove(path: str) -> bool:
    """Remove a file; return False if it is gone already or cannot be removed."""
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


def _folders(folder: str) -> list[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return [
            entry.path
            for entry in entries
            if len(entry.name) == 32
            and not entry.name.strip("0123456789abcdef")
            and entry.is_dir(follow_symlinks=False)
        ]
    return []


def _read_some(descriptor: int) -> bytes:
    os.lseek(descriptor, 0, os.SEEK_SET)
    data = b""
    while len(data) <= _MOST_TALLY_BYTES and (piece := os.read(descriptor, _MOST_TALLY_BYTES + 1)):
        data += piece
    return data
