"""Upload streams, read directly by the storing thread, without a temporary file."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import deque
from collections.abc import AsyncIterable
from contextlib import suppress
from typing import BinaryIO

from tensorcas_mlflow.file_formats import Readable

_MOST_WAITING_BYTES = 16 << 20
"""Bound on the bytes between the event loop and the storing thread; a faster client has to wait."""


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


class Inflow:
    """A bounded queue of pieces from an event loop to a thread; it never blocks the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Event()
        self._changed = threading.Condition()
        self._pieces: deque[memoryview] = deque()
        self._n_bytes = 0
        self._is_over = False
        self._failure: BaseException | None = None
        self._is_closed = False

    async def feed(self, chunks: AsyncIterable[bytes]) -> None:
        """Hand over all pieces; on the event loop.

        Raises:
            BaseException: An error of the pieces, or a cancellation; the thread's reading then fails too.
        """
        try:
            async for chunk in chunks:
                while self._n_bytes >= _MOST_WAITING_BYTES and not self._is_closed:
                    self._room.clear()
                    # A second check: the thread may have made room just before.
                    if self._n_bytes >= _MOST_WAITING_BYTES and not self._is_closed:
                        await self._room.wait()
                if self._is_closed:
                    return
                if chunk:
                    with self._changed:
                        self._pieces.append(memoryview(chunk))
                        self._n_bytes += len(chunk)
                        self._changed.notify()
        except BaseException as error:
            self._end(error)
            raise
        self._end(None)

    def readinto(self, buffer: memoryview, /) -> int:
        """Give the thread the next bytes; 0 at the end.

        Raises:
            ConnectionError: The upload broke off.
        """
        with self._changed:
            while not self._pieces and not self._is_over:
                self._changed.wait()
            if self._failure is not None:
                raise ConnectionError("the upload broke off") from self._failure
            if not self._pieces:
                return 0
            piece = self._pieces[0]
            n_bytes = min(len(piece), len(buffer))
            buffer[:n_bytes] = piece[:n_bytes]
            if n_bytes == len(piece):
                self._pieces.popleft()
            else:
                self._pieces[0] = piece[n_bytes:]
            self._n_bytes -= n_bytes
        self._wake()
        return n_bytes

    def close(self) -> None:
        """Stop reading, on behalf of the thread."""
        with self._changed:
            self._is_closed = True
            self._pieces.clear()
            self._n_bytes = 0
        self._wake()

    def _end(self, failure: BaseException | None) -> None:
        with self._changed:
            self._failure = failure
            self._is_over = True
            self._changed.notify()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the loop is closed, so nothing waits any more
            self._loop.call_soon_threadsafe(self._room.set)
