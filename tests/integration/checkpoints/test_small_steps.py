"""The work of a step of a training whose states are small: Python calls, which no load of the machine changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import mlflow
import pytest
import torch

N_WARM = 12
MOST_CALLS = 2_000
"""Some more than measured with Python 3.11 and torch 2: other versions of other libraries make other calls."""
MOST_CALLS_IN_BACKGROUND = 750


def calls_of(act: Callable[[], object]) -> int:
    """Count the Python calls of this thread."""
    n_calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal n_calls
        n_calls += event == "call"

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


def steps(net: torch.nn.Module, *, blocking: bool) -> list[int]:
    """Log steps of a loop, each after a small change, and count the calls of the caller's thread in each."""
    counts = []
    with mlflow.start_run():
        for step in range(N_WARM + 4):
            with torch.no_grad():
                for weights in net.parameters():
                    weights += 1e-3 * torch.randn_like(weights)
            mlflow.tensorcas.wait()
            counts.append(calls_of(lambda: mlflow.tensorcas.log_checkpoint(net, step=step, blocking=blocking)))  # noqa: B023
        mlflow.tensorcas.wait()
    return counts


@pytest.mark.parametrize(("blocking", "most"), [(True, MOST_CALLS), (False, MOST_CALLS_IN_BACKGROUND)])
def test_warm_step_of_a_small_net_makes_few_python_calls(net: torch.nn.Module, blocking: bool, most: int) -> None:
    counts = steps(net, blocking=blocking)

    assert max(counts[N_WARM:]) < most


def test_background_step_costs_its_caller_less_than_half_of_the_calls(net: torch.nn.Module) -> None:
    assert max(steps(net, blocking=False)[N_WARM:]) < min(steps(net, blocking=True)[N_WARM:]) / 2
