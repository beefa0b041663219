from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import wait

import pytest

from tensorcas_mlflow.base import config, threads


@pytest.fixture(params=["1", "3"])
def n_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("TENSORCAS_THREADS", request.param)
    return int(request.param)


def test_results_come_in_the_order_of_the_items(n_threads: int) -> None:
    def slow_for_small(n: int) -> int:
        time.sleep(0.001 * (5 - n % 5))
        return n * n

    assert list(threads.ordered_map(slow_for_small, range(40))) == [n * n for n in range(40)]


def test_items_are_drawn_only_as_results_are_taken(n_threads: int) -> None:
    drawn: list[int] = []

    def items():  # type: ignore[no-untyped-def]
        for n in range(1_000):
            drawn.append(n)
            yield n

    results = threads.ordered_map(str, items(), window=4)
    next(results)

    assert len(drawn) <= 5


@pytest.fixture
def no_thread_is_free(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TENSORCAS_THREADS", "3")
    end = threading.Event()
    busy = [threads._shared_pool().submit(end.wait) for _ in range(3)]
    yield
    end.set()
    wait(busy)


def test_caller_runs_the_items_that_no_thread_has_begun(no_thread_is_free: None) -> None:
    done_in = list(threads.ordered_map(lambda _: threading.current_thread(), range(20)))

    assert set(done_in) == {threading.current_thread()}


def test_pool_keeps_no_item_that_the_caller_has_run(no_thread_is_free: None) -> None:
    class Item:
        pass

    seen: list[weakref.ref[Item]] = []

    def items() -> Iterator[Item]:
        for _ in range(20):
            item = Item()
            seen.append(weakref.ref(item))
            yield item
            del item

    for _ in threads.ordered_map(id, items()):
        pass

    assert [each() for each in seen] == [None] * 20


def test_error_of_an_item_is_raised_at_its_place(n_threads: int) -> None:
    def fail_at_3(n: int) -> int:
        if n >= 3:
            raise KeyError(n)
        return n

    results = threads.ordered_map(fail_at_3, range(100))

    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="3"):
        next(results)


def test_nothing_is_under_way_once_an_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORCAS_THREADS", "4")
    under_way = [0]
    lock = threading.Lock()

    def work(n: int) -> None:
        with lock:
            under_way[0] += 1
        try:
            if n == 0:
                raise OSError(n)
            time.sleep(0.05)
        finally:
            with lock:
                under_way[0] -= 1

    with pytest.raises(OSError, match="0"):
        threads.run_all(work, range(8))

    assert under_way == [0]


def test_an_abandoned_map_leaves_the_pool_usable(n_threads: int) -> None:
    results = threads.ordered_map(str, range(1_000))
    next(results)
    del results

    assert list(threads.ordered_map(str, range(3))) == ["0", "1", "2"]


def meet_in_pairs() -> None:
    """Do what one thread alone never gets done."""
    barrier = threading.Barrier(2)

    def meet(_: int) -> None:
        barrier.wait(10)

    threads.run_all(meet, range(2))


def test_a_forked_child_gets_a_pool_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORCAS_THREADS", "3")
    meet_in_pairs()

    child = os.fork()
    if child == 0:
        meet_in_pairs()
        os._exit(0)

    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child waits for threads that are not there")
    assert status == 0


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5", "²"])
def test_invalid_number_of_threads_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TENSORCAS_THREADS", value)

    with pytest.raises(ValueError, match=r"²|TENSORCAS_THREADS"):
        config.n_threads()


def test_every_item_is_done_once_when_all_are_run(n_threads: int) -> None:
    done: list[int] = []
    threads.run_all(done.append, range(500))

    assert sorted(done) == list(range(500))


def test_the_caller_takes_part_when_all_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORCAS_THREADS", "2")
    done_by: set[int] = set()
    meet = threading.Barrier(2)

    def note(item: int) -> None:
        meet.wait(10)
        done_by.add(threading.get_ident())

    threads.run_all(note, range(2))

    assert len(done_by) == 2
    assert threading.get_ident() in done_by


def test_the_error_of_the_first_item_is_raised_when_all_are_run(n_threads: int) -> None:
    under_way = 0
    lock = threading.Lock()

    def fail_late(item: int) -> None:
        nonlocal under_way
        with lock:
            under_way += 1
        time.sleep(0.01 if item == 3 else 0.001)
        with lock:
            under_way -= 1
        if item in (3, 4):
            raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item 3"):
        threads.run_all(fail_late, range(100))
    assert under_way == 0
    threads.run_all(lambda item: None, range(10))


def test_an_error_of_the_items_themselves_is_raised_when_all_are_run(n_threads: int) -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        threads.run_all(lambda item: None, items())


def test_an_interrupt_is_not_lost_behind_the_failure_of_an_earlier_item(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORCAS_THREADS", "2")
    main, helpers, interrupted = threading.get_ident(), list[int](), threading.Event()

    def work(item: int) -> None:
        if threading.get_ident() != main:
            helpers.append(item)
            assert interrupted.wait(10)
            raise OSError(str(item))
        if helpers and item > helpers[0]:
            interrupted.set()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        threads.run_all(work, itertools.count())

    assert helpers != []


def test_an_interrupt_leaves_no_lock_taken() -> None:
    lock = threads.Lock()
    n_interrupts = 0

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        while n_interrupts < 200:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0003)
                while True:
                    with lock:
                        pass
            except KeyboardInterrupt:
                n_interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    taken: list[bool] = []
    other = threading.Thread(target=lambda: taken.append(lock.acquire(timeout=5)))
    other.start()
    other.join()

    assert taken == [True]


def test_a_lock_that_another_thread_holds_is_open_in_a_forked_child() -> None:
    lock, held, done = threads.Lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(10)
    child = os.fork()
    if child == 0:
        os._exit(0 if lock.acquire(timeout=5) else 1)
    _, status = os.waitpid(child, 0)
    done.set()
    holder.join()

    assert status == 0


def test_jobs_run_in_their_caller_if_the_first_pool_is_wanted_at_the_end_of_the_interpreter() -> None:
    script = """
import atexit
from tensorcas_mlflow.base import threads

def last():
    print(*threads.ordered_map(str, [1, 2]))
    threads.run_all(print, [3, 4])

atexit.register(last)
"""
    environment = os.environ | {"TENSORCAS_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)

    assert (done.stdout.split(), done.stderr) == (["1", "2", "3", "4"], "")
