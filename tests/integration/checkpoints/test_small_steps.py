"""The work of a step of a training whose states are small: Python calls, which no load of the machine changes."""

from __future__ import annotations

from statistics import median

import mlflow
import pytest
import torch

from tensorcas_mlflow.integration.checkpoints import _log
from tests.python_calls import calls_of, depths_of_ours

N_WARM = 12
MOST_CALLS = 1_230
"""Some more than measured with Python 3.11 and torch 2: other versions of other libraries make other calls."""
MOST_CALLS_OF_ANY = 1_300
"""The same of the dearest step. After one in three, the choices of codings are made anew."""
MOST_CALLS_IN_BACKGROUND = 285
MOST_MODULES = 46
"""Modules of our packages that a warm step passes."""
MOST_FRAMES = 25
"""Frames of our packages that are open at once: no encoder runs inside a generator that the backend draws."""


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch, cas_experiment: str) -> torch.nn.Module:
    monkeypatch.setenv("TENSORCAS_DATABASE", "1")
    monkeypatch.setattr(_log, "_MOST_HERE_BYTES", 0)  # no trials of saves in the caller
    return torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 20))


def steps(net: torch.nn.Module, *functions: str, blocking: bool) -> list[int]:
    """Log steps of a loop, each after a small change, and count calls of the caller's thread in each."""
    counts = []
    with mlflow.start_run():
        for step in range(N_WARM + 16):
            change(net)
            with calls_of(*functions) as calls:
                mlflow.tensorcas.log_checkpoint(net, step=step, blocking=blocking)
            counts.append(len(calls))
        mlflow.tensorcas.wait()
    return counts


def change(net: torch.nn.Module) -> None:
    with torch.no_grad():
        for weights in net.parameters():
            weights += 1e-3 * torch.randn_like(weights)
    mlflow.tensorcas.wait()


def test_warm_step_of_a_small_net_makes_few_python_calls(net: torch.nn.Module) -> None:
    counts = steps(net, blocking=True)[N_WARM:]

    assert median(counts) < MOST_CALLS
    assert max(counts) < MOST_CALLS_OF_ANY


def test_warm_step_in_the_background_makes_few_python_calls_of_its_caller(net: torch.nn.Module) -> None:
    assert max(steps(net, blocking=False)[N_WARM:]) < MOST_CALLS_IN_BACKGROUND


@pytest.mark.long
def test_background_step_costs_its_caller_less_than_a_third_of_the_calls(net: torch.nn.Module) -> None:
    assert max(steps(net, blocking=False)[N_WARM:]) < min(steps(net, blocking=True)[N_WARM:]) / 3


@pytest.mark.long
def test_step_asks_the_database_twelve_times_at_most(net: torch.nn.Module) -> None:
    assert max(steps(net, "Database.read", "Database.write", blocking=True)[N_WARM:]) <= 12


def test_warm_step_passes_few_modules_and_opens_few_frames(net: torch.nn.Module) -> None:
    warm: list[dict[str, int]] = []
    with mlflow.start_run():
        for step in range(N_WARM + 16):
            change(net)
            with depths_of_ours() as depths:
                mlflow.tensorcas.log_checkpoint(net, step=step)
            if step >= N_WARM:
                warm.append(depths)
        mlflow.tensorcas.wait()

    assert max(map(len, warm)) <= MOST_MODULES
    assert max(max(depths.values()) for depths in warm) <= MOST_FRAMES
