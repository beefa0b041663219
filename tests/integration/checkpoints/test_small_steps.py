"""The work of a step of a training whose states are small: Python calls, which no load of the machine changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from types import FrameType
from typing import Any

import mlflow
import pytest
import torch

from tensorcas_mlflow.backends._logs import Logs

N_WARM = 12
MOST_CALLS = 1_900
"""Some more than measured with Python 3.11 and torch 2: other versions of other libraries make other calls."""
MOST_CALLS_IN_BACKGROUND = 650


def calls_of(act: Callable[[], object], function: Callable[..., object] | None = None) -> int:
    """Count the Python calls of this thread, or those of one function."""
    n_calls = 0
    code = None if function is None else function.__code__

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal n_calls
        n_calls += event == "call" and code in (None, frame.f_code)

    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
    return n_calls


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch, cas_experiment: str) -> torch.nn.Module:
    monkeypatch.setenv("TENSORCAS_LOGS", "1")
    return torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 20))


def steps(net: torch.nn.Module, *, blocking: bool, function: Callable[..., object] | None = None) -> list[int]:
    """Log steps of a loop, each after a small change, and count calls of the caller's thread in each."""
    counts = []
    with mlflow.start_run():
        for step in range(N_WARM + 8):
            with torch.no_grad():
                for weights in net.parameters():
                    weights += 1e-3 * torch.randn_like(weights)
            mlflow.tensorcas.wait()
            log = partial(mlflow.tensorcas.log_checkpoint, net, step=step, blocking=blocking)
            counts.append(calls_of(log, function))
        mlflow.tensorcas.wait()
    return counts


@pytest.mark.parametrize(("blocking", "most"), [(True, MOST_CALLS), (False, MOST_CALLS_IN_BACKGROUND)])
def test_warm_step_of_a_small_net_makes_few_python_calls(net: torch.nn.Module, blocking: bool, most: int) -> None:
    counts = steps(net, blocking=blocking)

    assert median(counts[N_WARM:]) < most  # the log's tree of records makes some steps dearer than others


def test_background_step_costs_its_caller_less_than_half_of_the_calls(net: torch.nn.Module) -> None:
    assert max(steps(net, blocking=False)[N_WARM:]) < min(steps(net, blocking=True)[N_WARM:]) / 2


def test_step_looks_at_the_logs_four_times(net: torch.nn.Module) -> None:
    assert set(steps(net, blocking=True, function=Logs.refresh)[N_WARM:]) == {4}
