"""A long call of the core looks for signals: Ctrl-C ends it, and a handler that returns does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow import native
from tests.native.interrupted import WAYS, decoding

HANG_S = 60
MOST_S = 1.5
ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_interrupt_ends_a_long_call_of_the_core_within_a_second(way: str, n_threads: int) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.native.interrupted", way, str(n_threads)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    assert float(done.stdout) < MOST_S


def test_call_goes_on_after_a_handler_that_returns() -> None:
    pieces, handled, core = [bytes(16 << 20)] * 60, [], native.core
    out, again = bytearray(60 * 32), bytearray(32)

    def handle(*_: object) -> None:
        # A handler may call the core too, in the middle of the other call.
        core.hash_each([b"abc"], again, 1)
        handled.append(time.monotonic())

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        core.hash_each(pieces, out, 2)
        over = time.monotonic()
        timer.join()
        time.sleep(0.01)
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert bytes(out) == core.digest(pieces[0]) * 60
    assert bytes(again) == core.digest(b"abc")
    assert handled
    assert handled[0] < over


def test_thread_of_the_pool_serves_other_calls_after_one_that_was_stopped() -> None:
    call = decoding(3)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        signal.signal(signal.SIGINT, before)
    out = bytearray(300 * 32)
    native.core.hash_each([np.full(1 << 20, 1, np.uint8)] * 300, out, 3)

    assert bytes(out) == native.core.digest(bytes([1]) * (1 << 20)) * 300
