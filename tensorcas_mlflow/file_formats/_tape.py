"""A file as it passes by once, and the parts that a splitter announces of it."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tensorcas_mlflow.base.tensors import MAX_NAME_BYTES
from tensorcas_mlflow.errors import FormatError

MAX_PEEK_BYTES = 64 << 20
"""Longest look ahead of a splitter. A longer header is not understood."""
MIN_TENSOR_BYTES = 64
"""A smaller tensor stays in the skeleton: a row of its own would cost more than it saves."""
UNREADABLE = (FormatError, ValueError, IndexError, KeyError, TypeError, OverflowError, RecursionError, struct.error)
"""Exceptions that reading a malformed file may raise."""

_BLOCK_BYTES = 1 << 20
_LENGTH_BYTES = 8


class Readable(Protocol):
    """Source of a tape; a binary file is one."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill the beginning of a buffer; return 0 or None at the end."""


class Skippable(Readable, Protocol):
    """Source of a tape that can skip bytes."""

    def skip(self, n_bytes: int, /) -> None:
        """Skip bytes without reading them."""


class Tape:
    """Bytes that pass by once: read forward, with a bounded look ahead, never sought.

    A tape allocates only as much as its caller asks for, which callers bound. A file's own claims about its size
    allocate nothing.
    """

    def __init__(self, source: Readable, *, block_bytes: int = _BLOCK_BYTES) -> None:
        """Stand before the first byte.

        Args:
            source: The bytes.
            block_bytes: Smallest read.
        """
        self._source = source
        self._block_bytes = block_bytes
        self._buffer = memoryview(b"")
        self._is_over = False
        self._failure: Exception | None = None
        self.position = 0
        """Number of bytes taken."""

    @classmethod
    def over(cls, data: bytes | bytearray) -> Tape:
        """Return a tape of bytes in memory, without a copy."""
        tape = cls(io.BytesIO())
        tape._buffer, tape._is_over = memoryview(data), True
        return tape

    def peek(self, n_bytes: int) -> memoryview:
        """Return the next bytes without taking them.

        Returns:
            ``n_bytes`` bytes, or fewer at the end. They stay valid; do not write to them.

        Raises:
            ValueError: ``n_bytes`` exceeds `MAX_PEEK_BYTES`.
            Exception: Any error of the source, raised now or before.
        """
        if n_bytes > MAX_PEEK_BYTES:
            raise ValueError(f"a splitter may look {MAX_PEEK_BYTES} bytes ahead, and not {n_bytes}")
        while len(self._buffer) < n_bytes and not self._is_over:
            # The buffer at most doubles each time, so a long look ahead costs no more than the bytes that exist.
            self._fill(min(max(n_bytes, self._block_bytes), 2 * len(self._buffer) + self._block_bytes))
        return self._buffer[:n_bytes]

    def peek_length_prefixed(self) -> memoryview:
        """Return a header that follows its size in 8 little-endian bytes, without taking it.

        Raises:
            FormatError: The header is longer than a splitter may look ahead, or the file ends in it.
        """
        n_bytes = int.from_bytes(self.peek(_LENGTH_BYTES), "little")
        if n_bytes > MAX_PEEK_BYTES - _LENGTH_BYTES:
            raise FormatError(f"its header has {n_bytes} bytes")
        header = self.peek(_LENGTH_BYTES + n_bytes)[_LENGTH_BYTES:]
        if len(header) < n_bytes:
            raise FormatError("it ends in its header")
        return header

    def take(self, n_bytes: int) -> memoryview:
        """Take the next bytes.

        Returns:
            ``n_bytes`` bytes, or fewer at the end. The caller owns them: nothing overwrites them.
        """
        if n_bytes > len(self._buffer) and not self._is_over:
            self._fill(n_bytes)
        taken, self._buffer = self._buffer[:n_bytes], self._buffer[n_bytes:]
        self.position += len(taken)
        return taken

    def divert(self, write: Callable[[memoryview], int], reopen: Callable[[], Readable], n_bytes: int) -> None:
        """Write the next bytes elsewhere without taking them, and go on with what has been written.

        Args:
            write: Writes bytes; returns how many it has written.
            reopen: Opens what has been written.
            n_bytes: Number of bytes; there may be fewer.

        Raises:
            Exception: Any error of the source, or of ``write``; no byte is lost.
        """
        try:
            while n_bytes > 0 and (block := self.peek(min(n_bytes, self._block_bytes))):
                n_written = write(block)
                self._buffer = self._buffer[n_written:]
                n_bytes -= n_written
        finally:
            self._source = _Joined([reopen(), io.BytesIO(self._buffer), self._source])
            self._buffer, self._is_over = memoryview(b""), False

    def is_at_end(self) -> bool:
        """Tell whether no byte is left."""
        return len(self.peek(1)) == 0

    def _fill(self, n_bytes: int) -> None:
        """Read until the buffer has ``n_bytes`` bytes or the source ends."""
        block = memoryview(bytearray(n_bytes))
        n_there = len(self._buffer)
        block[:n_there] = self._buffer
        while n_there < n_bytes and not self._is_over:
            n_read = self._read(block[n_there:])
            if not n_read:
                self._is_over = True
            else:
                n_there += n_read
        self._buffer = block[:n_there]

    def _read(self, out: memoryview) -> int | None:
        # An error of the source is raised again at every read. A splitter that takes the error for a malformed file
        # must not turn half of a stream into a whole file.
        if self._failure is None:
            try:
                return self._source.readinto(out)
            except Exception as error:
                self._failure = error
                raise
        raise self._failure


class _Joined:
    """Sources one after the other."""

    def __init__(self, sources: list[Readable]) -> None:
        self._sources = sources

    def readinto(self, buffer: memoryview, /) -> int | None:
        while self._sources:
            if n_bytes := self._sources[0].readinto(buffer):
                return n_bytes
            del self._sources[0]
        return 0


class SkippingTape(Tape):
    """A tape that skips bytes of its source without reading them."""

    def __init__(self, source: Skippable, *, block_bytes: int = _BLOCK_BYTES) -> None:
        super().__init__(source, block_bytes=block_bytes)
        self._skippable = source

    def skip(self, n_bytes: int) -> None:
        """Skip the next bytes; the source has at least that many."""
        n_ahead = len(self._buffer)
        if n_bytes <= n_ahead:
            self._buffer = self._buffer[n_bytes:]
        else:
            self._buffer = memoryview(b"")
            self._skippable.skip(n_bytes - n_ahead)
        self.position += n_bytes


class TapePart(Tape):
    """The next bytes of another tape, as a tape of their own: a member of an archive."""

    def __init__(self, tape: Tape, n_bytes: int) -> None:
        """Stand for bytes; the other tape's caller takes them.

        Args:
            tape: The other tape, at the first of them.
            n_bytes: Their number; there may be fewer.
        """
        self._outer = tape
        self._start = tape.position
        self._n_bytes = n_bytes

    @property
    def position(self) -> int:  # type: ignore[override]
        """Number of bytes taken."""
        return self._outer.position - self._start

    @property
    def n_left(self) -> int:
        """Number of bytes that are left, if the file does not end before."""
        return self._n_bytes - self.position

    def peek(self, n_bytes: int) -> memoryview:
        return self._outer.peek(min(n_bytes, max(0, self.n_left)))

    def take(self, n_bytes: int) -> memoryview:
        return self._outer.take(min(n_bytes, max(0, self.n_left)))

    def divert(self, write: Callable[[memoryview], int], reopen: Callable[[], Readable], n_bytes: int) -> None:
        self._outer.divert(write, reopen, min(n_bytes, max(0, self.n_left)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """A stretch of a file that holds no tensor: headers, pickles, text. The store cuts it by its content."""

    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainBytes:
    """A stretch that is compressed or of an unknown format. The store cuts it by its content, into large pieces."""

    n_bytes: int
    starts_piece: bool = False
    """True to cut before the stretch: its own cuts do not depend on the bytes before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """The elements of one tensor, without gaps, in C order of ``shape``. It gets a row of its own in the manifest."""

    n_bytes: int
    """Size of this stretch; `More` may continue the tensor."""
    name: str = ""
    """The tensor's name as its users know it, such as ``encoder.weight``; "" if the file gives none. The caller makes
    names unique."""
    dtype: str | None = None
    """A name of `tensorcas_mlflow.base.dtypes`; None if the file does not say it, or not yet."""
    shape: tuple[int, ...] | None = None
    """None: one dimension, as long as the bytes that come."""
    cuts: Sequence[int] | None = None
    """Byte offsets at which a chunk ends, the last one the tensor's size; None for the fixed grid."""

    def __post_init__(self) -> None:
        # A file may call its tensors anything. A bad name is no reason to refuse the file.
        if not self.name.isprintable() or len(self.name.encode("utf-8", "replace")) > MAX_NAME_BYTES:
            object.__setattr__(self, "name", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class More:
    """A stretch that continues the tensor announced last, for formats that state no size in advance."""

    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedBytes:
    """Bytes that a function makes of their content, such as a compressed stream (``docs/format.md``, Derived rows).

    The tape has all of the bytes: a splitter has compared them.
    """

    n_bytes: int
    function: str
    """Its name."""
    params: Mapping[str, Any]
    """Its parameters."""
    content: Tape
    """The bytes of its inputs, one after the other, such as the inflated stream."""
    parts: Iterator[FilePart | Learned]
    """Parts of the content in order, to its end; none is `DerivedBytes`. The caller takes their bytes from
    ``content``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """Facts about tensors that have passed, read from a table behind them. It has no bytes of its own."""

    tensors: Mapping[str, Tensor]
    """The correct announcement, by the name that was announced. Without a dtype it changes the name only."""


FilePart = Skeleton | PlainBytes | Tensor | More | DerivedBytes

SplitMember = Callable[[Tape, int], "Iterator[FilePart | Learned] | None"]
"""Takes a member of an archive apart, to its end and no further: the next bytes of a tape, and their number. Returns
None for a member of an unknown format."""

Splitter = Callable[[Tape], Iterator[FilePart | Learned]]
"""Announces the parts of a file one after the other, from the tape's position.

A splitter only peeks: its caller takes the bytes of a part before it asks for the next one. A splitter may announce
more bytes than exist; the file is truncated then. It may stop before the end of the file, and it raises one of
`UNREADABLE` for a malformed file; the rest becomes plain bytes, so nothing is lost. It imports nothing that a file
names, and calls nothing.
"""


def below(part: FilePart | Learned, prefix: str) -> FilePart | Learned:
    """Put a prefix before the names of a part's tensors."""
    if isinstance(part, Tensor):
        return replace(part, name=f"{prefix}{part.name}")
    if isinstance(part, Learned):
        renamed = {
            f"{prefix}{name}": replace(tensor, name=f"{prefix}{tensor.name}") for name, tensor in part.tensors.items()
        }
        return Learned(tensors=renamed)
    if isinstance(part, DerivedBytes):
        return replace(part, parts=(below(each, prefix) for each in part.parts))
    return part
