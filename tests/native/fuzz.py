"""Calls of every entry of a compiled core with random and hostile arguments.

Run as ``python -m tests.native.fuzz CORE SECONDS SEED`` with the path of an extension that was built with sanitizers. A
module ``fuzz_*.py`` beside this one holds functions ``fuzz_*(core, rng)``. Each makes one call with arguments of its
own, and compares the result if the call succeeds. A call may raise ValueError, TypeError, OverflowError or BufferError.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

REFUSALS = (ValueError, TypeError, OverflowError, BufferError)
HOSTILE = (-1, 0, 1, 3, 7, 255, 256, 1 << 31, (1 << 32) + 1, 1 << 62, (1 << 63) - 1, -(1 << 63))


def number(rng: np.random.Generator, usual: Sequence[int]) -> int:
    """Return one of the usual numbers, and sometimes a hostile one."""
    among = HOSTILE if rng.integers(0, 12) == 0 else usual
    return among[rng.integers(0, len(among))]


def bytes_of(rng: np.random.Generator, most: int, *, exactly: bool = False) -> bytes:
    """Return random bytes of any length up to the given one, often a round one."""
    length = most if exactly else int(rng.integers(0, most + 1))
    if not exactly and rng.integers(0, 2):
        length -= length % 64
    return rng.bytes(length)


def load(path: str) -> ModuleType:
    """Load the extension from a file."""
    spec = importlib.util.spec_from_file_location("_core", path)
    assert spec is not None
    assert spec.loader is not None
    core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    return core


def entries() -> dict[str, Callable[[ModuleType, np.random.Generator], None]]:
    """Return the functions that make calls, by name."""
    found = {}
    for file in sorted(Path(__file__).parent.glob("fuzz_*.py")):
        module = importlib.import_module(f"tests.native.{file.stem}")
        found |= {f"{file.stem}.{name}": entry for name, entry in vars(module).items() if name.startswith("fuzz_")}
    return found


def main(path: str, seconds: str, seed: str) -> None:
    """Call the entries in turn until the time is over; print the number of calls that succeeded for each."""
    core, calls = load(path), entries()
    done = dict.fromkeys(calls, 0)
    end, turn = time.monotonic() + float(seconds), 0
    while time.monotonic() < end:
        for name, entry in calls.items():
            # Each call has a seed of its own, so that one that fails can be repeated.
            try:
                entry(core, np.random.default_rng([int(seed), turn]))
                done[name] += 1
            except REFUSALS:
                pass
            except BaseException:
                print(f"{name} fails with the seed [{seed}, {turn}]", file=sys.stderr)
                raise
        turn += 1
    print(f"{turn} turns;", ", ".join(f"{name}: {count}" for name, count in done.items()))
    assert all(done.values()), "an entry refused all of its calls"


if __name__ == "__main__":
    main(*sys.argv[1:])
