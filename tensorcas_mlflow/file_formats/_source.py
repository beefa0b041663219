"""Random access to the bytes of a file, on this machine or in a store, and to the files beside it.

An index names files, and a folder may hold links; neither may lead out of the folder. There is one exception: the cache
of Hugging Face's hub links ``models--<name>/snapshots/<revision>/<file>`` to ``models--<name>/blobs/<digest>``
(https://huggingface.co/docs/huggingface_hub/guides/manage-cache).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import sys
import weakref
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from tensorcas_mlflow.base.files import map_privately
from tensorcas_mlflow.errors import (
    BackendError,
    CorruptError,
    FileMissingError,
    FormatError,
    MalformedFileError,
    NewerFormatError,
)
from tensorcas_mlflow.file_formats._tape import UNREADABLE, Tape

_MISSING = (FileNotFoundError, NotADirectoryError)
_LENGTH_BYTES = 8
_TEXT_BYTES = 64 << 10
_FIRST_OF_TWO = b"\xc2\xc3"


class ByteSource(ABC):
    """A file that does not change, read at any position by any number of threads."""

    name: str
    """Name for messages."""
    size: int
    """Size in bytes."""

    @abstractmethod
    def read_into(self, start: int, out: memoryview) -> None:
        """Fill a buffer with the bytes from ``start`` on.

        Raises:
            CorruptError: The file ends before the buffer is full, or its stored bytes are damaged.
            BackendError: The storage does not give the bytes.
        """

    def read(self, start: int, n_bytes: int) -> memoryview:
        """Read bytes; raises as `read_into`. The caller has checked that the file is long enough."""
        out = memoryview(bytearray(n_bytes))
        self.read_into(start, out)
        return out

    def read_length_prefixed(self, max_bytes: int) -> memoryview:
        """Read a header that follows its size in 8 little-endian bytes at the file's beginning.

        Raises:
            FormatError: The header is longer than ``max_bytes``, or the file ends in it.
        """
        if self.size < _LENGTH_BYTES:
            raise FormatError(f"it has {self.size} bytes")
        n_bytes = int.from_bytes(self.read(0, _LENGTH_BYTES), "little")
        if n_bytes > max_bytes:
            raise FormatError(f"its header has {n_bytes} bytes, and may have {max_bytes}")
        if n_bytes > self.size - _LENGTH_BYTES:
            raise FormatError("it ends in its header")
        return self.read(_LENGTH_BYTES, n_bytes)

    def view(self, start: int, n_bytes: int) -> memoryview | None:
        """Return memory-mapped bytes, which the system reads when they are touched; None if there is no map."""
        return None


@contextlib.contextmanager
def blaming(path: str, format: str) -> Iterator[None]:
    """Turn any exception of a malformed file into a `MalformedFileError` that names the file and its format."""
    try:
        yield
    except (CorruptError, MalformedFileError, NewerFormatError):
        raise
    except (*UNREADABLE, zlib.error) as error:
        raise MalformedFileError(path, format, str(error)) from error


class FileRange(NamedTuple):
    """A named range of a file: a member of an archive, or a storage that tensors view."""

    name: str
    start: int
    """First byte, after any header of its own."""
    n_bytes: int
    """Size in the file, perhaps deflated."""
    raw_bytes: int
    """Size once inflated."""
    is_deflated: bool = False
    crc32: int = 0


OpenSibling = Callable[[str], ByteSource]
"""Opens a file beside another one, by a name that the other file gives.

Raises:
    FormatError: There is none, or the name leads elsewhere.
    BackendError: The storage does not give the file.
"""


class LocalFile(ByteSource):
    """A file of this machine, memory-mapped where possible."""

    def __init__(self, path: str | os.PathLike[str], *, descriptor: int | None = None) -> None:
        """Open and map a file.

        The map is private: writing to the memory of `view` never reaches the file. The map outlives a deletion or a
        replacement of the file. If another process truncates the file, touching the lost pages kills the process
        (SIGBUS); `read_into` reads the file itself, and raises.

        Args:
            path: The file.
            descriptor: An open file without a path, whose name for errors is then ``path``. It stays the caller's.

        Raises:
            BackendError: The file is missing or unreadable, or is a pipe or the like.
        """
        self.name = os.fspath(path)
        self._mapped: mmap.mmap | None = None
        try:
            # O_NONBLOCK: opening a pipe would otherwise wait for a writer.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            self._descriptor = os.open(path, flags) if descriptor is None else os.dup(descriptor)
            weakref.finalize(self, os.close, self._descriptor)
            status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is not a file")
            self.size = status.st_size
        except (OSError, ValueError) as error:
            kind = FileMissingError if isinstance(error, _MISSING) else BackendError
            raise kind("open", self.name, getattr(error, "strerror", None) or str(error)) from error
        if self.size:
            with contextlib.suppress(OSError, ValueError):  # a file that cannot be mapped is read
                self._mapped = map_privately(self._descriptor, self.size)

    def read_into(self, start: int, out: memoryview) -> None:
        at = 0
        try:
            while at < len(out):
                n_read = os.preadv(self._descriptor, [out[at : at + (1 << 30)]], start + at)
                if n_read == 0:
                    raise CorruptError(self.name, f"it ends before byte {start + len(out)}")
                at += n_read
        except OSError as error:
            raise BackendError("read", self.name, f"{type(error).__name__}: {error}") from error

    def view(self, start: int, n_bytes: int) -> memoryview | None:
        if self._mapped is None or start + n_bytes > self.size:
            return None
        return memoryview(self._mapped)[start : start + n_bytes]


class SliceSource(ByteSource):
    """A range of another source."""

    def __init__(self, inner: ByteSource, start: int, size: int, name: str) -> None:
        """Take a range.

        Args:
            inner: The other source.
            start: First byte.
            size: Size in bytes.
            name: Name for messages.

        Raises:
            CorruptError: The range exceeds the other source.
        """
        if start < 0 or size < 0 or start + size > inner.size:
            raise CorruptError(inner.name, f"it ends before byte {start + size}")
        self.name = name
        self.size = size
        self._inner = inner
        self._start = start

    def read_into(self, start: int, out: memoryview) -> None:
        if start + len(out) > self.size:
            raise CorruptError(self.name, f"it ends before byte {start + len(out)}")
        self._inner.read_into(self._start + start, out)

    def view(self, start: int, n_bytes: int) -> memoryview | None:
        return self._inner.view(self._start + start, n_bytes) if start + n_bytes <= self.size else None


class MemberSource(SliceSource):
    """A stored member of an archive.

    The first read after the listing compares a member that is memory-mapped with its CRC-32. A member in a store is
    not: that would fetch all of it, and the digests of its chunks say that it is what was saved.
    """

    def __init__(self, inner: ByteSource, member: FileRange, *, is_listed: bool = False) -> None:
        """Take a member; raises as `SliceSource`."""
        super().__init__(inner, member.start, member.n_bytes, f"{inner.name}, {member.name[:80]!r}")
        self.is_listed = is_listed
        """True once the member is listed: headers are read before its checksum is known to be right."""
        self._crc32 = member.crc32
        self._is_checked = False

    def read_into(self, start: int, out: memoryview) -> None:
        self._check()
        super().read_into(start, out)

    def view(self, start: int, n_bytes: int) -> memoryview | None:
        self._check()
        return super().view(start, n_bytes)

    def _check(self) -> None:
        if self._is_checked or not self.is_listed:
            return
        whole = super().view(0, self.size)
        if whole is not None and zlib.crc32(whole) != self._crc32:
            raise CorruptError(self.name, "its bytes do not have their CRC-32")
        self._is_checked = True


class JoinedSource(ByteSource):
    """Ranges of another source, one after the other."""

    def __init__(self, name: str, inner: ByteSource, ranges: Sequence[tuple[int, int]]) -> None:
        """Join ranges.

        Args:
            name: Name for messages.
            inner: The other source.
            ranges: First byte and size of each range, which lies in the source.
        """
        self.name = name
        self._inner = inner
        self._ranges = ranges
        self._ends = [*accumulate(n_bytes for _, n_bytes in ranges)]
        self.size = self._ends[-1] if ranges else 0

    def read_into(self, start: int, out: memoryview) -> None:
        if start + len(out) > self.size:
            raise CorruptError(self.name, f"it ends before byte {start + len(out)}")
        nth = bisect_right(self._ends, start)
        while len(out):
            begin, n_bytes = self._ranges[nth]
            left = self._ends[nth] - start
            self._inner.read_into(begin + n_bytes - left, out[:left])
            out, start, nth = out[left:], start + left, nth + 1


class MemorySource(ByteSource):
    """Bytes in memory."""

    def __init__(self, name: str, data: bytes = b"") -> None:
        self.name = name
        self.size = len(data)
        self._data = bytearray(data)

    def add(self, data: bytes) -> int:
        """Append bytes, and return their position."""
        start = self.size
        self._data += data
        self.size += len(data)
        return start

    def read_into(self, start: int, out: memoryview) -> None:
        if start + len(out) > self.size:
            raise CorruptError(self.name, f"it ends before byte {start + len(out)}")
        out[:] = memoryview(self._data)[start : start + len(out)]


class Latin1Source(ByteSource):
    """Bytes written as a Latin-1 text in UTF-8: one character per byte, from 128 on two bytes of text."""

    def __init__(self, inner: ByteSource, start: int, n_text_bytes: int, size: int, name: str) -> None:
        """Stand for the bytes.

        Args:
            inner: The source of the text.
            start: First byte of the text.
            n_text_bytes: Size of the text.
            size: Number of bytes that the text encodes.
            name: Name for messages.
        """
        self.name = name
        self.size = size
        self._inner = inner
        self._start = start
        self._stop = start + n_text_bytes
        self._reached = (0, start)
        """A position in the bytes and its position in the text: most reads continue the last one."""

    def read_into(self, start: int, out: memoryview) -> None:
        at, text_at = self._reached if self._reached[0] <= start else (0, self._start)
        stop = start + len(out)
        if stop > self.size:
            raise CorruptError(self.name, f"it ends before byte {stop}")
        while at < stop:
            raw = bytes(self._inner.read(text_at, min(_TEXT_BYTES, self._stop - text_at)))
            if len(raw) > 1 and raw[-1] in _FIRST_OF_TWO:
                raw = raw[:-1]
            try:
                data = raw.decode("utf-8").encode("latin-1")
            except UnicodeError as error:
                raise CorruptError(self.name, "its text encodes no bytes") from error
            end = at + len(data)
            is_over = text_at + len(raw) == self._stop
            if not data or end > self.size or (is_over and end != self.size):
                raise CorruptError(self.name, f"its text encodes other than {self.size} bytes")
            low, high = max(start - at, 0), min(stop - at, len(data))
            if low < high:
                out[at + low - start : at + high - start] = data[low:high]
            if end > stop:
                break
            at, text_at = self._reached = end, text_at + len(raw)
        if at == self.size and text_at != self._stop:
            raise CorruptError(self.name, f"its text encodes more than {self.size} bytes")


class SourceStream:
    """A source read forward, as a `Tape` needs it."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._at = 0

    def skip(self, n_bytes: int, /) -> None:
        """Skip bytes without reading them."""
        self._at = min(self._at + n_bytes, self._source.size)

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill the beginning of a buffer; return 0 at the end."""
        n_bytes = min(len(buffer), self._source.size - self._at)
        if n_bytes:
            self._source.read_into(self._at, buffer[:n_bytes])
        self._at += n_bytes
        return n_bytes


def spool(tape: Tape) -> ByteSource:
    """Copy what is left of a tape into a temporary file, from which the tape goes on.

    The file has no name, so a process that is killed leaves nothing behind.

    Raises:
        FormatError: The file cannot be written; the tape has all bytes.
        Exception: Any error of the tape's source.
    """
    import tempfile  # only a file that h5py reads needs it

    opened: list[LocalFile] = []

    def reopen() -> SourceStream:
        opened.append(LocalFile("a temporary copy", descriptor=file.fileno()))
        return SourceStream(opened[0])

    try:
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - errors of its block are others
    except OSError as error:
        raise FormatError(f"it cannot be copied: {error}") from error

    def write(block: memoryview) -> int:
        try:
            return file.write(block) or 0
        except OSError as error:
            raise FormatError(f"it cannot be copied: {error}") from error

    with file:
        tape.divert(write, reopen, sys.maxsize)
    return opened[0]


def spilled(pieces: Iterable[bytes | memoryview]) -> memoryview:
    """Write bytes into a temporary file without a name, and map it.

    Raises:
        BackendError: There is no room for the file.
    """
    import tempfile

    try:
        with tempfile.TemporaryFile(buffering=0) as file:
            for piece in pieces:
                # Not through the map: on a full disk, writing to a map kills the process.
                at = 0
                while at < len(piece):
                    at += file.write(piece[at:]) or 0
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if file.tell() else b"")
    except OSError as error:
        raise BackendError("write", tempfile.gettempdir(), f"{type(error).__name__}: {error}") from error


def file_in(folder: Path, name: str) -> Path:
    """Find a file of a folder by an untrusted name.

    Raises:
        FormatError: The name is a path, or the file lies elsewhere.
        BackendError: There is no such file.
    """
    if name in ("", ".", "..") or "\0" in name or "/" in name or "\\" in name:
        raise FormatError(f"{name[:80]!r} is no file of the folder")
    try:
        home, file = folder.resolve(strict=True), (folder / name).resolve(strict=True)
    except (OSError, RuntimeError) as error:
        kind = FileMissingError if isinstance(error, _MISSING) else BackendError
        raise kind("open", str(folder / name), f"{type(error).__name__}: {error}") from error
    homes = [home]
    if home.parent.name == "snapshots":
        homes.append(home.parent.parent / "blobs")
    if file.parent not in homes:
        raise FormatError(f"{name[:80]!r} is a link to a file outside of the folder")
    return file


def files_named(folder: Path, suffix: str) -> list[str]:
    """List the names of a folder's files with this suffix, sorted, without hidden ones.

    Raises:
        BackendError: The folder cannot be read.
    """
    try:
        return sorted(
            path.name
            for path in folder.iterdir()
            if path.name.endswith(suffix) and not path.name.startswith(".") and path.is_file()
        )
    except OSError as error:
        raise BackendError("list", str(folder), f"{type(error).__name__}: {error}") from error
