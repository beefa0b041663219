"""Processes that die or work at once in one bucket lose nothing, and what has arrived is not sent again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess

import pytest

from tensorcas_mlflow.maintenance import plan_gc, verify
from tensorcas_mlflow.store import Store, _save
from tests.backends.objects import crowd
from tests.backends.objects.proxy import Proxy
from tests.backends.objects.relay import Link
from tests.backends.objects.requests_seen import Kind
from tests.backends.objects.servers import S3Server
from tests.backends.objects.trials import Place, Trials, model_of, reach

pytestmark = pytest.mark.long

N_TENSORS, TENSOR_BYTES = 24, 100_000
PACK_BYTES = 3 * TENSOR_BYTES
MODEL_BYTES = N_TENSORS * TENSOR_BYTES
END_S = 90

_context = get_context("spawn")


@pytest.fixture
def place(s3: S3Server, way: Proxy, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Place:
    """An empty store, at the end of a slow way."""
    reach(s3.at(way.endpoint), monkeypatch)
    way.shape(Link(latency_s=0.01, up_bytes_per_s=4e6))
    return Trials(s3, way, bucket).place()


def uri_of(place: Place) -> str:
    return f"tensorcas-s3://{place.bucket}/{place.prefix}"


def started(target: Callable[..., None], *args: object) -> BaseProcess:
    process = _context.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def wait_until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + END_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def kill_at(place: Place, n_sent: int) -> None:
    """Kill a process that saves a model when so many bytes of its packs are on their way."""
    process = started(
        crowd.save_in_packs, uri_of(place), model_of(0, n_tensors=N_TENSORS, n_bytes=TENSOR_BYTES), PACK_BYTES
    )
    try:
        wait_until(lambda: sent_bytes(place) >= n_sent or not process.is_alive())
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.join()


def sent_bytes(place: Place) -> int:
    return sum(it.up_bytes for it in place.way.traffic().of(Kind.PUT).exchanges if "/packs/" in it.path)


@pytest.mark.parametrize(
    "part",
    [0.3, 0.8, *(pytest.param(n / 10, marks=pytest.mark.long) for n in (0, 1, 2, 4, 5, 6, 7, 9))],
)
def test_packs_that_arrived_before_a_kill_are_not_sent_again(
    place: Place, part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_save, "TARGET_BYTES", PACK_BYTES)
    kill_at(place, int(part * MODEL_BYTES))
    time.sleep(0.2)  # what the dead process had sent arrives
    arrived = sum(info.size for info in place.direct().backend.list("packs"))
    place.way.shape(Link())
    place.way.forget()
    place.keep(place.through(), 0, model_of(0, n_tensors=N_TENSORS, n_bytes=TENSOR_BYTES))

    assert arrived >= part * MODEL_BYTES - 2 * PACK_BYTES
    assert sent_bytes(place) <= MODEL_BYTES - arrived + 20_000
    place.check()


def crowded(place: Place, n_savers: int, n_collectors: int, seconds: float) -> tuple[Store, dict[int, list[int]], int]:
    """Let processes save, drop and collect at once; gives the steps that must be there, and how many packs went."""
    ours, theirs = zip(*(_context.Pipe() for _ in range(n_savers + n_collectors)), strict=True)
    jobs = [(crowd.save_and_drop, uri_of(place), seed, seconds) for seed in range(n_savers)]
    jobs += [(crowd.collect, uri_of(place), seconds) for _ in range(n_collectors)]  # type: ignore[misc]
    processes = [started(target, *args, pipe) for (target, *args), pipe in zip(jobs, theirs, strict=True)]
    for process in processes:
        process.join(END_S)
    assert [process.exitcode for process in processes] == [0] * len(processes)
    reports = [pipe.recv() for pipe in ours]
    kept = {seed: steps for seed, steps in reports if seed is not None}
    return place.direct(), kept, sum(counts[0] for seed, counts in reports if seed is None)


@pytest.mark.parametrize(
    ("n_savers", "n_collectors", "seconds"), [(2, 1, 3.0), pytest.param(4, 2, 12.0, marks=pytest.mark.long)]
)
def test_nothing_is_lost_while_many_save_and_drop_and_others_collect(
    place: Place, n_savers: int, n_collectors: int, seconds: float
) -> None:
    place.way.shape(Link(latency_s=0.002))
    store, kept, n_deleted = crowded(place, n_savers, n_collectors, seconds)
    plan_gc(store, grace_s=0).execute()

    assert n_deleted > 0
    assert sum(map(len, kept.values())) > n_savers
    assert crowd.lost(place.direct(), kept) == []
    assert verify(place.direct()).problems == ()
    assert list(store.backend.list("intents")) == []
