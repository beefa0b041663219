"""Making names durable: what a folder holds survives a crash of the machine only once the folder is synced."""

from __future__ import annotations

import errno
import os


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
