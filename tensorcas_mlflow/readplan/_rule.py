"""The numbers by which a way of reading is chosen: measured defaults, or what was measured on this machine."""

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
    """When which way of reading is taken. The defaults are explained in ``docs/design/reading.md``."""

    threads_from_bytes: int = 1 << 20
    """Less than this is read by the calling thread alone, if some of it has to be decoded."""
    raw_threads_from_bytes: int = 3 << 20
    """The same where nothing has to be: then waking a thread costs what reading and hashing 1 MiB does."""
    least_chunk_bytes: int = 8 << 10
    """Chunks that are smaller on average are read by the calling thread alone too."""
    warm_read_bytes: int = 1 << 20
    """How much one thread reads at once of what is in memory: as much as its own cache holds, so that it is there still
    when it is decoded and hashed."""
    cold_read_bytes: int = SCRATCH_BYTES - 16 * PAGE_BYTES
    """How much one thread reads at once from the disk; many do. Direct reads bring up to two pages more."""
    gap_bytes: int = 16 << 10
    """Two chunks nearer than this are read together."""
    direct_from_bytes: int = 4 << 20
    """As much of one pack, if it is not in memory, is read past the page cache."""
    uses_ring: bool = False
    """Whether io_uring takes the place of threads for what is not in memory."""
    source: str = "measured by the authors; `tensorcas calibrate` measures this machine"
    """Where the numbers come from, in words."""

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
    """Keep a rule for this machine, in the folder of the chunk cache; later processes of this user follow it.

    Returns:
        The file; None where the environment allows no such folder.

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
    """The rule that was kept for this machine; the defaults where there is none, or none that can be read."""
    folder = config.cache_folder()
    if folder is None:
        return Rule()
    try:
        with open(folder / _FILE, "rb") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return Rule()  # it decides nothing but speed, and still is nobody else's to set
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
