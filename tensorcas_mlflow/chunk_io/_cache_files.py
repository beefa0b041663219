"""Files of the chunk cache, and the bound on their total size (``docs/design/caches.md``, Chunk cache)."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import struct
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tensorcas_mlflow.base.digest import Buffer, digest
from tensorcas_mlflow.errors import CorruptError

Int64s: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
PutExtent: TypeAlias = tuple[int, Buffer]
"""Start of an extent in its pack, and its bytes."""

BLOCK_BYTES = 256 << 10
"""Size of a block with one digest. Larger ones make a lone small chunk more expensive to read; with smaller ones,
threads wait for each other at every digest."""
NAME = re.compile(r"[0-9a-f]{32}\.extents")
STAGING_NAME = re.compile(r"[0-9a-f]{32}\.staging")

_MAGIC = b"\x89TCEX\r\n\x01"
_HEADER = struct.Struct("<8sIIQ8x32s")
_EXTENT = np.dtype([("start", "<u8"), ("n_bytes", "<u8")])
_DIGEST_BYTES = 16
_FIRST_READ_BYTES = 16 << 10
"""Enough for the whole head of a file of few extents."""
_MOST_BYTES = 1 << 48
_TOUCH_S = 60
_OPEN = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtentFile:
    """A file with a verified head. It may be gone by the time of a read."""

    path: str
    starts: Int64s
    """Start of each extent in the pack."""
    stops: Int64s
    positions: Int64s
    """Start of each extent in the payload, ascending."""
    payload_at: int
    payload_bytes: int
    digests: bytes
    """Digests of the payload's blocks, one after the other."""

    def read(self, start: int, stop: int) -> memoryview:
        """Read a stretch of the payload.

        Args:
            start: First byte; ``0 <= start < stop <= payload_bytes``.
            stop: One past the last byte.

        Returns:
            The bytes, in memory of the caller's own and hashed there: later changes of the file do not matter.

        Raises:
            CorruptError: The file differs from the one written.
            OSError: It cannot be read; most often it is gone.
        """
        first = start // BLOCK_BYTES
        begin, end = first * BLOCK_BYTES, min(-(-stop // BLOCK_BYTES) * BLOCK_BYTES, self.payload_bytes)
        # Not mapped: a map of a truncated file kills the process, and mapped bytes may change after hashing.
        block = np.empty(end - begin, dtype=np.uint8).data
        descriptor = open_regular(self.path)
        try:
            _read_fully(descriptor, self.payload_at + begin, block, self.path)
            _touch(descriptor)
        finally:
            os.close(descriptor)
        expected = self.digests[first * _DIGEST_BYTES : -(-stop // BLOCK_BYTES) * _DIGEST_BYTES]
        if _digests_of(block) != expected:
            raise CorruptError(self.path, "its content does not hash to the digests in its head")
        return block[start - begin : stop - begin]


def write_file(folder: str, label: bytes, extents: Sequence[PutExtent]) -> str:
    """Write a file that others see only when it is complete.

    Args:
        folder: Folder of the pack; it exists.
        label: 32 bytes identifying the pack.
        extents: At least one; none is empty.

    Returns:
        The file's path.

    Raises:
        OSError: It could not be written; nothing is left over, unless the process dies.
    """
    payload = extents[0][1] if len(extents) == 1 else b"".join([data for _, data in extents])
    head = _head(label, extents, memoryview(payload).cast("B"))
    path = os.path.join(folder, f"{digest(head)[:_DIGEST_BYTES].hex()}.extents")
    staging = os.path.join(folder, f"{uuid.uuid4().hex}.staging")
    descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)  # whatever the umask says
            file.write(head)
            file.write(payload)
        # Not synced: after a crash of the machine the digests show which files are intact.
        os.replace(staging, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(staging)
        raise
    return path


def open_file(path: str, label: bytes) -> ExtentFile:
    """Read and check a file's head.

    Raises:
        CorruptError: The file is damaged, of another pack, or of another version.
        OSError: It cannot be read; most often it is gone.
    """
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        head = bytearray(min(size, _FIRST_READ_BYTES))
        _read_fully(descriptor, 0, memoryview(head), path)
        if size < _HEADER.size:
            raise CorruptError(path, f"a file of the chunk cache cannot have only {size} bytes")
        magic, n_extents, _, payload_bytes, its_label = _HEADER.unpack_from(head)
        digests_at = _HEADER.size + n_extents * _EXTENT.itemsize
        payload_at = digests_at + -(-payload_bytes // BLOCK_BYTES) * _DIGEST_BYTES
        if magic != _MAGIC or payload_at + payload_bytes != size:
            raise CorruptError(path, "its header and its size do not fit each other")
        if payload_at > len(head):
            rest = bytearray(payload_at - len(head))
            _read_fully(descriptor, len(head), memoryview(rest), path)
            head += rest
    finally:
        os.close(descriptor)
    del head[payload_at:]
    if f"{digest(head)[:_DIGEST_BYTES].hex()}.extents" != os.path.basename(path):
        raise CorruptError(path, "its head does not hash to its name")
    if its_label != label:
        raise CorruptError(path, "it is of another pack")
    table = np.frombuffer(head, dtype=_EXTENT, count=n_extents, offset=_HEADER.size)
    if n_extents and max(int(table["start"].max()), int(table["n_bytes"].max())) > _MOST_BYTES:
        raise CorruptError(path, "it has impossible extents")
    starts, sizes = table["start"].astype(np.int64), table["n_bytes"].astype(np.int64)
    if int(sizes.sum()) != payload_bytes or not sizes.all():
        raise CorruptError(path, "its extents do not add up to its content")
    return ExtentFile(
        path=path,
        starts=starts,
        stops=starts + sizes,
        positions=sizes.cumsum() - sizes,
        payload_at=payload_at,
        payload_bytes=payload_bytes,
        digests=bytes(head[digests_at:]),
    )


def open_regular(path: str) -> int:
    """Open a file of the cache for reading; the caller closes the descriptor.

    Raises:
        OSError: There is no such file, or another user may have written it.
    """
    descriptor = os.open(path, _OPEN)
    found = os.fstat(descriptor)
    # Another user's file could hold any weights, with digests to match.
    if not stat.S_ISREG(found.st_mode) or (hasattr(os, "geteuid") and found.st_uid != os.geteuid()):
        os.close(descriptor)
        raise PermissionError(f"{path} is no file of this user's")
    return descriptor


def file_bytes(extents: Sequence[PutExtent]) -> int:
    """Return the size of the file with these extents."""
    payload = sum(memoryview(data).nbytes for _, data in extents)
    return _HEADER.size + len(extents) * _EXTENT.itemsize + -(-payload // BLOCK_BYTES) * _DIGEST_BYTES + payload


def disk_bytes(n_bytes: int) -> int:
    """Return the disk space of a file on a disk that allocates pages."""
    return -(-n_bytes // 4096) * 4096


def _head(label: bytes, extents: Sequence[PutExtent], payload: memoryview) -> bytes:
    table = np.zeros(len(extents), dtype=_EXTENT)
    table["start"] = [start for start, _ in extents]
    table["n_bytes"] = [memoryview(data).nbytes for _, data in extents]
    if int(table["start"].max()) > _MOST_BYTES or not int(table["n_bytes"].min()):
        raise ValueError("an extent is empty, or begins outside of any pack")
    header = _HEADER.pack(_MAGIC, len(extents), 0, payload.nbytes, label)
    return header + table.tobytes() + _digests_of(payload)


def _digests_of(payload: memoryview) -> bytes:
    blocks = range(0, len(payload), BLOCK_BYTES)
    return b"".join([digest(payload[at : at + BLOCK_BYTES])[:_DIGEST_BYTES] for at in blocks])


def _read_fully(descriptor: int, start: int, out: memoryview, path: str) -> None:
    at = 0
    while at < len(out):
        n_read = os.preadv(descriptor, [out[at:]], start + at)
        if n_read == 0:
            raise CorruptError(path, f"it ends before byte {start + len(out)}")
        at += n_read


def _touch(descriptor: int) -> None:
    # Once a minute: a second's difference between two files decides nothing, and a write per read costs time.
    if abs(time.time() - os.fstat(descriptor).st_mtime) > _TOUCH_S:
        with contextlib.suppress(OSError):
            os.utime(descriptor)


_RECORD = struct.Struct("<q")
_PACK_NAME = re.compile(r"[0-9a-f]{32}")
_SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_MARK_BYTES = 16
_MOST_TALLY_BYTES = 64 << 10
"""A longer tally is begun anew, as each put reads all of it."""
_STALE_S = 3600
"""Writing a file takes seconds. One still under way after this is its dead writer's; if the writer only slept, its
put has no effect."""


class Listed(NamedTuple):
    """A file of the cache, as listed in a scan of its folders."""

    used: float
    n_bytes: int
    path: str


class Room:
    """The space of the files below a folder, and its bound."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._tally = os.path.join(folder, "tally")

    def reserve(self, n_bytes: int, max_bytes: int) -> bytes | None:
        """Make room for a file; evict the least recently used files if there is none.

        Returns:
            The mark for `settle` after the write; None if the file is too large for this bound.

        Raises:
            OSError: The tally cannot be written.
        """
        size = disk_bytes(n_bytes)
        too_large = size > max_bytes // 8
        total, mark = self._add(0 if too_large else size)
        if total is None or total > max_bytes:
            mark = self._tidy(0 if too_large else size, max_bytes)
        return None if too_large else mark

    def settle(self, mark: bytes, n_bytes: int, max_bytes: int) -> None:
        """Record that a file with reserved room exists.

        Raises:
            OSError: The tally cannot be written.
        """
        # If another process has begun a new tally since, its scan perhaps missed the file. Counting it twice
        # only causes an earlier scan.
        if self._read_mark() != mark:
            total, _ = self._add(disk_bytes(n_bytes))
            if total is None or total > max_bytes:
                self._tidy(0, max_bytes)

    def total(self) -> int | None:
        """Return the size in the tally; None if nobody has counted yet."""
        return self._add(0)[0]

    def give_back(self, n_bytes: int) -> None:
        """Record that a file is gone; without this record the next scan only comes earlier."""
        with contextlib.suppress(OSError):
            self._add(-disk_bytes(n_bytes))

    def _tidy(self, wanted_bytes: int, max_bytes: int) -> bytes:
        files = sorted(self._look())
        total = sum(file.n_bytes for file in files) + wanted_bytes
        if total > max_bytes:
            for file in files:
                if total <= max_bytes - max_bytes // 8:
                    break
                remove(file.path)
                total -= file.n_bytes
        return self._begin_tally(total)

    def _look(self) -> Iterator[Listed]:
        now = time.time()
        for folder in [self._folder, *_folders(self._folder)]:
            n_left = 0
            for file in files_in(folder):
                if STAGING_NAME.fullmatch(os.path.basename(file.path)) and abs(now - file.used) > _STALE_S:
                    remove(file.path)
                else:
                    n_left += 1
                    # A file with a time in the future counts as the oldest: a clock was wrong.
                    yield file if file.used <= now + _STALE_S else file._replace(used=0.0)
            if not n_left and folder != self._folder:
                with contextlib.suppress(OSError):
                    os.rmdir(folder)

    def _add(self, n_bytes: int) -> tuple[int | None, bytes]:
        """Add to the tally; return its sum, None if there is none to trust, and the tally's mark."""
        try:
            descriptor = os.open(self._tally, os.O_RDWR | os.O_APPEND | _SAFE)
        except OSError:
            return None, b""
        try:
            if n_bytes:
                os.write(descriptor, _RECORD.pack(n_bytes))
            data = _read_some(descriptor)
        except BlockingIOError:
            return None, b""  # no file
        finally:
            os.close(descriptor)
        if len(data) < _MARK_BYTES or (len(data) - _MARK_BYTES) % _RECORD.size or len(data) > _MOST_TALLY_BYTES:
            return None, b""
        total = sum(record for (record,) in _RECORD.iter_unpack(data[_MARK_BYTES:]))
        return (total if total >= 0 else None), data[:_MARK_BYTES]

    def _read_mark(self) -> bytes:
        try:
            descriptor = os.open(self._tally, os.O_RDONLY | _SAFE)
        except OSError:
            return b""
        try:
            return os.read(descriptor, _MARK_BYTES)
        except OSError:
            return b""
        finally:
            os.close(descriptor)

    def _begin_tally(self, total: int) -> bytes:
        mark = uuid.uuid4().bytes
        staging = os.path.join(self._folder, f"{uuid.uuid4().hex}.staging")
        try:
            descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o600)
            try:
                os.fchmod(descriptor, 0o600)
                os.write(descriptor, mark + _RECORD.pack(total))
            finally:
                os.close(descriptor)
            os.replace(staging, self._tally)
        except BaseException:
            remove(staging)
            raise
        return mark


def files_in(folder: str) -> list[Listed]:
    """List the cache's files of one pack, those under way too; other names are left alone."""
    found: list[Listed] = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if NAME.fullmatch(entry.name) or STAGING_NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    info = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(info.st_mode):
                        found.append(Listed(info.st_mtime, disk_bytes(info.st_size), entry.path))
    return found


def remove(path: str) -> bool:
    """Remove a file; return False if it is gone already or cannot be removed."""
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


def _folders(folder: str) -> list[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return [
            entry.path
            for entry in entries
            if len(entry.name) == 32
            and not entry.name.strip("0123456789abcdef")
            and entry.is_dir(follow_symlinks=False)
        ]
    return []


def _read_some(descriptor: int) -> bytes:
    os.lseek(descriptor, 0, os.SEEK_SET)
    data = b""
    while len(data) <= _MOST_TALLY_BYTES and (piece := os.read(descriptor, _MOST_TALLY_BYTES + 1)):
        data += piece
    return data
