"""Memory that is asked for in one piece, and of which only what is touched is ever there."""

from __future__ import annotations

import contextlib
import mmap
import platform
import sys

# The standard library has no name for it, and the number is the machine's.
_NORESERVE = 0x4000 if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") else 0
_TO_BE_WRITTEN = mmap.PROT_READ | mmap.PROT_WRITE


def map_privately(descriptor: int, n_bytes: int, offset: int = 0) -> mmap.mmap:
    """Map a stretch of a file so that the memory can be written to, and nothing that is written reaches the file.

    What could be written takes memory when it is; Linux else refuses maps of more than the machine has, though most
    are only ever read.

    Raises:
        ValueError: The file ends before the stretch does.
        OSError: It cannot be mapped; by a system that grants no more memory than it has, for its size.
    """
    return mmap.mmap(descriptor, n_bytes, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=_TO_BE_WRITTEN, offset=offset)


def sparse_memory(n_bytes: int) -> mmap.mmap:
    """Make memory of which only a little will be touched, a page here and a page there.

    Raises:
        MemoryError: The system grants no more than it has.
    """
    try:
        memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, prot=_TO_BE_WRITTEN)
    except OSError as error:
        raise MemoryError(f"the system refuses {n_bytes} bytes, few of which would be used") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory
