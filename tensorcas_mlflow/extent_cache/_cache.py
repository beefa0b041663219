"""The cache as a whole: its folder, its contents and its bound."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tensorcas_mlflow import config
from tensorcas_mlflow.digest import digest
from tensorcas_mlflow.errors import CorruptError
from tensorcas_mlflow.extent_cache._cached_pack import CachedPack
from tensorcas_mlflow.extent_cache._file import NAME, ExtentFile, PutExtent, file_bytes, open_file, write_file
from tensorcas_mlflow.extent_cache._filling import FILE_BYTES, Filling
from tensorcas_mlflow.extent_cache._merge import join_extents, small_files_to_merge
from tensorcas_mlflow.extent_cache._room import Room, files_in, remove

_logger = logging.getLogger(__name__)

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
        """Create a cache in a folder, which need not exist.

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
        folder, label = self._place(store_id, pack)
        return CachedPack(list(self._files(folder, label)))

    def filling(self, store_id: str) -> Filling:
        """Begin to put the reads of one load; see `Filling`."""
        return Filling(lambda pack, extents: self.put(store_id, pack, extents))

    def put(self, store_id: str, pack: str, extents: Iterable[PutExtent]) -> None:
        """Keep extents of one pack, in files of some 8 MiB.

        Args:
            store_id: Id of the store; any text unique to the store.
            pack: Name of the pack, or any text for bytes that never change.
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
        """Create the cache configured in the environment; None if it is ``off`` (see `tensorcas_mlflow.config`)."""
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
    most = _file_bytes(max_bytes)
    batch: list[PutExtent] = []
    n_bytes = 0
    for start, data in extents:
        size = file_bytes([(start, data)])
        if batch and n_bytes + size > most:
            yield batch
            batch, n_bytes = [], 0
        if memoryview(data).nbytes:
            batch.append((start, data))
            n_bytes += size
    if batch:
        yield batch


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
