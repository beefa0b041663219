"""Files of this machine: durable names, private mappings, and the scope of process ids."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from functools import partial

from tensorcas_mlflow.base import threads

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


def _sync_file(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_parent(folder: str) -> None:
    """Make the names in a folder durable; skip an unreadable one, which another user has created."""
    with contextlib.suppress(PermissionError):
        sync_folder(folder)


def _unsettled(folder: str, settled: Set[str]) -> Iterator[tuple[str, str]]:
    """Yield a folder and its parents, each with the folder above it, which holds a name that may not be durable.

    The last one is below a settled folder, or below one unchanged for so long that its name has reached the disk by
    itself.
    """
    while folder not in settled:
        above = os.path.dirname(folder)
        found = os.stat(folder)
        is_old = time.time() - found.st_ctime > _LONG_S
        if is_old or above == folder or os.stat(above).st_dev != found.st_dev:
            break
        yield folder, above
        folder = above


def _refuse(error: OSError) -> None:
    raise error


class Settled:
    """Folders whose own names, and those of all folders above, are known to be durable."""

    def __init__(self) -> None:
        self._folders: set[str] = set()

    def settle(self, *folders: str, names_of: Collection[str] = (), beside: Iterable[Callable[[], None]] = ()) -> None:
        """Make the names in some folders durable; the first time also their own, and those of their parents.

        Another process may have created a folder and died before its name was durable. So this also syncs the parents,
        up to the first folder unchanged for so long that its name has reached the disk by itself. It skips unreadable
        parents: another user has created these. All syncs run at once: the disk mostly answers them together.

        Args:
            folders: Absolute paths.
            names_of: Absolute paths of folders with only their own names to be made durable, and those of parents.
            beside: Further syncs.
        """
        parents: dict[str, str] = {}
        for folder in (*folders, *names_of):
            for below, above in _unsettled(folder, self._folders):
                if below in parents:
                    break
                parents[below] = above
        syncs: list[Callable[[], None]] = [
            *beside,
            *(partial(sync_folder, folder) for folder in folders),
            *(partial(_sync_parent, parent) for parent in sorted({*parents.values()}.difference(folders))),
        ]
        threads.run_all(lambda sync: sync(), syncs, waits=True)
        if len(self._folders) > _MAX_SETTLED:
            self._folders.clear()
        self._folders.update(folders, names_of, parents.values())

    def settle_tree(self, folder: str) -> None:
        """Make a folder, its name and everything in it durable, after another program has written it without syncing.

        Args:
            folder: An absolute path. Links in it are left alone.
        """
        places: list[str] = []
        files: list[str] = []
        for place, _, names in os.walk(folder, onerror=_refuse):
            places.append(place)
            paths = (os.path.join(place, name) for name in names)
            files += (path for path in paths if stat.S_ISREG(os.lstat(path).st_mode))
        self.settle(*places, beside=[partial(_sync_file, path) for path in files])

    def forget(self, folder: str, top: str = "") -> None:
        """Record that a folder, and perhaps its parents, have been created anew.

        Args:
            folder: An absolute path.
            top: The nearest folder above that is known to be the old one; by default there is none.
        """
        while folder != top and (above := os.path.dirname(folder)) != folder:
            self._folders.discard(folder)
            folder = above


def pid_space() -> str:
    """Return an id for the processes that see each other under the same ids as this one; empty if all do.

    Containers may share their host's name and boot and still number their processes separately: without this id, a save
    alive in one container would count as dead in another.
    """
    try:
        return f"{os.stat('/proc/self/ns/pid').st_ino:x}"
    except OSError:
        return ""


_draw = os.urandom
"""What draws names; tests put another one in its place, to know them before."""


def new_name() -> str:
    """Draw a name: 32 hex digits."""
    return _draw(16).hex()


def started(pid: int) -> int | None:
    """Return the start of a process of this machine, in clock ticks since boot; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may contain anything; the 20th field after it is the start time.
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


# The standard library has no name for this flag, and its number depends on the machine.
_NORESERVE = 0x4000 if sys.platform == "linux" and os.uname().machine in ("x86_64", "aarch64") else 0
_TO_BE_WRITTEN = mmap.PROT_READ | mmap.PROT_WRITE


def map_privately(descriptor: int, n_bytes: int, offset: int = 0) -> mmap.mmap:
    """Memory-map a stretch of a file privately: the memory is writable, and the file never changes.

    Writable pages count as allocated memory. Without MAP_NORESERVE Linux refuses maps larger than the machine's memory,
    although most are only ever read.

    Raises:
        ValueError: The file ends before the stretch does.
        OSError: The mapping fails; a system without overcommit refuses it for its size.
    """
    return mmap.mmap(descriptor, n_bytes, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=_TO_BE_WRITTEN, offset=offset)


def sparse_memory(n_bytes: int) -> mmap.mmap:
    """Reserve memory for only a few touched pages.

    Raises:
        MemoryError: The system does not overcommit memory.
    """
    try:
        memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, prot=_TO_BE_WRITTEN)
    except OSError as error:
        raise MemoryError(f"the system refuses {n_bytes} bytes, although few of them would be used") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


_LOCAL_TYPES = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "overlay"})


def is_on_local_disk(folder: str) -> bool:
    """Tell whether a folder is known to lie on a file system of this machine: all its users see one state of it."""
    try:
        device = os.stat(folder).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                fields, _, rest = line.partition(" - ")
                if fields.split()[2] == wanted:
                    return rest.split()[0] in _LOCAL_TYPES
        # A subvolume of btrfs has a device number of its own, which no mount shows.
        return False
    except (OSError, IndexError):
        return False
