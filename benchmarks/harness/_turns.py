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
    """A timed action, with the untimed ones before and after it."""

    act: Callable[[], Any]
    """The timed action."""
    before: Callable[[], Any] = _nothing
    after: Callable[[Any], Any] = _nothing
    """Gets the result of ``act``, to check it and clean up."""


def interleave(turns: Mapping[str, Turn], n_rounds: int, *, n_warm: int = 1) -> dict[str, Series]:
    """Run each turn once in every round, and return their times in seconds.

    Each round starts with another turn, and after as many rounds as there are turns the order is reversed. So no turn
    always follows the same neighbour, with its favourable caches, and disturbances of the machine affect all. Garbage
    is collected before a turn and not during it.

    Args:
        turns: By name.
        n_rounds: How many rounds count.
        n_warm: How many rounds go before them and do not: they fill caches and touch memory.

    Returns:
        Seconds by name, in the order of ``turns``.
    """
    names = list(turns)
    taken: dict[str, list[float]] = {name: [] for name in names}
    # Existing objects are frozen: collecting them before each turn would take longer than most turns.
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
