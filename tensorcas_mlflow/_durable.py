"""Durable names: the entries of a folder survive a crash of the machine only after a sync of the folder."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time

_LONG_S = 3600.0
"""Systems write unsynced data to disk within seconds, or a few minutes."""
_MAX_SETTLED = 1 << 14
"""Maximum number of remembered folders; beyond it all are forgotten, and synced once more."""


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
    """Make a folder, its name and everything in it durable, after another program has written it without syncing.

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
        """Make the names in a folder durable; the first time also its own, and those of its parents.

        Another process may have created a folder and died before its name was durable. So this also syncs the parents,
        up to the first folder unchanged for so long that its name has reached the disk by itself. It skips unreadable
        parents: another user has created these.

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
        """Record that a folder, and perhaps its parents, have been created anew."""
        while (above := os.path.dirname(folder)) != folder:
            self._folders.discard(folder)
            folder = above
