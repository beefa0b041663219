"""The bytes of a file that is read at any place: on this machine, or in a store."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable

from tensorcas_mlflow._mapping import map_privately
from tensorcas_mlflow.errors import BackendError, CorruptError

_TEXT_BYTES = 64 << 10
_FIRST_OF_TWO = b"\xc2\xc3"


class ByteSource(ABC):
    """A file that does not change, read at any place; by many threads at once."""

    name: str
    """For errors."""
    size: int
    """Bytes."""

    @abstractmethod
    def read_into(self, start: int, out: memoryview) -> None:
        """Fill a buffer with the bytes from ``start`` on.

        Raises:
            CorruptError: The file ends before the buffer is full, or what is stored of it is damaged.
            BackendError: The storage does not give them.
        """

    def read(self, start: int, n_bytes: int) -> memoryview:
        """Read bytes; raises as `read_into`. The caller has seen that the file is so long."""
        out = memoryview(bytearray(n_bytes))
        self.read_into(start, out)
        return out

    def view(self, start: int, n_bytes: int) -> memoryview | None:
        """Give bytes without reading them, where they can be mapped: they are read as they are touched."""
        return None


Beside = Callable[[str], ByteSource]
"""Opens a file beside another one, by a name that the other has chosen.

Raises:
    FormatError: It may not be opened, or there is none.
    BackendError: The storage does not give it.
"""


class LocalFile(ByteSource):
    """A file of this machine, mapped if the system does that."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Map a file.

        The memory of `view` may be written to, and what is written never reaches the file. The map outlives a deletion
        and a replacement of the file. If somebody cuts the file short, who touches what was there is killed (SIGBUS);
        `read_into` asks the file itself, and raises.

        Raises:
            BackendError: There is no such file, or it cannot be read, or it is a pipe or the like.
        """
        self.name = os.fspath(path)
        self._mapped: mmap.mmap | None = None
        try:
            # Without waiting: to open a pipe would take until somebody writes into it.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is not a file")
            self.size = status.st_size
        except (OSError, ValueError) as error:
            raise BackendError("open", self.name, getattr(error, "strerror", None) or str(error)) from error
        if self.size:
            with contextlib.suppress(OSError, ValueError):  # what cannot be mapped is read
                self._mapped = map_privately(self._descriptor, self.size)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self._descriptor)

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


class PartSource(ByteSource):
    """A stretch of another source."""

    def __init__(self, inner: ByteSource, start: int, size: int, name: str) -> None:
        """Stand for a stretch.

        Args:
            inner: What it is a stretch of.
            start: Its first byte.
            size: How many it has.
            name: For errors.

        Raises:
            CorruptError: It goes on behind the end.
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


class HeldSource(ByteSource):
    """Bytes in memory."""

    def __init__(self, name: str, data: bytes = b"") -> None:
        self.name = name
        self.size = len(data)
        self._data = bytearray(data)

    def add(self, data: bytes) -> int:
        """Add bytes, and say where they begin."""
        start = self.size
        self._data += data
        self.size += len(data)
        return start

    def read_into(self, start: int, out: memoryview) -> None:
        if start + len(out) > self.size:
            raise CorruptError(self.name, f"it ends before byte {start + len(out)}")
        out[:] = memoryview(self._data)[start : start + len(out)]


class Latin1Source(ByteSource):
    """Bytes that are written as a text, each as one character: in UTF-8 those from 128 on take two."""

    def __init__(self, inner: ByteSource, start: int, n_text_bytes: int, size: int, name: str) -> None:
        """Stand for what is written.

        Args:
            inner: Where the text is.
            start: Its first byte.
            n_text_bytes: How many it has.
            size: How many bytes it says.
            name: For errors.
        """
        self.name = name
        self.size = size
        self._inner = inner
        self._start = start
        self._stop = start + n_text_bytes
        self._reached = (0, start)
        """A place in the bytes and the one in the text where they are said: tensors are mostly read from end to end."""

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
                raise CorruptError(self.name, "it says no bytes") from error
            end = at + len(data)
            is_over = text_at + len(raw) == self._stop
            if not data or end > self.size or (is_over and end != self.size):
                raise CorruptError(self.name, f"it says other than {self.size} bytes")
            low, high = max(start - at, 0), min(stop - at, len(data))
            if low < high:
                out[at + low - start : at + high - start] = data[low:high]
            if end > stop:
                break
            at, text_at = self._reached = end, text_at + len(raw)
        if at == self.size and text_at != self._stop:
            raise CorruptError(self.name, f"it says more than {self.size} bytes")


class SourceStream:
    """A source read from its beginning on, or from a place in it, as a `Tape` is made of."""

    def __init__(self, source: ByteSource, start: int = 0) -> None:
        self._source = source
        self._at = start

    def skip(self, n_bytes: int, /) -> None:
        """Pass bytes without reading them."""
        self._at = min(self._at + n_bytes, self._source.size)

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill the beginning of a buffer; 0 at the end."""
        n_bytes = min(len(buffer), self._source.size - self._at)
        if n_bytes:
            self._source.read_into(self._at, buffer[:n_bytes])
        self._at += n_bytes
        return n_bytes
