"""Locks of open files and folders between processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import ClassVar

if os.name == "posix":
    import fcntl


class LockedFile:
    """Exclusive locks (`flock`) of open files: free after the process has died, and in its forked children."""

    _held: ClassVar[set[int]] = set()

    @classmethod
    def lock(cls, descriptor: int, *, waits: bool = True) -> bool:
        """Lock a file; return whether it is locked.

        Raises:
            OSError: The file system has no locks.
        """
        cls._held.add(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            cls._held.discard(descriptor)
            return False
        except BaseException:
            cls._held.discard(descriptor)
            raise
        return True

    @classmethod
    def release(cls, descriptor: int) -> None:
        """Unlock and close a file."""
        cls._held.discard(descriptor)
        # A child forked meanwhile has the file open too, and closing it here alone would leave it locked.
        try:  # noqa: SIM105 -- every save passes here, and a context manager takes three calls
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        except OSError:
            pass
        os.close(descriptor)

    @classmethod
    @contextlib.contextmanager
    def alone_in(
        cls, path: str, flags: int = os.O_RDONLY, mode: int = 0o666, *, make: Callable[[str], None] | None = None
    ) -> Iterator[int]:
        """Open and lock a file or folder, and yield its descriptor.

        Args:
            make: Creates the folder if it is missing.

        Raises:
            OSError: It cannot be opened, or the file system has no locks.
        """
        try:
            descriptor = os.open(path, flags, mode)
        except FileNotFoundError:
            if make is None:
                raise
            make(path)
            descriptor = os.open(path, flags, mode)
        try:
            cls.lock(descriptor)
            yield descriptor
        finally:
            cls.release(descriptor)

    @classmethod
    def works_in(cls, folder: str) -> bool:
        """Tell whether locks of a folder keep out others."""
        try:
            with cls.alone_in(folder):
                other = os.open(folder, os.O_RDONLY)
                is_locked = False
                try:
                    is_locked = cls.lock(other, waits=False)
                finally:
                    cls.release(other)
                return not is_locked
        except OSError:
            return False

    @classmethod
    def close_all(cls) -> None:
        """Close the files locked by the parent's threads, in a child made by fork."""
        while cls._held:
            with contextlib.suppress(OSError):
                os.close(cls._held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=LockedFile.close_all)
