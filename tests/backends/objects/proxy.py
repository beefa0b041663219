"""A proxy in front of an S3 server that counts requests, slows them down and breaks them on purpose.

It is a process of its own: what it costs does not run under the interpreter lock of the client that is measured. The
Host header is passed on as it came, so signatures made for the proxy's address hold at the server. ::

    with proxy(server.endpoint, link=Link(latency_s=0.03, up_bytes_per_s=1e9, down_bytes_per_s=1e9)) as way:
        way.inject(LostAnswer(), kinds=(Kind.PUT,), path="/refs/")
        ...  # a client of way.endpoint
        print(way.traffic())
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

from tests.backends.objects.faults import Fault, Rule
from tests.backends.objects.relay import Link, Relay
from tests.backends.objects.requests_seen import Kind, Traffic

START_S = 60
ANSWER_S = 20
STOP_S = 10
BACKLOG = 256


class Proxy:
    """The way to a server, from the test's side."""

    def __init__(self, control: Connection, port: int) -> None:
        self._control = control
        self.endpoint = f"http://127.0.0.1:{port}"
        """Address of the server, as a client gets it."""

    def shape(self, link: Link) -> None:
        """Change how slow the way is, for requests that come from now on."""
        self._ask("shape", link)

    def inject(
        self,
        fault: Fault,
        *,
        kinds: tuple[Kind, ...] = (),
        path: str = "",
        header: str = "",
        nth: int = 1,
        times: int | None = 1,
        probability: float = 1.0,
        seed: int = 0,
    ) -> None:
        """Make a fault happen to some of the requests that come from now on; see `Rule` for which.

        Of several rules that strike one request, the one that was injected first is carried out.
        """
        rule = Rule(
            fault=fault,
            kinds=kinds,
            path=path,
            header=header,
            nth=nth,
            times=times,
            probability=probability,
            seed=seed,
        )
        self._ask("inject", rule)

    def calm(self) -> None:
        """Drop all rules."""
        self._ask("calm")

    def traffic(self) -> Traffic:
        """Tell what has passed since the beginning, or since it was last forgotten.

        Raises:
            RuntimeError: Something went wrong in the proxy that no rule asked for.
        """
        return Traffic(self._ask("exchanges"))

    def forget(self) -> None:
        """Begin to count anew."""
        self._ask("forget")

    def repeat(self) -> int:
        """Carry out once more the requests that a `Twice` has struck; returns how many those were."""
        return int(self._ask("repeat"))

    def _ask(self, *question: object) -> Any:
        self._control.send(question)
        if not self._control.poll(ANSWER_S):
            raise TimeoutError(f"the proxy does not answer: {question}")
        answer, defects = self._control.recv()
        if defects:
            raise RuntimeError(f"the proxy failed: {'; '.join(defects)}")
        return answer


@contextmanager
def proxy(endpoint: str, *, link: Link | None = None) -> Iterator[Proxy]:
    """Run a proxy in front of a server, for as long as the block lasts.

    Args:
        endpoint: The server's address, with scheme and port; plain HTTP.
        link: How slow the way to it is; not slowed unless given.
    """
    url = urlsplit(endpoint)
    assert url.scheme == "http", endpoint
    assert url.hostname is not None, endpoint
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(
        target=_run, args=(theirs, (url.hostname, url.port or 80), link or Link()), daemon=True
    )
    process.start()
    theirs.close()
    try:
        if not ours.poll(START_S):
            raise TimeoutError("the proxy did not start")
        running = Proxy(ours, ours.recv())
        yield running
        running._ask("exchanges")  # raises if the proxy is not well
    finally:
        ours.close()  # which ends the process
        process.join(STOP_S)
        if process.is_alive():
            process.kill()
            process.join()


def _run(control: Connection, server: tuple[str, int], link: Link) -> None:
    relay = Relay(server, link)
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    threading.Thread(target=_accept, args=(listener, relay), daemon=True).start()
    control.send(listener.getsockname()[1])
    while True:
        try:
            question, *values = control.recv()
        except (EOFError, OSError):
            return  # The test has ended, one way or the other; threads of connections end with the process.
        control.send((_obey(relay, question, *values), relay.defects))


def _obey(relay: Relay, question: str, *values: Any) -> object:
    match question:
        case "shape":
            relay.shape(*values)
        case "inject":
            with relay.lock:
                relay.rules.add(*values)
        case "calm":
            with relay.lock:
                relay.rules.clear()
        case "forget":
            relay.forget()
        case "repeat":
            return relay.repeat()
        case "exchanges":
            return relay.exchanges()
        case _:
            raise ValueError(question)
    return None


def _accept(listener: socket.socket, relay: Relay) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=relay.serve, args=(connection,), daemon=True).start()
