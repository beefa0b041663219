"""Schedules: all of them within a bound, random ones, and ones written down."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.protocol.interleave import (
    NO_MEANINGS,
    Actor,
    Blobs,
    Decision,
    Kill,
    Meaning,
    Program,
    PrunedError,
    Run,
    View,
)

EVERY = 1
"""Of so many interruptions an exploration within a bound tries one, drawn from a fixed seed."""


@dataclass(slots=True)
class Exploration:
    """Result of an exploration."""

    n_schedules: int = 0
    """Runs, also those that ended where another had been."""
    n_states: int = 0
    n_complete: int = 0
    """Runs to the end."""
    failure: str | None = None
    trace: list[str] = field(default_factory=list)
    is_exhausted: bool = False
    """True if the exploration covered every schedule within the bound, or the sample for which `EVERY` asks."""

    def __str__(self) -> str:
        text = f"{self.n_schedules} schedules, {self.n_complete} to the end, {self.n_states} states"
        return text if self.failure is None else "\n".join([text, self.failure, *self.trace])


def explore(
    blobs: Blobs,
    programs: Mapping[str, Program],
    check: Callable[[Run], str | None],
    *,
    max_preemptions: int | None,
    deaths: Sequence[str] = (),
    max_schedules: int = 1_000_000,
    view: View | None = None,
    is_remote: bool = False,
    meanings: Mapping[str, Meaning] = NO_MEANINGS,
) -> Exploration:
    """Try all schedules with few preemptions, those with the fewest first, until one fails.

    Args:
        blobs: What the backend holds at the start.
        programs: By actor.
        check: Looks at a run that went to the end; returns what is wrong.
        max_preemptions: How often an actor that could go on may be interrupted. A death counts as one. None is without
            bound: then what is checked may depend on what each actor has seen, and not only on the blobs.
        deaths: Actors that may die at any call.
        max_schedules: Where to stop in any case.
        view: What the actors see of the backend, if not all there is.
        is_remote: Whether the backend is one of a remote store.
        meanings: See `Run`. What is checked may depend on a blob's meaning, and not on its bytes.
    """
    found = Exploration()
    seen: set[int] = set()
    checked: set[int] = set()
    levels: list[list[list[int]]] = [[[]], *([] for _ in range(max_preemptions or 0))]
    is_bounded = max_preemptions is not None
    draw = random.Random(0)
    for level, waiting in enumerate(levels):
        while waiting:
            if found.n_schedules >= max_schedules:
                return found
            prefix = waiting.pop()
            found.n_schedules += 1
            try:
                chooser = _Branching(prefix, seen, level, levels, frozenset(deaths), draw, is_bounded=is_bounded)
                run = Run(blobs, programs, chooser, view=view, is_remote=is_remote, meanings=meanings)
            except PrunedError:
                continue
            finally:
                found.n_states = len(seen)
            found.n_complete += 1
            end = run.content if is_bounded else run.state(None)
            if end in checked and not run.errors():
                continue
            found.failure = check(run)
            if found.failure is not None:
                found.trace = run.trace
                return found
            checked.add(end)
    found.is_exhausted = True
    return found


class _Branching:
    """Follows a prefix, then goes straight on, noting every turn that could have been taken instead."""

    def __init__(
        self,
        prefix: list[int],
        seen: set[int],
        level: int,
        levels: list[list[list[int]]],
        deaths: frozenset[str],
        draw: random.Random,
        *,
        is_bounded: bool,
    ) -> None:
        self._draw = draw
        self._prefix = prefix
        self._seen = seen
        self._level = level
        self._levels = levels
        self._deaths = deaths
        self._is_bounded = is_bounded
        self._taken: list[int] = []

    def __call__(self, run: Run, current: Actor | None) -> Decision:
        step = len(self._taken)
        if step < len(self._prefix):
            number = self._prefix[step]
            self._taken.append(number)
            if number >= 0:
                return run.actors[number]
            assert current is not None
            return Kill(current)
        state = run.state(current if self._is_bounded or self._deaths else None)
        if state in self._seen:
            raise PrunedError
        self._seen.add(state)
        able = [actor for actor in run.actors if actor.can_run]
        chosen = able[0] if current is None else current
        costs = 0 if current is None or not self._is_bounded else 1
        if self._level + costs < len(self._levels):
            others = [actor.number for actor in able if actor is not chosen]
            if current is not None and current.name in self._deaths:
                others.append(-1)
            if costs:
                others = [number for number in others if self._draw.random() * EVERY < 1]
            for number in others:
                self._levels[self._level + costs].append([*self._taken, number])
        self._taken.append(chosen.number)
        return chosen


class RandomWalk:
    """A seeded random schedule."""

    def __init__(self, seed: int, *, deaths: Sequence[str] = ()) -> None:
        self.random = random.Random(seed)
        self._switch = self.random.choice([0.02, 0.1, 0.3, 0.6])
        self._die = self.random.choice([0.0, 0.0, 0.02])
        self._deaths = frozenset(deaths)

    def __call__(self, run: Run, current: Actor | None) -> Decision:
        if current is not None:
            if current.name in self._deaths and self.random.random() < self._die:
                return Kill(current)
            if self.random.random() >= self._switch:
                return current
        return self.random.choice([actor for actor in run.actors if actor.can_run])


class Script:
    """A schedule in words: who runs, up to which call (not including it). Who is not at its end then dies."""

    def __init__(self, *steps: tuple[str, str]) -> None:
        """Write a schedule.

        Args:
            steps: An actor, and how the call begins before which it is stopped ("" for going on to its end).
        """
        self._steps = list(steps)

    def __call__(self, run: Run, current: Actor | None) -> Decision:
        actors = {actor.name: actor for actor in run.actors}
        while self._steps:
            name, until = self._steps[0]
            actor = actors[name]
            if actor.can_run and not (until and actor.pending.startswith(until)):
                return actor
            assert actor.done == (not until), f"{name} never came to {until!r}"
            self._steps.pop(0)
        return Kill(next(actor for actor in run.actors if actor.can_run))
