"""Engines: new processes of this machine, and a cluster of Ray on it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tensorcas_mlflow.base import config
from tensorcas_mlflow.base.engines import MOST_DEATHS, Engine, LocalProcesses, in_order, map_in_order, open_engine
from tensorcas_mlflow.errors import BackendError, StarvedError
from tests.engines import cluster_of_two

ENGINES = [
    pytest.param("local", id="local processes"),
    pytest.param("ray", id="ray", marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with cluster_of_two(request.param) as engine:
        yield engine


def square(number: int) -> int:
    return number * number


def process_of(number: int) -> tuple[int, int]:
    time.sleep(0.05)
    return os.getpid(), config.n_threads()


def die_at_first(folder: Path, number: int, *, deaths: int = 1) -> int:
    """Kill this process the first times it is asked for the number 3."""
    died = len(list(folder.iterdir()))
    if number == 3 and died < deaths:
        (folder / str(died)).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def fail_at(wanted: int, number: int) -> int:
    if number == wanted:
        raise BackendError("read", "packs/a.pack", "no such disk")
    time.sleep(0.01)
    return number


class ObstinateError(Exception):
    """Error that cannot be sent to another process."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def fail_obstinately(number: int) -> int:
    raise ObstinateError(number, number)


def make_a_function(number: int) -> object:
    return lambda: number


@pytest.mark.long
def test_engine_applies_a_function_to_every_item(engine: Engine) -> None:
    found = list(engine.map(square, range(20)))

    assert sorted(found) == [(number, number * number) for number in range(20)]
    assert list(in_order(found)) == [number * number for number in range(20)]
    assert list(engine.map(square, [])) == []


@pytest.mark.long
def test_engine_works_in_other_processes_that_share_the_cores(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORCAS_THREADS", "2")
    found = [each for _, each in engine.map(process_of, range(20))]

    assert engine.n_workers == 2
    assert len({process for process, _ in found}) == 2
    assert os.getpid() not in {process for process, _ in found}
    assert {n_threads for _, n_threads in found} == {1}


@pytest.mark.long
def test_item_of_a_worker_that_dies_is_tried_again(engine: Engine, tmp_path: Path) -> None:
    found = sorted(engine.map(partial(die_at_first, tmp_path), range(6)))

    assert found == [(number, number) for number in range(6)]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.long
def test_item_that_kills_every_worker_is_given_up(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(StarvedError, match="a part of the work"):
        list(engine.map(partial(die_at_first, tmp_path, deaths=1000), range(6)))

    assert len(list(tmp_path.iterdir())) >= MOST_DEATHS


@pytest.mark.long
def test_error_of_a_call_is_raised_as_it_is(engine: Engine) -> None:
    with pytest.raises(BackendError, match="no such disk") as caught:
        list(engine.map(partial(fail_at, 4), range(1000)))

    assert caught.value.key == "packs/a.pack"
    assert "fail_at" in caught.value.__notes__[0]


@pytest.mark.long
def test_error_that_cannot_be_sent_is_told_in_words(engine: Engine) -> None:
    with pytest.raises(RuntimeError, match="ObstinateError: 5 and 5"):
        list(engine.map(fail_obstinately, [5]))


@pytest.mark.long
def test_items_are_drawn_as_workers_become_free(engine: Engine) -> None:
    drawn: list[int] = []

    def items() -> Iterator[int]:
        for number in range(40):
            drawn.append(number)
            yield number

    results = engine.map(square, items())
    next(results)

    assert len(drawn) <= 8
    assert len(list(results)) == 39


def slow_at_first(number: int) -> int:
    time.sleep(0.2 if number == 0 else 0)
    return number


@pytest.mark.long
def test_results_come_in_the_order_of_the_items_and_few_are_held(engine: Engine) -> None:
    drawn: list[int] = []

    def items() -> Iterator[int]:
        for number in range(20):
            drawn.append(number)
            yield number

    results = map_in_order(engine, slow_at_first, items())
    first = next(results)

    assert first == 0
    assert len(drawn) <= 4
    assert list(results) == list(range(1, 20))


@pytest.mark.long
def test_kept_processes_work_for_several_calls_and_end_then() -> None:
    engine = LocalProcesses(2)
    with engine.kept():
        first = {process for _, (process, _) in engine.map(process_of, range(8))}
        second = {process for _, (process, _) in engine.map(process_of, range(8))}

    assert second == first
    for process in first:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


@pytest.mark.long
def test_process_that_dies_while_it_is_kept_is_replaced(tmp_path: Path) -> None:
    engine = LocalProcesses(1)
    with engine.kept():
        [(_, (process, _))] = engine.map(process_of, [0])
        os.kill(process, signal.SIGKILL)

        assert list(engine.map(square, [3])) == [(0, 9)]


def test_result_that_cannot_be_sent_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="cannot be sent"):
        list(LocalProcesses(1).map(make_a_function, [1]))


@pytest.mark.long
def test_no_process_is_left_when_a_caller_stops() -> None:
    results = LocalProcesses(2).map(process_of, range(100))
    _, (process, _) = next(results)
    results.close()  # type: ignore[attr-defined]

    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_engine_is_chosen_by_its_name() -> None:
    chosen = open_engine("local", 3)

    assert isinstance(chosen, LocalProcesses)
    assert chosen.n_workers == 3
    assert open_engine("local") is open_engine("local", 1) is None
    with pytest.raises(ValueError, match="there is no engine 'spark'"):
        open_engine("spark")
    with pytest.raises(ValueError, match="--jobs"):
        open_engine("ray", 2)
    with pytest.raises(ValueError, match="from 1 on"):
        open_engine("local", 0)
