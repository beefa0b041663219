"""The page cache: its share of a folder, and eviction of the folder."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np


def drop_from_cache(folder: Path) -> None:
    """Ask the kernel to drop the cached pages of all files below a folder, and no others.

    Dirty pages are written first: only clean ones can be dropped.
    """
    for path in _files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def resident_share(folder: Path) -> float:
    """Return the cached share of the pages of all files below a folder: 0 to 1."""
    n_pages = n_resident = 0
    libc = ctypes.CDLL(None, use_errno=True)
    for path in _files(folder):
        if path.stat().st_size == 0:
            continue
        mapped = np.memmap(path, np.uint8, mode="r")
        states = np.zeros(-(-mapped.nbytes // mmap.PAGESIZE), np.uint8)
        if libc.mincore(
            ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(mapped.nbytes), states.ctypes.data_as(ctypes.c_void_p)
        ):
            raise OSError(ctypes.get_errno(), "mincore failed", str(path))
        n_pages += len(states)
        n_resident += int((states & 1).sum())
    return n_resident / n_pages if n_pages else 0.0


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
