"""Work that goes on after a call has returned."""

from __future__ import annotations

import dis
import functools
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.threads import Background


def test_jobs_are_done_in_order_by_one_thread() -> None:
    background = Background("test")
    done: list[tuple[int, int]] = []

    def job(number: int) -> None:
        time.sleep(0.001 * (number % 3))
        done.append((number, threading.get_ident()))

    for number in range(20):
        background.submit(lambda number=number: job(number))
    background.wait()

    assert [number for number, _ in done] == list(range(20))


def test_a_job_may_be_given_while_another_ends() -> None:
    background = Background("test")
    futures = [background.submit(lambda number=number: number) for number in range(2_000)]

    assert [background.result(future) for future in futures] == list(range(2_000))
    background.wait()


def test_job_for_later_begins_at_its_time() -> None:
    background = Background("test")
    begin_s = time.monotonic() + 0.2

    begun = background.submit(time.monotonic, begin_s=lambda: begin_s).result(10)

    assert begun >= begin_s


def test_job_for_later_begins_at_once_if_somebody_waits() -> None:
    background = Background("test")
    begun = time.monotonic()
    background.submit(lambda: None, begin_s=lambda: begun + 60)
    background.wait()

    assert time.monotonic() - begun < 30


def test_job_for_later_does_not_keep_an_interpreter_from_ending() -> None:
    code = """
import time
from tensorcas_mlflow.base.threads import Background
Background("test").submit(lambda: print("done"), begin_s=lambda: time.monotonic() + 60)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50)

    assert ended.stdout == "done\n"


def test_each_error_of_a_background_job_is_raised_once() -> None:
    background = Background("test")

    def fail(text: str) -> None:
        raise ValueError(text)

    background.submit(lambda: fail("one"))
    background.submit(lambda: fail("two"))

    for text in ("one", "two"):
        with pytest.raises(ValueError, match=text):
            background.wait()
    background.wait()


def test_a_job_is_done_here_and_now_if_no_thread_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    background = Background("test")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        future = background.submit(threading.get_ident)
        assert future.result(0) == threading.get_ident()

    assert background.result(background.submit(threading.get_ident)) != threading.get_ident()


def test_job_runs_in_its_giver_if_asked_to() -> None:
    background = Background("test")
    future = background.submit(threading.get_ident, runs_here=True)

    assert future.done()
    assert background.result(future) == threading.get_ident()


def test_error_of_a_job_that_ran_in_its_giver_is_raised_where_somebody_waits() -> None:
    background = Background("test")
    background.submit(lambda: [].pop(), runs_here=True)

    with pytest.raises(IndexError):
        background.wait()
    background.wait()


def test_job_does_not_run_in_its_giver_before_an_earlier_one() -> None:
    background = Background("test")
    go_on = threading.Event()
    done: list[int] = []
    background.submit(lambda: done.append(1) if go_on.wait(30) else None)
    background.submit(lambda: done.append(2), runs_here=True)
    assert done == []

    go_on.set()
    background.wait()
    assert done == [1, 2]


def test_jobs_do_not_overlap_if_one_runs_in_its_giver() -> None:
    background = Background("test")
    began, go_on = threading.Event(), threading.Event()
    done: list[int] = []

    def first() -> None:
        began.set()
        assert go_on.wait(30)
        done.append(1)

    giver = threading.Thread(target=lambda: background.submit(first, runs_here=True))
    giver.start()
    assert began.wait(30)
    second = background.submit(lambda: done.append(2))
    with pytest.raises(TimeoutError):
        second.result(0.1)
    go_on.set()
    background.wait()
    giver.join(30)

    assert done == [1, 2]


def test_a_job_whose_giver_was_interrupted_is_done_when_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: threading.Thread) -> None:
        raise KeyboardInterrupt

    background = Background("test")
    done: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            background.submit(lambda: done.append(1))
    waiter = threading.Thread(target=background.wait, daemon=True)
    waiter.start()
    waiter.join(10)

    assert not waiter.is_alive()
    assert done == [1]


@pytest.mark.parametrize("runs_here", [True, False])
def test_job_that_waits_for_itself_is_refused(runs_here: bool) -> None:
    background = Background("test")
    background.submit(background.wait, runs_here=runs_here)

    with pytest.raises(RuntimeError, match="in a signal handler, set a flag"):
        background.wait()
    assert background.result(background.submit(lambda: 7, runs_here=runs_here)) == 7


def test_an_interrupt_between_any_two_calls_leaves_no_job_that_is_waited_for_forever() -> None:
    for n_calls in itertools.count(1):
        background = Background("test")
        done: list[int] = []
        was_interrupted = interrupted_after(n_calls, background, functools.partial(done.append, 1))
        waiter = threading.Thread(target=background.wait, daemon=True)
        waiter.start()
        waiter.join(10)

        assert not waiter.is_alive()
        assert background.result(background.submit(lambda: 7, runs_here=True)) == 7
        assert len(done) <= 1
        if not was_interrupted:
            assert done == [1]
            break
    assert n_calls > 10


def interrupted_after(n_calls: int, background: Background, job: Callable[[], object]) -> bool:
    """Run a job in its giver, and interrupt it where Python looks for signals: at calls, and jumps back.

    Returns:
        False if there are fewer of these places.
    """
    n_left = n_calls
    before = ""

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal n_left, before
        if frame.f_code.co_filename != threads.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            n_left -= before in ("CALL", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD")
            before = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if n_left == 0:
                n_left = -1
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        background.submit(job, runs_here=True)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_an_interrupt_of_a_job_done_here_and_now_is_raised_here_and_now() -> None:
    background = Background("test")
    background.end()

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        background.submit(interrupted)

    background.wait()
    assert background.result(background.submit(lambda: 7)) == 7


def test_a_thread_that_has_nothing_to_do_takes_the_next_job() -> None:
    background = Background("test")
    first = background.result(background.submit(threading.current_thread))

    assert background.result(background.submit(threading.current_thread)) is first


def test_an_interpreter_does_not_wait_for_a_thread_that_waits_for_jobs() -> None:
    program = (
        "from tensorcas_mlflow.base.threads import Background\n"
        "Background._LINGERS_S = 60\n"
        "background = Background('test')\n"
        "background.result(background.submit(int))\n"
    )

    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
