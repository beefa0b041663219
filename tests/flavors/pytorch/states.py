"""Training states for the tests of the PyTorch adapter."""

from __future__ import annotations

import argparse
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda parts: torch.optim.Adam(parts, lr=0.01),
    "amsgrad": lambda parts: torch.optim.Adam(parts, lr=0.01, amsgrad=True),
    "momentum": lambda parts: torch.optim.SGD(parts, lr=0.01, momentum=0.9, nesterov=True),
    "adamw": lambda parts: torch.optim.AdamW(parts, lr=0.01, fused=False, foreach=False),
    "adamw tensor lr": lambda parts: torch.optim.AdamW(parts, lr=torch.tensor(0.01)),
    "lbfgs": lambda parts: torch.optim.LBFGS(parts, lr=0.1, max_iter=4),
    "rmsprop": lambda parts: torch.optim.RMSprop(parts, lr=0.01, centered=True),
    "adagrad": lambda parts: torch.optim.Adagrad(parts, lr=0.01),
}


class Halving:
    """A learning rate as an object with state."""

    def __init__(self) -> None:
        self.by = 0.5

    def __call__(self, epoch: int) -> float:
        return float(self.by**epoch)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "object": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, Halving()),
    "onecycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "steps": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3, 3]),
    "cyclic": lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 0.001, 0.1, cycle_momentum=False),
    "sequential": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.ConstantLR(optimizer, 0.1),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        milestones=[2],
    ),
    "multiplicative": lambda optimizer: torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.95),
    "linear": lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
    "polynomial": lambda optimizer: torch.optim.lr_scheduler.PolynomialLR(optimizer, 6),
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
    "restarts": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "momentum cycle": lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 0.001, 0.1),
    "scaled cycle": lambda optimizer: torch.optim.lr_scheduler.CyclicLR(
        optimizer, 0.001, 0.1, cycle_momentum=False, scale_fn=lambda cycle: 0.9**cycle
    ),
    "chained": lambda optimizer: torch.optim.lr_scheduler.ChainedScheduler(
        [
            torch.optim.lr_scheduler.ConstantLR(optimizer, 0.1),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ]
    ),
    "averaged": lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
}


@dataclass
class Settings:
    width: int = 4
    note: str = "ä"


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None, *, n_steps: int = 3) -> None:
    """Take some steps that depend on nothing but the model, the optimizer and the scheduler."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(n_steps):
        inputs, targets = torch.randn(16, 5, generator=generator), torch.randn(16, 1, generator=generator)

        def loss(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
            optimizer.zero_grad()
            error = nn.functional.mse_loss(model(inputs), targets)
            error.backward()
            return error

        error = optimizer.step(loss)
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(error.detach())
        elif scheduler is not None:
            scheduler.step()


def trained(optimizer: str = "adam", scheduler: str | None = None, seed: int = 0) -> dict[str, Any]:
    """A live training state after some steps."""
    model = network(seed)
    made = OPTIMIZERS[optimizer](model.parameters())
    state: dict[str, Any] = {"model": model, "optimizer": made}
    if scheduler is not None:
        state["scheduler"] = SCHEDULERS[scheduler](made)
    train(model, made, state.get("scheduler"))
    return state | {"epoch": 3}


def as_plain(state: dict[str, Any]) -> dict[str, Any]:
    """The same state as state dicts."""
    return {name: part.state_dict() if hasattr(part, "state_dict") else part for name, part in state.items()}


def plain_values() -> dict[str, Any]:
    """Every kind of plain value in every kind of container."""
    shared = [1, 2]
    by_default: defaultdict[str, list[int]] = defaultdict(list, {"a": [1]})
    return {
        "nothing": None,
        "yes": True,
        "whole": [0, -1, 2**63, -(2**200), 10**5000],
        "real": [0.1, -0.0, float("inf"), float("-inf"), float("nan"), 5e-324],
        "complex": complex(-0.0, float("nan")),
        "text": ["", "ä", "\ud800", "\ud83d\ude00", "\0\n", '"values":['],
        "bytes": [b"", b"\0\xff", bytearray(b"ab")],
        "tuple": ((), (1, (2.5, "x"))),
        "size": torch.Size([2, 0, 3]),
        "set": [{1, "a", None}, frozenset({(1, 2.5)})],
        "keys": {1: "int", "1": "str", False: 2, None: 0, 2.5: 1, (1, "a", 0.5): [], b"b": {}, -(2**70): 1},
        "ordered": OrderedDict([("b", 1), ("a", {"c": OrderedDict()})]),
        "default": [by_default, defaultdict(None, {1: 2}), defaultdict(dict)],
        "counter": Counter("abca"),
        "dtype": [torch.bfloat16, torch.complex32, torch.bits8],
        "device": [torch.device("cpu"), torch.device("cuda:1"), torch.device("meta")],
        "random": random.Random(3).getstate(),
        "numpy random": np.random.RandomState(3).get_state(),
        "generator": [
            np.random.default_rng(3).bit_generator.state,
            np.random.Philox(3).state,
            np.random.SFC64(3).state,
        ],
        "torch random": torch.Generator().manual_seed(3).get_state(),
        "scalars": [
            np.float64(-0.0),
            np.float32("nan"),
            np.int8(-3),
            np.bool_(True),
            np.str_("ä"),
            np.datetime64("NaT"),
        ],
        "arrays": [
            np.arange(6).reshape(2, 3),
            np.asfortranarray(np.ones((2, 3))),
            np.array("x"),
            np.zeros((0, 2), ">f4"),
        ],
        "tensors": {
            "a": torch.arange(3),
            "deep": [(torch.ones(2, 2).t(), torch.tensor(1.5))],
            "empty": torch.ones(0, 3),
        },
        "many": [list(range(100)), tuple(range(100)), [0.5, -0.0, float("nan")] * 20, [1, 2.0] * 30, [2**70] * 40],
        "shared": [shared, shared],
    }


def live_values() -> dict[str, Any]:
    """Values that only a pickle says."""
    return {"settings": Settings(), "arguments": argparse.Namespace(lr=0.1), "kind": nn.Linear}


def exactly(one: Any, other: Any) -> bool:
    """Tell whether two nests are the same, types, orders and bits included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        facts = [(t.dtype, t.shape, t.stride(), t.requires_grad) for t in (one, other)]
        return facts[0] == facts[1] and one.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist() == (
            other.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist()
        )
    if isinstance(one, np.ndarray | np.generic):
        facts = [(part.dtype, part.shape, part.size and part.strides, part.tobytes()) for part in (one, other)]
        return bool(facts[0] == facts[1])
    if isinstance(one, dict):
        attributes = exactly(*([*getattr(part, "__dict__", {}).items()] for part in (one, other)))
        factories = getattr(one, "default_factory", None) is getattr(other, "default_factory", None)
        return attributes and factories and exactly(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(exactly, one, other))
    if isinstance(one, float | complex):
        return repr(one) == repr(other)
    return bool(one == other)
