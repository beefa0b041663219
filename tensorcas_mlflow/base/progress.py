"""Progress of a call that takes long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a call has come, in bytes and in whole things."""

    done_bytes: int
    n_bytes: int | None = None
    """Bytes there are to do; None where nobody knows it beforehand."""
    n_done: int = 0
    """Checkpoints and files that are done; 0 where only bytes are counted."""
    n: int = 0
    """Checkpoints and files there are."""


Watcher = Callable[[Progress], None]
"""Function that a call tells its progress, in the thread of the caller."""


def ignore(progress: Progress) -> None:
    """Ignore the progress of a call."""
