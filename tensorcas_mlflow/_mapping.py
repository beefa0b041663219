"""Memory reserved in one piece and allocated page by page on first touch."""

from __future__ import annotations

import contextlib
import mmap
import platform
import sys

# The standard library has no name for this flag, and its number depends on the machine.
_NORESERVE = 0x4000 if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") else 0
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
    """Reserve memory of which only a few pages will be touched.

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
