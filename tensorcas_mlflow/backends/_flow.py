"""Pieces of an upload on their way from the drawing thread to the sending one."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

_MOST_WAITING_BYTES = 8 << 20


def joined(pieces: Iterable[Any], most_bytes: int) -> bytes | Iterator[Any]:
    """Join pieces, copied once, if their total is at most ``most_bytes``; otherwise return all of them in turn."""
    source = iter(pieces)
    drawn: list[memoryview] = []
    n_bytes = 0
    for piece in source:
        drawn.append(memoryview(piece).cast("B"))
        n_bytes += drawn[-1].nbytes
        if n_bytes > most_bytes:
            return itertools.chain(drawn, source)
    return b"".join(drawn)


class _BrokenOffError(Exception):
    """Ends an incomplete upload."""


class Flow:
    """Queue of pieces from the drawing thread to the sending one; few wait in between."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self.is_fed = False
        """Whether all pieces are in the queue."""
        self.has_begun = False
        """Whether the sender has asked for a piece; from then on the upload cannot be repeated."""
        self._changed = threading.Condition()
        self._pieces: deque[Any] = deque()
        self._n_waiting_bytes = 0
        self._is_broken = False
        self._is_closed = False

    def feed(self, pieces: Iterable[Any]) -> None:
        """Queue pieces until there are no more, or the sender has stopped; raise their exceptions."""
        try:
            for piece in pieces:
                view = memoryview(piece).cast("B")
                if not view.nbytes:
                    continue
                with self._changed:
                    while self._n_waiting_bytes > _MOST_WAITING_BYTES and not self._is_closed:
                        self._changed.wait()
                    if self._is_closed:
                        return
                    self._pieces.append(view)
                    self._n_waiting_bytes += view.nbytes
                    self.n_bytes += view.nbytes
                    self._changed.notify_all()
        except BaseException:
            with self._changed:
                self._is_broken = True
                self._changed.notify_all()
            raise
        with self._changed:
            self.is_fed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop accepting pieces."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._changed:
            self.has_begun = True
            while not (self._pieces or self.is_fed or self._is_broken):
                self._changed.wait()
            if self._is_broken:
                raise _BrokenOffError
            if not self._pieces:
                raise StopIteration
            piece = self._pieces.popleft()
            self._n_waiting_bytes -= piece.nbytes
            self._changed.notify_all()
            return piece
