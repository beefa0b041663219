"""Work in the background of a server."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from tensorcas_mlflow.errors import BackendError
from tensorcas_mlflow.integration.server_app import _jobs
from tensorcas_mlflow.integration.server_app._jobs import BusyError, Jobs


def test_result_is_computed_once_while_it_is_fresh() -> None:
    jobs, calls = Jobs(), []

    def compute(last: int | None) -> int:
        calls.append(last)
        return len(calls)

    known = [jobs.get("key", compute, fresh_s=100.0, wait_s=10.0) for _ in range(3)]

    assert [(each.value, each.error) for each in known] == [(1, None)] * 3
    jobs.forget("key")
    assert jobs.get("key", compute, fresh_s=100.0, wait_s=10.0).value == 2
    assert calls == [None, 1]


def test_last_result_is_shown_while_a_new_one_is_computed() -> None:
    jobs, gate = Jobs(), threading.Event()

    def compute(last: int | None) -> int:
        assert last is None or gate.wait(30)
        return 1 if last is None else last + 1

    jobs.get("key", compute, fresh_s=0.0, wait_s=10.0)
    known = jobs.get("key", compute, fresh_s=0.0, wait_s=0.01)

    assert (known.value, known.is_fresh) == (1, False)
    gate.set()
    assert jobs.get("key", compute, fresh_s=100.0, wait_s=10.0).value == 2


def test_failure_is_told_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, errors = Jobs(), [BackendError("read", "format", "no network"), KeyError("surprise")]

    def compute(last: int | None) -> int:
        if errors:
            raise errors.pop(0)
        return 1

    def get() -> Any:
        return jobs.get("key", compute, fresh_s=math.inf, wait_s=10.0)

    assert "no network" in get().error
    assert len(errors) == 1
    get()
    assert len(errors) == 1
    monkeypatch.setattr(_jobs, "_AGAIN_S", 0.0)
    assert "unexpected error, KeyError" in get().error
    assert (get().value, get().error) == (1, None)


def test_too_many_jobs_are_refused_and_old_results_forgotten() -> None:
    jobs, gate = Jobs(most_kept=2, most_waiting=2), threading.Event()

    def compute(last: int | None) -> bool:
        return gate.wait(30)

    for key in ("a", "b"):
        assert jobs.get(key, compute, fresh_s=1.0, wait_s=0.0).value is None
    with pytest.raises(BusyError):
        jobs.get("c", compute, fresh_s=1.0, wait_s=0.0)
    gate.set()
    for key in ("a", "b", "d", "e", "f"):
        assert jobs.get(key, compute, fresh_s=100.0, wait_s=10.0).value is True
    assert len(jobs._entries) <= 3
