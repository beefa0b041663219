"""Making names durable: what a folder holds survives a crash of the machine only once the folder is synced."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time

_LONG_S = 3600.0
"""Systems write within seconds, or a few minutes, what nobody has asked them to."""
_MAX_SETTLED = 1 << 14
"""Folders remembered; beyond it all are forgotten, and synced once more."""


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make the names in a folder durable."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder, and need not.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: str) -> None:
    """Make all durable that lies in a folder, and its own name: others have written it, and do not care.

    Args:
        folder: An absolute path. Links in it are left alone.
    """
    for place, _, names in os.walk(folder, onerror=_refuse):
        for name in names:
            path = os.path.join(place, name)
            if stat.S_ISREG(os.lstat(path).st_mode):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        sync_folder(place)
    Settled().settle(folder)


def _refuse(error: OSError) -> None:
    raise error


class Settled:
    """Folders whose own names, and those of all folders above, are known to be durable."""

    def __init__(self) -> None:
        self._folders: set[str] = set()

    def settle(self, folder: str) -> None:
        """Make the names in a folder durable; the first time also its own, and those above it.

        Another process may have made a folder and died before its name was durable. So those above are synced as well,
        up to the first folder that has not changed for so long that its name has reached the disk by itself, and but
        for those that may not be read: somebody else has made these.

        Args:
            folder: An absolute path.
        """
        sync_folder(folder)
        if folder in self._folders:
            return
        new: list[str] = []
        while folder not in self._folders:
            new.append(folder)
            above = os.path.dirname(folder)
            found = os.stat(folder)
            is_old = time.time() - found.st_ctime > _LONG_S
            if is_old or above == folder or os.stat(above).st_dev != found.st_dev:
                break
            with contextlib.suppress(PermissionError):
                sync_folder(above)
            folder = above
        if len(self._folders) > _MAX_SETTLED:
            self._folders.clear()
        self._folders.update(new)

    def forget(self, folder: str) -> None:
        """Take note that a folder has been made anew, and perhaps those above it."""
        while (above := os.path.dirname(folder)) != folder:
            self._folders.discard(folder)
            folder = above
