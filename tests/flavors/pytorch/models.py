"""Models and comparisons for the tests of the PyTorch adapter."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import torch
from torch import nn

from tensorcas_flavors.pytorch import PyTorchAdapter
from tensorcas_mlflow.adapter import Array

ADAPTER = PyTorchAdapter()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Embedding(7, 4)
        self.decode = nn.Linear(4, 7, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(tokens))


class Holder(nn.Module):
    """Holds what a test gives it, as buffers, attributes or parameters."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def with_buffer(self, name: str, tensor: torch.Tensor, *, persistent: bool = True) -> Holder:
        self.register_buffer(name, tensor, persistent=persistent)
        return self


class Noted(nn.Linear):
    """Has extra state, which any object may be."""

    def __init__(self, note: object = None) -> None:
        super().__init__(2, 2)
        self.note = note

    def get_extra_state(self) -> object:
        return self.note

    def set_extra_state(self, state: object) -> None:
        self.note = state


def stored(model: Any) -> dict[str, Array]:
    """Return the rows as a store returns them: owned, writable arrays in C order."""
    return {name: np.array(array, order="C", copy=True) for name, array in ADAPTER.extract(model).items()}


def round_trip(model: Any) -> Any:
    return ADAPTER.reconstruct(stored(model))


def raw(tensor: torch.Tensor) -> bytes:
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}[tensor.itemsize]
    return tensor.detach().reshape(-1).view(words).numpy().tobytes()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    facts = [(t.dtype, t.shape, t.stride(), t.requires_grad, type(t)) for t in (one, other)]
    return facts[0] == facts[1] and raw(one) == raw(other)


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2))


def run(script: str, *arguments: str) -> str:
    """Run a script in an interpreter of its own, which has imported nothing, and return what it prints."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()


def shares_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata
