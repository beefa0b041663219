"""A blob that is a file of this machine, and the ways of reading that only files have."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import TracebackType
from typing import Any

import numpy as np

from tensorcas_mlflow._mapping import map_privately
from tensorcas_mlflow.backends._tally import Tally
from tensorcas_mlflow.errors import BackendError, CorruptError

PAGE_BYTES = 4096
"""What direct reads and looks into the page cache count in: at least a page and a disk's block everywhere we know."""
_MAX_BUFFERS = 1000
"""POSIX lets a call fill 1,024."""
_READ_BYTES = 1 << 30
"""Linux reads at most 2 GiB in one call."""
_SAMPLES = 16
"""Pages that are looked at to tell whether a file is in memory."""
_ANNOUNCED_BYTES = 1 << 20
"""Of an announcement that is longer than what it reads at once the system may forget the rest."""
_POPULATE_READ = 22
"""MADV_POPULATE_READ, which the standard library has no name for: read all pages now, and say so if that fails."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class BlobFile:
    """An open blob. It can be read until it is closed, whoever deletes it meanwhile; by many threads at once."""

    def __init__(self, key: str, descriptor: int, path: str) -> None:
        """Take over an open file.

        Args:
            key: Of the blob, for errors.
            descriptor: Of a regular file; closed with this object.
            path: Where it was opened.
        """
        self.key = key
        self.descriptor = descriptor
        self.size = os.fstat(descriptor).st_size
        self.tally: Tally | None = None
        """What counts the reads, if somebody wants to know."""
        self._path = path
        self._direct: int | None = None
        self._is_random = False

    def __enter__(self) -> BlobFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; what was mapped stays."""
        direct, self._direct = self._direct, None
        if direct is not None:
            os.close(direct)
        os.close(self.descriptor)

    def read_into(self, start: int, outs: Sequence[memoryview]) -> None:
        """Fill buffers, one after the other, with the bytes from ``start`` on.

        Raises:
            CorruptError: It ends before the last buffer is full.
            BackendError: The disk does not give them.
        """
        at, first = start, 0
        with self._reading():
            while first < len(outs):
                last, n_bytes = first, 0
                while last < len(outs) and last - first < _MAX_BUFFERS and n_bytes < _READ_BYTES:
                    n_bytes += len(outs[last])
                    last += 1
                self._fill(at, outs[first:last], n_bytes)
                self.count(n_bytes)
                at, first = at + n_bytes, last

    def count(self, n_bytes: int) -> None:
        """Count a read; for one that was made with the descriptor."""
        if self.tally is not None:
            self.tally.add(n_bytes)

    def _fill(self, start: int, outs: Sequence[memoryview], n_bytes: int) -> None:
        n_read = os.preadv(self.descriptor, outs, start) if n_bytes <= _READ_BYTES else 0
        if n_read == n_bytes:
            return
        # A read may bring less than was asked for; the rest comes buffer by buffer.
        begin = 0
        for out in outs:
            at = max(n_read - begin, 0)
            while at < len(out):
                n_more = os.preadv(self.descriptor, [out[at : at + _READ_BYTES]], start + begin + at)
                if n_more == 0:
                    raise CorruptError(self.key, f"it ends before byte {start + n_bytes}")
                at += n_more
            begin += len(out)

    @property
    def is_direct(self) -> bool:
        """Whether `open_direct` has been called and can be done."""
        return self._direct is not None

    def open_direct(self) -> bool:
        """Prepare for `read_direct`; not for many threads at once.

        Returns:
            Whether it can be done: some file systems, and all other systems than Linux, have no such reads.
        """
        if self._direct is None and hasattr(os, "O_DIRECT"):
            with contextlib.suppress(OSError):
                found = os.open(self._path, os.O_RDONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)
                if os.path.sameopenfile(found, self.descriptor):
                    self._direct = found
                else:
                    os.close(found)  # somebody has put another file there
        return self._direct is not None

    def read_direct(self, start: int, stop: int, scratch: Bytes) -> memoryview:
        """Read past the page cache, after `open_direct`.

        Args:
            start: First byte.
            stop: One past the last.
            scratch: Begins at a multiple of `PAGE_BYTES` in memory, and holds two pages more than is read.

        Returns:
            The bytes, somewhere in ``scratch``.

        Raises:
            CorruptError: The file ends before them.
            BackendError: The disk does not give them.
        """
        assert self._direct is not None
        begin = start // PAGE_BYTES * PAGE_BYTES
        end = -(-stop // PAGE_BYTES) * PAGE_BYTES
        view = scratch.data
        at = 0
        with self._reading():
            while begin + at < stop:
                n_read = os.preadv(self._direct, [view[at : end - begin]], begin + at)
                self.count(n_read)
                at += n_read
                if n_read == 0 or (at % PAGE_BYTES and begin + at < stop):
                    raise CorruptError(self.key, f"it ends before byte {stop}")
        return view[start - begin : stop - begin]

    def map(self, start: int, stop: int, *, is_private: bool = False) -> MappedStretch:
        """Map a stretch of the file.

        With ``is_private`` the memory can be written to, and what is written never reaches the file. The map outlives
        this object and a `delete` of the blob. If somebody cuts the file short, who touches what was there is killed
        (SIGBUS).

        Raises:
            CorruptError: The file ends before ``stop``.
            BackendError: It cannot be mapped.
        """
        stretch = self._map(start, stop, is_private=is_private)
        if self.tally is not None:
            self.tally.add_mapped(stop - start)
        return stretch

    def _map(self, start: int, stop: int, *, is_private: bool = False) -> MappedStretch:
        begin = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with self._reading():
            try:
                if is_private:
                    mapped = map_privately(self.descriptor, stop - begin, begin)
                else:
                    mapped = mmap.mmap(self.descriptor, stop - begin, access=mmap.ACCESS_READ, offset=begin)
            except ValueError:
                raise CorruptError(self.key, f"it ends before byte {stop}") from None
        return MappedStretch(key=self.key, begin=begin, mapped=mapped)

    def share_in_memory(self, stretches: Sequence[tuple[int, int]]) -> float:
        """Estimate which part of some stretches the page cache holds, by a sample that reads nothing.

        Args:
            stretches: Start and stop of each.

        Returns:
            From 0 to 1; 1 where the system does not tell, as it does to users who may not write the file.
        """
        if _mincore is None or not stretches or max(stop for _, stop in stretches) > self.size:
            return 1.0
        pages = {place // mmap.PAGESIZE * mmap.PAGESIZE for place in _spread_over(stretches)}
        try:
            stretch = self._map(min(pages), max(pages) + 1)
        except (BackendError, CorruptError):
            return 1.0
        data = stretch.data
        begin = data.ctypes.data - stretch.begin
        state = ctypes.c_ubyte()
        held = 0
        for page in pages:
            if _mincore(begin + page, 1, ctypes.byref(state)):
                return 1.0
            held += state.value & 1
        return held / len(pages)

    def forget_cached(self) -> None:
        """Have the system put the file out of memory, as far as it does; nothing is lost."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def read_at_random(self) -> None:
        """Have the system read no more than is asked for: by default it reads megabytes ahead."""
        if hasattr(os, "posix_fadvise") and not self._is_random:
            self._is_random = True
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def _reading(self) -> contextlib.AbstractContextManager[None]:
        return _translated(self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedStretch:
    """A stretch of a file in memory, from the page cache; mapped for as long as anybody uses its data."""

    key: str
    begin: int
    """Of the stretch in the file, down to where a map can begin."""
    mapped: mmap.mmap

    @property
    def data(self) -> Bytes:
        """The bytes from ``begin`` on; writable where the map is private."""
        return np.frombuffer(self.mapped, np.uint8)

    def announce(self, start: int, stop: int) -> None:
        """Have the system begin to read a part of the file, and nothing beyond it, as `populate` by itself would.

        Raises:
            BackendError: The disk does not give it.
        """
        if sys.platform != "linux":
            return
        first, end = (start - self.begin) // mmap.PAGESIZE * mmap.PAGESIZE, stop - self.begin
        with _translated(self.key):
            for at in range(first, end, _ANNOUNCED_BYTES):
                self.mapped.madvise(mmap.MADV_WILLNEED, at, min(_ANNOUNCED_BYTES, end - at))

    def populate(self, start: int, stop: int) -> None:
        """Read a part of the file into memory now; what is not announced brings with it what lies behind it.

        Raises:
            BackendError: The disk does not give it, or the file ends before it. A system that has no such call (Linux
                before 5.14) does nothing, and reads pages as they are touched.
        """
        if sys.platform != "linux":
            return
        first = (start - self.begin) // mmap.PAGESIZE * mmap.PAGESIZE
        with _translated(self.key):
            try:
                self.mapped.madvise(_POPULATE_READ, first, stop - self.begin - first)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise


@contextlib.contextmanager
def _translated(key: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BackendError("read", key, f"{type(error).__name__}: {error}") from error


def _spread_over(stretches: Sequence[tuple[int, int]]) -> list[int]:
    """Give places in some stretches, as far from each other as so many can be."""
    ends = list(accumulate(stop - start for start, stop in stretches))
    spots = [(2 * number + 1) * ends[-1] // (2 * _SAMPLES) for number in range(_SAMPLES)]
    return [stretches[at := bisect_right(ends, spot)][1] - (ends[at] - spot) for spot in spots]


def aligned_buffer(n_bytes: int) -> Bytes:
    """Allocate memory that begins at a multiple of `PAGE_BYTES`, as `BlobFile.read_direct` needs it."""
    block = np.empty(n_bytes + PAGE_BYTES, dtype=np.uint8)
    start = -block.ctypes.data % PAGE_BYTES
    return block[start : start + n_bytes]


def _find_mincore() -> Any:
    try:
        # It waits for nothing, and to let go of the interpreter's lock for it would take longer.
        found = ctypes.PyDLL(None).mincore
    except (OSError, AttributeError, TypeError):
        return None
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    found.restype = ctypes.c_int
    return found


_mincore = _find_mincore()
