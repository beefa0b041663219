"""Chunk cache: extents of packs on local disk. After a change, the next load downloads the new chunks only."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tensorcas_mlflow.base import config
from tensorcas_mlflow.base.digest import Buffer, digest
from tensorcas_mlflow.base.tensors import group_by_bytes
from tensorcas_mlflow.base.threads import Background, Lock
from tensorcas_mlflow.chunk_io._cache_files import (
    BLOCK_BYTES,
    NAME,
    ExtentFile,
    Int64s,
    Listed,
    PutExtent,
    Room,
    file_bytes,
    files_in,
    open_file,
    remove,
    write_file,
)
from tensorcas_mlflow.chunk_io._ways import plan_reads
from tensorcas_mlflow.errors import CorruptError


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedRead:
    """One read of the cache, and its chunks."""

    members: Int64s
    """Numbers of the requested chunks it holds."""
    begins: Int64s
    """Start of each member in the result of `read`."""
    _file: ExtentFile
    _start: int
    _stop: int

    def read(self) -> memoryview | None:
        """Read and verify; any thread may.

        Returns:
            Stored bytes, each member's from its place in ``begins`` on, in memory of the caller's own; None if they
            are gone from the cache or were damaged; damaged ones are removed.
        """
        try:
            return self._file.read(self._start, self._stop)
        except CorruptError:
            self.discard()
        except OSError:
            pass
        return None

    def discard(self) -> None:
        """Remove this read's extents from the cache: they are as put, and turned out to be wrong."""
        with contextlib.suppress(OSError):
            os.unlink(self._file.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheHits:
    """The requested chunks in the cache, and their reads."""

    held: np.ndarray[Any, np.dtype[np.bool_]]
    """For each requested chunk, whether the cache has it."""
    reads: list[CachedRead]
    """The reads; each chunk in the cache is a member of one of them."""


class CachedPack:
    """The cached extents of a pack at the time of opening. Some may be gone by now; then a read returns None."""

    def __init__(self, files: Sequence[ExtentFile]) -> None:
        self._files = files
        self._starts = _joined([file.starts for file in files])
        self._stops = _joined([file.stops for file in files])
        self._positions = _joined([file.positions for file in files])
        self._payloads = np.array([file.payload_bytes for file in files], dtype=np.int64)
        self._numbers = np.repeat(np.arange(len(files)), [len(file.starts) for file in files])
        order = np.argsort(self._starts, kind="stable")
        self._sorted_starts = self._starts[order]
        stops = self._stops[order]
        reach = np.maximum.accumulate(stops)
        # Extents of several loads may overlap. Of those beginning at or before a chunk, the one reaching farthest
        # holds the chunk if any does.
        farthest = np.maximum.accumulate(np.where(stops == reach, np.arange(len(stops)), 0))
        self._farthest = order[farthest]

    @property
    def n_extents(self) -> int:
        """Return the number of extents."""
        return len(self._starts)

    def find(self, offsets: Any, lengths: Any) -> CacheHits:
        """Look many chunks up, and plan the reads of those found.

        Args:
            offsets: For each chunk its start in the pack; any integer dtype.
            lengths: For each chunk its size in the pack.

        Returns:
            The chunks found, and reads of some 8 MiB each: chunks near each other in a file are read together.
        """
        offsets, lengths = np.asarray(offsets).astype(np.int64), np.asarray(lengths).astype(np.int64)
        if not len(self._starts):
            return CacheHits(held=np.zeros(len(offsets), dtype=bool), reads=[])
        place = np.searchsorted(self._sorted_starts, offsets, side="right") - 1
        extent = self._farthest[np.maximum(place, 0)]
        # Not offsets + lengths, which could overflow.
        held = (place >= 0) & (lengths > 0) & (offsets <= self._stops[extent] - lengths)
        chosen = np.flatnonzero(held)
        extent = extent[chosen]
        positions = self._positions[extent] + offsets[chosen] - self._starts[extent]
        numbers = self._numbers[extent]
        # In whole blocks, as reads and digests cover blocks: chunks of one block are one read.
        begins = positions // BLOCK_BYTES * BLOCK_BYTES
        ends = -(-(positions + lengths[chosen]) // BLOCK_BYTES) * BLOCK_BYTES
        ends = np.minimum(ends, self._payloads[numbers])
        reads = [
            CachedRead(
                members=chosen[read.members],
                begins=positions[read.members] - read.start,
                _file=self._files[read.pack],
                _start=read.start,
                _stop=read.stop,
            )
            for read in plan_reads(numbers, begins, ends - begins)
        ]
        return CacheHits(held=held, reads=reads)


def _joined(arrays: list[Int64s]) -> Int64s:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64)


FILE_BYTES = 8 << 20
"""Size of a cache file, about: large enough for few files, small enough for small evictions."""
_MOST_WAITING_BYTES = 64 << 20


class CacheFill:
    """The extents one load puts into the cache: a context manager, for many threads.

    Thousands of small extents become few files: those of one pack wait for each other, 64 MiB in all at most. When the
    context ends, the rest is put; when it ends by an exception, the rest is dropped.
    """

    def __init__(self, put: Callable[[str, list[PutExtent]], None]) -> None:
        self._put = put
        self._lock = Lock()
        self._waiting: dict[str, list[PutExtent]] = {}
        self._sizes: dict[str, int] = {}

    def __enter__(self) -> CacheFill:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            for pack in list(self._waiting):
                self._flush(pack)

    def add(self, pack: str, start: int, data: Buffer) -> None:
        """Put one extent, now or together with others.

        Args:
            pack: Name of the pack.
            start: Start of the extent in it.
            data: Its bytes, verified; they must not change until the context has ended.
        """
        n_bytes = memoryview(data).nbytes
        if n_bytes >= FILE_BYTES // 2:
            self._put(pack, [(start, data)])
            return
        with self._lock:
            self._waiting.setdefault(pack, []).append((start, data))
            self._sizes[pack] = self._sizes.get(pack, 0) + n_bytes
            full = pack if self._sizes[pack] >= FILE_BYTES else None
            if full is None and sum(self._sizes.values()) > _MOST_WAITING_BYTES:
                full = max(self._sizes, key=self._sizes.__getitem__)
        if full is not None:
            self._flush(full)

    def _flush(self, pack: str) -> None:
        with self._lock:
            extents = self._waiting.pop(pack, [])
            self._sizes.pop(pack, None)
        if extents:
            self._put(pack, extents)


_N_ALIKE = 8
_SMALL_BYTES = 1 << 20


def small_files_to_merge(files: Sequence[Listed], *, max_bytes: int) -> list[Listed]:
    """Choose small files of about one size, once there are eight of them.

    Only files of one size are merged, so a byte is rewritten at most once for every eightfold size.

    Args:
        files: Files of one pack.
        max_bytes: Maximum total size of files to merge.

    Returns:
        Eight files or more, or none.
    """
    alike: defaultdict[int, list[Listed]] = defaultdict(list)
    for file in files:
        if file.n_bytes <= _SMALL_BYTES and NAME.fullmatch(os.path.basename(file.path)):
            alike[(file.n_bytes.bit_length() - 1) // 3].append(file)
    for group in alike.values():
        if len(group) >= _N_ALIKE and sum(file.n_bytes for file in group) <= max_bytes:
            return group
    return []


def join_extents(files: Sequence[ExtentFile]) -> list[PutExtent]:
    """Read all extents of some files, ascending, without those inside another.

    Damaged and missing files are left out.
    """
    extents: list[PutExtent] = []
    for file in files:
        try:
            payload = file.read(0, file.payload_bytes)
        except (CorruptError, OSError):
            continue
        sizes = (file.stops - file.starts).tolist()
        for start, position, size in zip(file.starts.tolist(), file.positions.tolist(), sizes, strict=True):
            extents.append((start, payload[position : position + size]))
    extents.sort(key=lambda extent: (extent[0], -len(extent[1])))
    stops = np.array([start + len(data) for start, data in extents], dtype=np.int64)
    reach = np.maximum.accumulate(stops)
    return [extent for at, extent in enumerate(extents) if at == 0 or int(stops[at]) > int(reach[at - 1])]


_logger = logging.getLogger(__name__)

_puts = Background("tensorcas-cache")
"""The writing of new packs into caches: a save goes on sending meanwhile."""

_VERSION = "extents-1"
"""Name of the folder below the cache's own. Another format gets another name, and leaves these files alone."""
_MOST_BYTES = 16 << 30
_PAUSE_S = 60.0
"""Pause after a failed put: a full or read-only disk is not tried at every extent."""


class ExtentCache:
    """Cache of packs' stored bytes in files of one user; threads and processes share it without locks.

    Anybody may delete anything in it at any moment. No call raises because of the disk: the cache skips extents it
    cannot keep, and logs it once.
    """

    def __init__(self, folder: Path, *, max_bytes: int | None = None) -> None:
        """Create a cache in a folder, existing or not.

        Args:
            folder: Folder of the cache. Only files created by this class are ever removed from it.
            max_bytes: Bound of all files together; one file may take at most an eighth of it. While several
                processes write at once, their files under way may exceed it. By default 16 GiB, and never more than
                a tenth of the free disk, checked at each put: as others fill the disk, the cache shrinks.
        """
        self._folder = os.path.join(folder, _VERSION)
        self._max_bytes = max_bytes
        self._room = Room(self._folder)
        self._has_logged = False
        self._pause_until = 0.0

    def open_pack(self, store_id: str, pack: str) -> CachedPack:
        """Open the cached extents of one pack: read the heads of its files, not their payloads."""
        _puts.wait()
        folder, label = self._place(store_id, pack)
        return CachedPack(list(self._files(folder, label)))

    def filling(self, store_id: str) -> CacheFill:
        """Begin to put the reads of one load; see `CacheFill`."""
        return CacheFill(lambda pack, extents: self.put(store_id, pack, extents))

    def kept(self, store_id: str, pack: str, pieces: Iterable[Buffer]) -> Iterator[Buffer]:
        """Pass the bytes of a new pack on, and put them on another thread.

        Args:
            store_id: Id of the store.
            pack: Name of the pack.
            pieces: Its bytes, in pieces that end where chunks end. Nobody changes them any more.
        """
        begin = n_bytes = 0
        extents: list[PutExtent] = []
        for piece in pieces:
            extents.append((begin, piece))
            begin += memoryview(piece).nbytes
            n_bytes += memoryview(piece).nbytes
            if n_bytes >= FILE_BYTES:
                self._put_later(store_id, pack, extents)
                extents, n_bytes = [], 0
            yield piece
        if extents:
            self._put_later(store_id, pack, extents)

    def _put_later(self, store_id: str, pack: str, extents: list[PutExtent]) -> None:
        """Put extents on another thread; wait for the earlier ones first if too many are held in memory."""
        _puts.wait(most=_MOST_WAITING_BYTES // FILE_BYTES - 1)
        _puts.submit(partial(self._put_kept, store_id, pack, extents))

    def _put_kept(self, store_id: str, pack: str, extents: list[PutExtent]) -> None:
        with contextlib.suppress(MemoryError):
            self.put(store_id, pack, extents)

    def put(self, store_id: str, pack: str, extents: Iterable[PutExtent]) -> None:
        """Keep extents of one pack, in files of some 8 MiB.

        Args:
            store_id: Id of the store; any text unique to the store.
            pack: Name of the pack, or any text for immutable bytes.
            extents: Start of each in the pack, and its bytes; each holds whole chunks.
        """
        if time.monotonic() < self._pause_until:
            return
        folder, label = self._place(store_id, pack)
        try:
            max_bytes = self._bound()
            for batch in _batches(sorted(extents, key=lambda extent: extent[0]), max_bytes):
                self._put_file(folder, label, batch, max_bytes)
            self._merge(folder, label, max_bytes)
        except OSError as error:
            self._pause_until = time.monotonic() + _PAUSE_S
            self._log(error)

    @classmethod
    def of_environment(cls) -> ExtentCache | None:
        """Create the cache configured by the environment; None if it is ``off`` (see `config.cache_folder`)."""
        folder = config.cache_folder()
        return None if folder is None else cls(folder, max_bytes=config.cache_bytes())

    def _place(self, store_id: str, pack: str) -> tuple[str, bytes]:
        label = digest(f"{store_id}/{pack}".encode())
        return os.path.join(self._folder, label[:16].hex()), label

    def _files(self, folder: str, label: bytes) -> Iterator[ExtentFile]:
        try:
            names = [name for name in os.listdir(folder) if NAME.fullmatch(name)]
        except FileNotFoundError:
            return
        except OSError as error:
            self._log(error)
            return
        for name in names:
            path = os.path.join(folder, name)
            try:
                yield open_file(path, label)
            except CorruptError:
                remove(path)
            except OSError:
                continue  # gone, or foreign

    def _put_file(self, folder: str, label: bytes, extents: Sequence[PutExtent], max_bytes: int) -> str | None:
        """Write one file; return its path, or None if it would be too large."""
        n_bytes = file_bytes(extents)
        _make_folder(self._folder)
        mark = self._room.reserve(n_bytes, max_bytes)
        if mark is None:
            return None
        try:
            _make_folder(folder)
            path = write_file(folder, label, extents)
        except FileNotFoundError:
            # Somebody has deleted the folder just now.
            _make_folder(folder)
            path = write_file(folder, label, extents)
        self._room.settle(mark, n_bytes, max_bytes)
        return path

    def _merge(self, folder: str, label: bytes, max_bytes: int) -> None:
        small = small_files_to_merge(files_in(folder), max_bytes=_file_bytes(max_bytes))
        if not small:
            return
        opened: list[ExtentFile] = []
        for listed in small:
            try:
                opened.append(open_file(listed.path, label))
            except CorruptError:
                remove(listed.path)
            except OSError:
                continue  # gone
        batches = _batches(join_extents(opened), max_bytes)
        paths = [self._put_file(folder, label, batch, max_bytes) for batch in batches]
        if None in paths:
            return
        for listed in small:
            # The name is a digest of the contents: a file with all extents of the others has been rewritten in place.
            if listed.path not in paths and remove(listed.path):
                self._room.give_back(listed.n_bytes)

    def _bound(self) -> int:
        if self._max_bytes is not None:
            return self._max_bytes
        folder = self._folder
        while not os.path.isdir(folder) and folder != os.path.dirname(folder):
            folder = os.path.dirname(folder)
        return min(_MOST_BYTES, shutil.disk_usage(folder).free // 10)

    def _log(self, error: OSError) -> None:
        if not self._has_logged:
            self._has_logged = True
            reason = errno.errorcode.get(error.errno or 0, "error")
            _logger.warning("The chunk cache at %s is not used to the full: %s (%s)", self._folder, error, reason)


def _file_bytes(max_bytes: int) -> int:
    """Return the size of one file: small enough to be kept under a small bound, with its head."""
    return min(FILE_BYTES, max_bytes // 12)


def _batches(extents: Sequence[PutExtent], max_bytes: int) -> Iterator[list[PutExtent]]:
    filled = (extent for extent in extents if memoryview(extent[1]).nbytes)
    return group_by_bytes(filled, lambda extent: file_bytes([extent]), _file_bytes(max_bytes))


def _make_folder(folder: str) -> None:
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        return
    except FileNotFoundError:
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            return
    os.chmod(folder, 0o700)  # whatever the umask is
