"""What process ids mean on this machine."""

from __future__ import annotations

import os


def pid_space() -> str:
    """Name the processes of this machine that see each other under the ids this one sees; empty where all do.

    Containers may share the name of their machine and its boot, and count their processes apart: what is alive in one
    would be taken for dead in another.
    """
    try:
        return f"{os.stat('/proc/self/ns/pid').st_ino:x}"
    except OSError:
        return ""


def started(pid: int) -> int | None:
    """When a process of this machine began, in clock ticks since boot; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may hold anything; the 20th field after it is the start time.
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None
