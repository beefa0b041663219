"""The rule for choosing a way to read: measured defaults, or measurements of this machine."""

from __future__ import annotations

import json
import os
import platform
import uuid
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from tensorcas_mlflow import config
from tensorcas_mlflow.backends import PAGE_BYTES, SCRATCH_BYTES

_FILE = "reading.json"
_FORMAT = 1
_MOST_BYTES = 64 * 1024
_NEVER = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Thresholds of the ways of reading. ``docs/design/reading.md`` explains the defaults."""

    threads_from_bytes: int = 1 << 20
    """Less than this is read by the calling thread alone, if some of it needs decoding."""
    raw_threads_from_bytes: int = 3 << 20
    """The same if nothing needs decoding: then waking a thread costs as much as reading and hashing 1 MiB."""
    least_chunk_bytes: int = 8 << 10
    """Chunks smaller than this on average are read by the calling thread alone too."""
    warm_read_bytes: int = 1 << 20
    """Size of one thread's reads from memory: small enough to stay in its core's cache until decoding and
    hashing."""
    cold_read_bytes: int = SCRATCH_BYTES - 16 * PAGE_BYTES
    """Size of one thread's reads from the disk; many are under way. Direct reads fetch up to two pages more."""
    gap_bytes: int = 16 << 10
    """Chunks nearer to each other than this are read together."""
    direct_from_bytes: int = 4 << 20
    """From this size on, the wanted bytes of one pack outside of memory are read past the page cache."""
    uses_ring: bool = False
    """Whether io_uring replaces threads for data outside of memory."""
    source: str = "measured by the authors; `tensorcas calibrate` measures this machine"
    """Origin of the numbers, in words."""

    def __post_init__(self) -> None:
        for name in (
            "threads_from_bytes",
            "raw_threads_from_bytes",
            "least_chunk_bytes",
            "warm_read_bytes",
            "cold_read_bytes",
            "gap_bytes",
            "direct_from_bytes",
        ):
            if not 0 <= getattr(self, name) <= _NEVER:
                raise ValueError(f"a rule's {name} is not {getattr(self, name)}")
        if not min(self.warm_read_bytes, self.cold_read_bytes) >= 64 << 10:
            raise ValueError("a rule's reads have 64 KiB or more")
        if max(self.warm_read_bytes, self.cold_read_bytes) > 2 << 20:
            raise ValueError("a rule's reads have at most 2 MiB: many are under way at once, and memory is bounded")


NEVER_DIRECT = _NEVER
"""For `Rule.direct_from_bytes`: no read is so long."""


def keep_rule(rule: Rule) -> Path | None:
    """Store a rule for this machine, in the folder of the chunk cache; later processes of this user follow it.

    Returns:
        The file; None if the environment allows no such folder.

    Raises:
        OSError: It cannot be written.
    """
    folder = config.cache_folder()
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _FILE
    staging = folder / f"{_FILE}.{uuid.uuid4().hex}"
    staging.write_text(json.dumps({"format": _FORMAT, "machine": platform.node(), "rule": asdict(rule)}) + "\n")
    staging.replace(path)
    rule_of_machine.cache_clear()
    return path


@lru_cache(maxsize=1)
def rule_of_machine() -> Rule:
    """Return the stored rule of this machine; the defaults if there is none, or only an unreadable one."""
    folder = config.cache_folder()
    if folder is None:
        return Rule()
    try:
        with open(folder / _FILE, "rb") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return Rule()  # it affects nothing but speed, yet no other user may set it
            said = json.loads(file.read(_MOST_BYTES))
        if said["format"] != _FORMAT or said["machine"] != platform.node():
            return Rule()
        return Rule(**_checked(said["rule"]))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return Rule()


def _checked(said: dict[str, Any]) -> dict[str, Any]:
    defaults = Rule()
    known = {field.name: getattr(defaults, field.name) for field in fields(Rule)}
    for name, value in said.items():
        if type(value) is not type(known[name]):
            raise ValueError(f"a rule's {name} is not {value!r:.100}")
    return said
