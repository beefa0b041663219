"""Progress of a long call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a call, in bytes and in items."""

    done_bytes: int
    n_bytes: int | None = None
    """Bytes in total; None if unknown."""
    n_done: int = 0
    """Checkpoints and files done; 0 if only bytes are counted."""
    n: int = 0
    """Checkpoints and files in total."""


ByteProgress = Callable[[int, int], None]
"""Function that a call tells the bytes done so far, and the bytes in all."""

Watcher = Callable[[Progress], None]
"""Receiver of a call's progress, called in the thread of the caller."""


def counted(watch: Watcher, n_bytes: int) -> Callable[[int], None]:
    """Return a function that adds up the bytes of parts of some work, and tells a watcher the sum."""
    done_bytes = 0

    def add(n_more: int) -> None:
        nonlocal done_bytes
        done_bytes = min(done_bytes + n_more, n_bytes)
        watch(Progress(done_bytes=done_bytes, n_bytes=n_bytes))

    return add


def ignore(progress: Progress) -> None:
    """Ignore the progress of a call."""
