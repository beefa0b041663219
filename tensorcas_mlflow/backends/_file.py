"""A blob in a local file, with the reads that only files offer: mapped and direct."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.base.files import map_privately
from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.errors import BackendError, CorruptError


class ReadCounter:
    """Counts of bytes and requests, for many threads at once."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self.n_requests = 0
        self.n_mapped_bytes = 0
        self.n_cached = 0
        self._lock = Lock()

    def add(self, n_bytes: int, n_requests: int = 1) -> None:
        """Count requests and the bytes read."""
        with self._lock:
            self.n_bytes += n_bytes
            self.n_requests += n_requests

    def add_mapped(self, n_bytes: int) -> None:
        """Count memory-mapped bytes."""
        with self._lock:
            self.n_mapped_bytes += n_bytes

    def add_cached(self, n_chunks: int) -> None:
        """Count chunks found in the chunk cache."""
        with self._lock:
            self.n_cached += n_chunks


PAGE_BYTES = 4096
"""Unit of direct reads and page cache queries: at least a page and a disk's block on all known systems."""
_MAX_BUFFERS = 1000
"""Bound of buffers per call; POSIX allows 1,024."""
_READ_BYTES = 1 << 30
"""Bound of bytes per call; Linux reads at most 2 GiB."""
_SAMPLES = 16
"""Number of sampled pages to estimate whether a file is in memory."""
_ANNOUNCED_BYTES = 1 << 20
"""Size of one prefetch request; the system may drop the rest of a longer one."""
_POPULATE_READ = 22
"""MADV_POPULATE_READ, missing in the standard library: read all pages now, and report failures."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class BlobFile:
    """An open blob. It can be read until it is closed, even after its deletion; by many threads at once."""

    def __init__(self, key: str, descriptor: int, path: str) -> None:
        """Take over an open file.

        Args:
            key: Key of the blob, for errors.
            descriptor: Descriptor of a regular file; closed with this object, and if its size cannot be read.
            path: Path of the file.
        """
        self.key = key
        self.descriptor = descriptor
        try:
            self.size = os.fstat(descriptor).st_size
        except OSError:
            os.close(descriptor)
            raise
        self.tally: ReadCounter | None = None
        """Counter of the reads, if a caller wants one."""
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
        """Close the file; mapped memory stays."""
        direct, self._direct = self._direct, None
        if direct is not None:
            os.close(direct)
        os.close(self.descriptor)

    def read_into(self, start: int, outs: Sequence[memoryview]) -> None:
        """Fill buffers, one after the other, with the bytes from ``start`` on.

        Raises:
            CorruptError: It ends before the last buffer is full.
            BackendError: The disk fails to read it.
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

    def count(self, n_bytes: int, n_requests: int = 1) -> None:
        """Count reads made with a descriptor."""
        if self.tally is not None:
            self.tally.add(n_bytes, n_requests)

    def _fill(self, start: int, outs: Sequence[memoryview], n_bytes: int) -> None:
        n_read = os.preadv(self.descriptor, outs, start) if n_bytes <= _READ_BYTES else 0
        if n_read == n_bytes:
            return
        # A read may return less than requested; the loop reads the rest buffer by buffer.
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
        """True if `open_direct` has been called and has succeeded."""
        return self._direct is not None

    @property
    def direct_descriptor(self) -> int | None:
        """Return the descriptor for direct reads, once `open_direct` has succeeded."""
        return self._direct

    def open_direct(self) -> bool:
        """Prepare for `read_direct`; not for many threads at once.

        Returns:
            Whether direct reads work: some file systems, and all systems except Linux, do not support them.
        """
        if self._direct is None and hasattr(os, "O_DIRECT"):
            with contextlib.suppress(OSError):
                found = os.open(self._path, os.O_RDONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)
                if os.path.sameopenfile(found, self.descriptor):
                    self._direct = found
                else:
                    os.close(found)  # another file has taken its place
        return self._direct is not None

    def read_direct(self, start: int, stop: int, scratch: Bytes) -> memoryview:
        """Read past the page cache, after `open_direct`.

        Args:
            start: First byte.
            stop: One past the last.
            scratch: A buffer at a multiple of `PAGE_BYTES` in memory, two pages longer than the read.

        Returns:
            The bytes, somewhere in ``scratch``.

        Raises:
            CorruptError: The file ends before them.
            BackendError: The disk fails to read them.
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
        """Memory-map a stretch of the file.

        With ``is_private`` the memory is writable, and writes never reach the file. The map outlives this object and a
        `delete` of the blob. If somebody truncates the file, touching the missing part kills the process (SIGBUS).

        Raises:
            CorruptError: The file ends before ``stop``.
            BackendError: The mapping fails.
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
        """Estimate the share of some stretches in the page cache, by a sample that reads nothing.

        Args:
            stretches: Start and stop of each.

        Returns:
            From 0 to 1; 1 if the system does not tell, as for users without write permission on the file.
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

    def read_at_random(self) -> None:
        """Turn the system's readahead off: by default it reads megabytes ahead."""
        if hasattr(os, "posix_fadvise") and not self._is_random:
            self._is_random = True
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def _reading(self) -> contextlib.AbstractContextManager[None]:
        return _translated(self.key)


class MappedStretch(NamedTuple):
    """A memory-mapped stretch of a file; mapped for as long as its data is in use."""

    key: str
    begin: int
    """Start of the map in the blob: the stretch's start, rounded down to a valid map offset."""
    mapped: mmap.mmap

    @property
    def data(self) -> Bytes:
        """Return the bytes from ``begin`` on; writable if the map is private."""
        return np.frombuffer(self.mapped, np.uint8)

    def announce(self, start: int, stop: int) -> None:
        """Prefetch a part of the file, and nothing beyond it; `populate` alone would read further.

        Raises:
            BackendError: The disk fails to read it.
        """
        if sys.platform != "linux":
            return
        first, end = (start - self.begin) // mmap.PAGESIZE * mmap.PAGESIZE, stop - self.begin
        with _translated(self.key):
            for at in range(first, end, _ANNOUNCED_BYTES):
                self.mapped.madvise(mmap.MADV_WILLNEED, at, min(_ANNOUNCED_BYTES, end - at))

    def populate(self, start: int, stop: int) -> None:
        """Read a part of the file into memory now; unless it is prefetched, the system also reads beyond it.

        Raises:
            BackendError: The disk fails to read it, or the file ends before it. A system without the call (Linux
                before 5.14) does nothing, and reads pages on first touch.
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
    """Return places in some stretches, spread as far apart as possible."""
    ends = list(accumulate(stop - start for start, stop in stretches))
    spots = [(2 * number + 1) * ends[-1] // (2 * _SAMPLES) for number in range(_SAMPLES)]
    return [stretches[at := bisect_right(ends, spot)][1] - (ends[at] - spot) for spot in spots]


def aligned_buffer(n_bytes: int) -> Bytes:
    """Allocate memory at a multiple of `PAGE_BYTES`, as `BlobFile.read_direct` needs it."""
    block = np.empty(n_bytes + PAGE_BYTES, dtype=np.uint8)
    start = -block.ctypes.data % PAGE_BYTES
    return block[start : start + n_bytes]


def _find_mincore() -> Any:
    try:
        # The call does not block, and releasing the interpreter's lock for it would take longer.
        found = ctypes.PyDLL(None).mincore
    except (OSError, AttributeError, TypeError):
        return None
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    found.restype = ctypes.c_int
    return found


_mincore = _find_mincore()


SCRATCH_BYTES = 1 << 20
"""Length of an ordinary buffer."""
_SMALL_BYTES = 256 << 10
_HUGE_PAGE_BYTES = 2 << 20
_PAGES_AT_ONCE = 2
"""Numpy asks the system for huge pages from 4 MiB on."""


class Scratch:
    """Buffers reused by the next read: fresh memory costs more than a read.

    They lie in huge pages, if the system has them. Each ordinary page is a segment of its own, so the disk's driver
    splits a direct read into ordinary pages into many requests, and the read takes three times as long.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._small: list[Any] = []
        self._idle: list[Any] = []

    def take(self, n_bytes: int) -> Any:
        """Return a buffer of at least so many bytes, aligned to a page; nobody else has it until it is given back."""
        idle = self._small if n_bytes <= _SMALL_BYTES else self._idle
        with self._lock:
            while idle:
                buffer = idle.pop()
                if len(buffer) >= n_bytes:
                    return buffer
            if n_bytes <= _SMALL_BYTES:
                return aligned_buffer(_SMALL_BYTES)
            if n_bytes > SCRATCH_BYTES:
                return _in_huge_pages(n_bytes)
            slab = _in_huge_pages(_PAGES_AT_ONCE * _HUGE_PAGE_BYTES)
            idle += [slab[at : at + SCRATCH_BYTES] for at in range(SCRATCH_BYTES, len(slab), SCRATCH_BYTES)]
            return slab[:SCRATCH_BYTES]

    def give_back(self, buffer: Any) -> None:
        """Return a buffer for reuse; None is none."""
        if buffer is not None:
            with self._lock:
                (self._small if len(buffer) <= _SMALL_BYTES else self._idle).append(buffer)


def _in_huge_pages(n_bytes: int) -> Any:
    whole = np.empty(max(n_bytes, _PAGES_AT_ONCE * _HUGE_PAGE_BYTES) + _HUGE_PAGE_BYTES, dtype=np.uint8)
    begin = -whole.ctypes.data % _HUGE_PAGE_BYTES
    return whole[begin : begin + n_bytes]
