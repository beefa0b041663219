"""The scope of process ids on this machine."""

from __future__ import annotations

import os


def pid_space() -> str:
    """Return an id for the processes that see each other under the same ids as this one; empty if all do.

    Containers may share their host's name and boot and still number their processes separately: without this id, a save
    alive in one container would count as dead in another.
    """
    try:
        return f"{os.stat('/proc/self/ns/pid').st_ino:x}"
    except OSError:
        return ""


def started(pid: int) -> int | None:
    """Return the start of a process of this machine, in clock ticks since boot; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may contain anything; the 20th field after it is the start time.
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None
