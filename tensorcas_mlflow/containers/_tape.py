"""A file or stream as it passes by: looked at a little ahead, taken once, never sought."""

from __future__ import annotations

from typing import Protocol

MAX_PEEK_BYTES = 64 << 20
"""How far ahead a splitter may look; a header that is longer is not understood."""

_BLOCK_BYTES = 1 << 20


class Readable(Protocol):
    """What a tape can be made of; a binary file is one."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill the beginning of a buffer; 0 or None means that there is no more."""


class Skippable(Readable, Protocol):
    """What can go on somewhere else."""

    def skip(self, n_bytes: int, /) -> None:
        """Pass bytes without reading them."""


class Tape:
    """Bytes that pass by once.

    No memory is set aside because somebody claims that so many bytes will come: a buffer is as long as what was asked
    for, which callers bound, and holds only what has come.
    """

    def __init__(self, source: Readable, *, block_bytes: int = _BLOCK_BYTES) -> None:
        """Stand before the first byte.

        Args:
            source: What is read.
            block_bytes: How much is read at a time at least.
        """
        self._source = source
        self._block_bytes = block_bytes
        self._buffer = memoryview(b"")
        self._is_over = False
        self._failure: Exception | None = None
        self.position = 0
        """How many bytes have been taken."""

    def peek(self, n_bytes: int) -> memoryview:
        """Look at the next bytes without taking them.

        Returns:
            So many bytes, or fewer if the end comes first; valid for good, and not to be written to.

        Raises:
            ValueError: It is more than `MAX_PEEK_BYTES`.
            Exception: Whatever the source raises, now or before.
        """
        if n_bytes > MAX_PEEK_BYTES:
            raise ValueError(f"a splitter may look {MAX_PEEK_BYTES} bytes ahead, and not {n_bytes}")
        while len(self._buffer) < n_bytes and not self._is_over:
            # Twice as much each time, so that a long look ahead that is not fulfilled costs no more than what there is.
            self._fill(min(max(n_bytes, self._block_bytes), 2 * len(self._buffer) + self._block_bytes))
        return self._buffer[:n_bytes]

    def take(self, n_bytes: int) -> memoryview:
        """Take the next bytes.

        Returns:
            So many bytes, or fewer if the end comes first. They are the caller's: nothing is written over them.
        """
        if n_bytes > len(self._buffer) and not self._is_over:
            self._fill(n_bytes)
        taken, self._buffer = self._buffer[:n_bytes], self._buffer[n_bytes:]
        self.position += len(taken)
        return taken

    def is_at_end(self) -> bool:
        """Tell whether nothing is left."""
        return len(self.peek(1)) == 0

    def _fill(self, n_bytes: int) -> None:
        """Have so many bytes in the buffer, or all that there are."""
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
        # What a source has raised once it raises for ever: a splitter that takes it for a sign of a malformed file must
        # not make half of a stream into a whole file.
        if self._failure is None:
            try:
                return self._source.readinto(out)
            except Exception as error:
                self._failure = error
                raise
        raise self._failure


class SkippingTape(Tape):
    """A tape on which what nobody looks at is not read."""

    def __init__(self, source: Skippable, *, block_bytes: int = _BLOCK_BYTES) -> None:
        super().__init__(source, block_bytes=block_bytes)
        self._skippable = source

    def pass_over(self, n_bytes: int) -> None:
        """Pass the next bytes; there are as many."""
        n_ahead = len(self._buffer)
        if n_bytes <= n_ahead:
            self._buffer = self._buffer[n_bytes:]
        else:
            self._buffer = memoryview(b"")
            self._skippable.skip(n_bytes - n_ahead)
        self.position += n_bytes
