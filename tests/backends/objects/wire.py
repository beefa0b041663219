"""HTTP/1.1 messages over blocking sockets: heads as bytes, bodies passed on without being held."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

BUFFER_BYTES = 1 << 18
HEAD_BYTES = 1 << 16
"""Longer heads are refused; S3's limit is 8 KiB."""


class GoneError(Exception):
    """The other side has closed the connection, or broken it."""


@dataclass(frozen=True, slots=True)
class Head:
    """First line and headers of a message, with the bytes they came as."""

    raw: bytes

    @property
    def first(self) -> tuple[str, str, str]:
        """Method, target and version of a request; version, status and reason of an answer."""
        one, two, *rest = self.raw.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
        return one, two, rest[0] if rest else ""

    @property
    def headers(self) -> dict[str, str]:
        """The headers, by lower-case name; of a name that occurs twice, the last."""
        lines = self.raw.decode("latin-1").split("\r\n")[1:]
        pairs = (line.partition(":") for line in lines if line)
        return {name.strip().lower(): value.strip() for name, _, value in pairs}

    def without(self, name: str) -> bytes:
        """The bytes without one header, all else unchanged: what is signed must stay as it is."""
        lines = self.raw.split(b"\r\n")
        return b"\r\n".join(line for line in lines if line.partition(b":")[0].strip().lower() != name.encode())


class Wire:
    """One side's connection, read through a buffer of its own."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._rest = b""
        """Bytes read beyond the last head or line."""

    def send(self, data: bytes | memoryview) -> None:
        try:
            self.socket.sendall(data)
        except OSError as error:
            raise GoneError from error

    def head(self) -> Head:
        """Read up to the blank line.

        Raises:
            GoneError: The connection ended first.
            ValueError: The head does not end.
        """
        raw = self._until(b"\r\n\r\n")
        return Head(raw)

    def body(self, n_bytes: int | None) -> Iterator[memoryview]:
        """Read a body of known length, or all there is up to the connection's end.

        Yields:
            Pieces, each valid until the next is asked for.

        Raises:
            GoneError: The connection ended within a body of known length.
        """
        left = n_bytes
        while left is None or left > 0:
            piece = self._some(BUFFER_BYTES if left is None else min(left, BUFFER_BYTES))
            if not piece and left is None:
                return
            if not piece:
                raise GoneError
            left = None if left is None else left - len(piece)
            yield piece

    def chunks(self) -> Iterator[memoryview]:
        """Read a body in HTTP's chunks, with the lines between them: what is to be passed on as it came."""
        while True:
            line = self._until(b"\r\n")
            yield memoryview(line)
            n_bytes = int(line.split(b";")[0], 16)
            if n_bytes == 0:
                break
            yield from self.body(n_bytes + 2)
        while True:  # trailers, and the blank line after them
            line = self._until(b"\r\n")
            yield memoryview(line)
            if line == b"\r\n":
                return

    def reset(self) -> None:
        """End the connection so that the other side gets an error, not an end."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def close(self) -> None:
        self.socket.close()

    def _some(self, most: int) -> memoryview:
        if self._rest:
            piece, self._rest = self._rest[:most], self._rest[most:]
            return memoryview(piece)
        try:
            return self._buffer[: self.socket.recv_into(self._buffer[:most])]
        except OSError as error:
            raise GoneError from error

    def _until(self, end: bytes) -> bytes:
        while end not in self._rest:
            if len(self._rest) > HEAD_BYTES:
                raise ValueError(f"a head of more than {HEAD_BYTES} bytes")
            before, self._rest = self._rest, b""
            piece = self._some(HEAD_BYTES)
            if not piece:
                raise GoneError
            self._rest = before + piece
        found, _, self._rest = self._rest.partition(end)
        return found + end


def body_of(wire: Wire, head: Head, *, answers: str | None = None) -> Iterator[memoryview]:
    """Find where a message's body lies on the wire, and read it.

    Args:
        wire: Where its head was read.
        head: Its head.
        answers: The method of the request, if the message is an answer.
    """
    headers = head.headers
    if answers is not None and (answers == "HEAD" or head.first[1] in ("204", "304")):
        return iter(())
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return wire.chunks()
    if "content-length" in headers:
        return wire.body(int(headers["content-length"]))
    return wire.body(0 if answers is None else None)


def is_framed(head: Head, *, answers: str) -> bool:
    """Tell whether an answer to a request of some method says where it ends, other than by the connection's end."""
    no_body = answers == "HEAD" or head.first[1] in ("204", "304")
    return no_body or "content-length" in head.headers or "transfer-encoding" in head.headers


def stays_open(head: Head) -> bool:
    """Tell whether whoever sent an answer reads another request from the same connection."""
    return head.first[0] == "HTTP/1.1" and head.headers.get("connection", "").lower() != "close"
