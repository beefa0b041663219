"""Several ways to do the same, timed in turns in this process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.harness._series import Series


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Turn:
    """What is timed, and what goes before and after it."""

    act: Callable[[], Any]
    """The only thing that is timed."""
    before: Callable[[], Any] = _nothing
    after: Callable[[Any], Any] = _nothing
    """Is given what ``act`` returned: to look at it, and to clear away."""


def interleave(turns: Mapping[str, Turn], n_rounds: int, *, n_warm: int = 1) -> dict[str, Series]:
    """Let each take its turn in every round, and give the seconds that each took.

    Each round begins with another one, and after as many rounds as there are names they go the other way round: nobody
    always follows the same neighbour, which may leave in the caches what it needs, and whatever else slows the machine
    meets all. Garbage is collected before a turn and not during it.

    Args:
        turns: By name.
        n_rounds: How many rounds count.
        n_warm: How many rounds go before them and do not: they fill caches and touch memory.

    Returns:
        Seconds by name, in the order of ``turns``.
    """
    names = list(turns)
    taken: dict[str, list[float]] = {name: [] for name in names}
    # What is there already stays: looking through it before each turn would take longer than most turns do.
    gc.collect()
    gc.freeze()
    try:
        for number in range(-n_warm, n_rounds):
            first = number % len(names)
            order = names[first:] + names[:first]
            for name in order if number // len(names) % 2 == 0 else reversed(order):
                seconds = _timed(turns[name])
                if number >= 0:
                    taken[name].append(seconds)
    finally:
        gc.unfreeze()
    return {name: Series(tuple(values)) for name, values in taken.items()}


def _timed(turn: Turn) -> float:
    turn.before()
    gc.collect()
    gc.disable()
    try:
        begin = time.perf_counter()
        result = turn.act()
        seconds = time.perf_counter() - begin
    finally:
        gc.enable()
    turn.after(result)
    return seconds
