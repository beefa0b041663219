"""Upload streams, read directly by the storing thread, without a temporary file."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterable
from typing import BinaryIO

from tensorcas_mlflow.file_formats import Readable

_DRAWN_BYTES = 1 << 20
"""Bytes handed from the event loop to the storing thread at a time, or a little more; a faster client has to wait."""


class Rejoined:
    """A stream with its already read beginning put back."""

    def __init__(self, head: bytes, rest: Readable) -> None:
        self._head = memoryview(head)
        self._rest = rest

    def readinto(self, buffer: memoryview, /) -> int | None:
        if not self._head:
            return self._rest.readinto(buffer)
        n_bytes = min(len(buffer), len(self._head))
        buffer[:n_bytes] = self._head[:n_bytes]
        self._head = self._head[n_bytes:]
        return n_bytes


class UploadStream:
    """A stream that needs only ``read``, and fails if it ends before the announced length."""

    def __init__(self, stream: BinaryIO, *, n_announced: int | None = None) -> None:
        """Take a stream.

        Args:
            stream: The stream to read.
            n_announced: Its announced length in bytes; None if unknown.
        """
        self._stream = stream
        self._n_announced = n_announced or 0
        self._n_read = 0

    def readinto(self, buffer: memoryview, /) -> int:
        """Read the next bytes; 0 at the end.

        Raises:
            ConnectionError: The upload broke off.
        """
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self._n_read += len(data)
        if not data and self._n_read < self._n_announced:
            raise ConnectionError(f"the upload broke off after {self._n_read} of {self._n_announced} bytes")
        return len(data)


def n_announced(stream: BinaryIO) -> int | None:
    """Return the length announced by a client, if the stream is the body of the current request.

    Gunicorn ends the body of a vanished client as if it were complete, and Flask does not check.
    """
    flask = sys.modules.get("flask")
    if flask is None or not flask.has_request_context() or flask.request.stream is not stream:
        return None
    n_bytes: int | None = flask.request.content_length
    return n_bytes


def read_head(stream: Readable, n_bytes: int) -> bytes:
    """Read up to this many bytes from the start of a stream; fewer if it is shorter."""
    head = bytearray()
    block = memoryview(bytearray(min(n_bytes, 1 << 20)))
    while len(head) < n_bytes and (n_read := stream.readinto(block[: n_bytes - len(head)])):
        head += block[:n_read]
    return bytes(head)


class DrawnStream:
    """Pieces of an event loop's stream, drawn by the thread that stores them; it never blocks the loop."""

    def __init__(self, chunks: AsyncIterable[bytes]) -> None:
        self.failure: BaseException | None = None
        """The error of the pieces, if they have ended with one."""
        self._chunks = aiter(chunks)
        self._loop = asyncio.get_running_loop()
        self._piece = memoryview(b"")
        self._is_closed = False
        # The next piece arrives while the thread stores the one before.
        self._next = asyncio.run_coroutine_threadsafe(self._draw(), self._loop)

    async def _draw(self) -> bytearray:
        """Return the next pieces as one; empty at the end."""
        drawn = bytearray()
        try:
            async for chunk in self._chunks:
                drawn += chunk
                if len(drawn) >= _DRAWN_BYTES:
                    break
        except BaseException as error:
            self.failure = error
            raise
        return drawn

    def readinto(self, buffer: memoryview, /) -> int:
        """Give the thread the next bytes; 0 at the end.

        Raises:
            ConnectionError: The upload broke off.
        """
        if not self._piece:
            try:
                self._piece = memoryview(self._next.result())
                if self._piece:
                    self._next = asyncio.run_coroutine_threadsafe(self._draw(), self._loop)
            except BaseException as error:
                raise ConnectionError("the upload broke off") from error
            if self._is_closed:
                self._next.cancel()
        n_bytes = min(len(buffer), len(self._piece))
        buffer[:n_bytes] = self._piece[:n_bytes]
        self._piece = self._piece[n_bytes:]
        return n_bytes

    def close(self) -> None:
        """Draw no more pieces; a thread that still reads them gets an error."""
        self._is_closed = True
        self._next.cancel()
