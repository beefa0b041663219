"""Choice of the thread of each save, from the times of steps."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tensorcas_mlflow.integration.checkpoints._pace import Pace

StepOf = Callable[[int, bool], float]
"""Returns the time of a step, given its number and whether its save runs in the caller."""


def ways(step_s: StepOf, n_steps: int) -> list[bool]:
    """Return for each save of a loop whether it runs in the caller."""
    pace, now_s, found = Pace(), 0.0, []
    for number in range(n_steps):
        found.append(pace.next(now_s))
        now_s += step_s(number, found[-1])
    return found


def test_loop_of_saves_alone_soon_saves_in_its_caller() -> None:
    found = ways(lambda _, is_here: 6.2 if is_here else 9.5, 1_000)

    assert sum(found[60:150]) > 0.9 * 90
    assert sum(found[150:]) > 0.95 * 850


@pytest.mark.parametrize(("on_thread", "in_caller"), [(20, 25), (26, 46), (8.5, 11), (102, 107), (8, 8)])
def test_loop_that_works_between_saves_keeps_the_thread(on_thread: float, in_caller: float) -> None:
    found = ways(lambda _, is_here: in_caller if is_here else on_thread, 1_000)

    assert sum(found) <= 40
    assert sum(found[500:]) <= 12


def test_loop_whose_saves_make_a_few_steps_much_longer_saves_in_its_caller() -> None:
    drawn = random.Random(0)

    def step_s(_: int, is_here: bool) -> float:
        return 6.2 if is_here else 5.5 if drawn.random() < 0.7 else 15

    assert sum(ways(step_s, 1_000)[200:]) > 0.9 * 800


def test_saves_return_to_the_thread_when_the_loop_begins_to_work() -> None:
    def step_s(number: int, is_here: bool) -> float:
        if number < 500:
            return 6.2 if is_here else 9.5
        return 107 if is_here else 102

    found = ways(step_s, 1_000)

    assert sum(found[400:500]) > 90
    assert sum(found[800:]) < 20


def test_rare_long_steps_change_nothing() -> None:
    def step_s(number: int, is_here: bool) -> float:
        return (25 if is_here else 20) + (500 if number % 10 == 0 else 0)

    assert sum(ways(step_s, 1_000)) <= 60


def test_noise_makes_no_choice_flap() -> None:
    noise = random.Random(0)
    found = ways(lambda _, is_here: (6.2 if is_here else 9.5) * noise.lognormvariate(0, 0.4), 2_000)

    assert sum(found) > 0.9 * 2_000


def test_noise_costs_a_loop_that_works_between_saves_little() -> None:
    noise = random.Random(0)
    found = ways(lambda _, is_here: (25 if is_here else 20) * noise.lognormvariate(0, 0.4), 2_000)

    assert sum(found) < 0.1 * 2_000
