"""Random modules are filled as ``load_state_dict`` fills them, or stay unchanged. A strict fill rounds nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from tensorcas_mlflow.errors import AdapterError
from tests.flavors.pytorch.checkpoints import Checkpoint, read_into_live_tensors
from tests.flavors.pytorch.models import ADAPTER, raw, stored

SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (4, 5), (2, 3, 4, 5), (0, 7), (300, 40)]
DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.complex64, torch.bool, torch.int8, torch.uint8, torch.int64, torch.uint16),
]
PARTS = {
    "linear": lambda: nn.Linear(7, 3),
    "norm": lambda: nn.BatchNorm1d(4),
    "lstm": lambda: nn.LSTM(3, 4, 2),
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
    "spectral": lambda: nn.utils.spectral_norm(nn.Linear(3, 4)),
    "attention": lambda: nn.MultiheadAttention(8, 2),
}
LAYOUTS = {
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(5, 6).t(),
    "gaps": lambda: torch.randn(8, 6)[:, ::2],
}
KINDS = ["parameter", "buffer", "tied", "view", *PARTS, *LAYOUTS]


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape).abs() * 9).to(dtype)


def build(structure: int, values: int) -> nn.Module:
    """Build a module whose structure depends on one seed, and its values on another."""
    rng = random.Random(structure)
    torch.manual_seed(values)
    module = nn.Module()
    made: list[str] = []
    for number in range(rng.randint(1, 9)):
        name, kind, shape, dtype = f"t{number}", rng.choice(KINDS), rng.choice(SHAPES), rng.choice(DTYPES)
        if kind in PARTS:
            module.add_module(name, PARTS[kind]())
        elif kind in LAYOUTS:
            module.register_buffer(name, LAYOUTS[kind]())
        elif kind == "parameter":
            module.register_parameter(name, nn.Parameter(numbers(shape, dtype), dtype == torch.float32))
            made.append(name)
        elif kind == "buffer" or not made:
            module.register_buffer(name, numbers(shape, dtype))
            made.append(name)
        elif kind == "tied":
            tensor: Any = getattr(module, rng.choice(made))
            vars(module)["_parameters" if isinstance(tensor, nn.Parameter) else "_buffers"][name] = tensor
        else:
            module.register_buffer(name, getattr(module, rng.choice(made)).detach().flatten()[::2])
    return module


def cast(module: nn.Module, seed: int) -> nn.Module:
    """Give some parameters another dtype."""
    rng = random.Random(seed)
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None and rng.random() < 0.2:
                part._parameters[name] = nn.Parameter(parameter.detach().to(rng.choice(DTYPES)), False)
    return module


def contents(module: nn.Module) -> dict[str, Any]:
    return {name: (tensor.dtype, raw(tensor)) for name, tensor in module.state_dict().items()}


def is_cast(module: nn.Module, source: nn.Module) -> bool:
    own = module.state_dict()
    return any(own[name].dtype != tensor.dtype for name, tensor in source.state_dict().items() if name in own)


def holds_numbers_of(module: nn.Module, source: nn.Module) -> bool:
    own = module.state_dict()
    return all(
        torch.equal(own[name].to(tensor.dtype), tensor) for name, tensor in source.state_dict().items() if name in own
    )


@pytest.mark.parametrize("way", ["into new memory", "into live memory", "load_into"])
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.filterwarnings("ignore")
def test_random_module_is_filled_as_by_torch_or_stays_unchanged(
    seed: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    source = build(seed, 1)
    structure, dtypes, strict = seed + (rng.random() < 0.1), rng.random(), rng.random() < 0.7
    live, expected = (cast(build(structure, 2), seed) if dtypes < 0.5 else build(structure, 2) for _ in range(2))
    before = contents(live)
    if way == "into live memory":
        read_into_live_tensors(monkeypatch)

    try:
        expected.load_state_dict(source.state_dict(), strict=strict)
        is_refused = False
    except RuntimeError:
        is_refused = True
    may_not_round = strict and way != "load_into"
    is_rounded = not is_refused and not holds_numbers_of(expected, source)
    try:
        if way == "load_into":
            Checkpoint.of(source).fill(live, strict=strict)
        else:
            ADAPTER.reconstruct(stored(source), original=live, strict=strict)
    except AdapterError:
        assert is_refused or structure != seed or (may_not_round and is_cast(expected, source))
        assert contents(live) == before
    else:
        assert not is_refused
        assert not (may_not_round and is_rounded)
        assert contents(live) == contents(expected)
