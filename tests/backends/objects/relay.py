"""The proxy's work: exchanges between clients and one server, slowed, counted, and broken where a rule says so."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.backends.objects.faults import (
    Answer,
    CutBody,
    CutUpload,
    Fault,
    Late,
    LostAnswer,
    ResetBefore,
    Rulebook,
    Stall,
    Twice,
)
from tests.backends.objects.requests_seen import Exchange, kind_of
from tests.backends.objects.wire import GoneError, Head, Wire, body_of, is_framed, stays_open

BURST_S = 0.002
"""Seconds of idle time that a link may catch up with."""
SHORTEST_SLEEP_S = 0.0005
"""Less is owed until it adds up: the system cannot sleep so little."""
IDLE_S = 1.0
"""A connection to the server is not used again after so long: servers close what is idle, without notice."""
LOOK_S = 0.05
MEANINGFUL = ("range", "if-match", "if-none-match", "content-length", "x-amz-copy-source")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Latency and bandwidth of the connection to the server."""

    latency_s: float = 0.0
    """Delay of every request before the proxy forwards it."""
    up_bytes_per_s: float | None = None
    """Limit for all connections together; None for no limit."""
    down_bytes_per_s: float | None = None


class Throttle:
    """A limit on bytes per second that all connections share."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    def take(self, n_bytes: int) -> None:
        """Wait until so many bytes may pass."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_s = max(self._free_s, now - BURST_S) + n_bytes / self._bytes_per_s
            wait_s = self._free_s - now
        if wait_s > SHORTEST_SLEEP_S:
            time.sleep(wait_s)


class Relay:
    """Shared state of all connections. Any thread may call its methods."""

    def __init__(self, server: tuple[str, int], link: Link) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._rules = Rulebook()
        self._entries: list[Entry] = []
        self._kept: list[bytes] = []
        """Requests that are to be carried out twice."""
        self.defects: list[str] = []
        """Errors that no test asked for."""
        self.shape(link)

    @property
    def rules(self) -> Rulebook:
        return self._rules

    @property
    def lock(self) -> threading.Lock:
        """Held by whoever changes the rules."""
        return self._lock

    def shape(self, link: Link) -> None:
        """Change how slow the way is, for requests that come from now on."""
        self._link = link
        self._up, self._down = Throttle(link.up_bytes_per_s), Throttle(link.down_bytes_per_s)

    def exchanges(self) -> tuple[Exchange, ...]:
        return tuple(entry.exchange for entry in list(self._entries))

    def forget(self) -> None:
        self._entries = []

    def repeat(self) -> int:
        """Carry out once more what was kept for it, in its order; returns how many requests that were."""
        with self._lock:
            kept, self._kept = self._kept, []
        for request in kept:
            wire = _Server(self._server).wire
            wire.send(request)
            wire.head()
            wire.close()
        return len(kept)

    def serve(self, connection: socket.socket) -> None:
        """Serve one client until its connection ends."""
        client, server = Wire(connection), _Server(self._server)
        try:
            while self._exchange(client, server):
                pass
        except GoneError:
            pass
        except Exception as error:  # noqa: BLE001 - told to the test, whatever it is
            self.defects.append(repr(error))
        finally:
            client.close()
            server.close()

    def _exchange(self, client: Wire, server: _Server) -> bool:
        head = client.head()
        entry, fault = self._begin(head)
        time.sleep(self._link.latency_s)
        if isinstance(fault, ResetBefore):
            entry.end()
            client.reset()
            return False
        if head.headers.get("expect", "").lower() == "100-continue":
            # Answered here, for whether the server would is no part of what we measure.
            client.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = Head(head.without("expect"))
        body = self._counted_up(body_of(client, head), entry)
        if isinstance(fault, Answer):
            for _ in body:
                pass
            client.send(_error(fault, head.first[0], entry))
            return True
        if isinstance(fault, Late):
            time.sleep(fault.seconds)
        if isinstance(fault, Twice):
            whole = b"".join(map(bytes, body))
            body = iter([memoryview(whole)])
            with self._lock:
                self._kept.append(head.raw + whole)
        if not server.forward(head, body, most=fault.after_bytes if isinstance(fault, CutUpload) else None):
            entry.end()
            server.reset()
            client.reset()
            return False
        return self._answer(client, server, head, entry, fault)

    def _answer(self, client: Wire, server: _Server, asked: Head, entry: Entry, fault: Fault | None) -> bool:
        answer = server.answer()
        body = body_of(server.wire, answer, answers=asked.first[0])
        if isinstance(fault, LostAnswer):
            for _ in body:
                pass
            entry.end()
            client.reset()
            return False
        if isinstance(fault, Stall) and _goes_within(client, fault.seconds):
            return False
        framed = is_framed(answer, answers=asked.first[0])
        entry.end(int(answer.first[1]))
        # Whether the server keeps its connection is between it and us: moto's never does, and S3's does.
        client.send(answer.without("connection") if framed else answer.raw)
        cut = fault if isinstance(fault, CutBody) else None
        for piece in body:
            part = piece if cut is None else piece[: cut.after_bytes - entry.down_bytes]
            self._down.take(len(part))
            entry.pass_down(len(part))
            client.send(part)
            if cut is not None and entry.down_bytes >= cut.after_bytes:
                if cut.reset:
                    client.reset()
                return False
        server.done(open_still=framed and stays_open(answer))
        return framed

    def _begin(self, head: Head) -> tuple[Entry, Fault | None]:
        method, target, _ = head.first
        path, _, query = target.partition("?")
        headers = head.headers
        kind = kind_of(method, path, query, copies="x-amz-copy-source" in headers)
        with self._lock:
            fault = self._rules.fault_for(kind, path, tuple(headers))
            exchange = Exchange(
                method=method,
                kind=kind,
                path=path,
                query=query,
                headers=tuple((name, headers[name]) for name in MEANINGFUL if name in headers),
                status=None,
                up_bytes=0,
                down_bytes=0,
                fault=None if fault is None else repr(fault),
                start_s=time.monotonic(),
                stop_s=None,
            )
            entry = Entry(exchange)
            self._entries.append(entry)
        return entry, fault

    def _counted_up(self, pieces: Iterator[memoryview], entry: Entry) -> Iterator[memoryview]:
        for piece in pieces:
            self._up.take(len(piece))
            entry.up_bytes += len(piece)
            yield piece


class Entry:
    """An exchange under way. Whatever the client can see is noted before it can see it."""

    def __init__(self, begun: Exchange) -> None:
        self._begun = begun
        self._status: int | None = None
        self._stop_s: float | None = None
        self.up_bytes = 0
        self.down_bytes = 0

    @property
    def exchange(self) -> Exchange:
        return replace(
            self._begun,
            status=self._status,
            up_bytes=self.up_bytes,
            down_bytes=self.down_bytes,
            stop_s=self._stop_s,
        )

    def end(self, status: int | None = None) -> None:
        self._status = status
        self._stop_s = time.monotonic()

    def pass_down(self, n_bytes: int) -> None:
        self.down_bytes += n_bytes
        self._stop_s = time.monotonic()


class _Server:
    """The connection to the server that belongs to one client's connection; opened when needed, and again."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._wire: Wire | None = None
        self._used_s = 0.0
        self._spoiled = False

    @property
    def wire(self) -> Wire:
        if self._wire is None:
            try:
                self._wire = Wire(socket.create_connection(self._address, timeout=None))
            except OSError as error:
                raise GoneError from error
        return self._wire

    def forward(self, head: Head, body: Iterator[memoryview], *, most: int | None) -> bool:
        """Send a request on; False if it was cut after ``most`` bytes of its body."""
        if self._wire is not None and (time.monotonic() - self._used_s > IDLE_S or _readable(self._wire)):
            self.close()
        wire, sent_bytes = self.wire, 0
        wire.send(head.raw)
        for piece in body:
            if self._spoiled:
                continue  # The server has its answer ready; a client that has not sent all would not read it.
            part = piece if most is None else piece[: most - sent_bytes]
            try:
                wire.send(part)
            except GoneError:
                self._spoiled = True
            self._spoiled |= _readable(wire)
            sent_bytes += len(part)
            if most is not None and sent_bytes >= most:
                return False
        return True

    def answer(self) -> Head:
        """Read the head of the answer, passing over those that announce it."""
        while (head := self.wire.head()).first[1].startswith("1"):
            pass
        return head

    def done(self, *, open_still: bool) -> None:
        """Take note that an answer has been read to its end."""
        self._used_s = time.monotonic()
        if self._spoiled or not open_still:
            self.close()

    def close(self) -> None:
        self._spoiled = False
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def reset(self) -> None:
        if self._wire is not None:
            self._wire.reset()
            self._wire = None


def _readable(wire: Wire) -> bool:
    poll = select.poll()
    poll.register(wire.socket, select.POLLIN)
    return bool(poll.poll(0))


def _goes_within(client: Wire, seconds: float) -> bool:
    # A client that waits for an answer sends nothing, so what can be read is the end of its connection.
    give_up = time.monotonic() + seconds
    while (left := give_up - time.monotonic()) > 0:
        if _readable(client):
            return True
        time.sleep(min(left, LOOK_S))
    return False


def _error(answer: Answer, method: str, entry: Entry) -> bytes:
    text = (
        f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{answer.code}</Code><Message>on purpose</Message></Error>"
    )
    body = b"" if method == "HEAD" else text.encode()
    entry.end(answer.status)
    entry.pass_down(len(body))
    lines = [f"HTTP/1.1 {answer.status} {answer.code}", "Content-Type: application/xml", f"Content-Length: {len(body)}"]
    if answer.retry_after_s is not None:
        lines.append(f"Retry-After: {answer.retry_after_s}")
    return "\r\n".join([*lines, "", ""]).encode() + body
