"""Many concurrent file reads through io_uring, if the package `liburing` and the kernel support it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, Generic, TypeVar

T = TypeVar("T")
DEPTH = 16
"""Number of concurrent reads."""


@lru_cache(maxsize=1)
def has_ring() -> bool:
    """Tell whether io_uring is available; containers often forbid it."""
    try:
        with contextlib.closing(Ring[None]()):
            return True
    except (ImportError, OSError, AttributeError):
        return False


class Ring(Generic[T]):
    """An io_uring of one thread: reads start together and complete in any order."""

    def __init__(self) -> None:
        """Create a ring.

        Raises:
            ImportError: The package is not installed.
            OSError: The kernel refuses it.
            AttributeError: The package or the system is too old.
        """
        import liburing

        self._uring: Any = liburing
        self._ring = liburing.Ring()
        # The package keeps the interpreter's lock while it waits for the ring; waiting for an eventfd releases it.
        self._done = os.eventfd(0, os.EFD_CLOEXEC)
        try:
            liburing.io_uring_queue_init(DEPTH, self._ring)
        except BaseException:
            os.close(self._done)
            raise
        liburing.io_uring_register_eventfd(self._ring, self._done)
        self._idle: list[bytearray] = []
        self._under_way: dict[int, tuple[T, bytearray]] = {}

    def close(self) -> None:
        """Wait for reads under way, since the kernel still writes to their memory, and release the ring."""
        while self._under_way:
            for _ in self._completed():
                pass
        self._uring.io_uring_queue_exit(self._ring)
        os.close(self._done)

    def give_back(self, buffer: bytearray) -> None:
        """Return a buffer for the next read; any thread may."""
        self._idle.append(buffer)

    def read(self, wanted: Iterable[tuple[T, int, int, int]]) -> Iterator[tuple[T, bytearray | None]]:
        """Read stretches of open files.

        Args:
            wanted: For each read an id, the descriptor, the start, and the length.

        Yields:
            In any order the id of each read, and its bytes; None if the read failed or was short.
        """
        source = iter(wanted)
        is_more = True
        number = 0
        while is_more or self._under_way:
            while is_more and len(self._under_way) < DEPTH:
                one = next(source, None)
                if one is None:
                    is_more = False
                    break
                tag, descriptor, start, n_bytes = one
                buffer = self._buffer(n_bytes)
                entry = self._uring.io_uring_get_sqe(self._ring)
                self._uring.io_uring_prep_read(entry, descriptor, buffer, start)
                number += 1
                entry.user_data = number
                self._under_way[number] = (tag, buffer)
            if self._under_way:
                # Each time: the kernel may stop at a read it refuses, and those behind it are still waiting.
                self._uring.io_uring_submit(self._ring)
                yield from self._completed()

    def _buffer(self, n_bytes: int) -> bytearray:
        # The package reads into a bytearray and fills it: the length of the array is the length of the read.
        while self._idle:
            buffer = self._idle.pop()
            if len(buffer) == n_bytes:
                return buffer
        return bytearray(n_bytes)

    def _completed(self) -> Iterator[tuple[T, bytearray | None]]:
        """Wait until some reads have completed."""
        os.eventfd_read(self._done)
        found: list[tuple[T, bytearray | None]] = []
        head = self._uring.Cqe()
        for _ in range(self._uring.io_uring_cq_ready(self._ring)):
            self._uring.io_uring_peek_cqe(self._ring, head)
            entry = head[0]
            tag, buffer = self._under_way.pop(entry.user_data)
            try:
                n_read = entry.res
            except OSError:  # the package raises the kernel's error
                n_read = -1
            self._uring.io_uring_cqe_seen(self._ring, entry)
            found.append((tag, buffer if n_read == len(buffer) else None))
        yield from found
